from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from semspec.errors import BadRequest
from semspec.probe.features import Features
from semspec.probe_fit import collect as module
from semspec.probe_fit.collect import collect
from semspec.probe_fit.config import Config
from semspec.probe_fit.data import Folder, Trace
from semspec.probe_fit.sampler import Sampler
from semspec.probe_fit.traces import cut, read_traces
from semspec.sampling.draw import SamplingRows, process
from semspec.types import Draft, Sampling, ScoreOutput, VerifyRequest
from semspec.verify import make
from semspec.verify.collate import collate
from semspec.verify.probe_inputs import probe_inputs
from semspec.verify.semantic_plus import SemanticPlus
from tests.chi import chi_square, count
from tests.fakes import FakeRunner
from tests.probe_fit.fake import CONFIG, DELIMITER, LANGUAGES, VOCAB, A, fake_pair, prefixes, steps, traces
from tests.text.test_steps import END, END_THINK, byte_level
from tests.verify.binding import RuleResources


def test_prefixes_end_where_steps_do_and_thinking_goes_on() -> None:
    """The first of them is the prompt alone, unless first steps are left out."""
    found = cut(traces(2), steps(), byte_level())
    assert [(p.problem, p.step, len(p.tokens)) for p in found] == [
        ("problem/0", 0, 2), ("problem/0", 1, 5), ("problem/0", 2, 8),
        ("problem/1", 0, 2), ("problem/1", 1, 5), ("problem/1", 2, 8), ("problem/1", 3, 11),
    ]  # fmt: skip
    assert found[0].history == "" and found[2].history == "a b.\n\na b.\n\n"
    assert len({p.id for p in cut(traces(1) * 2, steps(), byte_level())}) == 6  # two traces of one problem
    without = cut(traces(2), steps(), byte_level(), first_steps=False)
    assert without == [p for p in found if p.step > 0]
    unasked = [Trace(t.problem, [], t.tokens) for t in traces(1)]  # nothing that a first token is predicted from
    assert [p.step for p in cut(unasked, steps(), byte_level())] == [1, 2]


def test_first_steps_are_drawn_as_often_as_others() -> None:
    """So that a step of a collection is like one drawn from all that a rule judges, but for how problems weigh."""
    many = [Trace(f"problem/{i}", t.prompt, t.tokens) for i, t in enumerate(traces(1) * 3000)]  # three prefixes each
    for per_problem in (1, 2):
        found = [p.step for p in cut(many, steps(), byte_level(), per_problem, seed=4)]
        assert [abs(found.count(step) / len(found) - 1 / 3) < 0.03 for step in (0, 1, 2)] == [True] * 3


def test_few_prefixes_of_a_problem_are_chosen_by_the_seed() -> None:
    def chosen(seed: int) -> list[str]:
        return [p.id for p in cut(traces(8), steps(), byte_level(), per_problem=2, seed=seed)]

    assert chosen(0) == chosen(0) != chosen(1)
    assert len(chosen(0)) == 16
    assert [p.step for p in cut(traces(1), steps(), byte_level(), longest=7)] == [0, 1]


def test_traces_without_steps_are_refused() -> None:
    with pytest.raises(BadRequest, match="blank lines"):
        cut([Trace("p", [A], [A, END])], steps(), byte_level())


