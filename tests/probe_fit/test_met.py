"""Collections of the draft's steps that a step rule verified, accepted or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import semspec
from semspec.errors import BadRequest
from semspec.pair import Pair
from semspec.probe.features import Features
from semspec.probe.former import FORMER
from semspec.probe.probe import Probe, ProbeNetwork
from semspec.probe_fit.collect import collect
from semspec.probe_fit.config import Config
from semspec.probe_fit.data import Drafted, Folder, Trace
from semspec.probe_fit.evaluate import reservation
from semspec.probe_fit.rows import load_rows
from semspec.probe_fit.sampler import Sampler
from semspec.probe_fit.traces import cut, drafts_of
from semspec.probe_fit.train import Training, learnable, predict
from semspec.tasks.base import MOST
from semspec.types import DraftedStep, Event
from tests.probe_fit.fake import CONFIG, DELIMITER, LANGUAGES, A, fake_pair, steps
from tests.probe_fit.test_chain import command
from tests.text.test_steps import byte_level

B = A + 1
ASKING = "random-step:rate=0.5,max_step_tokens=12"
FIRST, SECOND = [A, B, DELIMITER], [B, B, DELIMITER]


def events() -> list[Event]:
    """The draft's first step stands, the target begins the second, which falls; it writes one; two more stand at once;
    then the draft wants to end the thinking."""
    return [
        Event([*FIRST, B], [], drafted_steps=[DraftedStep("accepted", FIRST, 0)]),
        Event([A], [], drafted_steps=[DraftedStep("rejected", [B, A, DELIMITER], 3)]),
        Event([DELIMITER], []),
        Event(
            [*FIRST, *SECOND, A],
            [],
            drafted_steps=[DraftedStep("accepted", FIRST, 6), DraftedStep("accepted", SECOND, 9)],
        ),
        Event([DELIMITER], [], drafted_steps=[DraftedStep("handed over", [A, B], 12)]),
    ]


def trace() -> Trace:
    told: Any = SimpleNamespace(events=events())
    return Trace("p/0", [A], [token for event in events() for token in event.tokens], drafts_of(told))


def test_drafts_are_found_with_what_was_before_them() -> None:
    assert trace().drafts == [
        Drafted(0, 0, FIRST), Drafted(3, 4, [A, DELIMITER]), Drafted(6, 6, FIRST), Drafted(9, 9, SECOND),
    ]  # fmt: skip


def test_each_draft_has_its_prefix() -> None:
    found = cut([trace()], steps(), byte_level())
    text = trace().tokens
    assert [(p.step, p.step_prefix, list(p.drafted)) for p in found] == [
        (0, (), FIRST), (1, (B,), [A, DELIMITER]), (2, (), FIRST), (3, (), SECOND),
    ]  # fmt: skip
    assert [p.tokens for p in found] == [[A, *text[:at]] for at in (0, 4, 6, 9)]
    assert [p.history for p in found] == [byte_level().decode(text[:at]) for at in (0, 3, 6, 9)]
    assert [p.step for p in cut([trace()], steps(), byte_level(), first_steps=False)] == [1, 2, 3]
    assert [p.step for p in cut([trace()], steps(), byte_level(), longest=6)] == [0, 1]


@pytest.mark.parametrize("samples", [0, 2])
def test_the_draft_is_not_sampled_again(samples: int) -> None:
    """Its step is there already; the target's samples, if any, go on from the same place, in the same step."""
    prefixes = list(enumerate(cut([trace()], steps(), byte_level())))
    found, states = Sampler(fake_pair(), replace(CONFIG, traces=ASKING, samples=samples), steps()).run(prefixes)
    assert len(found) == 4 * (1 + samples)
    for row, sample in enumerate(found):
        prefix = next(p for _, p in prefixes if p.id == sample.prefix)
        if sample.model == "draft":
            assert tuple(sample.tokens) == prefix.drafted and sample.end == "blank line"
        assert sample.text == byte_level().decode([*prefix.step_prefix, *sample.tokens], skip_special_tokens=True)
        for model, layer in (("target", 1), ("draft", 0)):
            logits = [LANGUAGES[model](prefix.tokens + sample.tokens[:k]) for k in range(len(sample.tokens))]
            torch.testing.assert_close(states[f"{model}.{layer}.last"][row], torch.tensor(logits[-1]) + layer)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return semspec.load("pocket", device="cpu", dtype="float32", slots=6, context=512)


