"""`mt-bench`: conversations of two turns."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.tasks.chat import ChatTask


@dataclass(frozen=True)
class MtBench(ChatTask):
    """The 80 two-turn prompts of MT-bench (Zheng et al. 2023) in eight categories."""

    name = "mt-bench"
    filename = "mt_bench/question.jsonl"
