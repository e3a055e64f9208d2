"""Shuffled prompts: the same responses, each under another row's prompt (Appendix F of 2603.18593).

Averaged over several shuffles *in probability space*, log p(y | other prompts) estimates the reference marginal
p(y).  The shuffles belong to the text set, so they are the same for all models.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from registry.errors import BadInput


def shuffle_prompts(prompt_ids: Sequence[int], responses: Sequence[object], *, seed: int, draw: int) -> list[int]:
    """`order`, where position s gets the prompt of position `order[s]`: a permutation of the N positions.

    No position gets its own prompt, also not from another row that shares it, and no (prompt, response) occurs
    twice.  The order is that of sha256(seed, draw, position), which no library's generator can change; a position
    that breaks a rule then swaps with the first one after it, cyclically, with which both keep the rules.

    `prompt_ids` and `responses` have length N; responses only need equality.  Raises BadInput where the rules cannot
    be kept, as when more than half of the responses share one prompt.
    """
    n = len(prompt_ids)
    order = sorted(range(n), key=lambda position: hashlib.sha256(f"{seed}/{draw}/{position}".encode()).digest())
    pairs = Counter((prompt_ids[order[s]], responses[s]) for s in range(n))

    def breaks(s: int) -> bool:
        given = prompt_ids[order[s]]
        return given == prompt_ids[s] or pairs[given, responses[s]] > 1

    def swap(s: int, t: int) -> None:
        for position in (s, t):
            pairs[prompt_ids[order[position]], responses[position]] -= 1
        order[s], order[t] = order[t], order[s]
        for position in (s, t):
            pairs[prompt_ids[order[position]], responses[position]] += 1

    for s in range(n):
        if not breaks(s):
            continue
        for step in range(1, n):
            t = (s + step) % n
            swap(s, t)
            if not breaks(s) and not breaks(t):
                break
            swap(s, t)
        else:
            raise BadInput(
                f"the prompts cannot be shuffled so that every response gets another prompt and no pair occurs twice "
                f"(stuck at position {s} of {n})",
                hint="too many of the responses share a prompt: use a set with more prompts",
            )
    return order
