"""The loop with tree drafts: the text is the target's, caches hold it after every round, and whatever else is
asked for is that of the accepted path."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import semspec
from semspec import verify
from semspec.draft import ModelDrafter, NgramDrafter
from semspec.draft.tree import TreeOptions
from semspec.errors import BadRequest
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.repetition import RepetitionGuard
from semspec.loop.stats import Stats
from semspec.loop.thinking import Thinking
from semspec.loop.work import ScoreWork, Task
from semspec.model import ModelRunner
from semspec.types import Drafter, Sampling, Score
from tests.checkpoints import make_model, save
from tests.fakes import FakeRunner, chain, greedy, script
from tests.loop.test_decoder import PROMPT, VOCAB, decode
from tests.model.test_graph_runner import with_graphs

LANGUAGE = chain(VOCAB, seed=2, sharpness=1.0)
OTHER = chain(VOCAB, seed=7)
RULES = ["exact", "fly:window=1", "sampling", "traversal"]
TREE = TreeOptions(12, 0, 3)
HOT = Sampling(0.7, seed=11)


def slipping(context: list[int]) -> list[float]:
    """A draft whose second guess is often right."""
    return [own + 0.4 * other for own, other in zip(LANGUAGE(context), OTHER(context), strict=True)]


def drafters(draft: FakeRunner) -> dict[str, Drafter]:
    return {"tree": ModelDrafter(draft, tree=TREE), "ngram": NgramDrafter(tree=TREE), "chain": ModelDrafter(draft)}


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["tree", "ngram"])
def test_exact_writes_the_targets_text(kind: str, sampling: Sampling) -> None:
    target, draft = FakeRunner(LANGUAGE, VOCAB), FakeRunner(slipping, VOCAB)
    alone = decode(target, NgramDrafter(), "none", n=60, sampling=sampling)[0]
    for couple in ("exact", "exact:couple=true"):
        tokens, events, stats = decode(target, drafters(draft)[kind], couple, n=60, sampling=sampling)
        assert tokens == alone and not (target.held or draft.held)
        assert stats.accepted and sum(e.drafted for e in events) == stats.drafted > stats.accepted


def test_a_tree_accepts_more_than_its_first_path() -> None:
    target, draft = FakeRunner(LANGUAGE, VOCAB), FakeRunner(slipping, VOCAB)
    stats = {kind: decode(target, drafters(draft)[kind], n=200)[2] for kind in ("tree", "chain")}
    assert stats["tree"].tau > stats["chain"].tau + 0.3
    assert len(stats["tree"].drafted_per_position) == len(stats["chain"].drafted_per_position)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 20), st.integers(1, 30), st.sampled_from(RULES))
def test_the_target_holds_its_text_after_every_round(seed: int, k: int, size: int, n: int, rule: str) -> None:
    target, draft, stats = FakeRunner(LANGUAGE, VOCAB), FakeRunner(slipping, VOCAB), Stats()
    job = Job(PROMPT, verify.make(rule), k, n, Sampling(0.8, seed=seed))
    decoder = Decoder(job, target, ModelDrafter(draft, tree=TreeOptions(size, 0, 3)), stats)
    executor = Executor(budget=16)  # the prompt and a tree do not fit into one pass
    task = executor.submit(decoder.decode(), stats)
    while not task.done:
        executor.tick()
        if decoder.round and target.held and not decoder.target.length(decoder.slot) > len(decoder.context):
            assert target.held[decoder.slot] == decoder.context[: len(target.held[decoder.slot])]
    assert task.error is None and not (target.held or draft.held)
    assert len(decoder.context) == len(PROMPT) + n


def test_a_tree_is_never_cut_and_comes_after_the_prompt() -> None:
    target = FakeRunner(LANGUAGE, VOCAB)
    for count, budget in ((5, 512), (70, 512), (70, 16), (200, 48), (1, 4), (64, 512)):
        request = Score(target, 0, [1] * (count + 12), 13, parents=(-1,) * 12)
        work, passes = ScoreWork(Task(iter(()), Stats()), request), list[Score]()  # type: ignore[arg-type]
        while work.waiting:
            passes.append(work.next_pass(budget))
        assert sum(len(p.tokens) for p in passes) == count + 12 and sum(p.logits_to_keep for p in passes) == 13
        assert not any(p.parents for p in passes[:-1]) and passes[-1].parents == (-1,) * 12
        assert passes[-1].logits_to_keep == 13 and len(passes[-1].tokens) <= 64


def test_a_batch_gets_what_each_gets_alone() -> None:
    rules = ["exact", "sampling", "traversal", "fly:window=1", "typical", "none"]

    def run(which: list[int]) -> dict[int, list[int]]:
        target, draft, executor, tasks = FakeRunner(LANGUAGE, VOCAB), FakeRunner(slipping, VOCAB), Executor(), {}
        for i in which:
            stats, job = Stats(), Job(PROMPT[: 2 + i % 3], verify.make(rules[i]), 4, 30, Sampling(0.8, seed=i))
            one = drafters(draft)["tree" if i % 3 else "chain"]
            tasks[i] = executor.submit(Decoder(job, target, one, stats).decode(), stats)
        executor.run()
        assert not any(task.error for task in tasks.values()) and not (target.held or draft.held)
        return {i: [t for e in task.events for t in e.tokens] for i, task in tasks.items()}

    together = run(list(range(len(rules))))
    for i in range(len(rules)):
        assert run([i])[i] == together[i]


@pytest.mark.parametrize("rule", ["accept-all", "fly:theta=0,window=0"])
def test_a_loose_rule_that_repeats_itself_on_trees_is_replaced_by_exact(
    rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The draft's first guesses go round, and what it would rather say after them is only further branches."""
    round_and_round, other = script([3, 4], VOCAB, 0), chain(VOCAB, seed=7, sharpness=0.5)

    def draft(context: list[int]) -> list[float]:
        return [a + b for a, b in zip(round_and_round(context), other(context), strict=True)]

    target, drafter = FakeRunner(LANGUAGE, VOCAB), ModelDrafter(FakeRunner(draft, VOCAB), tree=TREE)
    tokens, events, stats = decode(target, drafter, rule, k=6, n=120)
    assert stats.loops == 1 and "going on with exact" in caplog.text
    origins = [origin for event in events for origin in event.origins]
    relaxed = [i for i, origin in enumerate(origins) if origin == "relaxed"]
    assert relaxed and relaxed[-1] < 80, "nothing is relaxed after the loop was found"
    after = relaxed[-1] + 10
    assert tokens[after:] == greedy(LANGUAGE, PROMPT + tokens[:after], 120 - after)
    guard = RepetitionGuard(repeats=0)
    assert decode(target, drafter, rule, k=6, n=120, repetition_guard=guard)[2].relaxed > len(relaxed), "unless told"
    assert decode(target, drafter, "exact", k=6, n=120)[2].loops == 0 and not target.held


