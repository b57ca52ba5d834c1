"""The whole way, from models to probes: on the shipped pair in little, and by the command line."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

import semspec
from semspec import pocket, tasks
from semspec.cli import main as cli
from semspec.pair import Pair
from semspec.probe import Probe, fingerprint
from semspec.probe.evidence import GROUPS
from semspec.probe.features import Features
from semspec.probe.probe import ProbeNetwork
from semspec.probe_fit.collect import collect
from semspec.probe_fit.config import Config
from semspec.probe_fit.data import Folder, Prefix, Sample
from semspec.probe_fit.meaning import operation, parser, truth
from semspec.probe_fit.sampler import Sampler, Seen
from semspec.probe_fit.traces import cut
from semspec.tasks.pocket import Pocket
from semspec.text.steps import StepDelimiters
from semspec.text.tokenizer import encode
from semspec.types import Score

PROBLEMS = 4


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Solutions of pocket problems as their generator writes them: good steps, whatever the shipped models can do."""
    task = Pocket()
    rows = []
    for problem in task.problems(PROBLEMS, seed=0):
        text = pocket.write_solution(task.story(problem), pocket.TARGET_HABITS, Random(0))
        rows.append({"problem": problem.id, "prompt": problem.prompt, "text": text})
    path = tmp_path_factory.mktemp("traces") / "solutions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:  # noqa: E501  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["semspec", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as end:
        cli.run()
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_fit_and_its_stages_alone_make_the_same_probes(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["--traces", traces, "--per-problem", 1, "--samples", 2, "--max-step-tokens", 40, "--layers", "4,last", "--device", "cpu", "--context", 640, "--shard", 3, "--poolings", "mean,last,second-last"]  # noqa: E501  # fmt: skip
    how = ["--calibration", "temperature", "--epochs", 3, "--device", "cpu"]
    code, out, err = command(monkeypatch, capsys, "probe", "fit", "pocket", "--out", tmp_path / "all", *what, *how)
    assert code == 0, err
    document = json.loads(out.splitlines()[-1])
    one, other = tmp_path / "all", tmp_path / "stages"
    train = ["train", other, *how, "--layers", "4,last", "--draft-layers", "last"]
    for stage in (["collect", "pocket", "--out", other, *what], ["label", other], train):
        code, out, err = command(monkeypatch, capsys, "probe", *stage)
        assert code == 0, err
    assert json.loads(out.splitlines()[-1]) == json.loads(json.dumps(document).replace(str(one), str(other)))

    pair = semspec.load("pocket", device="cpu", slots=1, context=512)
    assert pair.draft is not None
    for model, runner in (("target", pair.target), ("draft", pair.draft)):
        probe, again = (Probe.load(place / model, fingerprint(runner)) for place in (one, other))
        assert probe.card == again.card and (one / model / "reliability.png").exists()
        assert probe.layers == ((4, 8) if model == "target" else (runner.num_layers,))
        states = {layer: torch.randn(5, probe.head.inputs // len(probe.layers)) for layer in probe.layers}
        said = [p(states, torch.tensor([0, 3]), torch.tensor([3, 2])) for p in (probe, again)]
        assert torch.equal(*said) and ((said[0] >= 0) & (said[0] <= 1)).all()
        assert document[model]["metrics"]["test"]["n"] > 0
    code, _, err = command(monkeypatch, capsys, "probe", "measure", one, other)
    assert code == 2 and re.search(r"has seen \d of these problems", err)
    code, _, err = command(monkeypatch, capsys, "probe", "train", other, *how, "--layers", 4)
    assert code == 0 and Probe.load(other / "target", fingerprint(pair.target)).layers == (4,)
    code, _, err = command(monkeypatch, capsys, "probe", "train", other, *how, "--pooling", "second-last")
    assert code == 0 and Probe.load(other / "target", fingerprint(pair.target)).features.pooling == "second-last", err
    code, _, err = command(monkeypatch, capsys, "probe", "train", other, *how, "--pooling", "last-prompt")
    assert code == 2 and "last-prompt" in err, "what was not collected cannot be seen"
    with pytest.raises(semspec.ModelError, match="belongs to model"):
        Probe.load(one / "target", fingerprint(pair.draft))


def test_probes_of_the_target_may_attend_and_know_how_sure_the_draft_was(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["--traces", traces, "--per-problem", 1, "--samples", 2, "--max-step-tokens", 40, "--context", 512]
    how = ["--token-states", "--pooling", "attention", "--judge-states", "--evidence", "numbers,draft", "--epochs", 2, "--target-evidence", "draft,tokens"]  # noqa: E501  # fmt: skip
    out = ["--out", tmp_path, "--device", "cpu"]
    code, _, err = command(monkeypatch, capsys, "probe", "fit", "pocket", *what, *how, *out)
    assert code == 0, err
    card = json.loads((tmp_path / "judge" / "card.json").read_text())
    assert card["pooling"] == "attention" and card["evidence"] == ["numbers", "draft"]
    card = json.loads((tmp_path / "target" / "card.json").read_text())
    assert card["layers"] and card["evidence"] == ["tokens", "draft"]
    pair = semspec.load("pocket", device="cpu", slots=4, context=512)
    (problem,) = Pocket().problems(1, seed=3)
    for temperature in (0.0, 0.6):
        rules = [f"semantic+:probes={tmp_path},threshold={least}" for least in (0, 1)]
        options = {"max_new_tokens": 160, "temperature": temperature, "seed": 1}
        all_, none = (pair.generate(problem.prompt, verifier=rule, **options).stats.step_outcomes for rule in rules)
        assert all_["accepted"] > 0 == all_["rejected"] and none["rejected"] > 0
        paper = pair.generate(problem.prompt, verifier=f"semantic:probes={tmp_path},top=0,tau=0.01", **options)
        assert paper.stats.step_outcomes["accepted"] + paper.stats.step_outcomes["rejected"] > 0


def test_states_of_a_real_model_are_those_of_one_long_pass(traces: Path, tmp_path: Path) -> None:
    """Collected in batches behind shared prefixes, against prefix and step read at once by a fresh slot."""
    pair = semspec.load("pocket", device="cpu", slots=4, context=512)
    config = Config(traces=str(traces), per_problem=1, samples=2, max_step_tokens=40, target_layers=(3, -1))
    folder = collect(config, tmp_path, pair)
    steps = StepDelimiters.of(pair.tokenizer, pair.eos, 40)
    prefixes = {p.id: p.tokens for p in cut(folder.read_traces(), steps, pair.tokenizer, 1, 0)}
    samples, states = folder.read_samples(0), folder.read_states(0)
    assert len(samples) == PROBLEMS * 2 * 2
    for row in range(0, len(samples), 3):
        tokens = samples[row].tokens
        slot = pair.target.acquire()
        fed = prefixes[samples[row].prefix] + tokens[:-1]
        (rows,) = pair.target.score([Score(pair.target, slot, fed, len(tokens), layers=(3, 8))])
        pair.target.release(slot)
        for layer in (3, 8):
            torch.testing.assert_close(
                states[f"target.{layer}.mean"][row], rows.hidden[layer].mean(0), atol=1e-3, rtol=1e-3
            )
            torch.testing.assert_close(
                states[f"target.{layer}.last"][row], rows.hidden[layer][-1], atol=1e-3, rtol=1e-3
            )


def test_a_first_step_is_collected_as_semantic_plus_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt alone is before it, the mark that opens the thoughts is its first token, for states and evidence."""
    pair = semspec.load("pocket", device="cpu", slots=4, context=512)
    features, shown = Features((3, 8), evidence=tuple(GROUPS)), list[torch.Tensor]()
    sampler = Sampler(pair, Config(target_layers=(3, 8)), StepDelimiters.of(pair.tokenizer, pair.eos))

    def look(prefix: list[int], tokens: tuple[int, ...]) -> torch.Tensor:
        """What the collection has of a step, in the order of a probe's features."""
        found = {tokens: Seen()}
        sampler.answer([sampler.observe(Prefix("0/0", "p", 0, prefix, ""), found)])
        named = {k: v for m, view in sampler.observers.items() for k, v in view.named(found[tokens].numbers[m][None]).items()}  # noqa: E501  # fmt: skip
        order = ("target.3.mean", "target.8.mean", "target.evidence", "draft.confidence")
        return torch.cat([named[name] for name in order], -1)[0]

    def noted(self: ProbeNetwork, seen: torch.Tensor) -> torch.Tensor:
        shown.append(seen[0])
        return torch.full((len(seen),), 9.0)

    problems = Pocket().for_fitting().problems(3, seed=8)
    prompts = [encode(pair.tokenizer, problem.prompt) for problem in problems]
    inputs = len(look(prompts[0], (1, 2)))
    Probe(ProbeNetwork(inputs, (4,)), features, fingerprint(pair.target)).save(tmp_path / "judge")
    monkeypatch.setattr(ProbeNetwork, "forward", noted)
    options = {"temperature": 0.6, "top_p": 0.95, "seed": 2, "max_new_tokens": 80}
    for problem, prompt in zip(problems, prompts, strict=True):
        shown.clear()
        tokens = pair.generate(problem.prompt, verifier=f"semantic+:probes={tmp_path}", **options).tokens
        first = tuple(tokens[: sampler.steps.step_end(tokens)])
        assert pair.tokenizer.decode(first).startswith("<think>") and len(shown) > 1
        torch.testing.assert_close(shown[0], look(prompt, first), atol=1e-3, rtol=1e-3)
        late = look([*prompt, first[0]], first[1:])
        assert (shown[0] - late).abs().max() > 0.1, "without the mark it would have been seen"


def test_a_pair_of_random_models_writes_its_own_traces(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    """Random models write hardly any blank lines, so that most of their steps end by length."""
    pair = semspec.load(target_folder, draft_folder, device="cpu", slots=4, context=48)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("the quick", "the sky", "one two")))
    for by in ("target", "draft", "both"):
        config = Config(f"jsonl:path={prompts}", n=3, traces=by, per_problem=2, samples=2, max_step_tokens=6, seed=1)
        folder = collect(config, tmp_path / by, pair)
        assert len(folder.read_traces()) == 3
        samples = [s for shard in folder.shards for s in folder.read_samples(shard)]
        assert {s.model for s in samples} == {"target", "draft"} and {len(s.tokens) for s in samples} <= set(
            range(1, 7)
        )
    ours, theirs = (Folder(tmp_path / by).read_traces() for by in ("target", "draft"))
    assert ours != theirs
    mixed = Folder(tmp_path / "both").read_traces()
    assert mixed == [ours[0], theirs[1], ours[2]]


def test_pocket_knows_what_steps_mean_and_whether_they_are_right() -> None:
    task = Pocket()
    (problem,) = task.problems(1, seed=5)
    steps = pocket.write_steps(task.story(problem), pocket.DRAFT_HABITS, Random(1))
    judge, read = truth(task), parser(task)
    assert judge is not None and read is not None

    def right(place: int, before: int, of: str = problem.id) -> bool | None:
        assert judge is not None
        history = "<think>\n" + "".join(f"{s}\n\n" for s in steps[:before])
        return judge(Sample("0/1", of, 1, "draft", 0, [], steps[place] + "\n\n", "blank line", {}), history)

    first = Sample("0/0", problem.id, 0, "draft", 0, [], f"<think>\n{steps[0]}\n\n", "blank line", {})
    assert judge(first, "") is True, "with the mark that opens the thoughts"
    assert judge(replace(first, text=f"<think>\n{steps[-1]}\n\n"), "") is False
    assert read(first.text) == read(steps[0]) == pocket.meaning(steps[0]) is not None
    assert right(1, before=1) is True
    assert right(0, before=1) is False  # said already
    assert right(1, before=1, of="solutions/0") is None  # some other problem
    kind, meaning = operation(task), pocket.meaning(steps[0])
    assert (
        kind is not None
        and meaning is not None
        and kind(first.text) == kind(steps[0] + "\n\n") == meaning.op
        and kind("Hm.") == ""
    )
    other = tasks.make("gsm8k")
    assert truth(other) is None and parser(other) is None and operation(other) is None


def test_fit_refuses_at_once_what_could_not_be_labelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = command(monkeypatch, capsys, "probe", "fit", "pocket", "--task", "gsm8k", "--out", tmp_path / "x")
    assert code == 2 and "no parser" in err and not (tmp_path / "x").exists()
    code, _, err = command(monkeypatch, capsys, "probe", "fit", "pocket", "--layers", "top", "--out", tmp_path / "x")
    assert code == 2 and "16,last" in err
    code, _, err = command(monkeypatch, capsys, "probe", "train", tmp_path / "x")
    assert code == 2 and "probe collect" in err


def test_a_probe_needs_a_pair(pair: Pair) -> None:
    with pytest.raises(semspec.BadRequest, match="draft model"):
        Sampler(Pair(pair.target, pair.tokenizer), replace(Config(), samples=1), StepDelimiters.of(pair.tokenizer))
