"""A model that has been located and checked, before any of its weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from semspec.errors import ModelError
from semspec.model.config import NotNative, Shape, context_of, dtype_of, read_config, stop_of, text_of
from semspec.model.dequantised import dequantised, parameters
from semspec.model.gguf_blocks import kept_bytes, main_kind
from semspec.model.gguf_header import Header
from semspec.model.graph_memory import rule_bytes
from semspec.model.hf_loading import refuse_without_truncation
from semspec.model.hf_runner import TransformersRunner
from semspec.model.memory_plan import MemoryPlan
from semspec.model.past import bytes_of_past
from semspec.model.placement import Precision, choose_context, choose_device
from semspec.model.quantisation import Quantisation
from semspec.model.reading import reading
from semspec.model.runner import ModelRunner
from semspec.model.weights import Checkpoint, default_weights, locate, shape_of


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    config: PreTrainedConfig  # of the text model, where there is more
    shape: Shape | None  # None: only transformers can run it

    @staticmethod
    def find(model: str | Path) -> Source:
        path = locate(model)
        config = read_config(path)
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"{path}: {config.model_type!r} is an encoder-decoder, whose text does not go on from a prompt; take a "
                "causal language model"
            )
        try:
            return Source(path, text_of(config), shape_of(path, config))
        except NotNative:
            if path.suffix == ".gguf":
                raise
            Quantisation.read(path)  # which refuses what cannot be dequantised
            refuse_without_truncation(config, str(path))
            return Source(path, text_of(config), None)

    @property
    def quantisation(self) -> Quantisation | None:
        """How the checkpoint's weights are stored; None: as plain floats, or in a GGUF file."""
        return Quantisation.read(self.path) if self.path.is_dir() else None

    @property
    def stored_as(self) -> str | None:
        """In a word, where weights are no plain floats."""
        if self.path.suffix == ".gguf":
            return main_kind(Header.read(self.path))
        return None if self.quantisation is None else self.quantisation.method

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        return context_of(self.config)

    @property
    def stop(self) -> frozenset[int]:
        return stop_of(self.config)

    def plan(
        self,
        device: str,
        dtype: str,
        slots: int,
        context: int | None,
        transposed_layers: int = 0,
        kv_dtype: str = "auto",
        rules: bool = False,
        pool: bool = False,
    ) -> MemoryPlan:
        """See MemoryPlan.of for `transposed_layers`. A target's plan has what `rules` need beside it. `pool`: slots are
        to share one on a CPU, too, which is slower; those of integer weights, which NumPy reads, cannot."""
        plan = self._plan(device, dtype, slots, context, transposed_layers, kv_dtype)
        plan = replace(plan, paged=plan.paged or (pool and self._reads_pages(device, dtype)))
        return replace(plan, graphs=plan.graphs + rule_bytes(self.vocab_size, plan.device, slots)) if rules else plan

    def _plan(
        self, device: str, dtype: str, slots: int, context: int | None, transposed_layers: int, kv_dtype: str
    ) -> MemoryPlan:
        where, precision = self._placed(device, dtype, kv_dtype)
        context, name = choose_context(context, self.context), self.path.name
        if self.shape is not None:
            stored = self._kept_bytes(self.shape) if precision.weights in ("stored", "blocks") else None
            return MemoryPlan.of(name, self.shape, where, precision, slots, context, transposed_layers, stored)
        with Checkpoint(self.path) as checkpoint:
            quantised, kind = self.quantisation is not None, precision.dtype
            count = parameters(dequantised(checkpoint, kind)) if quantised else checkpoint.parameters
        per_token, states = bytes_of_past(self.config, kind)
        return MemoryPlan(name, where, count * kind.itemsize, per_token, slots, context, states=states)

    def load(
        self,
        device: str,
        dtype: str,
        slots: int,
        context: int | None,
        vocab: int | None = None,
        head_ids: Sequence[int] | None = None,
        tokens: int | None = None,
        kv_dtype: str = "auto",
    ) -> ModelRunner | TransformersRunner:
        """See ModelRunner.load."""
        with reading(choose_device(device)):
            if self.shape is not None:
                return ModelRunner.load(self.path, device, dtype, slots, context, vocab, head_ids, tokens, kv_dtype)
            if head_ids is not None:
                raise ModelError(f"{self.path}: draft_vocab is for the model types semspec runs itself; leave it out")
            where, precision = self._placed(device, dtype)
            if precision.weights != "plain":
                raise ModelError(f"{self.path}: dtype {dtype} is for the model types semspec runs itself; give float32")
            kind = precision.dtype
            return TransformersRunner.load(self.path, where, kind, slots, choose_context(context, self.context), vocab)

    def precision(self, device: str, dtype: str) -> torch.dtype:
        """In which it computes."""
        return self._placed(device, dtype)[1].dtype

    def _reads_pages(self, device: str, dtype: str) -> bool:
        return self.shape is not None and self._placed(device, dtype)[1].weights == "plain"

    def _kept_bytes(self, shape: Shape) -> int:
        if self.path.suffix == ".gguf":
            return kept_bytes(Header.read(self.path), shape.tied)
        with Checkpoint(self.path) as checkpoint:
            return checkpoint.kept_bytes

    def _placed(self, device: str, dtype: str, kv_dtype: str = "auto") -> tuple[torch.device, Precision]:
        where = choose_device(device)
        quantisation, default = self.quantisation, "plain" if self.shape is None else default_weights(self.path, where)
        precision = Precision.choose(dtype, dtype_of(self.config), where, default)
        if self.shape is None and kv_dtype != "auto":
            raise ModelError(f"{self.path}: kv_dtype is for the model types semspec runs itself; leave it out")
        precision = precision.with_cache(kv_dtype, where)
        if quantisation is not None and quantisation.dequantises and precision.weights == "stored":
            precision = replace(precision, weights="plain")
        return where, precision
