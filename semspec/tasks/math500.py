"""`math500`: competition problems of all levels."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.tasks.contest import ContestTask


@dataclass(frozen=True)
class Math500(ContestTask):
    """500 problems of MATH (Hendrycks et al. 2021, chosen by Lightman et al. 2023); a group is the level."""

    name = "math500"
    max_new_tokens = 4096
    filename = "math/math500.jsonl"
