"""Where the trained pair lies, by the names it is loaded with."""

from __future__ import annotations

from pathlib import Path

_MODELS = Path(__file__).parent / "models"
SHIPPED: dict[str, Path] = {"pocket": _MODELS / "target", "pocket-draft": _MODELS / "draft"}
PROBES = _MODELS / "probes"
