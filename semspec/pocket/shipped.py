"""Where the trained models lie, by the names they are loaded with."""

from __future__ import annotations

from pathlib import Path

_MODELS = Path(__file__).parent / "models"
SHIPPED: dict[str, Path] = {
    "pocket": _MODELS / "target",
    "pocket-draft": _MODELS / "draft",
    "pocket-other-draft": _MODELS / "other-draft",  # with another tokenizer
}
HEADS: dict[str, Path] = {"pocket": _MODELS / "head"}  # draft heads, by the name after "eagle:"
PROBES = _MODELS / "probes"
JUDGE_OF_EVIDENCE = _MODELS / "probes-of-evidence"  # for the same models behind servers, which send no states


def shipped_pair(target: str | Path, draft: str | Path | None) -> tuple[str | Path, str | Path | None]:
    """The names of both models: pocket brings its draft, and as a draft it means that one."""
    if draft == "pocket" or (target == "pocket" and draft is None):
        draft = "pocket-draft"
    return target, draft