def test_a_sequence_may_be_cancelled_anywhere() -> None:
    for ticks in range(1, 12):
        target, draft, executor, stats = FakeRunner(LANGUAGE, VOCAB), FakeRunner(slipping, VOCAB), Executor(), Stats()
        job = Job(PROMPT, verify.make("exact"), 4, 60)
        task = executor.submit(Decoder(job, target, drafters(draft)["tree"], stats).decode(), stats)
        for _ in range(ticks):
            executor.tick()
        executor.cancel(task)
        assert not (target.held or draft.held)


def test_logprobs_are_those_of_the_accepted_path() -> None:
    target, draft = FakeRunner(LANGUAGE, VOCAB), FakeRunner(slipping, VOCAB)
    options = {"logprobs": 2, "sampling": HOT, "n": 40}
    alone = [lp for e in decode(target, NgramDrafter(), "none", **options)[1] for lp in e.logprobs or []]
    events = decode(target, drafters(draft)["tree"], "exact", count_entropy=True, **options)[1]
    assert any(e.accepted for e in events)
    assert [lp for e in events for lp in e.logprobs or []] == alone


def test_a_lossy_rule_keeps_to_one_side_of_the_end_of_thinking() -> None:
    """What follows the end within a draft is cut, on every branch."""
    end = 5
    target, draft = FakeRunner(LANGUAGE, VOCAB), FakeRunner(slipping, VOCAB)
    thinking = Thinking(4, end, True, None, relax_only=True)
    tokens, events, _ = decode(target, drafters(draft)["tree"], "accept-all", n=80, thinking=thinking)
    assert end in tokens
    for event in events:
        drafted = event.tokens[: event.accepted]
        assert end not in drafted[:-1]
    after = tokens.index(end) + 1
    late = [o for e in events for o in e.origins][after:]
    assert "relaxed" not in late


