"""What a bench compares: the target alone, the draft alone, and methods."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from semspec import verify
from semspec.errors import BadRequest
from semspec.loop.repetition import PERIOD, REPEATS
from semspec.options import AUTO, REPEATABLE, Options
from semspec.profile import Profile, read_profile

BASELINE, DRAFT, RESAMPLED = "none", "draft", "resampled"
GREEDY_SPREAD = 0.7  # temperature of the target's other samples where the run is greedy: else they would be one text
DRAFT_OPTIONS: dict[str, type] = {
    "draft_min_p": float,
    "draft_max_entropy": float,
    "loop_repeats": int,
    "loop_period": int,
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to answer. A method is a verifier with its options, and options of the draft besides."""

    name: str
    role: Literal["target", "draft", "resampled", "method"]
    verifier: str
    lossless: bool
    num_draft_tokens: int | str | None = None
    drafter: str = "auto"
    draft_min_p: float = 0.0
    draft_max_entropy: float | None = None
    loop_repeats: int = REPEATS
    loop_period: int = PERIOD
    sparse: str = ""  # folder of the plan by which the target verifies drafts; empty: the run's own, if it has one
    reseed: int = 0  # other noise than the other arms have
    profile: Profile | None = None  # from which it was read
    control: bool = False  # added to compare with, not asked for

    def options(self, **common: Any) -> Options:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NO_OPTIONS}
        return Options(**own, **common)

    def to_dict(self) -> dict[str, Any]:
        """For run.json: with the draft length that is used, whether given or the rule's own."""
        return asdict(self) | {"num_draft_tokens": self.options(referee=_no_referee).draft_length()}


_NO_OPTIONS = ("name", "role", "lossless", "sparse", "reseed", "control")


def _no_referee(so_far: str, step: str) -> bool:
    """In place of a task's referee where only the form of a request is checked."""
    return False


def parse_arm(spec: str, num_draft_tokens: int | str | None = None, drafter: str = "auto") -> Arm:
    """A method from "exact", "exact:k=4,drafter=ngram", "fly:window=4,k=15", "block:k=auto,draft_min_p=0.4",
    "exact:k=8,sparse=plan", "exact:k=6,drafter=model:tree=30;top=4"."""
    if (profile := read_profile(spec)) is not None:
        return replace(
            parse_arm(profile.verifier, profile.num_draft_tokens, profile.drafter), name=spec, profile=profile
        )
    name, _, text = spec.partition(":")
    rest, bounds = [], dict[str, Any]()
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key.strip() == "k":
            length = value.strip()
            automatic = length in (AUTO, REPEATABLE)
            if not automatic and not re.fullmatch("[1-9][0-9]{0,8}", length):
                raise BadRequest(
                    f"method {spec!r}: k is {value!r}; give a draft length of 1 or more, {AUTO} or {REPEATABLE}"
                )
            num_draft_tokens = length if automatic else int(length)
        elif key.strip() == "drafter":
            drafter = value.strip().replace(";", ",")
        elif key.strip() == "sparse":
            bounds["sparse"] = value.strip()
        elif key.strip() in DRAFT_OPTIONS:
            kind = DRAFT_OPTIONS[key.strip()]
            try:
                bounds[key.strip()] = kind(value)
            except ValueError:
                number = "a number" if kind is float else "a whole number"
                raise BadRequest(f"method {spec!r}: {key.strip()} is {value!r}; give {number}") from None
        else:
            rest.append(item)
    verifier = name + (":" + ",".join(rest) if rest else "")
    lossless = verify.make(verifier).lossless and not bounds.get("sparse")
    arm = Arm(spec, "method", verifier, lossless, num_draft_tokens, drafter, **bounds)
    arm.options(referee=_no_referee)  # refuses unknown names before anything is loaded
    return arm


def shown(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A run's arms as tables have them: one row for the target with other seeds, however many samples there are."""
    return [arm for arm in run["arms"] if arm["role"] != "resampled" or arm["name"] == RESAMPLED]


def on_trial(run: Mapping[str, Any], arm: Mapping[str, Any]) -> bool:
    """Whether an arm is compared with the target, and counts among the comparisons. The target's other samples are not
    where the run is greedy: drawn at another temperature, they show how far its own texts spread."""
    return arm["role"] != "resampled" or bool(run.get("config", {}).get("temperature"))


def arms_for(
    methods: list[str], has_draft: bool, num_draft_tokens: int | str | None, drafter: str, resamples: int = 0
) -> list[Arm]:
    """The target alone first, then with other seeds, the draft alone if there is one, then the methods, each once."""
    arms = {BASELINE: Arm(BASELINE, "target", "none", lossless=True)}
    for i in range(1, resamples + 1):
        name = RESAMPLED if i == 1 else f"{RESAMPLED} {i}"
        arms[name] = Arm(name, "resampled", "none", lossless=True, reseed=i, control=True)
    if has_draft:
        arms[DRAFT] = Arm(DRAFT, "draft", "none", lossless=False)
    for spec in methods:
        if spec not in arms:
            arms[spec] = parse_arm(spec, num_draft_tokens, drafter)
    return list(arms.values())
