"""A15: chat templates are programs of strangers; whatever they compute, they end, and the next text is rendered."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from registry.errors import Refused, Unavailable
from registry.statuses import Status
from tasks import chat_template, template_process
from tasks.rendering import Renderer
from tests.tasks.test_rendering import CHATML, renderer, tokenizer

REPOSITORY = Path(__file__).parents[2]

DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x | length }}"
NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"

TOO_LARGE = [
    "{{ 'x' | center(n) }}",
    "{{ 'x'.center(n) }}",
    "{{ 'x'.ljust(n) }}",
    "{{ 'x'.rjust(n) }}",
    "{{ 'x'.zfill(n) }}",
    "{{ 'x\nx' | indent(n) }}",
    "{{ 'x' * n }}",
    "{{ [1] * n }}",
    "{{ ('%' ~ n ~ 'd') % 1 }}",
    "{{ '%*d' % (n, 1) }}",
    "{{ ('%' ~ n ~ 'd') | format(1) }}",
    "{{ ('{:' ~ n ~ '}').format(1) }}",
    "{{ ('\t' * 9999).expandtabs(n) }}",
    "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "{{ (['x' * 99999] * (n // 9999)) | join }}",
    "{{ ('x' * 99999).join(['y'] * 99999) }}",
    "{{ {'a': 1} | tojson(indent=n) }}",
    "{{ 10 ** n }}",
    DOUBLED.replace("STEP", "ns.x ~ ns.x"),
    DOUBLED.replace("STEP", "ns.x + ns.x"),
    DOUBLED.replace("STEP", "[ns.x] | list * 2 | join"),
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    # Small in memory, but endless to write out or to compare.
    NESTED + "{{ ns.x }}",
    NESTED + "{{ ns.x | tojson }}",
    NESTED + "{% set other = ns.x %}" + NESTED + "{{ ns.x == other }}",
    "{% for i in range(99999) %}" * 4 + "{% set k = i %}" + "{% endfor %}" * 4,
    "{% for i in range(99999) %}" * 2 + "{{ 'x' * 10 }}" + "{% endfor %}" * 2,
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ range(n) | length }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('x' * 10000000) }}",
]


def attacked(program: str) -> Renderer:
    """Well-behaved while it is probed."""
    head = "{% set n = 1000000000 %}{% if 'attack' in messages[0]['content'] %}"
    return renderer(head + program + "{% endif %}" + CHATML)


@pytest.mark.parametrize("program", TOO_LARGE)
def test_every_way_to_be_endless_ends(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, where no signal of ours would reach it."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.4)
    made = attacked(program)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ThreadPoolExecutor(1) as pool:
        span = pool.submit(made.span, None, "attack", "The answer").result()
    assert span.status == Status.TEMPLATE_ERROR
    assert 0 < len(span.reason) <= 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024, "it was computed here"
    assert made.span(None, "Hello", "The answer").status == Status.OK


@pytest.mark.parametrize("expression", ["10 ** (10 ** 8)", "'x' | center(10 ** 10)", "'%*d' % (10 ** 10, 1)"])
def test_constants_are_computed_under_the_same_limits(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja folds them while it compiles, before anything is rendered."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.4)
    with pytest.raises(Refused) as caught:
        renderer("{{ " + expression + " }}" + CHATML)
    assert caught.value.reason == "bad_template"
    assert "memory" in caught.value.message or "longer than" in caught.value.message


def test_a_template_that_must_be_stopped_again_and_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(chat_template, "MAX_STOPPED", 2)
    made = attacked(NESTED + "{{ ns.x }}")
    for _ in range(2):
        assert made.span(None, "attack", "The answer").status == Status.TEMPLATE_ERROR
    with pytest.raises(Refused, match=r"stopped on 3 texts: the template ran longer than 0\.1 s") as caught:
        made.span(None, "attack", "The answer")
    assert caught.value.reason == "bad_template"


def test_what_is_written_is_counted_while_it_is_written() -> None:
    """Three million characters take neither time nor memory here, but would elsewhere."""
    span = attacked("{% for i in range(30000) %}{{ 'x' * 100 }}{% endfor %}").span(None, "attack", "The answer")
    assert span.status == Status.TEMPLATE_ERROR
    assert span.reason.startswith("the template wrote more than")


def test_a_template_may_use_what_a_long_text_needs() -> None:
    """The limits are far from honest work: a prompt of 4 MB, copied and trimmed."""
    prompt = "word " * 800_000 + "end"
    copied = CHATML.replace("m['content']", "(m['content'] ~ ' ') | replace('word', 'WORD') | trim")
    made = renderer("{% if messages[0]['content'] | length > 99 %}" + copied + "{% else %}" + CHATML + "{% endif %}")
    assert prompt.replace("word", "WORD") in made._chat.render(None, prompt, "y")  # type: ignore[union-attr]


def test_small_arithmetic_stays_allowed() -> None:
    harmless = "{% set n = 2 ** 10 * 3 % 7 %}{{ '-' * n }}{{ '%s' % n }}"
    assert renderer(harmless + CHATML).span(None, "a", "b").status == Status.OK


@pytest.mark.parametrize("expression", ["['a', 'b']|random", "lipsum(1)"])
def test_a_template_that_draws_at_random_is_refused(expression: str) -> None:
    with pytest.raises(Refused) as caught:
        renderer("{{ " + expression + " }}" + CHATML)
    assert caught.value.reason == "bad_template"


def test_threads_get_their_own_answers() -> None:
    made = [chat_template.ChatTemplate(tokenizer(f"{{# {n} #}}{n} " + CHATML)) for n in range(4)]

    def work(n: int) -> bool:
        return all(
            made[n].render(None, f"{n}-{i}", "y").startswith(f"{n} <|im_start|>user\n{n}-{i}<") for i in range(100)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_an_interrupted_question_does_not_shift_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = attacked("{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            made.span(None, "attack", "The answer")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert "Hello again" in made._chat.render(None, "Hello again", "The answer")  # type: ignore[union-attr]


def test_the_process_that_renders_knows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:secret@nowhere/x")
    process = template_process.TemplateProcess()
    try:
        seen = Path(f"/proc/{process._process.pid}/environ").read_bytes()
        assert b"PYTHONPATH" in seen
        assert b"secret" not in seen
    finally:
        process.end()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_asks_a_process_of_its_own() -> None:
    template = chat_template.ChatTemplate(tokenizer(CHATML))
    parents = template_process._current
    child = os.fork()
    if child == 0:
        right = False
        with contextlib.suppress(BaseException):
            own = "of the child" in template.render(None, "of the child", "y")
            right = own and template_process._current is not parents
            template_process._end()
        os._exit(0 if right else 1)
    assert "of the parent" in template.render(None, "of the parent", "y")
    assert os.waitpid(child, 0)[1] == 0
    assert template_process._current is parents


def test_it_does_not_outlive_the_one_who_asks() -> None:
    program = (
        "import os, signal; from tasks import template_process as t; p = t.TemplateProcess();"
        "print(p._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    stat = Path(f"/proc/{int(done.stdout)}/stat")

    def gone() -> bool:
        try:
            return stat.read_text().rsplit(") ", 1)[1][0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    for _ in range(600):
        if gone():
            break
        time.sleep(0.1)
    assert gone()


def test_a_process_that_does_not_start_is_no_fault_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_current", None)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Unavailable, match="does not start"):
        template_process.ask({"seconds": 1})


def test_whoever_sends_more_than_a_rendering_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a template would that got out of the sandbox: the answer is bounded where it is read, too."""
    template = chat_template.ChatTemplate(tokenizer(CHATML))
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 10_000_000)
    request = {
        "template": "{{ '\\n' * 9000 }}",
        "variables": {},
        "conversations": [[]],
        "seconds": 5,
        "output_chars": 9000,
    }
    assert template_process.ask(request)["texts"] == ["\n" * 9000]
    real = template_process.Connection.recv_bytes
    monkeypatch.setattr(
        template_process.Connection, "recv_bytes", lambda self, limit=None: real(self, 100 if limit else None)
    )
    with pytest.raises(template_process.Stopped):
        template_process.ask(request)
    monkeypatch.undo()
    assert "Hello" in template.render(None, "Hello", "y")
