"""What must hold on a GPU before a time is worth reading. Run by `bench/gpu.py --check` and by tests/model/test_gpu.py.

Kernels are held against float64, the runner against the plain float32 one on a CPU. Each check is a function that
raises AssertionError; inputs are fresh noise, never zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.fast import LONGEST, Fast
from semspec.model.graphs import Graphs, Plain
from semspec.model.kernels import (
    COUNT,
    FIELDS,
    MEASURED,
    SEED,
    START,
    STEP,
    STREAM,
    Choices,
    Chosen,
    Kernels,
    Rest,
    reference,
    reference_kernels,
    triton_kernels,
)  # fmt: skip
from semspec.model.transformer import Transformer
from semspec.noise import uniform
from semspec.sparse import AttentionPlan, SparsePlan, apply
from semspec.sparse.attention import listed
from semspec.types import Roll, Sampling, Score
from tests.checkpoints import FAMILIES, VOCAB

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
HALF = (torch.bfloat16, torch.float16)
MIXTURES = ("qwen3-moe", "mixtral")
DENSE = [name for name in FAMILIES if name not in MIXTURES]
CHECKS: dict[str, Callable[[torch.device], None]] = {}


def check(function: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def kernels(device: torch.device) -> Kernels:
    return triton_kernels() if device.type == "cuda" else reference_kernels()


def error(ours: Tensor, exact: Tensor) -> float:
    assert not ours.isnan().any(), "not a number"
    return float((ours.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-9))


def near(ours: Tensor, exact: Tensor, most: float, what: str = "") -> None:
    off = error(ours, exact)
    assert off < most, f"{what} is off by {off:.1e} of its size; at most {most:.1e} is right"


# -- kernels


def attention(
    device: torch.device, dtype: torch.dtype, lengths: list[int], queries: int, kv_heads: int, group: int, size: int,
    window: int | None = None, tree: bool = False,
) -> None:  # fmt: skip
    batch, capacity = len(lengths), max(lengths) + queries
    q = torch.randn(batch, queries, kv_heads * group, size, device=device, dtype=dtype)
    cache = [torch.randn(batch + 1, kv_heads, capacity, size, device=device, dtype=dtype) for _ in range(2)]
    for half in cache:  # what lies behind a sequence must not matter
        for b, length in enumerate(lengths):
            half[batch - b, :, length + queries - b % queries :] = float("nan")
    slots = torch.arange(batch, 0, -1, device=device)
    starts = torch.tensor(lengths, device=device)
    counts = torch.tensor([queries - b % queries for b in range(batch)], device=device)
    ancestors = None
    if tree:
        ancestors = torch.rand(batch, queries, queries, device=device).round().tril().to(torch.int8)
        ancestors |= torch.eye(queries, dtype=torch.int8, device=device)
    ours = kernels(device).attend(q, *cache, slots, starts, counts, size**-0.5, window, ancestors)
    for b in range(batch):  # one by one: the reference takes much more memory
        one = [x[b : b + 1] for x in (slots, starts, counts)]
        marks = None if ancestors is None else ancestors[b : b + 1]
        own = [half[slots[b] : slots[b] + 1, :, : lengths[b] + queries].double() for half in cache]
        exact = reference.attend(q[b : b + 1].double(), *own, one[0] * 0, *one[1:], size**-0.5, window, marks)
        near(ours[b : b + 1], exact, TOLERANCE[dtype], f"sequence {b} of {lengths}")


@check
def attention_over_random_shapes(device: torch.device) -> None:
    shapes = torch.Generator().manual_seed(torch.seed() % 2**31)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=shapes))]

    for i in range(24 if device.type == "cuda" else 3):  # nearly each is another kernel to compile
        dtype = (*HALF, torch.bfloat16, torch.float32)[i % 4] if device.type == "cuda" else torch.float32
        lengths = [pick(0, 1, 7, 63, 64, 65, 500, 2048, 5000) for _ in range(pick(1, 2, 3, 8))]
        window, tree = pick(0, 0, 1, 100, 4096) or None, bool(pick(0, 0, 1))
        queries, heads, size = pick(1, 2, 9, 17, 33, 64), (pick(1, 2, 8), pick(1, 5, 6, 7)), pick(64, 96, 128, 256)
        attention(device, dtype, lengths, queries, *heads, size, window, tree)


@check
def attention_over_140000_tokens(device: torch.device) -> None:
    longest = 140_000 if device.type == "cuda" else 1400
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for queries in (1, 9, 16, 17):
        attention(device, dtype, [longest - queries], queries, 2, 5, 128)
    attention(device, dtype, [longest - 16, 3, longest // 2], 16, 8, 4, 128)
    attention(device, dtype, [longest - 16], 16, 2, 5, 128, window=4096)


@check
def attention_to_chosen_blocks(device: torch.device) -> None:
    chosen_blocks(device, means=False)


@check
def attention_to_chosen_blocks_and_means_of_the_others(device: torch.device) -> None:
    chosen_blocks(device, means=True)


def chosen_blocks(device: torch.device, means: bool) -> None:
    longest = 140_000 if device.type == "cuda" else 1400
    for dtype in (torch.float32, *HALF) if device.type == "cuda" else (torch.float32,):
        for span, queries, share in ((16, 9, 0.3), (64, 16, 0.1), (64, 17, 1.0), (128, 33, 0.5)):
            lengths, heads, group, size = [longest - 70, 3, longest // 3], 4, 5, 128
            q = torch.randn(3, queries, heads * group, size, device=device, dtype=dtype)
            cache = [torch.randn(3, heads, longest, size, device=device, dtype=dtype) for _ in range(2)]
            places = [torch.tensor(x, device=device) for x in ([2, 0, 1], lengths, [queries, 1, queries])]
            keep = torch.rand(3, heads, longest // span, device=device) < share
            keep &= torch.arange(longest // span, device=device) < (places[1] // span)[:, None, None]
            chosen = Chosen(*listed(keep), span)
            if means:  # of blocks that are whole, and of nothing else
                made = [half[:, :, : longest // span * span].unflatten(2, (-1, span)).mean(3) for half in cache]
                for slot, length in zip([2, 0, 1], lengths, strict=True):
                    for half in made:
                        half[slot, :, length // span :] = float("nan")
                chosen = chosen._replace(rest=Rest(keep.to(torch.int8), made[0], made[1]))
            ours = kernels(device).attend(q, *cache, *places, size**-0.5, chosen=chosen)
            for b, (slot, length) in enumerate(zip([2, 0, 1], lengths, strict=True)):
                own = [half[slot : slot + 1, :, : length + queries].double() for half in cache]
                one = [places[0][:1] * 0, *(x[b : b + 1] for x in places[1:])]
                few = Chosen(chosen.lists[b : b + 1], chosen.counts[b : b + 1], span)
                if means:
                    wide = [half[slot : slot + 1].double() for half in made]
                    few = few._replace(rest=Rest(keep[b : b + 1], wide[0], wide[1]))
                exact = reference.attend(q[b : b + 1].double(), *own, *one, size**-0.5, chosen=few)
                near(ours[b : b + 1], exact, TOLERANCE[dtype], f"blocks of {span}, sequence {b}")


@check
def small_kernels(device: torch.device) -> None:
    k = kernels(device)
    for dtype in (torch.float32, *HALF) if device.type == "cuda" else (torch.float32,):
        for width in (64, 1536, 5120):
            x, added = (torch.randn(17, width, device=device, dtype=dtype) for _ in range(2))
            weight, inner = (torch.randn(width, device=device, dtype=dtype) for _ in range(2))
            for options in ((None,), (added,), (added, inner)):
                mine, exact_x = x.clone(), x.double()
                wide = [None if o is None else o.double() for o in options]
                ours = k.add_norm(mine, options[0], weight, 1e-6, *options[1:])
                exact = reference.add_norm(exact_x, wide[0], weight.double(), 1e-6, *wide[1:])
                near(ours, exact, TOLERANCE[dtype], "norm")
                near(mine, exact_x, TOLERANCE[dtype], "residual stream")
        for activation in ("silu", "gelu_pytorch_tanh"):
            gate_up = torch.randn(9, 2 * 8960, device=device, dtype=dtype) * 3
            near(k.gated(gate_up, activation), reference.gated(gate_up.double(), activation), TOLERANCE[dtype])
        angles = torch.rand(100, 32, device=device) * 6
        places = [torch.tensor(x, device=device) for x in ([2, 0], [40, 3], [5, 2])]
        qkv = torch.randn(2, 5, 10 + 4, 96, device=device, dtype=dtype)
        norms = (torch.randn(96, device=device, dtype=dtype), torch.randn(96, device=device, dtype=dtype))
        cache = [torch.randn(3, 2, 100, 96, device=device, dtype=dtype) for _ in range(2)]
        exact_cache = [half.double() for half in cache]
        turns = (angles.cos(), angles.sin())
        ours = k.turn_and_keep(qkv, *cache, *places, turns, 10, norms, 1e-6)
        exact = reference.turn_and_keep(
            qkv.double(), *exact_cache, *places, (turns[0].double(), turns[1].double()), 10,
            (norms[0].double(), norms[1].double()), 1e-6,
        )  # fmt: skip
        near(ours[0], exact[0], TOLERANCE[dtype], "queries")
        near(ours[1, :2], exact[1, :2], TOLERANCE[dtype], "queries")
        for mine, theirs in zip(cache, exact_cache, strict=True):
            near(mine, theirs, TOLERANCE[dtype], "cache")


@check
def draws_are_where_the_noise_falls(device: torch.device) -> None:
    """Of a large vocabulary, by sums in float64; where a draw is between two tokens, either is right."""
    draw, rows, size = kernels(device).draw, 64, 151936
    if draw is None:  # without a GPU there is none to look at
        return
    options = torch.tensor([[0.6], [0.0], [1.0], [0.0]], device=device).repeat(1, rows)
    options[0, ::8] = 0.0
    state = torch.randint(0, 5000, (FIELDS, rows), device=device)
    state[STEP] = 2
    for dtype in (torch.float32, *HALF):
        logits = torch.randn(rows, size + 128, device=device).mul(4).to(dtype)[:, :size]
        kept = torch.zeros(8, rows, size, device=device)
        tokens = draw(logits, options, state, kept)
        assert torch.equal(tokens, draw(logits, options, state, None)), "keeping changes the draw"
        weights = (logits.double() / 0.6).softmax(-1)
        reached = weights.cumsum(-1)
        noise = uniform(state[SEED], state[START] + state[COUNT], state[STREAM]).double()
        at = tokens[:, None]
        high = reached.gather(1, at)[:, 0]
        low = high - weights.gather(1, at)[:, 0]
        falls = (low - 2e-6 <= noise) & (noise <= high + 2e-6)
        greedy = options[0] == 0.0
        assert torch.where(greedy, tokens == logits.argmax(-1), falls).all(), f"{dtype}: a draw is not where it falls"
        sampled = kept[2][~greedy].double().log_softmax(-1).exp()
        near(sampled, weights[~greedy], 1e-4, f"{dtype}: what was drawn from")
        assert torch.equal(kept[2][greedy], logits[greedy].float()) and not kept[[0, 1, 3]].any()


@check
def products_of_few_rows(device: torch.device) -> None:
    for dtype in (torch.float32, *HALF) if device.type == "cuda" else (torch.float32,):
        for rows, outputs, inputs in (
            (1, 2048, 1536),
            (9, 1536, 1536),
            (16, 1536, 8960),
            (2, 17920, 1536),
            (5, 50, 100),
        ):
            x, weight = (torch.randn(size, device=device, dtype=dtype) for size in ((rows, inputs), (outputs, inputs)))
            weight *= inputs**-0.5  # or a gate times an up leaves what half precision can say
            bias = torch.randn(outputs, device=device, dtype=dtype)
            exact = reference.product(x.double(), weight.double(), bias.double(), 1)
            for parts in (False, True):
                ours = kernels(device).product(x, weight, bias, parts)
                near(ours.sum(0) if ours.dim() == 3 else ours, exact, TOLERANCE[dtype], f"{outputs} x {inputs}")
            if outputs % 2 == 0:
                exact, ours = (
                    reference.gated(exact, "silu"),
                    kernels(device).product(x, weight, bias, False, "silu"),
                )
                near(ours, exact, 2 * TOLERANCE[dtype], f"{outputs} x {inputs}, with its activation")


# -- the runner


class Seeded:
    """A checkpoint whose tensors are noise that depends on their names only, so that any device gets the same."""

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        tensor = 1 + 0.1 * noise if "norm" in name else 0.3 * noise
        return tensor.to(device, dtype)


def runner(
    family: str, device: torch.device, dtype: torch.dtype, plain: bool = False, choices: Choices = MEASURED
) -> ModelRunner:
    shape = Shape.of(FAMILIES[family][1])
    made = ModelRunner(Transformer(shape, Seeded(), device, dtype), 3, 512)
    if plain:
        made.use(None)
    else:
        runs = Plain() if device.type == "cpu" else Graphs(device)
        made.use(Fast(made.transformer, made.cache, kernels(device), runs, choices))
    return made


def text(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, [length], generator=torch.Generator().manual_seed(seed)).tolist()


def course(one: ModelRunner) -> list[Tensor]:
    """Logits along what decoding does: a prompt, drafts of several lengths, some taken back, sequences together. Longer
    feeds always go the plain way, so what they give is left out."""
    slots, said = [one.acquire() for _ in range(3)], []
    feeds = [text(i, 400) for i in range(3)]
    for step, sizes in enumerate(
        [(100, 1, 70), (9, 9, 9), (9, 17, 1), (1, 1, 1), (3, 64, 33), (120, 2, 6), (9, 16, 9)]
    ):
        requests = []
        for i, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
            start = one.length(slot)
            requests.append(Score(one, slot, feeds[i][start : start + size], size))
        short = [len(r.tokens) <= LONGEST for r in requests]
        said += [rows.logits.float().cpu() for rows, kept in zip(one.score(requests), short, strict=True) if kept]
        if step % 2:
            for slot in slots:
                one.truncate(slot, one.length(slot) - 1)
    for slot in slots:
        one.release(slot)
    return said


def rows_off(ours: list[Tensor], exact: list[Tensor]) -> Tensor:
    """How far each row is from the exact one, by its size."""
    mine, theirs = torch.cat(ours).double(), torch.cat(exact).double()
    return (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)


def no_rougher(ours: list[Tensor], rough: list[Tensor], exact: list[Tensor], what: str) -> None:
    """Both ways round as often, but not alike: what each makes of one row is luck, and a pass may have only one. In
    float16 on a CPU, where nothing but luck tells them apart, one way was 0.6 to 2.2 times as far off as the other in a
    single pass, 0.94 to 1.13 times over all passes, in its unluckiest row 0.6 to 1.5 times (15 families). So all rows
    together say whether ours is rougher, and one row says only whether it is wrong, which would be off by about 1."""
    mine, theirs = error(torch.cat(ours), torch.cat(exact)), error(torch.cat(rough), torch.cat(exact))
    assert theirs < 0.2, f"{what}, plain: off by {theirs:.1e}"
    assert mine < 1.3 * theirs, f"{what}: off by {mine:.1e} over all passes, the plain way by {theirs:.1e}"
    worst, allowed = float(rows_off(ours, exact).max()), 3 * float(rows_off(rough, exact).max())
    assert worst < allowed, f"{what}: a row is off by {worst:.1e}; {allowed:.1e} can be rounding"


def family_check(family: str, device: torch.device, choices: Choices = MEASURED) -> None:
    """float32 must be right; bfloat16 must be no farther from that than it is when operations go one by one."""
    ours, rough, exact, half = courses(family, device, choices)
    no_rougher(ours, rough, exact, str(half))


def courses(
    family: str, device: torch.device, choices: Choices
) -> tuple[list[Tensor], list[Tensor], list[Tensor], torch.dtype]:
    """In half precision, ours and one operation at a time; in float32 on a CPU, which float32 here must equal."""
    exact = course(runner(family, torch.device("cpu"), torch.float32, plain=True))
    for plain in (True, False):
        for ours, theirs in zip(course(runner(family, device, torch.float32, plain, choices)), exact, strict=True):
            near(ours, theirs, 1e-3, f"float32, {'plain' if plain else 'captured'}")
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    rough, mine = (course(runner(family, device, half, plain, choices)) for plain in (True, False))
    return mine, rough, exact, half


for name in DENSE:
    CHECKS[f"logits of {name}"] = lambda device, family=name: family_check(family, device)


@check
def checks_by_a_plan_are_the_same_everywhere(device: torch.device) -> None:
    for family in ("llama3.1", "gemma3"):
        for plan in (
            AttentionPlan(8, 16, 0.2),
            AttentionPlan(16, 0, 0.3, score="first", spread="heads"),
            AttentionPlan(8, 16, 0.2, rest="mean"),
        ):
            said = []
            for where, plain in ((torch.device("cpu"), True), (device, True), (device, False)):
                one = runner(family, where, torch.float32, plain)
                apply(SparsePlan(attention=plan, refresh=2), one)
                said.append(course(one))
            for i, (exact, *others) in enumerate(zip(*said, strict=True)):
                for ours in others:
                    near(ours, exact, 2e-3, f"{family}, pass {i // 3}")


def rolls_check(family: str, device: torch.device, choices: Choices) -> None:
    """In float32, so that near-ties are rare."""
    plans = [
        (text(1, 90), 40, Sampling(), frozenset[int]()),
        (text(2, 2), 21, Sampling(1.0, seed=5), frozenset(range(0, VOCAB, 16))),
        (text(3, 30), 33, Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01, seed=6), frozenset([7])),
    ]
    answers = []
    for plain in (True, False):
        one = runner(family, device, torch.float32, plain, choices)
        slots = [one.acquire() for _ in plans]
        requests = [
            Roll(one, slot, feed, n, sampling, 8, stop, keep_logits=True, layers=(1, one.depth))
            for slot, (feed, n, sampling, stop) in zip(slots, plans, strict=True)
        ]
        together = one.roll(requests)
        for slot in slots:
            one.truncate(slot, 0)
        alone = [one.roll([replace(r, runner=one)])[0] for r in requests]
        assert [r.tokens for r in together] == [r.tokens for r in alone], "together is not as alone"
        answers.append(together)
    for theirs, ours in zip(*answers, strict=True):
        assert ours.tokens == theirs.tokens, f"{ours.tokens} is not {theirs.tokens}"
        assert ours.logits is not None and theirs.logits is not None
        near(ours.logits.nan_to_num(neginf=0.0), theirs.logits.nan_to_num(neginf=0.0), 1e-3, "logits")
        for layer, states in ours.hidden.items():
            near(states, theirs.hidden[layer], 1e-3, f"layer {layer}")


for name, way, as_told in (
    ("qwen2", MEASURED, "as measured"),
    ("gemma3", MEASURED, "as measured"),
    ("gemma3", Choices(gate=False, turn=False), "without gate and turn"),
):
    CHECKS[f"rolls of {name} write what the plain way writes, {as_told}"] = lambda device, family=name, way=way: (
        rolls_check(family, device, way)
    )


@check
def attention_changes_no_bit_from_run_to_run(device: torch.device) -> None:
    """Whichever split ends first, and however often a graph is replayed."""
    if device.type == "cpu":
        return
    for batch, queries, kv_heads, group, length in ((1, 1, 2, 6, 2100), (3, 9, 2, 5, 700), (1, 16, 8, 4, 140_000)):
        q = torch.randn(batch, queries, kv_heads * group, 128, device=device, dtype=torch.bfloat16)
        cache = [torch.randn(batch, kv_heads, length, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
        slots = torch.arange(batch, device=device)
        places = (slots, length - queries - 50 * slots, torch.full_like(slots, queries))
        one = kernels(device)
        first = one.attend(q, *cache, *places, 0.1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = [one.attend(q, *cache, *places, 0.1) for _ in range(20)]
        for _ in range(20):
            for out in again:
                out.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(out, first) for out in again), f"{queries} queries over {length}"


@check
def ragged_batches_equal_singles_but_for_near_ties(device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one = runner("qwen3", device, dtype)
    slots, feeds = [one.acquire() for _ in range(3)], [text(i, 50) for i in range(3)]
    together = [
        r.tokens for r in one.roll([Roll(one, s, f, 60, Sampling(), 0) for s, f in zip(slots, feeds, strict=True)])
    ]
    for slot, feed, tokens in zip(slots, feeds, together, strict=True):
        one.truncate(slot, 0)
        (alone,) = one.roll([Roll(one, slot, feed, 60, Sampling(), 0, keep_logits=True)])
        first = next((i for i, (a, b) in enumerate(zip(alone.tokens, tokens, strict=True)) if a != b), None)
        if first is not None:
            assert alone.logits is not None
            row = alone.logits[first]
            gap = float(row[alone.tokens[first]] - row[tokens[first]])
            assert gap < 0.05 * float(row.std()), f"token {first} differs with a gap of {gap:.3f}"


@check
def the_oldest_graph_makes_room(device: torch.device) -> None:
    if device.type == "cpu":
        return
    one, few = runner("llama3", device, torch.float32), 2
    assert one.fast is not None
    one.fast.runs = Graphs(device, most=few)
    slot = one.acquire()
    expected = [one.score([Score(one, slot, text(1, n), 1)])[0].logits for n in (1, 2, 4)]
    for start, n, rows in ((0, 1, expected[0]), (1, 2, expected[1]), (3, 4, expected[2])):
        one.truncate(slot, start)
        near(one.score([Score(one, slot, text(1, n), 1)])[0].logits, rows, 1e-6)
        assert len(one.fast.runs) <= few
