"""A profile: a rule whose options were calibrated for one pair, so that the loss stays under a bound, as a small file.

`semspec calibrate` writes one; the command line reads it for `--verifier profile:FILE`. A request to a server cannot
name one: what is read from the disk is for whoever starts a program to say.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

from semspec import verify
from semspec.errors import BadRequest
from semspec.loop.stats import Stats
from semspec.verify import Rule

PREFIX = "profile:"
ACCURACY = "accuracy"  # the measure where there are right answers
SHARE, POINTS = "share", "points"  # units of a loss; points of accuracy in files before 2026-11-18
FORMAT = "semspec profile 1"
WINDOW, FEWEST = 200, 30  # sequences over which drift is watched, and after which it can be noticed
NOTICED, ERRORS = 0.5, 4.0  # standard deviations of a sequence, and standard errors of their mean
UNLIKE = 4.0  # standard deviations at which a single sequence is unlike the calibration's


@dataclass(frozen=True, slots=True)
class Figure:
    """Of a calibration's sequences."""

    mean: float
    deviation: float

    @staticmethod
    def of(values: Sequence[float]) -> Figure:
        if not values:  # of a rule that never drafted there: whatever does is unlike it
            return Figure(0.0, 0.0)
        mean = sum(values) / len(values)
        return Figure(mean, sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)))

    def deviations(self, value: float) -> float:
        return (value - self.mean) / max(self.deviation, 1e-3)


@dataclass(frozen=True, slots=True)
class Drift:
    """How unlike the calibration's a sequence is, in their standard deviations; None where that was not counted."""

    acceptance: float | None
    entropy: float | None
    otherwise: tuple[str, ...] = ()  # options of the request or the models for which nothing was calibrated

    @property
    def unlike(self) -> bool:
        return bool(self.otherwise) or any(abs(z) > UNLIKE for z in (self.acceptance, self.entropy) if z is not None)

    def as_dict(self) -> dict[str, Any]:
        return {"acceptance": _rounded(self.acceptance), "entropy": _rounded(self.entropy),
                "otherwise": list(self.otherwise), "unlike": self.unlike}  # fmt: skip


def lost_of(measure: str) -> str:
    """What a loss is a share of."""
    return "the target's correct answers" if measure == ACCURACY else f"the distance to the draft in {measure}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


