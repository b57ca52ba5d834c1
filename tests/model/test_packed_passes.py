"""Models say the same in packed passes as in rectangles and as by plain passes, and a tick is one pass as long as rows
allow; on a CPU, with references in place of kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import semspec
from semspec import tree
from semspec.model import ModelRunner, graph_memory, graph_runner
from semspec.model.graph_runner import GraphRunner
from semspec.model.kernels import KernelFlags, reference_kernels
from semspec.model.packed_rows import ROWS, PackedRows, fits_rectangle
from semspec.sparse import AttentionPlan, SparsePlan, apply
from semspec.types import Score, ScoreOutput
from tests.checkpoints import FAMILIES, make_model, make_tokenizer, save
from tests.model.test_graph_runner import Rehearsed, close, keys, text, with_graphs

PACKED, FLAT = KernelFlags(packed=True), KernelFlags(packed=False)


def twins(plain: ModelRunner, slots: int = 4, **options: object) -> list[ModelRunner]:
    """Plain passes, rectangles and packed passes, over the same weights."""
    made = [ModelRunner(plain.transformer, slots, plain.max_seq_len, **options) for _ in range(3)]  # type: ignore[arg-type]
    made[0].use(None)
    for runner, flags in zip(made[1:], (FLAT, PACKED), strict=True):
        runner.use(GraphRunner(plain.transformer, runner.cache, reference_kernels(), Rehearsed(), flags))
    return made


def same(results: Sequence[Sequence[ScoreOutput]]) -> None:
    exact, *others = results
    for other in others:
        for ours, theirs in zip(other, exact, strict=True):
            assert ours.hidden.keys() == theirs.hidden.keys() and ours.logits.shape == theirs.logits.shape
            if theirs.logits.numel():
                close(ours.logits, theirs.logits)
            for layer, states in theirs.hidden.items():
                close(ours.hidden[layer], states)


def course(runner: ModelRunner, seed: int = 0) -> list[ScoreOutput]:
    """Checks, single tokens, a prompt's tail and trees of four sequences, some taken back, in one pass each."""
    rng, slots, said = random.Random(seed), [runner.acquire() for _ in range(4)], list[ScoreOutput]()
    for sizes in [(30, 3, 1, 9), (9, 1, 70, 1), (1, 1, 1, 1), (9, 9, 9, 9), (1, 60, 1, 13)]:
        requests = []
        for slot, n in zip(slots, sizes, strict=True):
            keep, layers = rng.choice([0, 1, n, n]), rng.choice([(), (1,), (0, runner.num_layers)])
            parents = tuple(rng.randrange(-1, i) for i in range(n)) if n == 13 and runner.trees else ()
            requests.append(Score(runner, slot, text(rng.randrange(99), n), keep, layers, parents=parents))
        said += runner.score(requests)
        for slot in slots[::2]:
            runner.truncate(slot, runner.length(slot) - 1)
    for slot in slots:
        runner.release(slot)
    return said


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same(family: str, tmp_path: Path) -> None:
    plain = ModelRunner.load(save(make_model(family), tmp_path), device="cpu", slots=4, context=256)
    one, flat, packed = twins(plain)
    same([course(runner) for runner in (one, flat, packed)])
    kinds = [key[0] for key in keys(packed)]
    assert kinds.count("packed") >= 3 and "score" in kinds, "equal lengths make rectangles without padding"
    assert not any(key[0] == "packed" for key in keys(flat))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_pages_and_fp8(family: str, tmp_path: Path) -> None:
    plain = ModelRunner.load(save(make_model(family), tmp_path), device="cpu", slots=4, context=256)
    for fp8 in (False, True):
        _, flat, packed = twins(plain, page=16, fp8_cache=fp8)
        same([course(runner) for runner in (flat, packed)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = save(make_model("qwen2"), tmp_path_factory.mktemp("qwen2"))
    return ModelRunner.load(folder, device="cpu", slots=2, context=128)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_trees_beside_anything(trio: list[ModelRunner], seed: int, size: int) -> None:
    rng = random.Random(seed)
    parents = tuple(rng.randrange(-1, i) for i in range(size))
    lengths = [rng.choice([1, 2, 9, 60, 70]) for _ in range(3)]
    results = []
    for runner in trio:
        slots = [runner.acquire() for _ in range(4)]
        runner.score([Score(runner, slot, text(slot, 20), 0) for slot in slots])
        requests = [Score(runner, s, text(n, n), n) for s, n in zip(slots, lengths, strict=False)]
        requests.insert(seed % 4, Score(runner, slots[3], text(5, size + 1), size, (2,), parents=parents))
        said = runner.score(requests)
        runner.compact(slots[3], 21, tree.path(parents, size - 1))
        said += runner.score([Score(runner, slots[3], [7, 8], 2)])
        for slot in slots:
            runner.release(slot)
        results.append(said)
    same(results)


@pytest.fixture(scope="module")
def trio(plain: ModelRunner) -> list[ModelRunner]:
    return twins(plain)


def counted(runner: ModelRunner, lengths: Sequence[int]) -> tuple[list[int], list[PackedRows], int]:
    """Rows of the passes of one tick, those of them that are packed, and how many plain ones it had."""
    slots, before, plain = [runner.acquire() for _ in lengths], len(keys(runner)), list[int]()
    score = runner._score
    with pytest.MonkeyPatch.context() as watched:
        watched.setattr(runner, "_score", lambda *a: plain.append(1) or score(*a))
        runner.score([Score(runner, s, text(s, n), 1) for s, n in zip(slots, lengths, strict=True)])
    for slot in slots:
        runner.release(slot)
    made = keys(runner)[before:]
    packed = [key[1] for key in made if key[0] == "packed"]
    return [key[1].rows if key[0] == "packed" else key[1] * key[2] for key in made], packed, len(plain)


@pytest.mark.parametrize(
    ("lengths", "rows", "plain_passes"),
    [
        ([1] * 7 + [60], [72], 0),
        ([9] * 33, [320], 0),
        ([9] * 64, [576], 0),
        ([1] * 70, [72], 0),
        ([9] * 32 + [120], [448], 0),  # a piece of a prompt comes along
        ([64] * 16, [1024], 0),
        ([64] * 16 + [1], [1024, 1], 0),  # no second pass before 1,024 rows
        ([120] * 9, [], 1),  # prompts alone are bound by arithmetic
        ([9] * 8 + [120] * 8, [72], 1),  # too many for one pass
    ],
)
def test_a_tick_is_one_pass_as_long_as_rows_allow(
    plain: ModelRunner, lengths: list[int], rows: list[int], plain_passes: int
) -> None:
    *_, packed = twins(plain, slots=80)
    sizes, found, others = counted(packed, lengths)
    assert sizes == rows and others == plain_passes
    assert all((p.tiles == 0) == (set(lengths) == {1}) for p in found)


@pytest.mark.parametrize(
    ("lengths", "fits"),
    [([9], True), ([30], True), ([9] * 32, True), ([9] * 33, False), ([9] * 64, True), ([1] * 65, False),
     ([64] * 16, True), ([9, 1], False), ([8] * 8, False), ([60] + [1] * 7, False), ([120], False)],
)  # fmt: skip
def test_rectangles_are_made_where_they_have_no_more_rows(lengths: list[int], fits: bool) -> None:
    assert fits_rectangle(lengths) == fits


def test_the_head_sees_the_rows_that_somebody_wants(plain: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runners, seen, results = twins(plain), list[int](), []
    assert runners[2].graph_runner is not None
    fused = runners[2].graph_runner.fused
    head = fused.head
    monkeypatch.setattr(fused, "head", lambda normed, out: seen.append(len(normed)) or head(normed, out))
    for runner in runners:
        slots, said = [runner.acquire() for _ in range(3)], list[ScoreOutput]()
        for sizes in ((120, 100, 9), (60, 1, 9), (9, 9, 9)):
            requests = [
                Score(runner, s, text(s, n), n if n == 9 else 1, (2,), states=min(n, 40))
                for s, n in zip(slots, sizes, strict=True)
            ]
            said += runner.score(requests)
            for slot in slots:
                runner.truncate(slot, 0)
        results.append(said)
    same(results)
    assert seen[::2] == [12, 72, 32], "of 229 rows 11; sparing fewer than 128 would not be worth a graph"


def test_rows_stay_what_they_are_when_the_next_pass_comes(plain: ModelRunner) -> None:
    *_, packed = twins(plain)
    slot = packed.acquire()
    (rows,) = packed.score([Score(packed, slot, [1, 2, 3], 2, (1, 3))])
    before = [rows.logits.clone(), rows.hidden[1].clone(), rows.hidden[3].clone()]
    packed.score([Score(packed, slot, [8, 9], 2, (1, 3))])
    assert all(torch.equal(a, b) for a, b in zip(before, [rows.logits, rows.hidden[1], rows.hidden[3]], strict=True))


def test_sparse_checks_stay_rectangles_and_everything_else_is_packed(plain: ModelRunner) -> None:
    plan = SparsePlan(attention=AttentionPlan(8, 16, 0.2))
    results = []
    for runner in twins(plain):
        apply(plan, runner)
        slots = [runner.acquire(), runner.acquire()]
        said = runner.score([Score(runner, slot, text(slot, 60 - 57 * slot), 1) for slot in slots])
        said += runner.score([Score(runner, slots[0], text(3, 9), 9), Score(runner, slots[1], text(4, 1), 1)])
        results.append(said)
    same(results)
    kinds = [key[0] for key in keys(runner)]
    assert kinds == ["packed", "score"]


def test_an_answer_in_another_row_is_found_out(plain: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: rows of a check and of the prompt beside it change places."""
    one, _, packed = twins(plain)
    right = graph_runner.last_rows

    def wrong(requests: Sequence[Score]) -> tuple[list[int], list[int]]:
        wanted, observed = right(requests)
        return [row + 1 for row in wanted[:-1]] + wanted[-1:], observed

    monkeypatch.setattr(graph_runner, "last_rows", wrong)
    with pytest.raises(AssertionError):
        same([course(one), course(packed)])


def test_texts_are_the_same(plain: ModelRunner) -> None:
    options = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0.8, "seed": 4, "num_draft_tokens": 5}
    answers = []
    for flags in (FLAT, PACKED):
        pair = semspec.Pair(with_graphs(plain, flags), make_tokenizer(), with_graphs(plain, flags))
        answers.append(pair.generate(["the quick", "one two three", "a"], verifier="sampling", **options))
    assert [a.tokens for a in answers[0]] == [a.tokens for a in answers[1]]
    how = {"max_new_tokens": 24, "ignore_eos": True}
    alone = [pair.generate(prompt, verifier="none", **how).tokens for prompt in ("the quick", "a")]
    for drafter in ("model", "model:tree=8,top=2,depth=3"):
        made = pair.generate(["the quick", "a"], verifier="exact", num_draft_tokens=4, drafter=drafter, **how)
        assert [r.tokens for r in made] == alone


def test_memory_is_planned_for_both_ways(plain: ModelRunner) -> None:
    """A packed pass of few sequences may be as long as one of many; its numbers have one place for all sizes."""
    shape, card = plain.shape, torch.device("cuda")
    flat, packed = (graph_memory.graph_bytes(shape, card, 2, 2, 128, packed=way) for way in (False, True))
    assert graph_memory.graph_bytes(shape, card, 2, 2, 128) == packed > flat
    *_, runner = twins(plain)
    course(runner)
    assert runner.graph_runner is not None
    numbers = runner.graph_runner._buffers["packed"].nbytes
    more = graph_memory.lazy_bytes(shape, 4, 4, packed=True) - graph_memory.lazy_bytes(shape, 4, 4, packed=False)
    assert more == numbers + sum(ROWS) * shape.width * 4
