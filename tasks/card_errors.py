"""Errors of a card after which a process can compute nothing any more.

A failed assertion or an illegal address in a CUDA kernel spoils the context: every later call of the process fails too,
whatever model it is for, and some return numbers.  Only the end of the process clears it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from registry.errors import Unavailable

EXIT_CODE = 70
"""Of a worker's child that ended because its card failed; whoever started it starts another."""

_MARKS = ("cuda error", "device-side assert", "cublas_status", "cudnn_status", "cusolver_status", "nccl error")


class CardFailed(Unavailable):
    """This process must end: nothing that it computes on the card can be trusted."""

    slug = "card-failed"


def is_card_error(error: BaseException) -> bool:
    """Whether the card's context is lost.  Memory that runs out is not that: it is handed back and asked for again."""
    import torch

    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    if "out of memory" in text:
        return False
    return isinstance(error, torch.AcceleratorError) or any(mark in text for mark in _MARKS)


@contextmanager
def told_apart() -> Iterator[None]:
    """Raises CardFailed for what a failed card raises in the block; everything else passes."""
    try:
        yield
    except RuntimeError as error:
        if not is_card_error(error):
            raise
        first = (str(error).strip().splitlines() or ["no message"])[0]
        raise CardFailed(
            f"the card failed: {first}"[:300],
            hint="run the same command again; a new process goes on where this one ended",
        ) from error


@contextmanager
def ending_the_process() -> Iterator[None]:
    """For the body of a worker's child: on CardFailed the process ends at once, with EXIT_CODE.

    Not by an exception, which somebody may catch, nor with Python's clean-up, which may wait for the card for ever.
    """
    try:
        yield
    except CardFailed as error:
        sys.stderr.write(f"modelkin: {error.message}; this process ends\n")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(EXIT_CODE)
