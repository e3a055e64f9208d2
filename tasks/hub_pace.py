"""Waiting for the Hub: how long, and together with whoever else here talks to it.

The Hub limits requests by address, so when it tells one worker to pause it means all workers of this machine.  The
pause is therefore kept in a small file in MODELKIN_HOME:

- not in the database, which may be far away, serves machines with other addresses, and is not needed to download;
- not beside the Hub cache, which is often a network disk that several machines share and where locks do nothing;
- a file that is broken, foreign, unwritable or absent is no pause: a rate limit costs one more request then.

Only what speaks for the whole machine is shared: a 429, or any answer that says when to come back.  A plain 500 may be
the trouble of one repo, and waits alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from registry.errors import HubUnavailable
from registry.settings import settings
from tasks.hub_client import no_silent_waits
from tasks.hub_errors import hub_errors, status_of

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""Of the exponential waits, used where the Hub does not say how long."""

LONGEST_PAUSE_S = 3600.0
"""A longer pause in the file is not believed."""

UNANSWERED_SHARE = 0.1
"""Of the patience, where nothing answers at all: a rate limit always ends, a name that does not resolve seldom does."""

FILE = "hub-pace.json"
LOCK_PATIENCE_S = 1.0

Answer = TypeVar("Answer")
Progress = Callable[[float], None]
"""Told the seconds of each wait before it begins."""

_log = logging.getLogger(__name__)
_threads = threading.Lock()


@dataclass(frozen=True)
class Pause:
    """No request before `since + seconds`; both ends are kept so that a clock that jumps cannot lengthen it."""

    endpoint: str
    since: float
    """Seconds since the epoch."""
    seconds: float

    def left(self, now: float) -> float:
        """Seconds, between 0 and `seconds` whatever the clock says."""
        return max(0.0, min(self.seconds, self.since + self.seconds - now))


_here: Pause | None = None
"""What this process knows: all there is where the file cannot be written."""


def patiently(call: Callable[[], Answer], where: str, *, progress: Progress | None = None) -> Answer:
    """What `call()` returns, tried again while the Hub limits requests, fails or does not answer.

    `where` names for messages what is asked for.  The waits of one call of this function are at most
    MODELKIN_HUB_PATIENCE_S together, a tenth of it where nothing answers; time spent in `call` does not count.
    Without `progress` each wait is said in a warning of this module's logger, which ends on stderr.

    Raises the last HubUnavailable when patience is at its end, or at once when the Hub asks for a longer wait than is
    left; Refused and NoSpace as `hub_errors` makes them; anything else as `call` raised it.
    """
    patience = settings().hub_patience_s
    waited = 0.0
    tries = 0
    last: HubUnavailable | None = None
    while True:
        waited += _sit_out(where, patience - waited, progress, last)
        try:
            with hub_errors(where), no_silent_waits():
                return call()
        except HubUnavailable as error:
            last = error
        tries += 1
        if _is_for_all(last):
            _remember(_pause(last.retry_after_s or _exponential(tries)))
            continue
        wait = _exponential(tries)
        if waited + wait > patience * _share(last):
            raise last
        _tell(f"{last.message}: trying again in {wait:.0f} s (Ctrl-C ends it)", wait, progress)
        _sleep(wait)
        waited += wait


def paused_s() -> float:
    """Seconds for which the Hub asked this machine to pause, from now on."""
    pause = _current()
    return pause.left(_now()) if pause is not None else 0.0


def _sit_out(where: str, patience: float, progress: Progress | None, last: HubUnavailable | None) -> float:
    """Waits while the machine pauses; returns the seconds.

    Raises `last`, or a HubUnavailable of its own, when that would take longer than `patience` (seconds).
    """
    waited = 0.0
    before: Pause | None = None
    while True:
        pause = _current()
        left = pause.left(_now()) if pause is not None else 0.0
        # The same pause again after it was waited for in full: the clock was put back meanwhile.
        if pause is None or left == 0 or pause == before:
            return waited
        # Workers that wait for one moment must not all come at it.
        wait = left + random.uniform(0, 0.1 * pause.seconds + 0.5)
        if waited + left > patience:
            raise last or HubUnavailable(
                f"the Hub limits this machine's requests for another {left:.0f} s (asked for {where})",
                hint="run it again then, or set MODELKIN_HUB_PATIENCE_S higher",
                retry_after_s=left,
            )
        said = f"the Hub limits our requests: going on with {where} in {wait:.0f} s (Ctrl-C ends it)"
        _tell(said, wait, progress)
        _sleep(wait)
        waited += wait
        before = pause


def _is_for_all(error: HubUnavailable) -> bool:
    """Whether it speaks of the machine, not of one repo.  A wait of no seconds is none."""
    return bool(error.retry_after_s) or (status_of(error) == 429 and error.retry_after_s is None)


def _share(error: HubUnavailable) -> float:
    """Of the patience that this failure deserves."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return 0.0
    answered = status_of(error) is not None or error.retry_after_s is not None
    return 1.0 if answered else UNANSWERED_SHARE


def _exponential(tries: int) -> float:
    """Seconds, by chance between half and all of what doubles with every try."""
    return random.uniform(0.5, 1.0) * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(tries - 1, 10))


def _pause(seconds: float) -> Pause:
    from huggingface_hub import constants

    return Pause(constants.ENDPOINT, _now(), min(LONGEST_PAUSE_S, seconds))


def _tell(said: str, seconds: float, progress: Progress | None) -> None:
    if progress is not None:
        progress(seconds)
    else:
        _log.warning("%s", said)


def _current() -> Pause | None:
    """The pause that holds for this endpoint: the later end of the file's and this process's own."""
    from huggingface_hub import constants

    now = _now()
    known = [each for each in (_read(_file()), _here) if each is not None and each.endpoint == constants.ENDPOINT]
    return max(known, key=lambda each: each.left(now), default=None)


def _remember(pause: Pause) -> None:
    """Writes a pause down unless a longer one is known."""
    global _here
    with _threads:
        known = _current()
        if known is not None and known.left(_now()) >= pause.left(_now()):
            return
        _here = pause
        with contextlib.suppress(OSError):
            _write(_file(), pause)


def _file() -> Path:
    return settings().home / FILE


def _read(path: Path) -> Pause | None:
    """None for whatever is no pause: the file is a courtesy between workers, never a reason to fail."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = json.loads(os.read(descriptor, 4096))
        finally:
            os.close(descriptor)
        pause = Pause(str(found["endpoint"]), float(found["since"]), float(found["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    plausible = math.isfinite(pause.since) and 0 < pause.seconds <= LONGEST_PAUSE_S
    return pause if plausible else None


def _write(path: Path, pause: Pause) -> None:
    """In place under a lock; a longer pause that another worker wrote stays.  Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        _lock(descriptor)
        known = _read(path)
        now = _now()
        if known is not None and known.endpoint == pause.endpoint and known.left(now) >= pause.left(now):
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(pause)).encode(), 0)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """A moment's patience only: a worker that was stopped while it held the lock must not stop the others."""
    for _ in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOCK_PATIENCE_S / 20)


_now = time.time
_sleep = time.sleep
