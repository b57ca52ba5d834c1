"""Drafts that branch and draft heads on a GPU, against the plain way on a CPU; with all other checks."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from bench.gpu_checks import Seeded, no_rougher, runner, text
from bench.gpu_checks_kernels import check, near
from bench.gpu_checks_rules import CHECKS as CHECKS
from semspec import tree
from semspec.bench.shapes import RandomHead, random_head
from semspec.draft.tree import TreeOptions, fixed_shape, grow
from semspec.loop import scored
from semspec.model import ModelRunner
from semspec.model.heads.levels import Levels
from semspec.model.heads.runner import HeadRunner
from semspec.types import Decode, Draft, DraftRequest, Grow, Sampling, Score
from tests.checkpoints import VOCAB


def tree_course(one: ModelRunner) -> list[Tensor]:
    """Logits of trees of several sizes, in one pass and level by level, and of what follows their accepted paths."""
    said = []
    for size, before in ((63, 120), (10, 1), (40, 500 - 64)):
        parents = tree.preorder(fixed_shape(size, 9, 5))[1]
        tokens, slots = text(size, size), [one.acquire() for _ in range(3)]
        one.score([Score(one, slot, text(i, before)[: before - i], 0) for i, slot in enumerate(slots) if before > i])
        requests = [
            Score(one, slots[0], tokens, size, parents=parents),
            Score(one, slots[1], tokens[:5], 5),
            Score(one, slots[2], tokens[:9], 9, parents=parents[:9]),
        ]
        said += [rows.logits.float().cpu() for rows in one.score(requests)]
        (rows,) = one.score([Score(one, slots[2], tokens[9:], size - 9, parents=parents)]) if size > 9 else (None,)
        said += [] if rows is None else [rows.logits.float().cpu()]
        one.compact(slots[0], one.length(slots[0]) - size, tree.path(parents, size - 1))
        said += [rows.logits.float().cpu() for rows in one.score([Score(one, slots[0], text(7, 4), 4)])]
        for slot in slots:
            one.release(slot)
    return said


@check
def trees_are_the_same_everywhere(device: torch.device) -> None:
    """Float32 against a CPU, with and without windows, positions and norms of heads; half no rougher than plain."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    for family in ("llama3.1", "qwen3", "gemma3", "smollm3"):
        exact = tree_course(runner(family, torch.device("cpu"), torch.float32, plain=True))
        for plain in (True, False):
            for ours, theirs in zip(tree_course(runner(family, device, torch.float32, plain)), exact, strict=True):
                near(ours, theirs, 1e-3, f"{family}, {'plain' if plain else 'captured'}")
        rough, mine = (tree_course(runner(family, device, half, plain)) for plain in (True, False))
        no_rougher(mine, rough, exact, f"{family} in {half}")


class SeededHead(RandomHead, Seeded):
    read = Seeded.read


def small_head(device: torch.device, dtype: torch.dtype) -> HeadRunner:
    target = runner("llama3.1", torch.device("cpu"), torch.float32, plain=True)
    target.transformer.embedding = target.transformer.embedding.to(device, dtype)
    target.transformer.device, target.transformer.dtype = device, dtype
    return random_head(target, SeededHead(VOCAB - 20))


def begun(head: HeadRunner, texts: list[list[int]]) -> list[int]:
    """Slots that have read these texts but for their last token."""
    slots = []
    for i, own in enumerate(texts):
        slot, seeded = head.acquire(), torch.Generator().manual_seed(i)
        states = torch.randn(3, len(own) - 1, head.head.shape.width, generator=seeded)
        head.observe(slot, dict(zip(head.layers, states.to(head.device, head.head.dtype), strict=True)))
        slots.append(slot)
    if long := [(slot, own) for slot, own in zip(slots, texts, strict=True) if len(own) > 2]:
        head.score([Score(head, slot, own[:-1], 0) for slot, own in long])
    return slots


