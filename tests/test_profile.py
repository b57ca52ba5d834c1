"""Profiles: a calibrated rule from a file, for one pair, chosen by whoever starts a program and by nobody else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import semspec
from semspec import Options, Profile
from semspec.bench.arms import parse_arm
from semspec.cli.arguments import SpeculationArguments
from semspec.errors import BadRequest
from semspec.loop.stats import Stats
from semspec.profile import FEWEST, Drift, DriftMonitor, Figure
from semspec.serve.deltas import Finished
from semspec.serve.limits import Limits, Settings
from semspec.serve.metrics import Metrics
from semspec.serve.report import speculation_of
from semspec.serve.schema.speculation import Speculation
from semspec.serve.speculation import apply

PROFILE = Profile(
    verifier="fly:theta=0.45", num_draft_tokens=15, drafter="auto", temperature=0.0, top_k=0, top_p=1.0, min_p=0.0,
    target="t", draft="d", sparse="", task="pocket", data="0", problems=400, measure="accuracy", loss=0.01,
    confidence=0.95, seen=0.001, acceptance=Figure(0.7, 0.1), entropy=Figure(0.2, 0.05), created="today",
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    PROFILE.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_the_command_line_and_the_bench_read_a_profile(file: Path) -> None:
    options = SpeculationArguments(verifier=f"profile:{file}").options()
    assert options.profile == PROFILE and options.verifier == "fly:theta=0.45" and options.num_draft_tokens == 15
    arm = parse_arm(f"profile:{file}")
    assert arm.options().profile == PROFILE and not arm.lossless and json.dumps(arm.to_dict())
    with pytest.raises(BadRequest, match="which num_draft_tokens"):
        SpeculationArguments(verifier=f"profile:{file}", num_draft_tokens="4").options()
    with pytest.raises(BadRequest, match="allow_lossy"):
        SpeculationArguments(verifier=f"profile:{file}").options(allow_lossy=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "another"}, "no profile of this version"),
        ({"verifier": "profile:/etc/passwd"}, "no verifier 'profile'"),
        ({"verifier": "fly:theta=x"}, "theta"),
        ({"verifier": 3}, "verifier is 3"),
        ({"loss": "much"}, "loss is 'much'"),
        ({"problems": True}, "problems is True"),
        ({"problems": 0}, "problems is 0"),
        ({"loss": 1.5}, "loss is 1.5"),
        ({"confidence": 95}, "confidence is 95"),
        ({"verifier": "fly:theta=0"}, "was changed after it was calibrated"),
        ({"loss": 0.001}, "was changed after it was calibrated"),
        ({"target": "another"}, "was changed after it was calibrated"),
        ({"unit": "share"}, "was changed after it was calibrated"),
        ({"seal": ""}, "was changed after it was calibrated"),
        ({"acceptance": {"mean": 1e999, "deviation": 0.1}}, "acceptance is"),
        ({"acceptance": 3}, "damaged"),
        ({"more": 1}, "damaged"),
    ],
)
def test_a_damaged_profile_is_refused_in_words(file: Path, change: dict[str, Any], message: str) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(BadRequest, match=message):
        Profile.load(file)


def test_a_profile_says_what_it_promises_and_older_ones_are_read(file: Path) -> None:
    assert replace(PROFILE, unit="share").promise.startswith("at most 1 % of the target's correct answers lost")
    without = replace(PROFILE, unit="share", measure="meaning", loss=0.25)
    assert without.promise == "at most 25 % of the distance to the draft in meaning lost, with confidence 0.95"
    before = json.loads(file.read_text())
    del before["unit"], before["seal"]
    file.write_text(json.dumps(before))
    assert Profile.load(file).promise == "at most 1 points of accuracy lost, with confidence 0.95"


def test_a_calibration_without_drafts_finds_all_drafts_unlike_it() -> None:
    assert Figure.of([]).deviations(0.5) > 4


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").write_text(text)
    for path in (tmp_path / "p", tmp_path / "none", tmp_path):
        with pytest.raises(BadRequest, match="profile"):
            Profile.load(path)


def test_another_pair_is_refused() -> None:
    PROFILE.check_pair("t", "d", "")
    for pair in (("x", "d", ""), ("t", "", ""), ("t", "d", "a plan")):
        with pytest.raises(BadRequest, match="semspec calibrate"):
            PROFILE.check_pair(*pair)


def test_a_pair_checks_the_profile_of_a_request(pair: semspec.Pair) -> None:
    target, draft = pair.resources.fingerprints
    own = replace(PROFILE, target=target, draft=draft)
    result = pair.generate("hello", Options(**own.settings(), max_new_tokens=12))
    assert result.stats.entropy_tokens > 0 and result.drift is not None and result.drift.entropy is not None
    assert pair.generate("hello", max_new_tokens=4, num_draft_tokens=4).stats.mean_entropy is None, "counted on demand"
    with pytest.raises(BadRequest, match="calibrated with the draft"):
        pair.generate("hello", Options(**replace(own, draft="other").settings()))


def test_models_that_compute_in_another_way_and_longer_answers_are_named(pair: semspec.Pair) -> None:
    target, draft = pair.resources.fingerprints
    now = pair.resources.precisions
    assert now == {"dtype": "float32", "kv_dtype": "float32", "draft_dtype": "float32"}
    own = replace(PROFILE, target=target, draft=draft, max_new_tokens=6, **now)

    def named(profile: Profile, tokens: int = 6) -> tuple[str, ...]:
        drift = pair.generate("hello", Options(**profile.settings(), max_new_tokens=tokens, ignore_eos=True)).drift
        assert drift is not None and (drift.unlike or not drift.otherwise)
        return drift.otherwise

    assert named(own) == () == named(replace(own, dtype="", kv_dtype="", draft_dtype=""), 6)
    for option, other in (("dtype", "float32 with weights in int8"), ("kv_dtype", "fp8"), ("draft_dtype", "bfloat16")):
        assert named(replace(own, **{option: other})) == (option,)
    assert named(own, 12) == ("max_new_tokens",) and named(replace(own, max_new_tokens=0), 12) == ()


def test_a_models_precision_is_no_part_of_its_fingerprint() -> None:
    plain, rounded = (
        semspec.load("pocket", dtype=dtype, device="cpu", slots=1, context=128) for dtype in ("float32", "int8")
    )
    assert plain.resources.fingerprints == rounded.resources.fingerprints
    assert rounded.resources.precisions["dtype"] == "float32 with weights in int8"
    own = replace(PROFILE, **plain.resources.precisions)
    assert rounded.computed_otherwise(own) == ("dtype", "draft_dtype") and plain.computed_otherwise(own) == ()
    assert rounded.computed_otherwise(PROFILE) == () == rounded.computed_otherwise(None), "an older file does not say"


def test_options_that_were_not_calibrated_are_named(pair: semspec.Pair) -> None:
    target, draft = pair.resources.fingerprints
    own = Options(**replace(PROFILE, target=target, draft=draft).settings(), max_new_tokens=6)
    for more, named in (
        ({}, ()), ({"temperature": 0.7, "seed": 1}, ("temperature",)), ({"presence_penalty": 0.5}, ("penalties",)),
        ({"logit_bias": {5: 1.0}, "min_tokens": 2}, ("min_tokens", "logit_bias")),
        ({"bad_words": ("x",)}, ("bad_words",)),
        ({"structured_outputs": {"regex": "[a-z]+"}}, ("structured_outputs",)),
    ):  # fmt: skip
        drift = pair.generate("hello", replace(own, **more)).drift
        assert drift is not None and drift.otherwise == named and (drift.unlike or not named)


# -- over HTTP


def test_a_request_never_reaches_the_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(allow_lossy=True, defaults=Options(**PROFILE.settings()), limits=Limits(draft_tokens=16))

    def read(*_: object, **__: object) -> None:
        raise AssertionError("the disk was looked at")

    monkeypatch.setattr("semspec.profile.Profile.load", read)
    monkeypatch.setattr("pathlib.Path.read_text", read)
    monkeypatch.setattr("builtins.open", read)
    for how in (
        {"verifier": f"profile:{file}"}, {"verifier": "profile"}, {"verifier": "profile:path=x"},
        {"profile": str(file)}, {"verifier": "semantic+", "rewrite": f"profile:{file}"}, {"drafter": f"profile:{file}"},
    ):  # fmt: skip
        with pytest.raises(BadRequest):
            apply(Speculation.model_validate(how), settings)


def test_a_request_that_departs_from_the_profile_is_not_covered_by_it() -> None:
    settings = Settings(allow_lossy=True, defaults=Options(**PROFILE.settings()), limits=Limits(draft_tokens=16))
    assert apply(None, settings).profile == PROFILE == apply(Speculation(), settings).profile
    for how in ({"verifier": "exact"}, {"theta": 0.1}, {"num_draft_tokens": 4}, {"off": True}, {"drafter": "ngram"}):
        assert apply(Speculation.model_validate(how), settings).profile is None, how
    short = replace(settings, limits=Limits(draft_tokens=8))
    capped = replace(short, defaults=replace(short.defaults, num_draft_tokens=None, profile=None))
    assert apply(None, capped).profile is None


def finished(drift: Drift | None) -> Finished:
    stats = Stats()
    stats.observe(4, 2)
    return Finished(0, "stop", stats, [(4, 2)], "fly", False, 0, 5, 4, drift=drift)


def test_prompts_unlike_the_calibrations_are_noticed_in_the_metrics() -> None:
    metrics = Metrics()
    idle = {"pair": None, "running": 0, "waiting": 0, "slots": 0, "cache_usage": 0.0}
    metrics.watch(type("Engine", (), idle)())  # type: ignore[arg-type]

    def gauge(name: str) -> float:
        samples = [sample for family in metrics.registry.collect() for sample in family.samples]
        (value,) = [sample.value for sample in samples if sample.name == f"semspec:profile_drift_{name}"]
        return value

    for i in range(FEWEST + 10):
        metrics.finish(finished(Drift((-1.0) ** i, 0.9 * (-1.0) ** i)))
    assert gauge("noticed") == 0 and abs(gauge("acceptance")) < 0.1
    for _ in range(3 * FEWEST):
        metrics.finish(finished(Drift(-2.0, 0.1)))
    assert gauge("noticed") == 1 and gauge("acceptance") < -1
    assert speculation_of(finished(Drift(-5.0, None)), False)["profile_drift"]["unlike"] is True
    assert "profile_drift" not in speculation_of(finished(None), False)


def test_drift_needs_enough_sequences_and_a_real_shift() -> None:
    monitor = DriftMonitor()
    for _ in range(FEWEST - 1):
        monitor.observe(Drift(3.0, None))
    assert not monitor.noticed
    monitor.observe(Drift(3.0, None))
    assert monitor.noticed and monitor.mean("entropy") == 0
    assert Figure.of([1.0, 3.0]).deviations(2.0) == 0 and Figure.of([1.0, 1.0]).deviations(2.0) == pytest.approx(1000)
