"""The GPU's scoring and decoding against the plain pass, on a CPU: buffers, buckets, positions, noise and stop tokens
are the same logic there, with work done at once in place of graphs and references in place of kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import semspec
from semspec.errors import SemspecError
from semspec.model import ModelRunner
from semspec.model.buckets import BATCHES, MAX_QUERIES, MAX_ROWS, QUERIES, READ, bucket, feed_bucket
from semspec.model.fused_forward import covers
from semspec.model.graph_decode import CHUNK, GraphDecode, StopTable
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import NoGraphs
from semspec.model.kernels import DEFAULT_FLAGS, KernelFlags, reference_kernels
from semspec.sampling.noise import DRAFT, stream
from semspec.sampling.processors import Penalties, Processors
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import FAMILIES, VOCAB, make_model, make_tokenizer, save


class Rehearsed(NoGraphs):
    """As graphs are made: the work is tried once, what it changed is put back, then it is done. Whoever passes a state
    that does not hold everything that changes is found out."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []

    def run(self, key: Hashable, work: Callable[[], Any], state: Tensor) -> Any:
        if key not in self.keys:
            before = state.clone()
            work()
            state.copy_(before)
        self.keys.append(key)
        return work()


def with_graphs(runner: ModelRunner, flags: KernelFlags = DEFAULT_FLAGS) -> ModelRunner:
    twin = ModelRunner(runner.transformer, 4, runner.max_seq_len)
    twin.use(GraphRunner(runner.transformer, twin.cache, reference_kernels(), Rehearsed(), flags))
    return twin


def keys(runner: ModelRunner) -> list[Any]:
    assert runner.graph_runner is not None and isinstance(runner.graph_runner.launcher, Rehearsed)
    return runner.graph_runner.launcher.keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen2"), tmp_path_factory.mktemp("qwen2"))


@pytest.fixture
def plain(folder: Path) -> ModelRunner:
    return ModelRunner.load(folder, device="cpu", slots=4, context=96)


def close(ours: Tensor, theirs: Tensor) -> None:
    size = (theirs.norm() / max(theirs.numel(), 1) ** 0.5).clamp_min(1e-6)  # one token left by top-p may have logit 0
    torch.testing.assert_close(ours / size, theirs / size, atol=2e-4, rtol=0)


