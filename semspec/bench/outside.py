"""Measures that need a model besides the pair's: an encoder for meanings, a judge. Their results stay in the folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from semspec.bench.agreement import Values, agreements, by_encoder, references
from semspec.bench.arms import shown
from semspec.bench.folder import Sample, key_of, write_json
from semspec.bench.judge_model import JudgeModel, judged, who_judged
from semspec.bench.measures import JUDGE, MEANING
from semspec.errors import BadRequest

FILE = "meanings.json"
AUTO, WITHOUT = "auto", "none"
DEFAULT = Path(".models/all-MiniLM-L6-v2")  # where `auto` looks for one


def outside_measures(
    folder: Path, run: dict[str, Any], samples: Sequence[Sample], encoder: str = AUTO, judge: JudgeModel | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, Values], dict[str, str]]:  # fmt: skip
    """Measure -> values, and by whom in words; no meaning where the run has no samples of the target with other seeds,
    or no encoder is there."""
    roles = {arm["name"]: arm["role"] for arm in run["arms"]}
    found, by = dict[str, Values](), dict[str, str]()
    others, name = references(samples, roles), _name(encoder)
    if others and name:
        found[MEANING], by[MEANING] = _meanings(folder / FILE, samples, others, name), Path(name).name
    rows = {arm["name"] for arm in shown(run)}  # nobody pays for verdicts that no table shows
    if preferences := judged(folder, [s for s in samples if s["arm"] in rows], roles, judge, progress):
        pairs = sum(roles[arm] != "target" for arm, _, _ in preferences)
        found[JUDGE] = preferences
        by[JUDGE] = f"{who_judged(folder, judge)}, of {pairs} pairs of answers, asked in both orders where they differ"
    return found, by


def _name(encoder: str) -> str:
    if encoder == AUTO:
        return str(DEFAULT) if DEFAULT.is_dir() else ""
    if not encoder:
        raise BadRequest("the encoder has no name; give a folder or a hub id, auto, or none for words alone")
    return "" if encoder == WITHOUT else encoder


def _meanings(path: Path, samples: Sequence[Sample], others: dict[str, list[Sample]], name: str) -> Values:
    """From the file, if the same encoder has read the same samples; else encoded, and written there."""
    texts = sha256("\0".join(f"{key_of(s)}{s['text']}" for s in samples).encode(errors="surrogatepass")).hexdigest()
    if path.exists():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            values: Values = {(arm, problem, int(repeat)): value for arm, problem, repeat, value in kept["values"]}
            if (kept["encoder"], kept["texts"]) == (name, texts):
                return values
        except (ValueError, KeyError, TypeError):
            pass  # damaged: made again
    from semspec.text.encoder import Encoder

    values = agreements(samples, others, by_encoder(samples, Encoder(name, user="the measure of meaning")))
    write_json(path, {"encoder": name, "texts": texts, "values": [[*key, v] for key, v in values.items()]})
    return values
