"""huggingface_hub's HTTP client without waits of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_inside = 0


@contextmanager
def no_silent_waits() -> Iterator[None]:
    """While the block lasts, a 429 or 5xx is raised at once, in every thread.

    huggingface_hub would ask for a file up to five times more, sleeping Retry-After each time, in each of its threads
    by itself, without a word: `hub_pace` could neither bound these waits nor share them nor say that they happen.
    """
    global _inside
    from huggingface_hub import get_session

    client = get_session()
    with _lock:
        _inside += 1
        hooks = client.event_hooks
        # The library makes a new client after a connection failed, so this is looked at every time.
        if _raise_when_busy not in hooks["response"]:
            client.event_hooks = {**hooks, "response": [*hooks["response"], _raise_when_busy]}
    try:
        yield
    finally:
        with _lock:
            _inside -= 1


def _raise_when_busy(response: Any) -> None:
    if _inside and (response.status_code == 429 or response.status_code >= 500):
        from huggingface_hub import hf_raise_for_status

        hf_raise_for_status(response)
