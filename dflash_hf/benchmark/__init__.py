"""Measuring a drafter against plain decoding and every peer that can run here, in one process.

>>> from dflash_hf.benchmark import bench, read_prompts                          # doctest: +SKIP
>>> prompts, _ = read_prompts("prompts.jsonl", limit=30)                         # doctest: +SKIP
>>> bench(target, drafter, prompts, tokenizer=tokenizer).print()                 # doctest: +SKIP
"""

from .methods import Sampling
from .prompts import Prompt, read_prompts
from .report import Report
from .runner import bench

__all__ = ["Prompt", "Report", "Sampling", "bench", "read_prompts"]
