"""The process that renders chat templates, as the one that asks sees it: started when first needed, replaced when a
template has ended it.  Any thread may ask; one at a time is answered.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from registry.errors import Unavailable
from tasks.template_sandbox import READY

START_SECONDS = 120
WALL_FACTOR = 30
"""Times the CPU time that a template has: what a busy machine may take for it."""


class Stopped(Exception):
    """The template ended its process, or would not have ended by itself; says how."""


class TemplateProcess:
    def __init__(self) -> None:
        self.owner = os.getpid()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tasks.template_sandbox", str(theirs.fileno())],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        assert self._process.stderr is not None
        try:
            started = self._connection.poll(START_SECONDS) and self._connection.recv_bytes(len(READY)) == READY
        except (EOFError, OSError):
            started = False
        if not started:
            self._process.kill()
            said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
            self.end()
            raise Unavailable(
                f"the process that renders chat templates does not start: {said[-1] if said else 'it says nothing'}",
                hint="see `modelkin doctor`; --profile plain needs no template",
            )
        self._process.stderr.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises Stopped; the process is of no use then."""
        seconds = request["seconds"]
        try:
            self._connection.send_bytes(json.dumps(request, default=str).encode())
            if not self._connection.poll(WALL_FACTOR * seconds):
                raise Stopped(f"the template ran longer than {WALL_FACTOR * seconds:g} s")
            # At most six bytes a character in JSON; whoever sends more does not render.
            limit = 6 * len(request["conversations"]) * request["output_chars"] + 4096
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes(limit))
        except (EOFError, OSError) as error:
            code = self._ended()
            if code == -signal.SIGPROF:
                raise Stopped(f"the template ran longer than {seconds:g} s") from error
            raise Stopped(f"the template ended its process ({_shown(code)})") from error
        return answer

    def _ended(self) -> int:
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


_lock = threading.Lock()
_current: TemplateProcess | None = None
_inherited: list[TemplateProcess] = []


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """What `tasks.template_sandbox` answers.  Raises Stopped, Unavailable where no process can be started."""
    global _current
    with _lock:
        if _current is not None and _current.owner != os.getpid():
            # After a fork it is the parent's, who may be in the midst of a question.
            _inherited.append(_current)
            _current = None
        if _current is None:
            _current = TemplateProcess()
        try:
            return _current.ask(request)
        except BaseException:
            # Also when interrupted: the answer to this question must not be taken for that to the next.
            _current.end()
            _current = None
            raise


def _forked() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _end() -> None:
    if _current is not None and _current.owner == os.getpid():
        _current.end()


def _environment() -> dict[str, str]:
    """No tokens and no passwords: templates are strangers' programs."""
    kept = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "HOME", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "PYTHONPATH": os.pathsep.join(one for one in sys.path if one),
        "HF_HUB_OFFLINE": "1",
        # Idle threads of a numeric library count as memory.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _shown(code: int) -> str:
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"exit {code}"