def test_states_and_logprobs_are_those_that_predicted_the_tokens() -> None:
    """Against the definition: token k of a step was predicted from prefix + tokens before k."""
    samples, states = Sampler(fake_pair(), CONFIG, steps()).run(prefixes())
    where = {p.id: p.tokens for _, p in prefixes()}
    assert len(samples) == len(where) * 2 * 3
    wanted = ["draft.0.last", "draft.0.mean", "draft.confidence", "draft.evidence", "target.evidence"]
    assert sorted(states) == sorted([*wanted, *(f"target.{i}.{p}" for i in (1, 2) for p in ("last", "mean"))])
    for row, sample in enumerate(samples):
        for model, layer in (("target", 1), ("target", 2), ("draft", 0)):
            logits = torch.tensor([LANGUAGES[model](where[sample.prefix] + sample.tokens[:k]) for k in range(len(sample.tokens))])  # noqa: E501  # fmt: skip
            torch.testing.assert_close(states[f"{model}.{layer}.mean"][row], logits.mean(0) + layer)
            torch.testing.assert_close(states[f"{model}.{layer}.last"][row], logits[-1] + layer)
            own = logits.log_softmax(-1)[range(len(sample.tokens)), sample.tokens]
            assert sample.logprob[model] == pytest.approx(own.mean().item(), abs=1e-5)
            assert states[f"{model}.evidence"][row, 0] == pytest.approx(min(own.min().item(), 0.0), abs=1e-5)


def test_the_released_poolings_are_stored_if_asked_for() -> None:
    """The state before the last token's, and the prompt's last one, from which a step's first token was predicted."""
    config = replace(CONFIG, poolings=("second-last", "last-prompt"))
    samples, states = Sampler(fake_pair(), config, steps()).run(prefixes())
    where = {p.id: p.tokens for _, p in prefixes()}
    for row, sample in enumerate(samples):
        for pooling, k in (("second-last", max(len(sample.tokens) - 2, 0)), ("last-prompt", 0)):
            wanted = torch.tensor(LANGUAGES["target"](where[sample.prefix] + sample.tokens[:k])) + 1
            torch.testing.assert_close(states[f"target.1.{pooling}"][row], wanted)
    assert not any(name.endswith("mean") for name in states)


def test_token_states_are_kept_if_asked_for() -> None:
    samples, states = Sampler(fake_pair(), replace(CONFIG, token_states=True), steps()).run(prefixes())
    where = {p.id: p.tokens for _, p in prefixes()}
    for model, layer in (("target", 1), ("draft", 0)):
        rows = [LANGUAGES[model](where[s.prefix] + s.tokens[:k]) for s in samples for k in range(len(s.tokens))]
        torch.testing.assert_close(states[f"{model}.{layer}.tokens"], torch.tensor(rows) + layer)


@pytest.mark.parametrize("temperature", [0.6, 0.0])
def test_confidence_is_that_of_the_run_time(temperature: float) -> None:
    """What semantic+ makes of a draft's logits as a roll keeps them is what was collected for the same step."""
    config = replace(CONFIG, temperature=temperature, top_p=0.8)
    pair = fake_pair()
    samples, states = Sampler(pair, config, steps()).run(prefixes())
    where = {p.id: p.tokens for _, p in prefixes()}
    sampling = Sampling(temperature, top_p=0.8)
    rule = make("semantic+").bind(RuleResources(judge=Features((), evidence=("draft",))))
    judges, own = [], [i for i, sample in enumerate(samples) if sample.model == "draft"]
    for i in own:
        tokens = samples[i].tokens
        raw = torch.tensor([LANGUAGES["draft"](where[samples[i].prefix] + tokens[:k]) for k in range(len(tokens))])
        kept = process(raw, SamplingRows.of([sampling], [len(tokens)], raw.device)) if temperature else raw
        judges.append(
            VerifyRequest(rule, Draft(tokens, kept), ScoreOutput(torch.zeros(len(tokens) + 1, VOCAB)), sampling, 5, 0)
        )
    assert isinstance(rule, SemanticPlus) and rule.keeps_draft_logits
    shown = probe_inputs(collate(judges), ("draft",), torch.zeros(VOCAB, dtype=torch.bool))
    assert shown is not None
    torch.testing.assert_close(shown[:, -4:], states["draft.confidence"][own], atol=1e-4, rtol=1e-4)
    assert states["draft.confidence"].isfinite().all(), "also for steps that the draft would not have written"


