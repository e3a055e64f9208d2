"""Renders chat templates, in a process of its own: `python -m tasks.template_sandbox FD`.

Templates come from the Hub and are programs.  A sandbox keeps them from files and from Python, but not from computing
for ever or filling the memory: one filter (`'x'|center(10**9)`), one product, one list that holds itself twice over is
enough, and nothing inside the interpreter stops a single operation.  So the kernel does: this process has little memory
and, for each request, a few seconds of CPU time.  It knows none of the secrets of the process that asks; see
`tasks.template_process`.

Requests and answers are JSON, so that nothing that escapes here is believed there:
{template, variables, conversations, seconds, output_chars} → {texts} or {error, valid}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

CLOCK = datetime(2024, 7, 26, 12, tzinfo=UTC)
"""What `strftime_now` tells; the day of `tasks.chat_template.DATE`."""

MEMORY_BYTES = 512 << 20
"""Beyond what the interpreter and its libraries take."""

READY = b"ready"


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asks decides
    _compiled("")  # so that libraries are loaded before memory is limited
    _limit_memory()
    connection.send_bytes(READY)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with suppress(EOFError, OSError):  # whoever asked is gone
        while True:
            connection.send_bytes(_answer(json.loads(connection.recv_bytes())))


def _answer(request: dict[str, Any]) -> bytes:
    # The default action of SIGPROF ends the process, in the midst of any operation.
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    valid = False
    try:
        template = _compiled(request["template"])
        valid = True
        texts = [
            _rendered(template, messages, request["variables"], request["output_chars"])
            for messages in request["conversations"]
        ]
        return json.dumps({"texts": texts}).encode()
    except TooMuch as error:
        said = str(error)
    except MemoryError:
        said = "the template needs more memory than it is given"
    except BaseException as error:  # a template is a program of a stranger's: it may raise anything
        said = f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return json.dumps({"error": said, "valid": valid}).encode()


def _rendered(template: Any, messages: list[Any], variables: dict[str, Any], output_chars: int) -> str:
    pieces: list[str] = []
    written = 0
    blocks = template.generate(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=False,
        # Context variables shadow the environment's globals.
        strftime_now=CLOCK.strftime,
        **variables,
    )
    for block in blocks:
        written += len(block)
        if written > output_chars:
            raise TooMuch(f"the template wrote more than {output_chars} characters")
        pieces.append(block)
    return "".join(pieces)


class TooMuch(Exception):
    pass


@lru_cache(8)
def _compiled(text: str) -> Any:
    """The sandboxed environment is transformers' own: its filters, its extensions, its security fixes.

    But nothing in it draws at random, since a model must score the same twice.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # Of an empty template: compiling theirs would already compute its constants.
    environment = _compile_jinja_template("").environment.overlay()
    environment.filters = {name: one for name, one in environment.filters.items() if name != "random"}
    environment.globals = {name: one for name, one in environment.globals.items() if name != "lipsum"}
    return environment.from_string(text)


def _limit_memory() -> None:
    import resource

    with suppress(OSError, ValueError):  # macOS knows the limit and does not obey it
        with open("/proc/self/statm") as stream:
            now = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
