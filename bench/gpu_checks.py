"""What must hold on a GPU before a time is worth reading. Run by `bench/gpu.py --check` and by tests/model/test_gpu.py.

Here the runner, against the plain float32 one on a CPU; each kernel by itself: gpu_checks_kernels.py, and of experts,
channels and the choice of blocks gpu_checks_grouped.py, which knows all checks.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu_checks_kernels import CHECKS, check, error, kernels, near
from semspec.model import ModelRunner
from semspec.model.buckets import MAX_QUERIES
from semspec.model.config import Shape
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import GraphCache, NoGraphs
from semspec.model.kernels import DEFAULT_FLAGS, KernelFlags
from semspec.model.transformer import Transformer
from semspec.sparse import AttentionPlan, SparsePlan, apply
from semspec.types import Decode, Handover, Sampling, Score
from tests.checkpoints import FAMILIES, VOCAB

MIXTURES = ("qwen3-moe", "mixtral")
DENSE = [name for name in FAMILIES if name not in MIXTURES]


class Seeded:
    """A checkpoint whose tensors are noise that depends on their names only, so that any device gets the same."""

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        tensor = 1 + 0.1 * noise if "norm" in name else 0.3 * noise
        return tensor.to(device, dtype)


def runner(
    family: str,
    device: torch.device,
    dtype: torch.dtype,
    plain: bool = False,
    choices: KernelFlags = DEFAULT_FLAGS,
    context: int = 512,
) -> ModelRunner:
    shape = Shape.of(FAMILIES[family][1])
    made = ModelRunner(Transformer(shape, Seeded(), device, dtype), 3, context)
    if plain:
        made.use(None)
    else:
        runs = NoGraphs() if device.type == "cpu" else GraphCache(device)
        made.use(GraphRunner(made.transformer, made.cache, kernels(device), runs, choices))
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
        short = [len(r.tokens) <= MAX_QUERIES for r in requests]
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


def family_check(family: str, device: torch.device, choices: KernelFlags = DEFAULT_FLAGS) -> None:
    """float32 must be right; bfloat16 must be no farther from that than it is when operations go one by one."""
    ours, rough, exact, half = courses(family, device, choices)
    no_rougher(ours, rough, exact, str(half))


def courses(
    family: str, device: torch.device, choices: KernelFlags
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


def rolls_check(family: str, device: torch.device, choices: KernelFlags) -> None:
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
            Decode(one, slot, feed, n, sampling, 8, stop, keep_logits=True, layers=(1, one.num_layers))
            for slot, (feed, n, sampling, stop) in zip(slots, plans, strict=True)
        ]
        together = one.decode(requests)
        for slot in slots:
            one.truncate(slot, 0)
        alone = [one.decode([replace(r, runner=one)])[0] for r in requests]
        assert [r.tokens for r in together] == [r.tokens for r in alone], "together is not as alone"
        answers.append(together)
    for theirs, ours in zip(*answers, strict=True):
        assert ours.tokens == theirs.tokens, f"{ours.tokens} is not {theirs.tokens}"
        assert ours.logits is not None and theirs.logits is not None
        near(ours.logits.nan_to_num(neginf=0.0), theirs.logits.nan_to_num(neginf=0.0), 1e-3, "logits")
        for layer, states in ours.hidden.items():
            near(states, theirs.hidden[layer], 1e-3, f"layer {layer}")


for name, way, as_told in (
    ("qwen2", DEFAULT_FLAGS, "as measured"),
    ("gemma3", DEFAULT_FLAGS, "as measured"),
    ("gemma3", KernelFlags(fused_activation=False, fused_rope=False), "without fused activation and RoPE"),
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
        r.tokens for r in one.decode([Decode(one, s, f, 60, Sampling(), 0) for s, f in zip(slots, feeds, strict=True)])
    ]
    for slot, feed, tokens in zip(slots, feeds, together, strict=True):
        one.truncate(slot, 0)
        (alone,) = one.decode([Decode(one, slot, feed, 60, Sampling(), 0, keep_logits=True)])
        first = next((i for i, (a, b) in enumerate(zip(alone.tokens, tokens, strict=True)) if a != b), None)
        if first is not None:
            assert alone.logits is not None
            row = alone.logits[first]
            gap = float(row[alone.tokens[first]] - row[tokens[first]])
            assert gap < 0.05 * float(row.std()), f"token {first} differs with a gap of {gap:.3f}"


@check
def drafts_read_before_the_host_knows_them(device: torch.device) -> None:
    """A round as without: the same rows, the same cache, no pass more; the first round captures what the others use."""
    flags = replace(DEFAULT_FLAGS, hand_over=True)
    for batch in (1, 3):
        target, draft = (runner(f, device, torch.float32, choices=flags) for f in ("qwen3", "qwen2"))
        slots = [(target.acquire(), draft.acquire()) for _ in range(batch)]
        for slot, other in slots:
            for one, own in ((target, slot), (draft, other)):
                one.score([Score(one, own, text(slot, 20 + slot), 0)])
        for step in range(4):
            over = [Handover(target, slot, [step + 1]) for slot, _ in slots]
            wrote = draft.decode([
                Decode(draft, own, h.tokens, 8, Sampling(1.0, seed=step), 8, handover=h)
                for (_, own), h in zip(slots, over, strict=True)
            ])  # fmt: skip
            feeds = [[*h.tokens, *out.tokens] for h, out in zip(over, wrote, strict=True)]
            assert all(h.rows is not None for h in over) or not step, "nothing was begun"
            ours = target.score([Score(target, h.slot, f, 9, handover=h) for f, h in zip(feeds, over, strict=True)])
            after = [row.logits for row in ours]
            for h in over:
                target.truncate(h.slot, target.length(h.slot) - 9)
            again = target.score([Score(target, h.slot, f, 9) for f, h in zip(feeds, over, strict=True)])
            for mine, theirs in zip(after, again, strict=True):
                near(mine, theirs.logits, 1e-6, f"batch {batch}, round {step}")
            for slot, own in slots:
                target.truncate(slot, target.length(slot) - 4)
                draft.truncate(own, draft.length(own) - 3)


@check
def windows_that_are_given_back_change_nothing(device: torch.device) -> None:
    """Texts of many windows, of which a GPU's cache has no more than one: prompts, drafts taken back, copies."""
    if device.type == "cpu":  # there all of a text is kept
        return

    def course(one: ModelRunner) -> list[Tensor]:
        slots, said = [one.acquire() for _ in range(3)], list[Tensor]()
        for at in range(0, 3600, 1200):
            for i, slot in enumerate(slots):
                said.append(one.score([Score(one, slot, text(i, 3600)[at : at + 1200], 1)])[0].logits)
                for n in (9, 64):
                    said.append(one.score([Score(one, slot, text(n, n), n)])[0].logits)
                    one.truncate(slot, one.length(slot) - n)
        one.copy(slots[0], slots[1], 3590)
        said += [r.logits for r in one.score([Score(one, slot, text(5, 17), 17) for slot in slots])]
        return [rows.float().cpu() for rows in said]

    for family in ("mistral", "gemma3", "phi3"):
        exact = course(runner(family, torch.device("cpu"), torch.float32, plain=True, context=4096))
        for plain in (True, False):
            one = runner(family, device, torch.float32, plain, context=4096)
            assert one.windowed, "windows keep their window only"
            for ours, theirs in zip(course(one), exact, strict=True):
                near(ours, theirs, 1e-3, f"{family}, {'plain' if plain else 'captured'}")


