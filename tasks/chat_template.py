"""A model's own chat template, rendered the same way for every model, on any day.

Templates come from the Hub and are programs: they run in `tasks.template_sandbox`, a process with limits, where
transformers' sandbox holds them and the clock stands still.
"""

from __future__ import annotations

from typing import Any, Literal

from registry.canonical import sha256_hex
from registry.errors import BadInput, Refused
from tasks import template_process

DATE = "26 Jul 2024"
"""The date every prompt carries: the default of the Llama 3 templates, so that pinning it changes nothing there."""

SETTINGS = {
    "enable_thinking": False,  # Qwen3, SmolLM3, GLM
    "thinking": False,  # DeepSeek V3.1, Granite
    "date_string": DATE,  # Llama 3
}
"""Variables given to every template; the frozen `strftime_now` is the sandbox's."""

MAX_SECONDS = 5.0
"""Of CPU time, for one text."""

MAX_OUTPUT_CHARS = 2_000_000
"""Beyond what was put in."""

MAX_STOPPED = 10
"""Texts on which a template may be stopped by force before the model is refused: else each would take its seconds."""

# A newline inside: the repr of a list of parts, or JSON, would escape it, and then the text is not there verbatim.
_PROMPT_PROBE = "Zq7prompt\nprobe7qZ"
_RESPONSE_PROBE = "Zq7response\nprobe7qZ"

EmptyBehaviour = Literal["rendered", "skipped", "raises"]


class TemplateFailed(BadInput):
    """The template raised, ran too long or wrote too much on this text; the message says which."""

    slug = "template-failed"


class ChatTemplate:
    """The template of one tokenizer.

    `content_form` is `string`, or `parts` for templates that want `[{"type": "text", "text": …}]`; it is found once, by
    a probe whose two texts must come out verbatim, once each and in order.

    Raises Refused("no_template") without a template, Refused("bad_template") where the probe fails.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.text = _template_text(tokenizer)
        self.hash = sha256_hex(self.text)
        self._variables = {**tokenizer.special_tokens_map, **SETTINGS}
        self._stopped = 0
        self.content_form: Literal["string", "parts"] = self._probe_content_form()
        self.empty_behaviour: EmptyBehaviour = self._probe_empty()
        self._last: tuple[tuple[str | None, str], tuple[str, str]] | None = None

    def render(self, system: str | None, user: str, response: str) -> str:
        """The whole conversation, the response in the assistant's turn.  Raises TemplateFailed."""
        return self._render([(system, user, response)])[0]

    def render_around(self, system: str | None, user: str, response: str) -> tuple[str, str, str]:
        """What the template writes before the response, what after it, and the whole conversation.

        The first two are found with a placeholder in the response's place, so that a scaffold written for the
        assistant's turn (an empty thinking block, a channel header) belongs to the context and is not scored.

        Raises TemplateFailed; Refused("bad_template") when it had to be stopped again and again.
        """
        key = (system, user)
        if self._last is not None and self._last[0] == key:
            return *self._last[1], self.render(system, user, response)
        placeholder = _RESPONSE_PROBE
        while placeholder in user or placeholder in (system or ""):
            placeholder += "Z"
        rendered, whole = self._render([(system, user, placeholder), (system, user, response)])
        if rendered.count(placeholder) != 1:
            raise TemplateFailed("the template does not write the response exactly once")
        before, after = rendered.split(placeholder)
        self._last = (key, (before, after))
        return before, after, whole

    def _messages(self, system: str | None, user: str, response: str) -> list[dict[str, Any]]:
        parts = self.content_form == "parts"
        return [
            {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
            for role, text in (("system", system), ("user", user), ("assistant", response))
            if text is not None
        ]

    def _render(self, conversations: list[tuple[str | None, str, str]]) -> list[str]:
        given = max(sum(len(text or "") for text in one) for one in conversations)
        request = {
            "template": self.text,
            "variables": self._variables,
            "conversations": [self._messages(*one) for one in conversations],
            "seconds": MAX_SECONDS,
            "output_chars": MAX_OUTPUT_CHARS + 8 * given,
        }
        try:
            answer = template_process.ask(request)
        except template_process.Stopped as error:
            self._stopped += 1
            if self._stopped > MAX_STOPPED:
                raise Refused(
                    "bad_template",
                    f"the chat template had to be stopped on {self._stopped} texts: {error}",
                    hint="score it with --profile plain",
                ) from error
            raise TemplateFailed(str(error)) from error
        if "texts" in answer:
            return [str(one) for one in answer["texts"]]
        if not answer["valid"]:
            raise Refused(
                "bad_template",
                f"the chat template is not valid: {answer['error']}",
                hint="score it with --profile plain",
            )
        raise TemplateFailed(str(answer["error"]))

    def _probe_content_form(self) -> Literal["string", "parts"]:
        reasons = []
        forms: tuple[Literal["string", "parts"], ...] = ("string", "parts")
        for form in forms:
            self.content_form = form
            try:
                rendered = self.render(None, _PROMPT_PROBE, _RESPONSE_PROBE)
            except TemplateFailed as error:
                reasons.append(error.message)
                continue
            prompt_at, response_at = rendered.find(_PROMPT_PROBE), rendered.find(_RESPONSE_PROBE)
            once = rendered.count(_PROMPT_PROBE) == 1 == rendered.count(_RESPONSE_PROBE)
            if once and prompt_at < response_at:
                return form
            reasons.append(f"prompt and response as {form} do not come out verbatim, once and in order")
        raise Refused(
            "bad_template",
            "the chat template cannot render a prompt and a response: " + "; ".join(dict.fromkeys(reasons)),
            hint="score it with --profile plain",
        )

    def _probe_empty(self) -> EmptyBehaviour:
        """What becomes of an empty user turn, which stands for p(y): three behaviours are found in the wild."""
        try:
            empty = self.render(None, "", _RESPONSE_PROBE)
        except TemplateFailed:
            return "raises"
        full = self.render(None, _PROMPT_PROBE, _RESPONSE_PROBE)
        return "rendered" if _letters(full.replace(_PROMPT_PROBE, "")) == _letters(empty) else "skipped"


def _letters(text: str) -> str:
    """Without white space, which templates trim at will."""
    return "".join(text.split())


def _template_text(tokenizer: Any) -> str:
    try:
        text = tokenizer.get_chat_template()
    except (ValueError, AttributeError) as error:
        # ValueError: none, or several without a default; AttributeError: a tokenizer without templates at all.
        named = getattr(tokenizer, "chat_template", None)
        several = f" (it has {', '.join(sorted(named))}, no default)" if isinstance(named, dict) else ""
        raise Refused(
            "no_template", f"the tokenizer has no chat template{several}", hint="score it with --profile plain"
        ) from error
    return str(text)
