"""`college-math`: exercises of college textbooks."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.tasks.contest import ContestTask


@dataclass(frozen=True)
class CollegeMath(ContestTask):
    """The 2,818 test problems of CollegeMath (Tang et al. 2024); answers are numbers and formulas."""

    name = "college-math"
    max_new_tokens = 2048
    filename = "math/college_math.jsonl"
