"""Tiny language models of known ancestry: ground truth for every claim about likeness.

`build(folder)` trains seven families for seconds each and derives relatives: fine-tuned, quantised, pruned,
perturbed, permuted, merged, distilled, re-uploaded.  Each is a folder as transformers writes it (safetensors, config,
tokenizer) with the truth about its ancestry in `member.json`.
"""

from __future__ import annotations

from demo.population.build import Member, build

__all__ = ["Member", "build"]