@pytest.mark.parametrize(("family", "temperature"), [("qwen2", 0.7), ("gemma3", 0.0)])
def test_real_runners_plain_and_as_on_a_gpu(family: str, temperature: float, tmp_path: Path) -> None:
    """With a draft that is the target: whole paths are accepted, and moved together in the cache."""
    folder = save(make_model(family), tmp_path)
    plain = ModelRunner.load(folder, device="cpu", slots=4, context=192)
    sampling = Sampling(temperature, seed=2)
    alone = decode(plain, NgramDrafter(), "none", n=24, sampling=sampling)[0]
    for runner in (plain, with_graphs(plain)):
        for rule in ("exact", "exact:couple=true"):
            drafter = ModelDrafter(ModelRunner(plain.transformer, 2, 192), tree=TreeOptions(30, 0, 5))
            tokens, _, stats = decode(runner, drafter, rule, n=24, sampling=sampling)
            assert tokens == alone and runner.free == 4 and drafter.runner.free == 2
            assert stats.tau > 2 or temperature


@pytest.fixture(scope="module")
def pair() -> semspec.Pair:
    return semspec.load("pocket")


QUESTIONS = [
    "Mia has 4 bags with 6 pens each. Tom has 5 more pens than Mia. How many pens does Tom have?",
    "Ben has 3 boxes of 7 marbles. He gives away 5. How many marbles does Ben have?",
]


def test_the_pocket_pair(pair: semspec.Pair) -> None:
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    options = {"temperature": 0.7, "seed": 4, "max_new_tokens": 30}
    alone = pair.generate(prompts, verifier="none", **options)
    for drafter, length in (("model:tree=20,top=6", 5), ("ngram:tree=12", 5), ("model:tree=40", "auto-repeatable")):
        found = pair.generate(prompts, verifier="exact", drafter=drafter, num_draft_tokens=length, **options)
        assert [r.tokens for r in found] == [r.tokens for r in alone]
    options |= {"drafter": "model:tree=12", "num_draft_tokens": 4}
    assert pair.generate(prompts[0], verifier="traversal", **options).lossless
    loose = {"verifier": "typical", "drafter": "model:tree=16", "num_draft_tokens": 6, "max_new_tokens": 60}
    why = [relaxed for event in pair.stream(prompts[0], **loose) for relaxed in event.relaxed.values()]
    assert why and all(relaxed.reason.startswith("p ") for relaxed in why)


def test_what_cannot_branch_is_refused_in_words(pair: semspec.Pair) -> None:
    with pytest.raises(BadRequest, match="block' cannot verify tree drafts; take exact, sampling, traversal"):
        pair.generate(QUESTIONS[0], verifier="block", drafter="model:tree=9")
    with pytest.raises(BadRequest, match="semantic' cannot verify tree drafts"):
        pair.generate(QUESTIONS[0], verifier="semantic", drafter="model:tree=9")
    with pytest.raises(BadRequest, match="draft_min_p"):
        pair.generate(QUESTIONS[0], verifier="exact", drafter="model:tree=9", draft_min_p=0.5)
    assert pair.generate(QUESTIONS[0], verifier="none", drafter="model:tree=9", max_new_tokens=3).text
