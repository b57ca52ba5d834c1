"""Decisions from one pair, cost from another: make a run's recorded passes again on models of other sizes.

Acceptance is decided by a pair we can afford to run for quality; what a pass costs at 32 billion parameters is not
guessed but measured, by executing every recorded pass, with its rows and context lengths, on random weights of that
shape. What a GPU computes in vain, until it is seen that a roll has stopped, is in it. Only passes are timed: judging
and host work are not in a replay.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from semspec.bench.folder import RunFolder
from semspec.bench.summary import load_run, summarise
from semspec.errors import BadRequest
from semspec.loop.stats import SECONDS
from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.memory_plan import MemoryPlan, check
from semspec.model.placement import choose_device
from semspec.model.transformer import Transformer
from semspec.types import GREEDY, Decode, Sampling, Score


def _dense(
    kind: type[PreTrainedConfig], width: int, depth: int, heads: int, kv: int, ffn: int, vocab: int, tied: bool = False
) -> PreTrainedConfig:
    return kind(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )


SHAPES: dict[str, tuple[PreTrainedConfig, PreTrainedConfig]] = {
    "32B/1.5B": (
        _dense(Qwen2Config, 5120, 64, 40, 8, 27648, 152064),
        _dense(Qwen2Config, 1536, 28, 12, 2, 8960, 151936, tied=True),
    ),
    "8B/1B": (
        _dense(LlamaConfig, 4096, 32, 32, 8, 14336, 128256),
        _dense(LlamaConfig, 2048, 16, 32, 8, 8192, 128256, tied=True),
    ),
    "30B-A3B/0.6B": (
        Qwen3MoeConfig(
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            vocab_size=151936,
            max_position_embeddings=40960,
        ),
        Qwen3Config(
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            vocab_size=151936,
            tie_word_embeddings=True,
            max_position_embeddings=40960,
        ),
    ),
    "tiny-moe": (
        Qwen3MoeConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=128,
            moe_intermediate_size=32,
            num_experts=16,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            vocab_size=256,
            max_position_embeddings=4096,
        ),
        _dense(LlamaConfig, 32, 1, 2, 1, 64, 256, tied=True),
    ),
    "tiny": (_dense(LlamaConfig, 64, 2, 4, 2, 128, 256), _dense(LlamaConfig, 32, 1, 2, 1, 64, 256, tied=True)),
}


NAMES = ("target", "draft")
IN_VAIN = 32  # places for tokens that are computed before a stop is seen
BRIEF = 20  # tokens of a roll for the sake of warming up


class RandomWeights:
    """Stands in for a checkpoint whose tensors are noise."""

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device, dtype=dtype)
        return torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02)


def random_runner(
    config: PreTrainedConfig, slots: int, capacity: int, device: torch.device, dtype: torch.dtype
) -> ModelRunner:
    return ModelRunner(Transformer(Shape.of(config), RandomWeights(), device, dtype), slots, capacity)


def planned(
    name: str, config: PreTrainedConfig, slots: int, capacity: int, device: torch.device, dtype: torch.dtype
) -> MemoryPlan:
    """What memory such a runner takes at least."""
    shape = Shape.of(config)
    per_token = 2 * shape.depth * shape.kv_heads * shape.head_dim * dtype.itemsize
    return MemoryPlan(name, device, shape.parameters * dtype.itemsize, per_token, slots, capacity)


class Replay:
    """Two random models of a named shape that repeat passes, counting what they execute."""

    def __init__(
        self,
        shape: str,
        slots: int,
        capacity: int,
        device: str = "auto",
        dtype: str = "auto",
        sampling: Sampling = GREEDY,
    ) -> None:
        if shape not in SHAPES:
            raise BadRequest(f"there is no shape {shape!r}; the shapes are: {', '.join(SHAPES)}")
        self.device = choose_device(device)
        kind = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if dtype != "auto":
            kind = getattr(torch, dtype)
        check(
            [planned(name, c, slots, capacity, self.device, kind) for name, c in zip(NAMES, SHAPES[shape], strict=True)]
        )
        target, draft = (random_runner(c, slots, capacity, self.device, kind) for c in SHAPES[shape])
        self.runners = {"target": target, "draft": draft}
        self.sampling = sampling  # how tokens are drawn; which they are does not matter
        self.executed: list[list[Any]] = []
        for runner in self.runners.values():
            for _ in range(slots):
                runner.acquire()

    def play(self, passes: list[list[Any]], clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
        """Execute recorded passes; returns the seconds each model took."""
        seconds = dict.fromkeys(self.runners, 0.0)
        self._wait()
        for name, kind, rows in passes:
            runner = self.runners[name]
            began = clock()
            for slot, (_, context, *_) in enumerate(rows):
                runner.cache.lengths[slot] = context  # what lies there does not matter, only how much
            if kind == "score":
                runner.score([Score(runner, i, [1] * fed, out) for i, (fed, _, out) in enumerate(rows)])
            else:
                runner.decode([
                    Decode(runner, i, [1] * row[0], n, self._drawn(row), 0, keep_logits=any(row[4:5]))
                    for i, (row, n) in enumerate(zip(rows, written(runner, rows), strict=True))
                ])  # fmt: skip
            self._wait()
            seconds[name] += clock() - began
            self.executed.append([name, kind, rows])
        return seconds

    def _drawn(self, row: list[int]) -> Sampling:
        return GREEDY if any(row[5:]) else self.sampling

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def written(runner: ModelRunner, rows: list[list[int]]) -> list[int]:
    """Tokens each sequence of a roll computes: what it wrote, and the longest what follows until its end is seen."""
    counts = [row[2] for row in rows]
    longest = counts.index(max(counts))
    asked = max(max(row[2:4]) for row in rows)  # runs of older versions do not say; then it is what was written
    counts[longest] = runner.computed(counts[longest], asked)
    return counts


def once_each(passes: list[list[Any]]) -> list[list[Any]]:
    """One pass of every size: what is captured when it is first met is captured before anything is timed."""
    sizes: dict[str, list[Any]] = {}
    for name, kind, rows in passes:
        short = [[row[0], row[1], min(row[2], BRIEF), *row[3:]] for row in rows]
        known = json.dumps([name, kind, [[fed, *rest] for fed, _, *rest in short]])
        sizes.setdefault(known, [name, kind, short])
    return list(sizes.values())


def replay(folder: Path, shape: str, out: Path, device: str = "auto", progress: Any = None) -> dict[str, Any]:
    """Write a copy of a run whose seconds are those of another shape; returns its summary."""
    run, samples = load_run(folder)
    rows = [row for s in samples for _, _, group in s["passes"] for row in group]
    if not rows:
        raise BadRequest(f"{folder} has no recorded passes; run it again with this version")
    slots = max(len(group) for s in samples for _, _, group in s["passes"])
    drawn = Sampling(run["config"]["temperature"], top_p=run["config"]["top_p"])
    player = Replay(shape, slots, max(sum(row[:3]) for row in rows) + IN_VAIN, device, sampling=drawn)
    place = torch.cuda.get_device_name() if player.device.type == "cuda" else "CPU"
    decisions = run["label"].split(",")[0]
    target = RunFolder(out)
    target.open(run | {"label": f"{decisions}, cost: {shape} on {place}", "finished": False})
    player.play(once_each([p for s in samples for p in s["passes"]]))
    for s in samples[: len(run["arms"])]:
        player.play(s["passes"])
    player.executed.clear()
    spent = dict.fromkeys(SECONDS, 0.0)
    replayed = []
    for i, s in enumerate(samples):
        if s["passes"]:  # the first of a batch carries the passes of all
            took = player.play(s["passes"])
            spent |= {"draft": took["draft"] / s["batch"], "score": took["target"] / s["batch"]}
        made = {"seconds": sum(spent.values()), "seconds_recorded": s["seconds"]}
        replayed.append(s | made | {"stats": s["stats"] | {"seconds": dict(spent)}})
        if progress:
            progress(i + 1, len(samples))
    target.samples_file.unlink(missing_ok=True)
    target.append(replayed)
    summary = summarise(json.loads(target.run_file.read_text()), replayed)
    counts = {name: sum(p[0] == name for p in player.executed) for name in player.runners}
    summary["replayed_passes"] = counts
    target.finish(summary)
    return summary