def text(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, [length], generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_cpu_has_no_graphs(plain: ModelRunner) -> None:
    assert plain.graph_runner is None and plain.graph_decode is None


def test_heads_that_are_too_wide_are_not_covered(plain: ModelRunner) -> None:
    assert covers(plain.shape) and not covers(replace(plain.shape, head_dim=512))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_scores_and_writes_the_same(family: str, tmp_path: Path) -> None:
    plain = ModelRunner.load(save(make_model(family), tmp_path), device="cpu", slots=2, context=128)
    twin = with_graphs(plain)
    (a, b), (c, d) = ([r.acquire(), r.acquire()] for r in (plain, twin))
    cuts = [0, 7, 8, 60, 63]
    for begin, end in pairwise(cuts):
        layers = tuple(range(plain.num_layers + 1))
        feeds = [text(1, 63)[begin:end], text(2, 63)[begin : begin + (end - begin + 1) // 2]]
        left = plain.score([Score(plain, s, f, len(f), layers) for s, f in zip((a, b), feeds, strict=True)])
        right = twin.score([Score(twin, s, f, len(f), layers) for s, f in zip((c, d), feeds, strict=True)])
        for ours, theirs in zip(right, left, strict=True):
            close(ours.logits, theirs.logits)
            for layer in layers:
                close(ours.hidden[layer], theirs.hidden[layer])
    request = Decode(plain, a, [5, 6], 40, Sampling(1.0, seed=3), stream(DRAFT, 2))
    (theirs,), (ours,) = plain.decode([request]), twin.decode([replace(request, runner=twin, slot=c)])
    assert ours.tokens == theirs.tokens and len(set(ours.tokens)) > 5


SAMPLINGS = [Sampling(), Sampling(1.2, seed=7), Sampling(0.9, top_k=8), Sampling(1.0, top_p=0.8, min_p=0.02)]
plans = st.lists(
    st.tuples(
        st.integers(1, 70),  # fed before
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        st.integers(1, 20),  # to write
        st.sampled_from(SAMPLINGS),
        st.sets(st.integers(0, VOCAB - 1), max_size=60),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


@given(plans)
@settings(max_examples=25)
def test_decodes_of_all_kinds_together_write_what_the_plain_pass_writes(plain_and_twin, plan) -> None:
    runners = plain_and_twin
    answers = []
    for runner in runners:
        slots = [runner.acquire() for _ in plan]
        runner.score([Score(runner, s, text(i, p[0]), 0) for i, (s, p) in enumerate(zip(slots, plan, strict=True))])
        output = runner.decode([
            Decode(runner, s, feed, n, sampling, 8 * i, frozenset(stop), keep_logits=keep, layers=(2,) if keep else ())
            for i, (s, (_, feed, n, sampling, stop, keep)) in enumerate(zip(slots, plan, strict=True))
        ])  # fmt: skip
        answers.append((output, [runner.length(s) for s in slots]))
        for s in slots:
            runner.release(s)
    (theirs, lengths), (ours, own_lengths) = answers
    assert [r.tokens for r in ours] == [r.tokens for r in theirs] and own_lengths == lengths
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.logits is None) == (other.logits is None) and mine.hidden.keys() == other.hidden.keys()
        if mine.logits is not None and other.logits is not None:
            assert torch.equal(mine.logits.isinf(), other.logits.isinf())
            close(mine.logits.nan_to_num(neginf=0.0), other.logits.nan_to_num(neginf=0.0))
            close(mine.hidden[2], other.hidden[2])


@pytest.fixture(scope="module")
def plain_and_twin(folder: Path) -> tuple[ModelRunner, ModelRunner]:
    plain = ModelRunner.load(folder, device="cpu", slots=4, context=96)
    return plain, with_graphs(plain)


def test_passes_are_rounded_up_to_few_sizes(plain: ModelRunner) -> None:
    twin = with_graphs(plain, KernelFlags(packed=False))
    slots = [twin.acquire() for _ in range(3)]
    twin.score([Score(twin, slots[0], [1, 2, 3], 1), Score(twin, slots[1], [4], 1), Score(twin, slots[2], [5], 0)])
    twin.decode([Decode(twin, slots[0], [4], 7, Sampling(), 0)])
    assert keys(twin)[0] == ("score", 4, 4, (), None)
    assert [key[:4] for key in keys(twin)[1:]] == [("decode", 1, 1, 4), ("decode", 1, 1, 2), ("decode", 1, 1, 1)]


def test_a_long_feed_is_no_matter_of_buckets(plain: ModelRunner) -> None:
    twin, prompt = with_graphs(plain), text(3, 80)
    (theirs,) = plain.decode([Decode(plain, plain.acquire(), prompt, 5, Sampling(), 0)])
    slot = twin.acquire()
    (ours,) = twin.decode([Decode(twin, slot, prompt, 5, Sampling(), 0)])
    assert ours.tokens == theirs.tokens and twin.length(slot) == 80 + 4
    assert all(key[0] == "decode" for key in keys(twin))


def test_long_and_short_feeds_in_one_pass_keep_their_order(plain: ModelRunner) -> None:
    twin, feeds = with_graphs(plain), [text(4, 3), text(5, 80), text(6, 9)]
    results = []
    for runner in (plain, twin):
        slots = [runner.acquire() for _ in feeds]
        results.append(runner.score([Score(runner, s, f, 2, (3,)) for s, f in zip(slots, feeds, strict=True)]))
    for theirs, ours in zip(*results, strict=True):
        close(ours.logits, theirs.logits)
        close(ours.hidden[3], theirs.hidden[3])


FLAGS = [
    KernelFlags(),
    KernelFlags(skinny_gemm_bytes=0),
    KernelFlags(fused_activation=False),
    KernelFlags(fused_rope=False),
    KernelFlags(skinny_gemm_bytes=0, fused_rope=False),
    KernelFlags(packed=True),
]


@pytest.mark.parametrize("family", ["llama-bias", "gemma3", "phi4-mini"])
def test_no_kernel_flag_changes_the_results(family: str, tmp_path: Path) -> None:
    plain = ModelRunner.load(save(make_model(family), tmp_path), device="cpu", slots=1, context=96)
    feed, a = text(8, 12), plain.acquire()
    (theirs,) = plain.score([Score(plain, a, feed, 12)])
    (written,) = plain.decode([Decode(plain, a, [1, 2], 9, Sampling(), 0)])
    for flags in FLAGS:
        twin = with_graphs(plain, flags)
        b = twin.acquire()
        (ours,) = twin.score([Score(twin, b, feed, 12)])
        close(ours.logits, theirs.logits)
        (own,) = twin.decode([Decode(twin, b, [1, 2], 9, Sampling(), 0)])
        assert own.tokens == written.tokens


def test_only_small_layers_are_multiplied_by_our_kernel(plain: ModelRunner) -> None:
    called: list[int] = []
    kernels = reference_kernels()

    def product(x: Tensor, *rest: Any) -> Tensor:
        called.append(len(x))
        return kernels.product(x, *rest)

    for small, ours in ((0, False), (10**9, True)):
        twin = ModelRunner(plain.transformer, 1, 96)
        twin.use(
            GraphRunner(
                plain.transformer,
                twin.cache,
                replace(kernels, product=product),
                NoGraphs(),
                KernelFlags(skinny_gemm_bytes=small),
            )
        )
        called.clear()
        twin.score([Score(twin, twin.acquire(), [1, 2, 3], 1)])
        assert bool(called) == ours
    called.clear()
    twin.score([Score(twin, 0, text(1, 20), 1)])
    assert not called, "products of many rows are not its business"


def test_rows_stay_what_they_are_when_the_next_pass_comes(plain: ModelRunner) -> None:
    twin = with_graphs(plain)
    slot = twin.acquire()
    (rows,) = twin.score([Score(twin, slot, [1, 2], 2, (1,))])
    logits, hidden = rows.logits.clone(), rows.hidden[1].clone()
    (output,) = twin.decode([Decode(twin, slot, [3], 3, Sampling(1.0), 0, keep_logits=True)])
    kept = output.logits.clone()
    twin.score([Score(twin, slot, [8, 9], 2, (1,))])
    twin.decode([Decode(twin, slot, [7], 3, Sampling(1.0), 0, keep_logits=True)])
    assert torch.equal(rows.logits, logits) and torch.equal(rows.hidden[1], hidden)
    assert torch.equal(output.logits, kept)


def test_what_was_launched_in_vain_is_not_there(plain: ModelRunner) -> None:
    """A stop in the first chunk is seen when the second is on its way; nothing of that one remains."""
    twin = with_graphs(plain)
    slot = twin.acquire()
    (free,) = twin.decode([Decode(twin, slot, [1, 2, 3], 40, Sampling(1.0, seed=1), 0)])
    stop = free.tokens[3]
    twin.truncate(slot, 0)
    before = len(keys(twin))
    (stopped,) = twin.decode([Decode(twin, slot, [1, 2, 3], 40, Sampling(1.0, seed=1), 0, frozenset([stop]))])
    at = free.tokens.index(stop) + 1
    assert stopped.tokens == free.tokens[:at] and twin.length(slot) == 3 + at - 1
    steps = sum(key[3] for key in keys(twin)[before:])
    assert steps == 2 * CHUNK == twin.computed(at, 40), "one chunk more than needed, and no further"
    close(
        twin.score([Score(twin, slot, [9], 1)])[0].logits,
        plain.score([Score(plain, plain.acquire(), [1, 2, 3, *stopped.tokens[:-1], 9], 1)])[0].logits,
    )


@pytest.mark.parametrize(
    ("look", "waits", "wrote", "n", "computed"),
    [
        (1, False, 3, 40, 4), (2, False, 3, 40, 6), (2, False, 4, 40, 6), (2, False, 40, 40, 40),
        (3, False, 39, 40, 40), (8, False, 9, 40, 24), (8, False, 3, 8, 8),
        (1, False, 3, 8, 4), (2, False, 3, 8, 6), (1, True, 3, 8, 3), (1, True, 3, 40, 3), (1, True, 1, 8, 1),
    ],
)  # fmt: skip
def test_a_deep_model_computes_few_tokens_after_a_stop(
    plain: ModelRunner, look: int, waits: bool, wrote: int, n: int, computed: int
) -> None:
    """However short the decode may be: steps of reasoning are short, and every token of a deep model is slow."""
    twin = with_graphs(plain)
    assert twin.graph_decode is not None
    twin.graph_decode.look, twin.graph_decode.waits = look, waits
    slot = twin.acquire()
    (free,) = twin.decode([Decode(twin, slot, [1], n, Sampling(1.0, seed=1), 0)])
    tokens = free.tokens[:wrote]
    twin.truncate(slot, 0)
    before = len(keys(twin))
    stop = frozenset([tokens[-1]])
    (stopped,) = twin.decode([Decode(twin, slot, [1], n, Sampling(1.0, seed=1), 0, stop)])
    ended = free.tokens.index(tokens[-1]) + 1
    assert stopped.tokens == free.tokens[:ended]
    steps = sum(key[3] for key in keys(twin)[before:])
    assert steps == twin.computed(ended, n)
    assert twin.computed(wrote, n) == computed


def test_a_short_decode_that_cannot_stop_is_launched_whole(plain: ModelRunner) -> None:
    twin = with_graphs(plain)
    assert twin.graph_decode is not None
    twin.graph_decode.look, twin.graph_decode.waits = 1, True
    twin.decode([Decode(twin, twin.acquire(), [1], 8, Sampling(), 0)])
    assert [key[3] for key in keys(twin)] == [8] and twin.computed(8, 8) == 8


@pytest.mark.parametrize(("depth", "look", "waits"), [(3, 8, False), (28, 1, False), (64, 1, True)])
def test_how_often_stops_are_looked_for_depends_on_depth(
    plain: ModelRunner, depth: int, look: int, waits: bool
) -> None:
    runner = with_graphs(plain).graph_runner
    assert runner is not None
    runner.shape = replace(runner.shape, num_layers=depth)
    made = GraphDecode(runner)
    assert (made.look, made.waits) == (look, waits)


def test_a_decode_into_a_full_slot_ends_as_the_plain_one_does(plain: ModelRunner) -> None:
    twin = with_graphs(plain)
    for runner in (plain, twin):
        slot = runner.acquire()
        runner.score([Score(runner, slot, text(1, 90), 0)])
        (fits,) = runner.decode([Decode(runner, slot, [1], 6, Sampling(), 0)])  # the last one is not fed
        assert len(fits.tokens) == 6 and runner.length(slot) == 96
        runner.truncate(slot, 90)
        with pytest.raises(SemspecError, match="is full: 96 tokens and 1 more exceed its capacity of 96"):
            runner.decode([Decode(runner, slot, [1], 7, Sampling(), 0)])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("n", [1, 8, 40])
def test_logits_that_are_nan_end_a_sequence_and_no_other(folder: Path, sampling: Sampling, n: int) -> None:
    plain = ModelRunner.load(folder, device="cpu", slots=2, context=64)
    for runner in (plain, with_graphs(plain)):
        slots = [runner.acquire(), runner.acquire()]
        runner.score([Score(runner, slot, [1, 2], 0) for slot in slots])
        runner.cache.values[0, slots[0], :, :2] = float("nan")
        broken, whole = runner.decode([Decode(runner, slot, [3], n, sampling, 0) for slot in slots])
        assert broken.tokens[-1] == -1 and min(whole.tokens) >= 0 and len(whole.tokens) == n


@pytest.mark.parametrize("rule", ["none", "exact", "sampling", "fly"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_with_damaged_weights_answers_with_an_error(folder: Path, rule: str, temperature: float) -> None:
    plain = ModelRunner.load(folder, device="cpu", slots=1, context=96)
    plain.transformer.layers[0].ffn_norm.fill_(float("nan"))
    pair = semspec.Pair(plain, make_tokenizer(), ModelRunner.load(folder, device="cpu", slots=1, context=96))
    with pytest.raises(SemspecError, match=r"not numbers \(NaN\).* try --dtype float32"):
        pair.generate("the quick", verifier=rule, temperature=temperature, max_new_tokens=20)
    assert plain.free == 1


def test_decodes_with_logprobs_run_without_graphs(plain: ModelRunner) -> None:
    twin = with_graphs(plain)
    (theirs,) = plain.decode([Decode(plain, plain.acquire(), [1, 2], 6, Sampling(), 0, logprobs=2)])
    (ours,) = twin.decode([Decode(twin, twin.acquire(), [1, 2], 6, Sampling(), 0, logprobs=2)])
    assert ours.tokens == theirs.tokens and ours.logprobs is not None and len(ours.logprobs) == 6


def test_a_pair_writes_the_same_text_with_and_without_graphs(plain: ModelRunner) -> None:
    options = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0.8, "seed": 4, "num_draft_tokens": 5}
    answers = []
    for make in (lambda r: ModelRunner(r.transformer, 4, r.max_seq_len), with_graphs):
        pair = semspec.Pair(make(plain), make_tokenizer(), make(plain))
        answers.append(pair.generate(["the quick", "one two three"], verifier="sampling", **options))
    assert [a.tokens for a in answers[0]] == [a.tokens for a in answers[1]]
    assert sum(a.stats.accepted for a in answers[1]) > 20


class Counted(NoGraphs):
    """What would have been captured."""

    def __init__(self) -> None:
        self.keys = set[Hashable]()

    def run(self, key: Hashable, work: Callable[[], Any], state: Tensor) -> Any:
        self.keys.add(key)
        return super().run(key, work, state)


def test_a_draft_that_catches_up_is_captured_in_few_sizes(plain: ModelRunner) -> None:
    """Drafts are given up and begun again, with any number of tokens missed between: each size took a capture, so first
    answers did, too."""
    twin, counted = with_graphs(plain), Counted()
    assert twin.graph_runner is not None
    twin.graph_runner.launcher = counted
    (slot, other) = twin.acquire(), plain.acquire()
    for n in range(1, 65):
        feed = text(n, n)
        (ours,) = twin.decode([Decode(twin, slot, feed, 1, Sampling(), 0, keep_logits=True)])
        (theirs,) = plain.decode([Decode(plain, other, feed, 1, Sampling(), 0, keep_logits=True)])
        assert ours.tokens == theirs.tokens
        close(ours.logits, theirs.logits)
        for one, own in ((twin, slot), (plain, other)):
            one.truncate(own, 0)
        rows = []
        for one, own in ((twin, slot), (plain, other)):  # what is long is read first, see DecodeWork
            (row,) = one.score([Score(one, own, feed, n % 2, drafting=True)])
            (after,) = one.score([Score(one, own, [1], 1)])
            rows.append(torch.cat([row.logits, after.logits]))
            one.truncate(own, 0)
        close(*rows)
    sizes = {kind: {key[2] for key in counted.keys if key[0] == kind} for kind in ("decode", "score")}  # type: ignore[index]
    assert len(sizes["decode"]) == len(sizes["score"]) == 4


@given(st.integers(1, MAX_QUERIES), st.integers(1, BATCHES[-1]))
def test_feeds_are_padded_far_only_where_rows_are_free(feed: int, batch: int) -> None:
    batch = bucket(batch, BATCHES)
    size = feed_bucket(feed, batch)
    assert feed <= size and (size <= 2 * feed or size * batch <= READ)


@given(st.integers(1, MAX_QUERIES), st.integers(1, BATCHES[-1]))
def test_every_short_pass_has_a_bucket(queries: int, batch: int) -> None:
    assert queries <= bucket(queries, QUERIES) <= 2 * queries
    assert batch <= bucket(batch, BATCHES) < 2 * batch
    assert bucket(queries, QUERIES) <= MAX_ROWS


@given(st.lists(st.lists(st.frozensets(st.integers(0, 9), max_size=3), min_size=1, max_size=3), max_size=12))
def test_stop_sets_are_in_the_table_when_they_are_asked_for(calls: list[list[frozenset[int]]]) -> None:
    stops = StopTable(8, torch.device("cpu"), capacity=4)
    for sets in calls:
        for row, tokens in zip(stops.rows(sets), sets, strict=True):
            assert set(stops.table[row].nonzero()[:, 0].tolist()) == {t for t in tokens if t < 8}


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        # most of what can be had: windows, norms of heads and of sums, two rotations
        ("gemma3", KernelFlags(skinny_gemm_bytes=0, fused_rope=False)),
        ("gemma3", KernelFlags()),
        ("qwen2", KernelFlags()),
        ("gemma3", KernelFlags(packed=True)),
    ],
)
def test_tritons_kernels_give_the_same(tmp_path: Path, family: str, flags: KernelFlags) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from semspec.model.kernels import triton_kernels
    from tests.interpreter import allow_new_numpy

    allow_new_numpy()
    plain = ModelRunner.load(save(make_model(family), tmp_path), device="cpu", slots=2, context=48)
    twin = ModelRunner(plain.transformer, 2, 48)
    twin.use(GraphRunner(plain.transformer, twin.cache, triton_kernels(), NoGraphs(), flags))
    results = []
    for runner in (plain, twin):
        slots = [runner.acquire(), runner.acquire()]
        runner._score([Score(runner, slots[0], text(1, 30), 0)], runner.cache.extend([(slots[0], 30)]))
        rows = runner.score([Score(runner, slots[0], [4, 5, 6], 3, (1,)), Score(runner, slots[1], [7], 1, (1,))])
        warm = Sampling(1.0, seed=2)
        written = runner.decode([Decode(runner, s, [8], 2, warm, 0, frozenset([11])) for s in slots])
        rows += runner.score([Score(runner, slots[0], [9], 1, (1,))])  # a single token, for which there are other ways
        results.append((rows, written))
    (theirs, written), (ours, own) = results
    for mine, other in zip(ours, theirs, strict=True):
        close(mine.logits, other.logits)
        close(mine.hidden[1], other.hidden[1])
    assert [r.tokens for r in own] == [r.tokens for r in written]


def test_sequences_without_processors_keep_their_graphs_beside_others(plain: ModelRunner) -> None:
    twin = with_graphs(plain)
    penalised = Processors(1, [Penalties([1], 100.0, 0.0, 1.0)])

    def wanted(runner: ModelRunner, history: bool) -> Decode:
        own = penalised.after([1]) if history else None
        return Decode(runner, runner.acquire(), [1], 8, Sampling(1.0, seed=1), 0, history=own)

    free, bound = (plain.decode([wanted(plain, history)])[0].tokens for history in (False, True))
    assert len(set(bound)) == 8, "nothing is repeated"
    before = len(keys(twin))
    together = twin.decode([wanted(twin, False), wanted(twin, True), wanted(twin, False)])
    assert [out.tokens for out in together] == [free, bound, free]
    assert sum(key[3] for key in keys(twin)[before:] if key[0] == "decode") == 8, "the plain ones, in one decode"
