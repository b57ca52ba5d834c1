"""Collections of what a rule meets: the draft's steps as a step rule was asked about them, whatever became of them."""

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
from semspec.fit.collect import Config, Sampler, collect
from semspec.fit.data import Drafted, Folder, Trace
from semspec.fit.rows import load_rows
from semspec.fit.traces import cut, drafts_of
from semspec.fit.train import predict
from semspec.pair import Pair
from semspec.probe.features import Features
from semspec.types import Event, Tried
from semspec.verify.semantic_plus import SemanticPlus
from tests.fit.fake import CONFIG, DELIMITER, LANGUAGES, A, fake_pair, steps
from tests.fit.test_chain import command
from tests.test_steps import byte_level

B = A + 1
FIRST, SECOND = [A, B, DELIMITER], [B, B, DELIMITER]


def events() -> list[Event]:
    """The draft's first step stands, the target begins the second, which falls; it writes one; two more stand at once;
    then the draft wants to end the thinking."""
    return [
        Event([*FIRST, B], [], tried=[Tried("accepted", FIRST, 0)]),
        Event([A], [], tried=[Tried("refused", [B, A, DELIMITER], 3)]),
        Event([DELIMITER], []),
        Event([*FIRST, *SECOND, A], [], tried=[Tried("accepted", FIRST, 6), Tried("accepted", SECOND, 9)]),
        Event([DELIMITER], [], tried=[Tried("handed over", [A, B], 12)]),
    ]


def trace() -> Trace:
    told: Any = SimpleNamespace(events=events())
    return Trace("p/0", [A], [token for event in events() for token in event.tokens], drafts_of(told))


def test_drafts_are_found_with_what_stood_in_front_of_them() -> None:
    assert trace().drafts == [
        Drafted(0, 0, FIRST), Drafted(3, 4, [A, DELIMITER]), Drafted(6, 6, FIRST), Drafted(9, 9, SECOND),
    ]  # fmt: skip


def test_each_draft_has_its_prefix() -> None:
    found = cut([trace()], steps(), byte_level())
    text = trace().tokens
    assert [(p.step, p.begun, list(p.drafted)) for p in found] == [
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
    found, states = Sampler(fake_pair(), replace(CONFIG, traces="semantic+", samples=samples), steps()).run(prefixes)
    assert len(found) == 4 * (1 + samples)
    for row, sample in enumerate(found):
        prefix = next(p for _, p in prefixes if p.id == sample.prefix)
        if sample.model == "draft":
            assert tuple(sample.tokens) == prefix.drafted and sample.end == "blank line"
        assert sample.text == byte_level().decode([*prefix.begun, *sample.tokens], skip_special_tokens=True)
        for model, layer in (("target", 1), ("draft", 0)):
            logits = [LANGUAGES[model](prefix.tokens + sample.tokens[:k]) for k in range(len(sample.tokens))]
            torch.testing.assert_close(states[f"{model}.{layer}.last"][row], torch.tensor(logits[-1]) + layer)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return semspec.load("pocket", device="cpu", dtype="float32", slots=6, context=512)


@pytest.mark.parametrize("options", ["", ",sample=true", ",steps=3,ahead=0.1"])
def test_a_judge_says_of_what_was_collected_what_it_said_in_the_run(tmp_path: Path, pair: Pair, options: str) -> None:
    """So what it learns from is what it will see: the same tokens, behind the same words, however they came about."""
    rule, config = f"semantic+:least=0.97{options}", Config(n=6, top_p=1.0, per_problem=None, seed=5)
    judge, met = pair.judge(), list[str]()
    generate = pair.generate

    def noting(*asked: Any, **more: Any) -> Any:
        results = generate(*asked, **more)
        met.extend(t.fate for r in results for e in r.events for t in e.tried if t.fate != "handed over")
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "generate", noting)
        folder = collect(replace(config, traces=rule, samples=0, target_layers=judge.layers), tmp_path, pair)
    label(folder)
    rows = load_rows(folder, "target", judge.features, "valid")
    said = judge.calibrator(predict(judge.head, rows))
    assert ["accepted" if s >= 0.97 else "refused" for s in said.tolist()] == met
    assert {"accepted", "refused"} == set(met), "nothing to tell apart"


def label(folder: Folder) -> None:
    from semspec import tasks
    from semspec.fit import cluster
    from semspec.fit.label import label as run
    from semspec.fit.meaning import parser, truth

    task = tasks.make("pocket", None).for_fitting()
    run(folder, cluster.make("canonical", cluster.Source(parser(task))), {}, truth(task))


def test_confidence_of_best_guesses_is_not_that_of_draws(pair: Pair) -> None:
    drawn, guessed = (
        Sampler(pair, Config(traces=traces, samples=0, temperature=0.6, top_p=0.5), steps()).drafting.temperature
        for traces in ("semantic+:sample=true", "semantic+")
    )
    assert (drawn, guessed) == (0.6, 0.0)


def test_rules_that_do_not_judge_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="fly, which judges tokens"):
        Config(traces="fly:window=4")
    with pytest.raises(BadRequest, match="samples is 0; give 1"):
        Config(traces="target", samples=0)


def test_a_judge_is_fitted_to_what_it_meets_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["--traces", "semantic+", "--samples", 0, "--n", 8, "--layers", 6, "--device", "cpu", "--context", 512]
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
    assert code == 0 and json.loads(out)["bad"] == "invalid", err
    code, out, err = command(monkeypatch, capsys, "probe", "measure", joined, tmp_path / "3")
    assert code == 0 and json.loads(out.splitlines()[-1]).keys() == {"judge"}, err
    code, _, err = command(monkeypatch, capsys, "probe", "measure", joined, tmp_path / "1")
    assert code == 2 and "trained on 8 of these problems" in err
    code, _, err = command(monkeypatch, capsys, "probe", "train", joined, "--only", "jugde")
    assert code == 2 and "target, draft, judge" in err
    code, _, err = command(monkeypatch, capsys, "probe", "train", joined, "--only", "judge", "--device", "cpu")
    assert code == 2 and "0 samples of the target" in err, "what the target would write is known from its samples"
    rule = semspec.load("pocket", device="cpu", slots=1, context=512).judge(str(joined))
    assert rule.features == Features((6,), "last", ("tokens", "numbers", "entropy", "length"))
    assert SemanticPlus().judge_probe is None
