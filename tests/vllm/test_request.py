"""What a request may ask of semspec inside vLLM, and what is refused, where, and in which words."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

import semspec.vllm
from semspec.errors import BadRequest, SemspecError
from semspec.vllm import TESTED, check_version
from semspec.vllm.request import Choice, Settings, sampling_of


def test_a_request_overrides_the_engine() -> None:
    engine = Settings.of({"verifier": "fly:theta=0.3", "loop_repeats": 0})
    assert Choice.of(engine).rule.name == "fly"
    own = engine.of_request(
        {"semspec_verifier": "topk:top=3", "semspec_relax_span": "thinking", "fly_theta": 1, "x": []}
    )
    choice = Choice.of(own)
    assert choice.rule.top == 3 and choice.thinking_only and choice.guard.repeats == 0
    assert Choice.of(engine.of_request(None)) == Choice.of(engine)


@pytest.mark.parametrize("name", ["exact", "sampling", "block", "none"])
def test_lossless_rules_are_left_to_vllm(name: str) -> None:
    assert Choice.of(Settings(verifier=name)) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"semspec_verifier": "fly:theta=-1"}, "theta"),
        ({"semspec_verifier": "fly:theta=nan"}, "theta"),
        ({"semspec_verifier": "topk:top=99999999999999"}, "top"),
        ({"semspec_verifier": "no-such"}, "no-such"),
        ({"semspec_verifier": 3}, "semspec_verifier"),
        ({"semspec_verifier": ["fly"]}, "semspec_verifier"),
        ({"semspec_verifier": "fly:" + "window=3," * 100}, "longer"),
        ({"semspec_verfier": "fly"}, "semspec_verfier"),
        ({"semspec_verifier": "semantic+:probes=/etc"}, "started"),
        ({"semspec_verifier": "semantic+"}, "reasoning steps"),
        ({"semspec_verifier": "reflective"}, "read more than the draft"),
        ({"semspec_relax_span": "never"}, "relax_span"),
        ({"semspec_loop_repeats": 1}, "loop_repeats"),
        ({"semspec_loop_repeats": True}, "semspec_loop_repeats"),
        ({"semspec_loop_repeats": 10**9}, "loop_repeats"),
        ({"semspec_loop_period": 10**9}, "loop_period"),
    ],
)
def test_a_hostile_request_is_refused_in_words(given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        Choice.of(Settings().of_request(given))


@pytest.mark.parametrize("given", ["fly", ["fly"], {"verifer": "fly"}, {"verifier": None}])
def test_an_engine_with_odd_settings_does_not_start(given: Any) -> None:
    with pytest.raises(BadRequest):
        Settings.of(given)


def test_sampling_in_our_terms() -> None:
    params = SimpleNamespace(temperature=0.7, top_k=-1, top_p=0.9, min_p=0.0, seed=None)
    assert sampling_of(params, 5).top_k == 0 and sampling_of(params, 5).seed == 5
    assert sampling_of(SimpleNamespace(**vars(params) | {"seed": -3, "top_k": 4}), 5).seed == 2**63 - 3


@pytest.mark.parametrize("found", ["0.31.0", "0.32.1", "1.0", "0.320.0"])
def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(semspec.vllm, "version", lambda package: found)
    with pytest.raises(SemspecError, match=TESTED):
        check_version()


def test_the_tested_vllm_and_its_cpu_build_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "vllm":
            raise PackageNotFoundError
        return f"{TESTED}+cpu"

    monkeypatch.setattr(semspec.vllm, "version", version)
    check_version()
