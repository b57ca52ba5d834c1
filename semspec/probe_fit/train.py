"""Train one model's probe on a labelled collection, calibrate it, and measure it on problems it has never seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from semspec.errors import BadRequest
from semspec.probe.calibrate import KINDS, Calibrator
from semspec.probe.features import Features, pool, resolve_layers
from semspec.probe.probe import Probe, ProbeNetwork, head_for
from semspec.probe_fit.data import Folder
from semspec.probe_fit.measure import measure
from semspec.probe_fit.rows import JUDGED, PARTS, Rows, Tokens, load_rows, split
from semspec.probe_fit.spans import spans


@dataclass(frozen=True)
class Training:
    """How to train. The defaults are the released recipe's, but for the labels, the split, the endings, standardised
    inputs and the calibration; `released` has those, too."""

    labels: str = "cross"  # own, cross or combined, see rows.load_rows; a draft's probe has own where this is cross
    leave_one_out: bool = False
    pooling: str = "mean"
    layers: tuple[int, ...] = ()  # of those that were collected; none named: all
    states: bool = True  # False: evidence alone
    evidence: tuple[str, ...] = ()  # also what the logits say: groups of `evidence`
    widths: tuple[int, ...] | None = None  # None: the paper's
    dropout: float = 0.3
    rate: float = 1e-3
    batch: int = 128
    epochs: int = 100
    patience: int = 15
    standardise: bool = True  # inputs have mean 0 and spread 1
    split: str = "problem"  # or "sample", see rows.split
    endings: bool = False  # also learn from steps that end the thinking or the text
    calibration: str = "isotonic"
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("batch", "epochs", "patience"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} is {getattr(self, name)}; give 1 or more")
        if not 0 <= self.dropout < 1 or self.rate <= 0 or min(self.widths or (1,)) < 1:
            given = f"widths {self.widths}, dropout {self.dropout}, rate {self.rate}"
            raise BadRequest(f"{given}: give widths of 1 or more, a dropout from 0 to below 1, and a rate above 0")
        if self.split not in SPLITS:
            raise BadRequest(f"there is no split by {self.split!r}; give {' or '.join(SPLITS)}")
        if self.calibration not in KINDS:
            raise BadRequest(f"there is no calibration {self.calibration!r}; give one of: {', '.join(KINDS)}")


SPLITS = ("problem", "sample")


def released(training: Training, model: str) -> Training:
    """As the paper's released code trains the target's or the draft's probe."""
    batch, patience = (128, 10) if model == "target" else (64, 20)
    return replace(
        training, labels="own", pooling="mean", calibration="none", widths=None, dropout=0.3, rate=1e-3, epochs=100,
        standardise=False, split="sample", endings=True, seed=42, evidence=(), states=True, leave_one_out=False,
        batch=batch, patience=patience,
    )  # fmt: skip


def learnable(samples: int, by_rule: bool, model: str, training: Training) -> None:
    """Refuse what a collection of so many samples cannot teach. `by_rule`: a rule wrote its traces."""
    if by_rule and model == "draft":
        raise BadRequest(
            "where a rule wrote the traces, the draft has one step after each prefix, which gives no share; "
            "train --only judge, and the draft's probe on a collection with --traces target"
        )
    if not samples and training.labels != "valid":
        raise BadRequest(
            "without samples of the target its own steps are not known; collect with --samples 8, or train --only "
            "judge --judge-labels valid, where the task can tell which steps are right"
        )


@dataclass
class Fit:
    """A probe, and its predictions for the test problems."""

    probe: Probe
    raw: Tensor  # [N] before calibration
    predicted: Tensor  # [N]
    labels: Tensor  # [N]