@pytest.mark.parametrize("options", [",keep=false", ",sample=true,rewrite=sampling", ",steps=3,ahead=0.1"])
def test_a_judge_says_of_what_was_collected_what_it_said_in_the_run(tmp_path: Path, pair: Pair, options: str) -> None:
    """So what it learns from is what it will see: the same tokens, behind the same words, however they came about."""
    rule, config = f"semantic+:threshold=0.97{options}", Config(n=6, top_p=1.0, per_problem=None, seed=5)
    judge, met = pair.resources.judge_probe(), list[str]()
    generate = pair.generate

    def noting(*asked: Any, **more: Any) -> Any:
        results = generate(*asked, **more)
        met.extend(t.outcome for r in results for e in r.events for t in e.drafted_steps if t.outcome != "handed over")
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "generate", noting)
        folder = collect(replace(config, traces=rule, samples=0, target_layers=judge.layers), tmp_path, pair)
    label(folder)
    rows = load_rows(folder, "target", judge.features, "valid")
    said = judge.calibrator(predict(judge.head, rows))
    assert ["accepted" if s >= 0.97 else "rejected" for s in said.tolist()] == met
    assert {"accepted", "rejected"} == set(met), "nothing to tell apart"


def label(folder: Folder) -> None:
    from semspec import tasks
    from semspec.probe_fit import cluster
    from semspec.probe_fit.label import label as run
    from semspec.probe_fit.meaning import parser, truth

    task = tasks.make("pocket", None).for_fitting()
    run(folder, cluster.make("canonical", cluster.Source(parser(task))), {}, truth(task))


