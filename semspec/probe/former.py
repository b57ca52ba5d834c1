"""Cards of probes and collections as they are written today, whatever version wrote them."""

from __future__ import annotations

from typing import Any

FORMER = {"least": "threshold", "met": "collected_by", "drawn": "samples_drafts", "bonus": "bonus_temperature"}
WITHIN = ("collected_by", "bound")  # tables of which the same is true


def current(data: dict[str, Any]) -> dict[str, Any]:
    """With today's keys in place of those of earlier versions."""
    found = {FORMER.get(key, key): value for key, value in data.items()}
    return {key: current(value) if key in WITHIN else value for key, value in found.items()}
