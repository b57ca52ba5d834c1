"""The table of bench/gpu.py: how a time is taken, what it is held against, and models whose weights are noise."""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from bench.gpu_arms import Arm, fast
from bench.gpu_quantised import BARS as QUANTISED_BARS
from bench.gpu_rules import BARS as RULE_BARS
from semspec.bench.shapes import SHAPES, RandomWeights
from semspec.loop import cost_profile as costs
from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.placement import Weights, choose_device
from semspec.model.transformer import Transformer

BARS = {  # milliseconds that must be reached on an H200 with 32B/1.5B
    "target pass, 1 token": 18.3, "target pass, 9 tokens": 18.3, "target pass, 17 tokens": 18.3,
    "draft token inside a roll": 1.60, "one K=8 step": 32.0, "batch 8, one K=8 step": 40.0,
    "target pass, 16 tokens, long context": 24.0, "8B pass, 16 tokens, longest context": 10.0,
    "host time of a step": 1.0, "start to first token": 30000.0, "30B-A3B check of 16 tokens, dense": 12.5,
    "target pass, tree of 60": 22.0, "head token": 0.55, "one step, tree of 60, paths of 7": 27.5,
}  # fmt: skip


class Table:
    """Rows of figures, and the models that they are about."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.device = asked, choose_device(asked.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.rows: list[dict[str, Any]] = []
        self.bandwidth = costs.bandwidth(self.device)
        self.models: dict[str, Transformer] = {}
        self.arms: dict[str, Arm] = {}  # winners, by model
        self.precisions: dict[str, Weights] = {}  # how matrices are stored, by model
        self.vocab: dict[str, int] = {}  # another size of the head, by model

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ms(self, work: Callable[[], Any], repeats: int | None = None, warm: int = 3) -> float:
        """Median milliseconds from asking to having, host included."""
        for _ in range(warm):
            work()
        times = []
        for _ in range(repeats or self.asked.repeats):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append((time.perf_counter() - began) * 1000)
        return statistics.median(times)

    def add(self, what: str, ms: float, read: float = 0.0, **more: Any) -> None:
        limit = read / self.bandwidth * 1000
        known = BARS | QUANTISED_BARS | RULE_BARS
        bar = known.get(what) if self.asked.shape in ("32B/1.5B", "70B/8B") and self.device.type == "cuda" else None
        self.rows.append({"what": what, "ms": ms, "limit_ms": limit, "bar_ms": bar, **more})
        self.show(self.rows[-1])

    @staticmethod
    def show(row: dict[str, Any]) -> None:
        limit, bar = row["limit_ms"], row["bar_ms"]
        ratio = f"{row['ms'] / limit:7.2f}x" if limit else " " * 8
        told = f"{bar:9.2f} {'reached' if row['ms'] <= bar else 'MISSED'}" if bar else ""
        print(f"{row['what']:40} {row['ms']:9.3f} {limit:9.3f} {ratio} {told}", flush=True)

    # -- models

    def config(self, which: str) -> PreTrainedConfig:
        others = {"8B": self.asked.long_shape, "mixture": self.asked.mixture_shape}
        config = SHAPES[others.get(which, self.asked.shape)][which == "draft"]
        if which not in self.vocab:
            return config
        smaller = copy.deepcopy(config)
        smaller.vocab_size = self.vocab[which]
        return smaller

    def runner(self, which: str, slots: int, capacity: int) -> ModelRunner:
        """A model with slots that are full of noise; every slot is taken."""
        if which not in self.models:
            shape, weights = Shape.of(self.config(which)), self.precisions.get(which, "plain")
            self.models[which] = Transformer(shape, RandomWeights(), self.device, self.dtype, weights)
        made = ModelRunner(self.models[which], slots, capacity, graphs=False)  # the flags choose how weights lie
        made.use(None if self.asked.plain else fast(made, self.arms.get(which, Arm(self.asked.choices))))
        for layer in range(made.num_layers):
            cached = made.cache.layer(layer)
            cached.keys.normal_()
            cached.values.normal_()
        for _ in range(slots):
            made.acquire()
        return made

    def drop(self, *which: str) -> None:
        for name in which:
            self.models.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def weights(self, which: str) -> float:
        """Bytes of weights that a pass reads; of an embedding that is not the head it reads a few rows."""
        shape = Shape.of(self.config(which))
        parameters = shape.parameters - (0 if shape.tied else shape.vocab_size * shape.width)
        return parameters * {"fp8": 1.0, "int8": 1.0, "int4": 0.5}.get(
            self.precisions.get(which, ""), self.dtype.itemsize
        )

    def kv(self, which: str, tokens: int) -> float:
        shape = Shape.of(self.config(which))
        return 2 * shape.num_layers * shape.kv_heads * shape.head_dim * tokens * self.dtype.itemsize