def test_samples_are_whole_steps_and_do_not_depend_on_their_neighbours() -> None:
    together, _ = Sampler(fake_pair(), CONFIG, steps()).run(prefixes())
    for sample in together:
        assert steps().step_end(sample.tokens) == len(sample.tokens)
    assert {s.end for s in together} >= {"blank line", "end of thinking"}
    alone = [s for one in prefixes() for s in Sampler(fake_pair(slots=1), CONFIG, steps()).run([one])[0]]
    assert alone == together


def test_steps_of_the_same_tokens_are_looked_at_once() -> None:
    """And everything is written before anything is looked at, so that nobody who writes waits for who scores."""
    pair, asked = fake_pair(), list[str]()
    assert pair.draft is not None

    def noted(verb: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noting(requests: list[Any]) -> Any:
            asked.extend([verb] * (sum(len(r.layers) > 0 for r in requests) if verb == "score" else 1))
            return run(requests)

        return noting

    for runner in (pair.target, pair.draft):
        for verb in ("score", "decode"):
            setattr(runner, verb, noted(verb, getattr(runner, verb)))
    samples, states = Sampler(pair, replace(CONFIG, samples=40), steps(limit=2)).run(prefixes())
    distinct = {(s.prefix, *s.tokens) for s in samples}
    assert asked.count("score") == 2 * len(distinct) < 2 * len(samples) / 2, "by each of the two models"
    assert asked.index("score") > max(i for i, verb in enumerate(asked) if verb == "decode")
    rows: dict[tuple[object, ...], int] = {}
    for i, sample in enumerate(samples):
        first = rows.setdefault((sample.prefix, *sample.tokens), i)
        assert all(torch.equal(tensor[first], tensor[i]) for tensor in states.values())
        assert sample.text == byte_level().decode(sample.tokens, skip_special_tokens=True)


def test_samples_follow_the_models_own_distributions() -> None:
    config = replace(CONFIG, samples=600, temperature=0.6, top_p=0.95)
    (number, prefix) = prefixes(1)[0]
    samples, _ = Sampler(fake_pair(), config, steps(limit=1)).run([(number, prefix)])  # first tokens are enough
    rows = SamplingRows.of([Sampling(0.6, top_p=0.95)], [1], torch.device("cpu"))
    for model, logits in LANGUAGES.items():
        first = [s.tokens[0] for s in samples if s.model == model]
        probs = process(torch.tensor([logits(prefix.tokens)]), rows).softmax(-1)[0]
        assert chi_square(count(torch.tensor(first), VOCAB), probs) > 1e-3


def test_slots_are_free_again_after_a_failure() -> None:
    pair = fake_pair(capacity=9)  # too small for a step behind the second prefix
    with pytest.raises(AssertionError, match="overflow"):
        Sampler(pair, CONFIG, steps()).run(prefixes())
    assert pair.target.free == 8 and pair.draft is not None and pair.draft.free == 8


def given(tmp_path: Path) -> Config:
    path = tmp_path / "given.jsonl"
    rows = [{"problem": f"p{i}", "prompt": "a", "text": "aa.\n\n" * (i + 2) + "</think>a.\n\n"} for i in range(3)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return replace(CONFIG, traces=str(path))


def test_traces_may_come_from_a_file(tmp_path: Path) -> None:
    found = read_traces(Path(given(tmp_path).traces), byte_level())
    assert [t.problem for t in found] == ["p0", "p1", "p2"]
    assert byte_level().decode(found[0].tokens) == "aa.\n\naa.\n\n</think>a.\n\n" and END_THINK in found[0].tokens


def test_a_collection_that_was_killed_goes_on_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, whole = given(tmp_path), tmp_path / "whole"
    seen: list[tuple[int, int]] = []
    collect(config, whole, fake_pair(), lambda done, total: seen.append((done, total)))
    assert seen == [(0, 12), (2, 12), (4, 12), (6, 12), (8, 12), (10, 12), (12, 12)]

    calls = 0
    run = module.Sampler.run

    def dies(self, prefixes):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return run(self, prefixes)

    monkeypatch.setattr(module.Sampler, "run", dies)
    with pytest.raises(KeyboardInterrupt):
        collect(config, tmp_path / "part", fake_pair())
    collect(config, tmp_path / "part", fake_pair())
    assert calls == 3 + 4  # of six shards, two were there
    one, other = Folder(whole), Folder(tmp_path / "part")
    assert one.shards == other.shards == [0, 1, 2, 3, 4, 5]
    for shard in one.shards:
        assert one.read_samples(shard) == other.read_samples(shard)
        left, right = one.read_states(shard), other.read_states(shard)
        assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_a_folder_of_another_collection_is_refused(tmp_path: Path) -> None:
    config = given(tmp_path)
    collect(config, tmp_path / "out", fake_pair())
    with pytest.raises(BadRequest, match="samples differs"):
        collect(replace(config, samples=4), tmp_path / "out", fake_pair())
    other = fake_pair()
    assert isinstance(other.draft, FakeRunner)
    other.draft.fingerprint = "fake-other"  # type: ignore[attr-defined]
    with pytest.raises(BadRequest, match="draft differs"):
        collect(config, tmp_path / "out", other)


def test_a_collection_from_before_there_were_first_steps_goes_on_without_them(tmp_path: Path) -> None:
    config = replace(given(tmp_path), first_steps=False)
    folder = collect(config, tmp_path / "out", fake_pair())
    run = folder.run
    del run["config"]["first_steps"]
    (folder.path / "run.json").write_text(json.dumps(run))
    (folder.samples / "00001.jsonl").unlink()
    assert {s.step for n in collect(config, folder.path, fake_pair()).shards for s in folder.read_samples(n)} == {1, 2, 3, 4}  # noqa: E501  # fmt: skip
    with pytest.raises(BadRequest, match="first_steps differs"):
        collect(replace(config, first_steps=True), folder.path, fake_pair())


def test_traces_are_written_by_whom_it_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both write, every other problem is the draft's; each stage goes on after a stop."""
    said: list[tuple[str, list[str]]] = []

    def write(pair, by, task, problems, *_):  # type: ignore[no-untyped-def]
        said.append((by, [p.id.rsplit("/", 1)[1] for p in problems]))
        return [Trace(p.id, [A], [A, DELIMITER, A, DELIMITER]) for p in problems]

    monkeypatch.setattr(module, "write_traces", write)
    config = replace(CONFIG, traces="both", n=3, samples=1)
    folder = collect(config, tmp_path, fake_pair())
    assert said == [("target", ["0"]), ("draft", ["1"]), ("target", ["2"]), ("draft", [])]
    assert [t.problem.rsplit("/", 1)[1] for t in folder.read_traces()] == ["0", "1", "2"]


@pytest.mark.parametrize("bad", [{"samples": 0}, {"shard": 0}, {"per_problem": 0}, {"top_p": 0.0}])
def test_bad_options_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BadRequest):
        Config(**bad)  # type: ignore[arg-type]


def test_traces_by_nobody_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="target, draft, both"):
        collect(replace(CONFIG, traces="tagret"), tmp_path / "out", fake_pair())
    assert not (tmp_path / "out").exists()


def test_given_traces_may_not_lie_where_the_collection_keeps_its_own(tmp_path: Path) -> None:
    mine = tmp_path / "traces.jsonl"
    mine.write_text('{"prompt": "a", "text": "b"}\n')
    with pytest.raises(BadRequest, match="keeps its own traces; give another --out"):
        collect(replace(CONFIG, traces=str(mine)), tmp_path, fake_pair())
    assert mine.read_text() == '{"prompt": "a", "text": "b"}\n' and not (tmp_path / "run.json").exists()


def test_a_context_without_room_for_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="larger context"):
        collect(given(tmp_path), tmp_path / "out", fake_pair(capacity=13))
