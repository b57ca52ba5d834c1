"""A finished probe against another collection: problems it has never seen, and more samples for a truer share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from semspec.errors import BadRequest, ModelError
from semspec.probe.probe import Probe
from semspec.probe_fit.data import Folder
from semspec.probe_fit.measure import measure
from semspec.probe_fit.risk import one_each
from semspec.probe_fit.rows import Rows, load_rows
from semspec.probe_fit.spans import among
from semspec.probe_fit.train import predict


def evaluate(probe: Probe, folder: Folder, model: str, kind: str, leave_one_out: bool = False) -> dict[str, Any]:
    """A card's figures. Baselines are fitted to the very rows they are tested on, in their favour."""
    rows = unseen(probe, folder, model, kind, leave_one_out)
    logits = predict(probe.head, rows)
    return measure(rows, probe.calibrator(logits), logits.sigmoid(), known=rows)


def unseen(probe: Probe, folder: Folder, model: str, kind: str, leave_one_out: bool = False) -> Rows:
    """A collection's steps as a probe sees them, if it has never seen their problems."""
    run, _ = folder.run, folder.labelled
    if run["models"][model] != probe.model:
        raise ModelError(
            f"the samples in {folder.path} are of model {run['models'][model]}, the probe is of {probe.model}; "
            "collect with the probe's own model"
        )
    rows = load_rows(folder, model, probe.features, kind, leave_one_out)
    seen = among(probe.data.get("seen", ()), rows.problems)
    if seen:
        raise BadRequest(
            f"the probe has seen {len(seen)} of these problems, such as {seen[0]}; collect with another --seed"
        )
    return rows


def reservation(judge: Probe, policy: dict[str, Any] | None, threshold: float) -> str | None:
    """Why a threshold's bound may not hold for the steps that the judge probe will verify, if there is a reason.
    `policy` is that of the rule by which the steps were collected."""
    if policy is None:
        return "they follow whole answers; collect with --traces semantic+:probes=... for those that it verifies"
    if policy.get("judge_probe") != judge.digest:
        other = f"{policy['rule']} with another judge probe"
        return f"they were verified by {other}; collect with --traces semantic+:probes=... again"
    collected_at = float(policy.get("threshold", 0))
    if threshold < collected_at:
        return (
            f"they were collected at a threshold of {collected_at:.4g}, and below that more is accepted; collect with "
            f"--traces semantic+:probes=...,threshold={threshold:.4g} again"
        )
    return None


@dataclass(frozen=True)
class ScoredSteps:
    """Independent draft steps, one a problem, with a judge probe's scores."""

    scores: list[float]
    bad: list[bool]
    meaning_of_bad: str


def scored_steps(judge: Probe, folder: Folder, bad: str = "", seed: int = 0) -> ScoredSteps:
    """A judge probe's scores of the draft's steps in a collection. Bad are those that are invalid, where the task can
    tell, or those that the target never wrote in any words."""
    tells = folder.tells
    bad = bad or ("invalid" if tells else "unwritten")
    if bad not in ("invalid", "unwritten") or (bad == "invalid" and not tells):
        raise BadRequest(
            f"steps cannot be called bad for being {bad!r} here; give unwritten, or invalid if the task can tell"
        )
    rows = unseen(judge, folder, "target", "valid" if bad == "invalid" else "written")
    rows, scores = rows.where(rows.cross), judge.calibrator(predict(judge.head, rows))[rows.cross]
    wrong = rows.labels < 0.5
    at = one_each(rows.problems, seed)
    return ScoredSteps(scores[at].tolist(), wrong[at].tolist(), bad)