def fit(
    folder: Folder,
    model: str,
    training: Training,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fit:
    """The probe of the target or the draft."""
    if model == "draft" and training.evidence:
        raise BadRequest(
            "evidence is what the target's pass says of a step, and a draft's probe has no part in that pass; "
            "give it none"
        )
    run, about = folder.run, folder.labelled
    layers = resolve_layers(training.layers or run["layers"][model], run["depth"][model]) if training.states else ()
    kind = "own" if training.labels == "cross" and model == "draft" else training.labels
    features = Features(layers, training.pooling, training.evidence)
    rows = load_rows(folder, model, features, kind, training.leave_one_out, training.endings)
    if "collected_by" in run and kind in JUDGED:  # a judge scores the draft's steps; the target's only label them
        rows = rows.where(rows.cross)
    parts = split(rows, training.seed, training.split)
    head, epochs = train(parts["train"], parts["validation"], features, training, device, progress)
    logits = {name: predict(head, parts[name]) for name in PARTS}
    calibrator = Calibrator.fit(training.calibration, logits["validation"], parts["validation"].labels)
    test = parts["test"]
    raw, predicted = logits["test"].sigmoid(), calibrator(logits["test"])
    probe = Probe(head.cpu(), features, run["models"][model], calibrator)
    own = {key: value for key, value in asdict(training).items() if key not in probe.card}
    probe.data = {
        "collection": run["config"],
        "labelling": about,
        "training": own | {"labels": kind, "epochs": epochs},
        "rows": {name: len(part) for name, part in parts.items()},
        "problems": {name: len(set(part.problems)) for name, part in parts.items()},
        "seen": spans(rows.problems),
    } | ({"collected_by": run["collected_by"]} if "collected_by" in run else {})
    probe.metrics = measure(test, predicted, raw, parts["train"])
    return Fit(probe, raw, predicted, test.labels)


def train(
    rows: Rows,
    validation: Rows,
    features: Features,
    training: Training,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[ProbeNetwork, int]:
    """The head with the least squared error on the validation rows, and the epoch it is from."""
    y, known = rows.labels.to(device), validation.labels.to(device)
    seen = Seen.of(rows, device)
    inputs = seen.fixed.shape[1] + (0 if seen.tokens is None else seen.tokens.states[0].numel())
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(training.seed)
        head = head_for(features, inputs, training.widths, training.dropout).to(device)
        if training.standardise:
            head.standardise(torch.cat([seen.by(head, some) for some in seen.batches()]).detach())
        if training.standardise and seen.tokens is not None:
            head.standardise_states(seen.tokens.states)
        optimiser = torch.optim.Adam(head.parameters(), lr=training.rate)
        best, best_epoch, weights = float("inf"), 0, copy.deepcopy(head.state_dict())
        for epoch in range(training.epochs):
            progress(epoch, training.epochs)
            head.train()
            for some in torch.randperm(len(y), device=device).split(training.batch):
                optimiser.zero_grad()
                mse_loss(head(seen.by(head, some)).sigmoid(), y[some]).backward()
                optimiser.step()
            head.eval()
            loss = float(mse_loss(predict(head, validation).sigmoid(), known.cpu()))
            if loss < best:
                best, best_epoch, weights = loss, epoch + 1, copy.deepcopy(head.state_dict())
            elif epoch + 1 - best_epoch >= training.patience:
                break
    if not best_epoch:
        raise BadRequest("training gave no finite error; are the collected states finite, or is the rate too high?")
    head.load_state_dict(weights)
    progress(training.epochs, training.epochs)
    return head.eval(), best_epoch


@dataclass
class Seen:
    """Rows as a head sees them, on its device: pooled with its own queries, where it has any."""

    fixed: Tensor  # [N, F]
    tokens: Tokens | None

    @staticmethod
    def of(rows: Rows, device: torch.device) -> Seen:
        return Seen(rows.features.to(device), None if rows.tokens is None else rows.tokens.to(device))

    def by(self, head: ProbeNetwork, at: Tensor) -> Tensor:
        """[n, inputs] of the rows at these places"""
        fixed = self.fixed[at]
        if self.tokens is None or head.queries is None:
            return fixed
        own = self.tokens.take(at)
        pooled = [
            pool(own.states[:, i], own.first, own.counts, "attention", query) for i, query in enumerate(head.queries)
        ]
        return torch.cat([*pooled, fixed], -1)

    def batches(self, size: int = 4096) -> tuple[Tensor, ...]:
        return torch.arange(len(self.fixed), device=self.fixed.device).split(size)


@torch.no_grad()
def predict(head: ProbeNetwork, rows: Rows) -> Tensor:
    """Logits [N], on the host."""
    seen = Seen.of(rows, head.shift.device)
    return torch.cat([head(seen.by(head, some)).cpu() for some in seen.batches()])
