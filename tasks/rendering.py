"""From (system, user, response) to the token ids that are context and the token ids that are scored.

The rule: render once, tokenise the rendered string once, score the tokens that meet the response.  Where that is not
possible without touching another token or another text, ids(before) + ids(response), marked `split`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from registry.canonical import sha256_hex
from registry.errors import BadInput
from registry.statuses import Status
from tasks.chat_template import DATE, ChatTemplate, EmptyBehaviour, TemplateFailed
from tasks.tokenization import Tokenization, require_ids, verify_tokenizer

__all__ = ["Renderer", "Span", "verify_tokenizer"]

_PLAIN = "{bos}{prompt}\n\n{response}"
_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Span:
    """Token ids of one text: what is conditioned on, and what is scored.

    Both are empty where `status` says that there is no value; `reason` then says why.
    """

    context_ids: list[int]
    response_ids: list[int]
    status: Status
    reason: str


class Renderer:
    """Renders texts for one tokenizer under one profile.

    chat   the model's own template, no system message unless the transform has one, thinking off, the date fixed.
           The end of the turn is not scored.
    plain  one BOS where the tokenizer has one, then prompt + "\\n\\n" + response; an empty prompt is BOS, response.

    `context_length` in tokens, None for no limit; `vocabulary` the rows of the embedding.

    Raises Refused("no_template" or "bad_template") under `chat`, BadInput for another profile.
    """

    def __init__(self, tokenizer: Any, profile: str, context_length: int | None, vocabulary: int) -> None:
        if profile not in ("chat", "plain"):
            raise BadInput(f"there is no profile {profile!r}", hint="use chat or plain")
        self.profile = profile
        self._context_length = context_length
        self._vocabulary = vocabulary
        self._chat = ChatTemplate(tokenizer) if profile == "chat" else None
        self._tokens = Tokenization(tokenizer)
        self._bos: int | None = tokenizer.bos_token_id
        self._prefix: int | None = self._bos if self._bos is not None else tokenizer.eos_token_id
        self.template_hash = self._chat.hash if self._chat else sha256_hex(_PLAIN)
        self.tokenizer_hash = self._tokens.hash
        self.empty_behaviour: EmptyBehaviour = self._chat.empty_behaviour if self._chat else "rendered"

    def span(self, system: str | None, user: str, response: str) -> Span:
        """The span of one text.

        Raises Refused("bad_tokenizer") for ids beyond the embedding, BadInput for an empty response.
        """
        if not response:
            raise BadInput("an empty response cannot be scored", hint="text sets refuse empty responses when made")
        try:
            before, after, rendered = self._render(system, user, response)
        except TemplateFailed as error:
            return _without_value(Status.TEMPLATE_ERROR, error.message)
        found = self._joint(before, rendered, response) if rendered == before + response + after else None
        status, reason = Status.OK, ""
        if found is None:
            status, reason = Status.SPLIT, self._why_split(before, after, rendered, response)
            continuation = self._tokens.continuation(response)
            if continuation is None:
                return _without_value(Status.UNALIGNABLE, f"{reason}, and its own ids do not decode back to it")
            found = self._tokens.ids(before), continuation
        context, scored = found
        return self._checked(self._with_prefix(context), scored, status, reason)

    def describe(self) -> dict[str, Any]:
        """What a vector's provenance says about rendering."""
        return {
            "profile": self.profile,
            "template_hash": self.template_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "empty_prompt": self.empty_behaviour,
            "content_form": self._chat.content_form if self._chat else "string",
            "system_message": "of the transform only",
            "thinking": "off",
            "date": DATE if self._chat else None,
            "end_of_turn_scored": False,
            "offsets": self._tokens.has_offsets,
            "bos_id": self._bos,
            # Stands before a response whose context is otherwise empty, so that its first token is scored too.
            "prefix_id": self._prefix,
        }

    def _render(self, system: str | None, user: str, response: str) -> tuple[str, str, str]:
        """What stands before the response, what after it, and the rendered string.  Raises TemplateFailed."""
        if self._chat is not None:
            return self._chat.render_around(system, user, response)
        before = "".join(part + _SEPARATOR for part in (system, user) if part)
        return before, "", before + response

    def _joint(self, before: str, rendered: str, response: str) -> tuple[list[int], list[int]] | None:
        """Ids before the response's and the response's own; None where they cannot be told apart."""
        if not self._tokens.has_offsets:
            return None
        ids, offsets = self._tokens.encode(rendered)
        start, end = len(before), len(before) + len(response)
        meeting = [at for at, (low, high) in enumerate(offsets) if low < end and high > start]
        if not meeting:
            return None
        first, last = meeting[0], meeting[-1]
        # Between the first and the last all belong to it, those of no width too.
        if any(low < start or high > end for low, high in offsets[first : last + 1]):
            return None
        if not _covers(offsets[first : last + 1], response, start):
            return None
        return ids[:first], ids[first : last + 1]

    def _why_split(self, before: str, after: str, rendered: str, response: str) -> str:
        if rendered != before + response + after:
            return "the template altered the response"
        return "a token straddles the response's boundary" if self._tokens.has_offsets else "no offsets"

    def _with_prefix(self, context: list[int]) -> list[int]:
        """`plain` gives one BOS where there is one; whoever has no context at all gets the declared prefix token."""
        if self.profile == "plain" and self._bos is not None:
            return [self._bos, *context]
        if not context and self._prefix is not None:
            return [self._prefix]
        return context

    def _checked(self, context: list[int], scored: list[int], status: Status, reason: str) -> Span:
        if not context:
            return _without_value(
                Status.TEMPLATE_ERROR, "nothing stands before the response and the tokenizer has neither BOS nor EOS"
            )
        total = len(context) + len(scored)
        if self._context_length is not None and total > self._context_length:
            return _without_value(Status.TOO_LONG, f"{total} tokens, the model's context has {self._context_length}")
        require_ids(context, self._vocabulary)
        require_ids(scored, self._vocabulary)
        return Span(context, scored, status, reason)


def _covers(offsets: list[tuple[int, int]], response: str, start: int) -> bool:
    """Whether no visible character of the response was dropped on the way to tokens."""
    reached = start
    for low, high in offsets:
        if low > reached and response[reached - start : low - start].strip():
            return False
        reached = max(reached, high)
    return not response[reached - start :].strip()


def _without_value(status: Status, reason: str) -> Span:
    return Span([], [], status, reason)