@dataclass(frozen=True, slots=True)
class Profile:
    verifier: str  # the rule with its options, as the command line has them
    num_draft_tokens: int | str | None
    drafter: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    target: str  # the models' fingerprints
    draft: str
    sparse: str  # the plan that the target had, in words
    task: str
    data: str  # hash of the prompts
    problems: int
    measure: str  # in which the loss is counted: accuracy, or one without right answers
    loss: float  # the bound, as a share of what `lost_of` says; where `unit` is points, of all answers
    confidence: float
    seen: float  # the loss on the calibration's own problems
    acceptance: Figure
    entropy: Figure
    created: str
    unit: str = POINTS  # a file without it is an older one, and does not have the following either
    dtype: str = ""  # how the models computed: the same weights have the same fingerprint in any type
    kv_dtype: str = ""
    draft_dtype: str = ""
    max_new_tokens: int = 0  # the longest answer that was allowed

    @property
    def promise(self) -> str:
        """What was calibrated, in words."""
        points = self.measure == ACCURACY and self.unit == POINTS
        most = (
            f"{100 * self.loss:g} points of accuracy" if points else f"{100 * self.loss:g} % of {lost_of(self.measure)}"
        )
        return f"at most {most} lost, with confidence {self.confidence:g}"

    @property
    def rule(self) -> Rule:
        return verify.make(self.verifier)

    def settings(self) -> dict[str, Any]:
        """The fields of `Options` that use this profile."""
        own = {key: getattr(self, key) for key in ("verifier", "num_draft_tokens", "drafter")}
        return {**own, "profile": self}

    def check_pair(self, target: str, draft: str, sparse: str) -> None:
        """Refuse models that it was not calibrated for."""
        for what, ours, theirs in (
            ("target", self.target, target), ("draft", self.draft, draft), ("sparse plan", self.sparse, sparse),
        ):  # fmt: skip
            if ours != theirs:
                raise BadRequest(
                    f"the profile was calibrated with the {what} {ours or 'none'}, and here it is {theirs or 'none'}; "
                    "calibrate one for this pair with `semspec calibrate`"
                )

    def computed_otherwise(self, precisions: Mapping[str, str]) -> tuple[str, ...]:
        """Options by which these models compute in another way than the calibration's, where both are known. That may
        change what is lost, and mostly does not by much: it is told, not refused."""
        return tuple(name for name, now in precisions.items() if getattr(self, name) and getattr(self, name) != now)

    def drift(self, stats: Stats, sampling: Any, otherwise: Sequence[str] = ()) -> Drift:
        """`otherwise`: what else is known to be unlike: options that change logits, of which no calibration has any,
        and those of the models."""
        names = ("temperature", "top_k", "top_p", "min_p")
        longer = ("max_new_tokens",) if 0 < self.max_new_tokens < stats.tokens else ()
        unlike = (*(name for name in names if getattr(sampling, name) != getattr(self, name)), *longer, *otherwise)
        entropy, drafted = stats.mean_entropy, stats.drafted
        return Drift(
            self.acceptance.deviations(stats.acceptance_rate) if drafted else None,
            None if entropy is None else self.entropy.deviations(entropy),
            unlike,
        )

    @property
    def seal(self) -> str:
        """Of all that it says: a rule made looser by hand would keep the promise of another."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode(errors="surrogatepass")).hexdigest()[:16]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        told = {"format": FORMAT, **asdict(self), "seal": self.seal}
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Profile:
        """A file is somebody's words until it is checked."""
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadRequest(f"the profile {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise BadRequest(f"{path} is no profile: {error}; make one with `semspec calibrate`") from None
        if not isinstance(given, dict) or given.pop("format", None) != FORMAT:
            raise BadRequest(f"{path} is no profile of this version; make one with `semspec calibrate`")
        seal = given.pop("seal", None)  # older files have none
        try:
            read: dict[str, Any] = given | {name: Figure(**given[name]) for name in ("acceptance", "entropy")}
            made = Profile(**read)
            made._check()
        except (TypeError, ValueError, KeyError) as error:
            raise BadRequest(f"the profile {path} is damaged: {error}") from None
        if seal not in (None, made.seal):
            raise BadRequest(
                f"the profile {path} was changed after it was calibrated, so what it promises is not known; calibrate "
                "again with `semspec calibrate`, or give the rule itself with --verifier and no promise"
            )
        return made

    def _check(self) -> None:
        kinds: dict[str, Any] = {
            "str": str,
            "int": int,
            "float": float,
            "Figure": Figure,
            "int | str | None": int | str | None,
        }
        for field in fields(self):
            value, kind = getattr(self, field.name), kinds[str(field.type)]
            good = isinstance(value, kind) or (kind is float and isinstance(value, int))
            numbers = [value.mean, value.deviation] if isinstance(value, Figure) else [value]
            if not good or isinstance(value, bool) or not all(_finite(number) for number in numbers):
                raise ValueError(f"{field.name} is {value!r:.60}")
        for name, least, most in (("loss", 0.0, 1.0), ("confidence", 0.0, 1.0), ("problems", 0, inf)):
            if not least < getattr(self, name) < most:
                raise ValueError(f"{name} is {getattr(self, name)}")
        verify.make(self.verifier)


def _finite(value: Any) -> bool:
    return isfinite(value) if isinstance(value, int | float) else isinstance(value, str) or value is None


def read_profile(verifier: str) -> Profile | None:
    """The profile that "profile:FILE" names; None for any other verifier. For command lines, not for requests."""
    if not verifier.startswith(PREFIX):
        return None
    return Profile.load(Path(verifier.removeprefix(PREFIX)).expanduser())


class DriftMonitor:
    """Whether sequences of late are unlike those of the calibration, on average."""

    def __init__(self) -> None:
        self.recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in ("acceptance", "entropy")}

    def observe(self, drift: Drift) -> None:
        for name, values in self.recent.items():
            value = getattr(drift, name)
            if value is not None:
                values.append(value)

    def mean(self, name: str) -> float:
        values = self.recent[name]
        return sum(values) / len(values) if values else 0.0

    @property
    def noticed(self) -> bool:
        return any(
            len(values) >= FEWEST and abs(self.mean(name)) > max(NOTICED, ERRORS / sqrt(len(values)))
            for name, values in self.recent.items()
        )