@check
def keys_and_values_in_fp8(device: torch.device) -> None:
    """Passes by graphs give what plain ones do with the same codes, and are near those without codes."""
    if device.type == "cpu":  # tests/model/test_kv_fp8.py
        return

    def course(one: ModelRunner) -> list[Tensor]:
        slot, other = one.acquire(), one.acquire()
        said = [one.score([Score(one, slot, text(1, 700), 1)])[0].logits]
        for n in (1, 9, 17, 64):
            said.append(one.score([Score(one, slot, text(n, n), n)])[0].logits)
            one.truncate(slot, one.length(slot) - n // 2)
        one.copy(slot, other, 690)
        said += [r.logits for r in one.score([Score(one, s, text(5, 5), 5) for s in (slot, other)])]
        return [rows.float().cpu() for rows in said]

    # What codes change of logits of noise, on a CPU: attention is sharp where biases are large.
    for family, loss in (("qwen2", 0.4), ("qwen3", 0.06), ("gemma3", 0.18)):
        for dtype, most in ((torch.float32, 1e-2), (torch.bfloat16, 5e-2)):
            made = [runner(family, device, dtype, plain, context=1024) for plain in (True, False)]
            narrow = [ModelRunner(one.transformer, 2, 1024, fp8_cache=True) for one in made]
            narrow[0].use(None)
            exact, plain, captured = (course(one) for one in (made[0], *narrow))
            for wide, ours, theirs in zip(exact, captured, plain, strict=True):
                near(ours, theirs, most, f"{family}, captured")
                near(ours, wide, 1.5 * loss + most, f"{family}, beside no codes")


@check
def the_oldest_graph_makes_room(device: torch.device) -> None:
    if device.type == "cpu":
        return
    one, few = runner("llama3", device, torch.float32), 2
    assert one.graph_runner is not None
    one.graph_runner.launcher = GraphCache(device, capacity=few)
    slot = one.acquire()
    expected = [one.score([Score(one, slot, text(1, n), 1)])[0].logits for n in (1, 2, 4)]
    for start, n, rows in ((0, 1, expected[0]), (1, 2, expected[1]), (3, 4, expected[2])):
        one.truncate(slot, start)
        near(one.score([Score(one, slot, text(1, n), 1)])[0].logits, rows, 1e-6)
        assert len(one.graph_runner.launcher) <= few
