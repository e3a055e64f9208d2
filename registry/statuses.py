"""What became of each text when a model scored it: one uint8 a text, stored beside the value."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    OK = 0
    """Scored; the response's tokens are those of the jointly tokenised string."""
    SPLIT = 1
    """Scored, as ids(prefix) + ids(response): a token straddled the boundary, the template altered the response, or
    the tokenizer gives no offsets."""
    TOO_LONG = 2
    """Longer than the model's context; nothing is cut silently."""
    NON_FINITE = 3
    """A log-probability was NaN or infinite."""
    TEMPLATE_ERROR = 4
    """The chat template raised on this text."""
    UNALIGNABLE = 5
    """Even tokenised alone, the response's ids do not decode back to it."""
    NOT_SCORED = 6
    """No value, for a reason outside this text (an import without it, a cancelled job)."""


HAS_VALUE = frozenset({Status.OK, Status.SPLIT})
FIRST_WITHOUT_VALUE = Status.TOO_LONG
"""`status < FIRST_WITHOUT_VALUE` is the validity mask."""
