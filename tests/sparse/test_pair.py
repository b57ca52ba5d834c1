"""A plan in a pair: with every rule, in batches, in what answers say of themselves, and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import semspec
from semspec.bench.run import Bench, Config
from semspec.errors import BadRequest
from semspec.model.prefix_cache import PrefixCache
from semspec.sparse import AttentionPlan, SparsePlan, apply, plan_of
from semspec.verify import REGISTRY

PROMPTS = [
    "the quick brown fox jumps over the lazy dog " * 3,
    "one two three four the sky is blue",
    "light scatters the",
]
LITTLE = SparsePlan(attention=AttentionPlan(block=4, dense_below=8, rho=0.1, sinks=1, recent=1), refresh=3)
ALL = SparsePlan(attention=AttentionPlan(block=4, dense_below=8, rho=1.0))
TOKEN_RULES = sorted(name for name, rule in REGISTRY.items() if rule.unit == "token" and name not in ("none",))


@pytest.fixture
def sparse_pair(target_folder: Path, draft_folder: Path) -> semspec.Pair:
    return semspec.load(target_folder, draft_folder, device="cpu", slots=4, sparse=LITTLE)


@pytest.mark.parametrize("rule", TOKEN_RULES)
def test_every_rule_goes_with_a_plan(sparse_pair: semspec.Pair, pair: semspec.Pair, rule: str) -> None:
    """In a batch as alone; with a full budget as without a plan."""
    options = {"verifier": rule, "max_new_tokens": 24, "num_draft_tokens": 4, "temperature": 0.7, "seed": 5}
    together = sparse_pair.generate(PROMPTS, **options)
    alone = [sparse_pair.generate(prompt, **options) for prompt in PROMPTS]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert all(not r.lossless and r.sparse.startswith("attention rho 0.1") for r in together)
    assert sparse_pair.target.free == 4
    apply(ALL, sparse_pair.target)
    for ours, dense in zip(sparse_pair.generate(PROMPTS, **options), pair.generate(PROMPTS, **options), strict=True):
        assert ours.tokens == dense.tokens and ours.stats.histogram == dense.stats.histogram


def test_step_rules_go_with_a_plan(sparse_pair: semspec.Pair) -> None:
    result = sparse_pair.generate(PROMPTS[0], verifier="random-step:rate=0.5", max_new_tokens=40, seed=1)
    assert len(result.tokens) > 0 and not result.lossless


def test_a_little_budget_changes_what_is_written(sparse_pair: semspec.Pair, pair: semspec.Pair) -> None:
    ours, dense = (p.generate(PROMPTS[0], max_new_tokens=60) for p in (sparse_pair, pair))
    assert ours.tokens != dense.tokens and ours.stats.tokens == dense.stats.tokens == 60


def test_the_target_alone_is_as_dense_as_ever(sparse_pair: semspec.Pair, pair: semspec.Pair) -> None:
    ours, dense = (p.generate(PROMPTS[0], verifier="none", max_new_tokens=20) for p in (sparse_pair, pair))
    assert ours.tokens == dense.tokens and ours.lossless and not ours.sparse


def test_who_wants_lossless_answers_is_refused(sparse_pair: semspec.Pair) -> None:
    with pytest.raises(BadRequest, match="sparse plan"):
        sparse_pair.generate(PROMPTS[0], allow_lossy=False)
    assert sparse_pair.generate(PROMPTS[0], verifier="none", allow_lossy=False, max_new_tokens=3).lossless


def test_a_pair_that_promises_losslessness_takes_no_plan(
    target_folder: Path, sparse_pair: semspec.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semspec.pair.loading.Source.find", lambda _: pytest.fail("refused too late"))
    with pytest.raises(BadRequest, match="a sparse plan is lossy, and allow_lossy is off"):
        semspec.load(target_folder, device="cpu", sparse=LITTLE, allow_lossy=False)
    by_hand = semspec.Pair(sparse_pair.target, sparse_pair.tokenizer, eos=sparse_pair.eos, allow_lossy=False)
    with pytest.raises(BadRequest, match="checks drafts by a sparse plan"):
        by_hand.generate(PROMPTS[0])


def test_a_runner_that_remembers_says_what_plan_is_inside(sparse_pair: semspec.Pair) -> None:
    around = PrefixCache(sparse_pair.target)
    wrapped = semspec.Pair(around, sparse_pair.tokenizer, sparse_pair.draft, sparse_pair.eos)
    assert plan_of(around) is LITTLE and wrapped.sparse is LITTLE
    first = wrapped.generate(PROMPTS[0], max_new_tokens=30)
    assert first.tokens == wrapped.generate(PROMPTS[0], max_new_tokens=30).tokens and around.hits > 20


def test_a_plan_from_a_folder_and_one_that_is_not_there(target_folder: Path, tmp_path: Path) -> None:
    LITTLE.save(tmp_path / "plan")
    pair = semspec.load(target_folder, device="cpu", slots=1, sparse=tmp_path / "plan")
    assert pair.sparse is not None and pair.sparse.attention == LITTLE.attention
    with pytest.raises(BadRequest, match="semspec sparse calibrate"):
        semspec.load(target_folder, device="cpu", sparse=str(tmp_path / "nowhere"))


def test_generate_with_a_plan(semspec, target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    LITTLE.save(tmp_path)
    arguments = ["generate", target_folder, PROMPTS[0], "--draft", draft_folder, "--sparse", tmp_path, "-n", "8"]
    done = semspec(*arguments, "--device", "cpu", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["lossless"] is False and document["sparse"].startswith("attention")
    told = semspec(*arguments, "--device", "cpu")
    assert "exact, sparse, 0 relaxed" in told.stderr
    refused = semspec(*arguments, "--no-allow-lossy", "--device", "cpu")
    assert refused.returncode == 2 and "sparse plan" in refused.stderr


def test_a_server_that_promises_losslessness_takes_no_plan(semspec, target_folder: Path, tmp_path: Path) -> None:
    done = semspec("serve", target_folder, "--sparse", tmp_path)
    assert done.returncode == 2 and "--allow-lossy" in done.stderr


def test_a_bench_calls_no_method_lossless_then(sparse_pair: semspec.Pair) -> None:
    made = Bench(Config(task="pocket", methods=["exact", "fly"], n=1), sparse_pair)
    assert {arm.name: arm.lossless for arm in made.arms} == {"none": True, "draft": False, "exact": False, "fly": False}
