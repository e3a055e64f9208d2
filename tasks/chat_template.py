"""A model's own chat template, rendered the same way for every model, on any day.

Templates come from the Hub and are programs.  They run in the sandbox that transformers builds, with a frozen clock
and limits on output and time, and only in a worker.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

from registry.canonical import sha256_hex
from registry.errors import BadInput, Refused

DATE = "26 Jul 2024"
"""The date every prompt carries: the default of the Llama 3 templates, so that pinning it changes nothing there."""

_CLOCK = datetime(2024, 7, 26, 12, tzinfo=UTC)

MAX_SECONDS = 5.0
MAX_OUTPUT_CHARS = 2_000_000
"""Beyond what was put in; nested loops in a template otherwise fill any memory."""

MAX_BITS = 10_000
"""Of an integer that a template computes."""

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
        self._variables = {**tokenizer.special_tokens_map, **_settings()}
        self._compiled = _compile(self.text)
        self.content_form: Literal["string", "parts"] = self._probe_content_form()
        self.empty_behaviour: EmptyBehaviour = self._probe_empty()
        self._last: tuple[tuple[str | None, str], tuple[str, str]] | None = None

    def render(self, system: str | None, user: str, response: str) -> str:
        """The whole conversation, the response in the assistant's turn.  Raises TemplateFailed."""
        turns = [("system", system), ("user", user), ("assistant", response)]
        return self._render([self._message(role, text) for role, text in turns if text is not None])

    def around(self, system: str | None, user: str) -> tuple[str, str]:
        """What the template writes before and after the response, whatever the response is.

        Found with a placeholder in the response's place, so that a scaffold written for the assistant's turn (an empty
        thinking block, a channel header) belongs to the context and is not scored.  Raises TemplateFailed.
        """
        key = (system, user)
        if self._last is None or self._last[0] != key:
            placeholder = _RESPONSE_PROBE
            while placeholder in user or placeholder in (system or ""):
                placeholder += "Z"
            rendered = self.render(system, user, placeholder)
            if rendered.count(placeholder) != 1:
                raise TemplateFailed("the template does not write the response exactly once")
            before, after = rendered.split(placeholder)
            self._last = (key, (before, after))
        return self._last[1]

    def _message(self, role: str, text: str) -> dict[str, Any]:
        parts = self.content_form == "parts"
        return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}

    def _render(self, messages: list[dict[str, Any]]) -> str:
        allowed = MAX_OUTPUT_CHARS + 8 * sum(len(str(message["content"])) for message in messages)
        pieces: list[str] = []
        written = 0
        deadline = time.monotonic() + MAX_SECONDS
        try:
            with _interrupted_after(MAX_SECONDS):
                blocks = self._compiled.generate(
                    messages=messages, tools=None, documents=None, add_generation_prompt=False, **self._variables
                )
                for block in blocks:
                    written += len(block)
                    if written > allowed:
                        raise TemplateFailed(f"the template wrote more than {allowed} characters")
                    if time.monotonic() > deadline:
                        raise _too_slow()
                    pieces.append(block)
        except TemplateFailed:
            raise
        except Exception as error:  # a template is a program of a stranger's: it may raise anything
            raise TemplateFailed(f"{type(error).__name__}: {error}"[:300]) from error
        return "".join(pieces)

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


def _settings() -> dict[str, Any]:
    """Variables given to every template: thinking off and the clock frozen.

    Context variables shadow the environment's globals, hence a frozen `strftime_now` without a template environment
    of our own.
    """
    return {
        "enable_thinking": False,  # Qwen3, SmolLM3, GLM
        "thinking": False,  # DeepSeek V3.1, Granite
        "date_string": DATE,  # Llama 3
        "strftime_now": lambda pattern: _CLOCK.strftime(pattern),  # Llama 3.2, Granite, SmolLM3, gpt-oss
    }


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


def _compile(text: str) -> Any:
    """The sandboxed environment is transformers' own: its filters, its extensions, its security fixes.

    But nothing in it draws at random, since a model must score the same twice; and no single operation is so large that
    neither the time limit nor the output limit would see it end.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        # Of an empty template: compiling theirs would already compute its constants.
        environment = _compile_jinja_template("").environment.overlay()
        environment.filters = {name: one for name, one in environment.filters.items() if name != "random"}
        environment.globals = {name: one for name, one in environment.globals.items() if name != "lipsum"}
        environment.intercepted_binops = frozenset({"*", "**", "%"})
        environment.call_binop = lambda context, operator, left, right: _bounded(
            environment.binop_table[operator], operator, left, right
        )
        return environment.from_string(text)
    except Exception as error:
        raise Refused(
            "bad_template",
            f"the chat template is not valid: {type(error).__name__}: {error}",
            hint="score it with --profile plain",
        ) from error


def _bounded(operation: Any, operator: str, left: Any, right: Any) -> Any:
    """`left operator right`, unless the result would be huge.  Raises TemplateFailed."""
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "**":
        huge = numbers and abs(left) > 1 and right > MAX_BITS / abs(left).bit_length()
    elif operator == "%":
        # "%1000000000d" % 1
        huge = isinstance(left, str) and re.search(r"%[^a-zA-Z%]*\d{7}", left) is not None
    elif numbers:
        huge = left.bit_length() + right.bit_length() > MAX_BITS
    else:
        sizes = [len(one) if hasattr(one, "__len__") else one for one in (left, right)]
        huge = all(isinstance(one, int) for one in sizes) and sizes[0] * sizes[1] > MAX_OUTPUT_CHARS
    if huge:
        raise TemplateFailed(f"the template computes something huge ({operator})")
    return operation(left, right)


def _too_slow() -> TemplateFailed:
    return TemplateFailed(f"the template ran longer than {MAX_SECONDS:g} s")


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raises TemplateFailed in the block after `seconds`, even in a loop that writes nothing.

    Signals reach only the main thread; elsewhere the check between output blocks is all there is.  Another timer that
    was running (a test's, a supervisor's) goes on with the time it had left.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(signum: int, frame: Any) -> None:
        raise _too_slow()

    handler = signal.signal(signal.SIGALRM, stop)
    started = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3), interval)