def head_course(device: torch.device, dtype: torch.dtype, plain: bool) -> list[Tensor]:
    """Logits of a head along what drafting does: prompts, a roll, a tree level by level, for several sequences."""
    head, said = small_head(device, dtype), list[Tensor]()
    if plain:
        head.use(None)
    parents, slots = (-1, -1, -1, 0, 0, 1, 3, 5), [head.acquire() for _ in range(3)]
    for i, slot in enumerate(slots):
        states = torch.randn(3, 100, head.head.shape.width, generator=torch.Generator().manual_seed(i)).to(
            device, dtype
        )
        head.observe(slot, dict(zip(head.layers, states, strict=True)))
    said += [rows.logits for rows in head.score([Score(head, s, text(i, 90), 1) for i, s in enumerate(slots)])]
    said += [rows.logits for rows in head.score([Score(head, s, text(i, 10 - i), 2) for i, s in enumerate(slots)])]
    for slot in slots:
        head.truncate(slot, 90)
        said += [rows.logits for rows in head.score([Score(head, slot, text(3, 7), 1)])]
    for begin, end in ((0, 3), (3, 6), (6, 8)):
        level = [Score(head, s, text(4, 8)[begin:end], end - begin, parents=parents[:end]) for s in slots[:2]]
        said += [rows.logits for rows in head.score(level)]
    (out,) = head.decode([Decode(head, slots[2], [5], 1, Sampling(), 0, keep_logits=True)])
    return [rows.float().cpu()[:, : VOCAB - 20] for rows in said] + [out.logits.float().cpu()[:, : VOCAB - 20]]  # type: ignore[union-attr]


@check
def draft_heads_say_the_same_everywhere(device: torch.device) -> None:
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    exact = head_course(torch.device("cpu"), torch.float32, plain=True)
    for ours, theirs in zip(head_course(device, torch.float32, plain=False), exact, strict=True):
        near(ours, theirs, 1e-3, "a head in float32")
    no_rougher(head_course(device, half, False), head_course(device, half, True), exact, f"a head in {half}")


def drafts_of(
    runner: HeadRunner, slots: list[int], texts: list[list[int]], asked: DraftRequest, options: TreeOptions
) -> list[tuple[list[int], tuple[int, ...]]]:
    """Trees, as the executor makes them: all rows, then all levels."""
    made: list[Draft] = []
    growing: list[tuple[Generator[Any, Any, Draft], Grow]] = []
    for slot, own in zip(slots, texts, strict=True):
        steps = grow(runner, slot, own, asked, options)
        request = next(steps)
        assert isinstance(request, Score)
        try:
            growing.append((steps, steps.send(scored.score(runner, [request])[0])))
        except StopIteration as end:
            made.append(end.value)
    if growing:
        scored.grow(runner, [request for _, request in growing], 512)
    for steps, _ in growing:
        try:
            next(steps)
        except StopIteration as end:
            made.append(end.value)
    return [(draft.tokens, draft.parents) for draft in made]


@check
def drafts_of_heads_chosen_on_the_device(device: torch.device) -> None:
    """Trees are those of level by level, for several sequences: what is captured and what follows."""
    head, texts = small_head(device, torch.float32), [text(i, 90 - i) for i in range(3)]
    assert head.graphs is not None or device.type != "cuda", "nothing was captured"
    on_device = None if head.graphs is None else Levels(head.graphs, head.vocab_size)
    said = []
    for chosen in (on_device, None):
        head.levels = chosen
        slots, found = begun(head, texts), list[Any]()
        for options in (TreeOptions(60, top=8), TreeOptions(20), TreeOptions(60, top=8)):
            found.append(drafts_of(head, slots, texts, DraftRequest(7, Sampling(), 0, threshold=1e-4), options))
            for slot, own in zip(slots, texts, strict=True):
                head.truncate(slot, len(own) - 1)
            out = head.decode([Decode(head, s, t[-1:], 6, Sampling(), 0) for s, t in zip(slots, texts, strict=True)])
            found.append([each.tokens for each in out])
            for slot, own in zip(slots, texts, strict=True):
                head.truncate(slot, len(own) - 1)
        said.append(found)
        for slot in slots:
            head.release(slot)
    assert said[0] == said[1], "other drafts than level by level"