def test_confidence_of_best_guesses_is_not_that_of_draws(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that is shown it gets drafts made like those it has learnt from, and a collection knows which."""

    def temperature(traces: str) -> float:
        return Sampler(pair, Config(traces=traces, samples=0, top_p=0.5), steps()).drafting.temperature

    assert (temperature("semantic+"), temperature("semantic+:sample=true")) == (0.0, 0.6)
    for learnt, expected in (
        ({}, 0.6),
        ({"collected_by": {"samples_drafts": True}}, 0.6),
        ({"collected_by": {"samples_drafts": False}}, 0.0),
    ):
        sees = Probe(ProbeNetwork(4, (4,)), Features((), evidence=("draft",)), "some model", data=learnt)
        monkeypatch.setattr(pair.resources, "judge_probe", lambda folder, sees=sees: sees)
        assert temperature("semantic+") == expected


def test_a_collection_knows_by_whom_its_steps_were_met(tmp_path: Path, pair: Pair) -> None:
    config = Config(traces="semantic+", n=2, samples=0, shard=4, target_layers=(6,))
    whole, part = collect(config, tmp_path / "whole", pair), collect(config, tmp_path / "part", pair)
    met = whole.run["collected_by"]
    assert met["rule"] == "semantic+" and met["judge_probe"] == pair.resources.judge_probe().digest and met["threshold"] == pair.resources.judge_probe().data["threshold"]  # noqa: E501  # fmt: skip
    (part.samples / "00001.jsonl").unlink()  # as if it had been killed; traces are read again
    collect(config, part.path, pair)
    assert [s for n in whole.shards for s in whole.read_samples(n)] == [s for n in part.shards for s in part.read_samples(n)]  # noqa: E501  # fmt: skip
    run = part.run
    (part.path / "run.json").write_text(json.dumps(run | {"collected_by": met | {"judge_probe": "another"}}))
    with pytest.raises(BadRequest, match="what wrote its traces differs"):
        collect(config, part.path, pair)


def test_a_collection_of_an_older_version_is_gone_on_with(tmp_path: Path, pair: Pair) -> None:
    """Its card calls who collected it `met`, a threshold `least`, sampled drafts `drawn` and a temperature `bonus`."""
    config = Config(traces="semantic+", n=2, samples=0, shard=4, target_layers=(6,))
    folder = collect(config, tmp_path / "old", pair)
    run, before = folder.run, {now: old for old, now in FORMER.items()}
    old = {before.get(key, key): value for key, value in run.pop("collected_by").items()}
    assert {"least", "drawn", "bonus"} <= old.keys()
    (folder.path / "run.json").write_text(json.dumps(run | {"met": old}))
    (folder.samples / "00001.jsonl").unlink()
    assert collect(config, folder.path, pair).run["collected_by"]["threshold"] == old["least"]


def test_a_bound_is_for_steps_like_those_it_was_found_with(pair: Pair) -> None:
    judge, met = (
        pair.resources.judge_probe(),
        {"rule": "semantic+", "judge_probe": pair.resources.judge_probe().digest, "threshold": 0.8},
    )
    assert reservation(judge, met, 0.8) is None and reservation(judge, met, 0.9) is None
    assert "threshold=0.7 again" in (reservation(judge, met, 0.7) or "")
    assert "another judge probe" in (reservation(judge, met | {"judge_probe": "x"}, 0.9) or "")
    assert "oracle" in (reservation(judge, {"rule": "oracle"}, 0.9) or "")
    assert "whole answers" in (reservation(judge, None, 0.9) or "")


def test_what_cannot_be_collected_or_learnt_is_refused_at_once() -> None:
    with pytest.raises(BadRequest, match="fly, which judges tokens"):
        Config(traces="fly:window=4")
    with pytest.raises(BadRequest, match="traces show one candidate for a step; leave out semantic"):
        Config(traces="semantic+:candidates=2")
    with pytest.raises(BadRequest, match="samples is 0; give 1"):
        Config(traces="target", samples=0)
    with pytest.raises(BadRequest, match="give the rule max_step_tokens=40 as well"):
        Config(traces="semantic+", max_step_tokens=40)
    assert Config(traces="semantic+:max_step_tokens=40", max_step_tokens=40).rule is not None
    learnable(0, True, "target", Training(labels="valid"))
    learnable(8, True, "target", Training(labels="written"))
    with pytest.raises(BadRequest, match="--samples 8"):
        learnable(0, True, "target", Training(labels="written"))
    with pytest.raises(BadRequest, match="--only judge"):
        learnable(8, True, "draft", Training())


def test_a_judge_is_fitted_to_what_it_meets_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = [
        "--traces",
        "semantic+",
        "--samples",
        0,
        "--problems",
        8,
        "--layers",
        6,
        "--device",
        "cpu",
        "--context",
        512,
    ]
    for seed in (1, 2, 3):
        for stage in (["collect", "pocket", "--out", tmp_path / str(seed), "--seed", seed, *what], ["label", tmp_path / str(seed)]):  # noqa: E501  # fmt: skip
            code, _, err = command(monkeypatch, capsys, "probe", *stage)
            assert code == 0, err
    joined = tmp_path / "all"
    code, _, err = command(monkeypatch, capsys, "probe", "join", tmp_path / "1", tmp_path / "2", "--out", joined)
    assert code == 0, err
    how = ["--only", "judge", "--judge-states", "--judge-labels", "valid", "--pooling", "last", "--epochs", 2]
    code, out, err = command(monkeypatch, capsys, "probe", "train", joined, *how, "--device", "cpu")
    assert code == 0 and json.loads(out.splitlines()[-1]).keys() == {"judge"}, err
    assert not (joined / "target").exists()
    code, out, err = command(monkeypatch, capsys, "probe", "calibrate", joined, tmp_path / "3", "--risk", 0.9)
    assert code == 0 and json.loads(out)["bad"] == "invalid" and "with another judge" in err, err
    code, out, err = command(monkeypatch, capsys, "probe", "measure", joined, tmp_path / "3")
    assert code == 0 and json.loads(out.splitlines()[-1]).keys() == {"judge"}, err
    code, _, err = command(monkeypatch, capsys, "probe", "measure", joined, tmp_path / "1")
    assert code == 2 and "has seen 8 of these problems" in err
    code, _, err = command(monkeypatch, capsys, "probe", "measure", joined, tmp_path / "3", "--only", "jugde")
    assert code == 2 and "target, draft, judge" in err
    code, _, err = command(monkeypatch, capsys, "probe", "train", joined, "--only", "jugde")
    assert code == 2 and "target, draft, judge" in err
    code, _, err = command(monkeypatch, capsys, "probe", "train", joined, "--only", "judge", "--device", "cpu")
    assert code == 2 and "collect with --samples 8" in err, "what the target would write is known from its samples"
    code, _, err = command(monkeypatch, capsys, "probe", "fit", "pocket", "--out", tmp_path / "new", *what)
    assert code == 2 and "--only judge" in err and not (tmp_path / "new").exists(), "before anything is collected"
    judge = semspec.load("pocket", device="cpu", slots=1, context=512).resources.judge_probe(str(joined))
    assert judge.features == Features((6,), "last", ("tokens", "numbers", "entropy", "length"))
    assert judge.data["collected_by"]["rule"] == "semantic+" and judge.data["seen"] == [["pocket/probe/", MOST, MOST + 7], ["pocket/probe/", 2 * MOST, 2 * MOST + 7]]  # noqa: E501  # fmt: skip
    code, _, err = command(
        monkeypatch, capsys, "probe", "collect", "pocket", "--out", tmp_path / "4", "--seed", 4, *what
    )
    assert code == 0, err
    code, _, err = command(monkeypatch, capsys, "probe", "calibrate", joined, tmp_path / "4", "--risk", 0.9)
    assert code == 2 and "semspec probe label" in err
