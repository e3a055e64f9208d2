"""A progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Report(Protocol):
    def __call__(self, done: int, total: int, tokens: int = 0) -> None: ...


@contextmanager
def progress(label: str, unit: str = "texts") -> Iterator[Report]:
    """Yields `report(done, total, tokens)`; shows units/s, tokens/s and the time left."""
    started = time.monotonic()
    last = started
    first_done: int | None = None
    reached = ""
    on_terminal = sys.stderr.isatty()

    def report(done: int, total: int, tokens: int = 0) -> None:
        nonlocal last, first_done, reached
        reached = f"{done}/{total} {unit}"
        if first_done is None:
            # Work resumed from an earlier run must not inflate the rate.
            first_done = done
            if done:
                sys.stderr.write(f"{label}: goes on at {reached}\n")
        now = time.monotonic()
        if now - last < (0.2 if on_terminal else 15) and done < total:
            return
        last = now
        seconds = max(now - started, 1e-6)
        rate = (done - first_done) / seconds
        left = f", {_clock((total - done) / rate)} left" if rate > 0 and done < total else ""
        speed = f"{rate:.1f} {unit}/s" + (f", {tokens / seconds:.0f} tokens/s" if tokens else "")
        line = f"{label}: {done}/{total} {unit}, {speed}{left}"
        sys.stderr.write(f"\r{line:<100}" if on_terminal else line + "\n")
        sys.stderr.flush()

    try:
        yield report
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{label}: interrupted at {reached or 'the start'}; the same command goes on from there")
        if not on_terminal:
            sys.stderr.write("\n")
        raise
    finally:
        if on_terminal:
            sys.stderr.write("\n")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
