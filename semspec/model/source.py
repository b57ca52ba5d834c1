"""A model that has been found and looked at, before any of its weights is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from semspec.errors import ModelError
from semspec.model import cpu_gemm as few
from semspec.model.config import NotNative, Shape, context_of, dtype_of, read_config, stop_of
from semspec.model.graph_memory import graph_bytes
from semspec.model.hf_runner import TransformersRunner, refuse_without_truncation
from semspec.model.memory_plan import MemoryPlan
from semspec.model.placement import choose_context, choose_device, choose_dtype
from semspec.model.runner import ModelRunner
from semspec.model.weights import locate, tensor_shapes


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    config: PreTrainedConfig  # of the text model, where there is more
    shape: Shape | None  # None: only transformers can run it

    @staticmethod
    def find(model: str | Path) -> Source:
        path = locate(model)
        config = read_config(path)
        try:
            return Source(path, config, Shape.of(config, str(path)))
        except NotNative:
            if path.suffix == ".gguf":
                raise
            refuse_without_truncation(config, str(path))
            return Source(path, config.get_text_config(decoder=True), None)

    @property
    def vocab(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        return context_of(self.config)

    @property
    def stop(self) -> frozenset[int]:
        return stop_of(self.config)

    def plan(self, device: str, dtype: str, slots: int, context: int | None) -> MemoryPlan:
        place = choose_device(device)
        kind = choose_dtype(dtype, dtype_of(self.config), place)
        wide = 4 if kind == torch.int8 else kind.itemsize
        if self.shape is None:
            parameters = sum(math.prod(shape) for shape in tensor_shapes(self.path))
            weights = read = parameters * wide
        else:
            table = self.shape.vocab * self.shape.width
            weights = self.shape.parameters * kind.itemsize
            # Of an embedding that is not the head as well, a pass reads a few rows.
            read = weights - (0 if self.shape.tied else table * kind.itemsize)
            if few.GemmPaths.of(
                self.shape.parameters, place, kind
            ).packed:  # all but an embedding that is no head, again
                weights += read
            if kind == torch.int8:  # the embedding is looked up in float32, and multiplied by in int8
                weights += table * wide - (0 if self.shape.tied else table)
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        head = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        per_token = 2 * self.config.num_hidden_layers * heads * head * (8 if kind == torch.int8 else wide)
        fixed = self.shape is not None and self.shape.mixture is None  # experts are read as they are chosen
        context = choose_context(context, self.context)
        graphs = graph_bytes(self.shape, place, wide, slots, context)
        return MemoryPlan(self.path.name, place, weights, per_token, slots, context, read if fixed else None, graphs)

    def load(self, device: str, dtype: str, slots: int, context: int | None) -> ModelRunner | TransformersRunner:
        if self.shape is not None:
            return ModelRunner.load(self.path, device, dtype, slots, context)
        place = choose_device(device)
        kind = choose_dtype(dtype, dtype_of(self.config), place)
        if kind == torch.int8:
            raise ModelError(f"{self.path}: dtype int8 is for the model types semspec runs itself; give float32")
        return TransformersRunner.load(self.path, place, kind, slots, choose_context(context, self.context))
