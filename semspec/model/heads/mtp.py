"""The layer for multi-token prediction (MTP) that many checkpoints have beside their model: a drafter of its own.

It reads pairs as an EAGLE head does: the target's last state at a token, and the token after it. Both are normed,
joined and projected, and go through a decoder layer of the model's own kind. Embedding and output are the target's.
To draft several tokens it reads its own output in place of a state. Of several such layers the first is used.
Models published with one run through transformers here, so that its modules compute the layer, too.
Source: DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from semspec.errors import ModelError
from semspec.model.hf_runner import TransformersRunner
from semspec.model.past import Past
from semspec.model.quantised import QuantisedLinear
from semspec.model.weights import Checkpoint, locate
from semspec.model.wrapper import unwrap
from semspec.types import Runner

STACKED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}  # of experts, as checkpoints have them


@dataclass(frozen=True, slots=True)
class MtpConfig:
    layers: tuple[int, ...]  # of the target: the last, after the final norm
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Widths:
    """As `Shape` has them; keys and values are in caches of transformers."""

    width: int
    num_layers: int = 1
    kv_heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a checkpoint has the parts."""

    embedding_norm: str
    state_norm: str
    joined: str
    block: str
    final_norm: str
    feeds_normed: bool  # whether the final norm is before what it reads next

    @staticmethod
    def of(checkpoint: Checkpoint, depth: int) -> Layout | None:
        """Qwen3-Next and Qwen3.5 have `mtp.*`; DeepSeek, GLM and others one more layer behind the last."""
        if "mtp.fc" in checkpoint.modules:  # in floats or in codes
            return Layout(
                "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.layers.0", "mtp.norm", True
            )
        pattern = re.compile(rf"(.*\blayers\.{depth})\.eh_proj")
        found = next((match for name in checkpoint.modules if (match := pattern.fullmatch(name))), None)
        if found is None:
            return None
        at = found[1]
        return Layout(f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj", at, f"{at}.shared_head.norm", False)


class MtpHead:
    """The contract of a head for `heads.runner`, but for the cache, which is one of transformers'."""

    def __init__(self, checkpoint: Checkpoint, runner: TransformersRunner) -> None:
        model, decoder = runner.model, runner.model.get_decoder()
        self.config = MtpConfig((runner.num_layers,))
        self.device, self.dtype = runner.device, model.dtype
        self.cache_config = config = config_of_layer(model.config.get_text_config(decoder=True))
        width = config.hidden_size
        self.shape = Widths(width)
        self.embedding = self.shared_embedding = model.get_input_embeddings().weight
        layout = Layout.of(checkpoint, depth := runner.num_layers)
        if layout is None:
            raise ModelError(
                f"{checkpoint.folder}: the checkpoint has no layer for multi-token prediction (mtp.fc or "
                f"layers.{depth}.eh_proj); take another drafter, or name a folder that has it: mtp:PATH"
            )
        self.layout = layout
        self._model, self._rotary = model, getattr(decoder, "rotary_emb", None)
        self._sdpa = config._attn_implementation == "sdpa"
        kind = type(decoder.layers[-1])
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            norm = type(decoder.norm)
            with self.device:
                self.embedding_norm, self.state_norm, self.final_norm = (
                    norm(width, eps=config.rms_norm_eps) for _ in range(3)
                )
                self.joined = nn.Linear(2 * width, width, bias=False)
                self.block = kind(config, 0).eval()
        except Exception as error:  # another class of layers may want anything
            raise ModelError(
                f"{checkpoint.folder}: {kind.__name__} cannot be made for its MTP layer: {error}"
            ) from error
        finally:
            torch.set_default_dtype(before)
        for module, name in (
            (self.embedding_norm, layout.embedding_norm), (self.state_norm, layout.state_norm),
            (self.joined, layout.joined), (self.block, layout.block), (self.final_norm, layout.final_norm),
        ):  # fmt: skip
            self._load(module, name, checkpoint)
        try:
            self._try()
        except Exception as error:  # and may read its past in any way
            raise ModelError(
                f"{checkpoint.folder}: {kind.__name__} cannot be run by itself as its MTP layer: {error}; take another "
                "drafter"
            ) from error

    @torch.inference_mode()
    def _try(self) -> None:
        """Two pairs, and one after them."""
        cache, tokens = Past(self.cache_config).cache, torch.zeros(3, dtype=torch.long, device=self.device)
        states = torch.zeros(3, self.shape.width, device=self.device, dtype=self.dtype)
        self.forward(tokens[:2], states[:2], 0, cache, 1)
        self.forward(tokens[2:], states[2:], 2, cache, 1)

    @staticmethod
    def load(path: str | Path, target: Runner) -> MtpHead:
        """`path`: a folder or hub id with the layer; "": the target's own checkpoint."""
        inner = unwrap(target)
        if not isinstance(inner, TransformersRunner):
            raise ModelError(
                "no model of this target's family is published with a layer for multi-token prediction; take another "
                "drafter, such as eagle:PATH"
            )
        with Checkpoint(locate(path or inner.model.config.name_or_path)) as checkpoint:
            return MtpHead(checkpoint, inner)

    def combine(self, states: list[Tensor]) -> Tensor:
        return states[0].to(self.dtype)

    def forward(
        self, tokens: Tensor, states: Tensor, start: int, cache: DynamicCache, keep: int
    ) -> tuple[Tensor, Tensor]:
        """Pairs of tokens [N] and states [N, width], from the pair `start` on -> for the last `keep` of them logits
        [keep, V] and the states to go on with [keep, width]."""
        embedded = self._model.get_input_embeddings()(tokens)
        x = self.joined(torch.cat([self.embedding_norm(embedded), self.state_norm(states)], -1))[None]
        count = len(tokens)
        at = torch.arange(start, start + count, device=self.device)
        mask = None
        if count > 1 and (start or not self._sdpa):
            seen = torch.arange(start + count, device=self.device) <= at[:, None]
            mask = torch.zeros(seen.shape, device=self.device, dtype=self.dtype)
            mask = mask.masked_fill(~seen, torch.finfo(self.dtype).min)[None, None]
        options: dict[str, Any] = {"attention_mask": mask, "position_ids": at[None], "past_key_values": cache}
        if self._rotary is not None:
            options["position_embeddings"] = self._rotary(x, at[None])
        x = self.block(x, **options)
        x = (x[0] if isinstance(x, tuple) else x)[0, count - keep :]
        normed = self.final_norm(x)
        return self._model.get_output_embeddings()(normed), normed if self.layout.feeds_normed else x

    def _load(self, module: nn.Module, name: str, checkpoint: Checkpoint) -> None:
        own, precise = {}, set(self._model._keep_in_fp32_modules_strict or ())
        for key, value in module.state_dict(keep_vars=True).items():
            if precise.intersection(key.split(".")):  # as in the model: such numbers choose the experts
                value.data = value.data.float()
            own[key] = self._read(f"{name}.{key}", tuple(value.shape), checkpoint, value.dtype)
        module.load_state_dict(own)

    def _read(self, name: str, size: tuple[int, ...], checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
        where, _, part = name.rpartition(".")
        if part in STACKED and name not in checkpoint.names and len(size) == 3:
            parts, (outputs, inputs) = STACKED[part], size[1:]
            each = outputs // len(parts), inputs
            experts = [
                torch.cat([self._read(f"{where}.{i}.{one}.weight", each, checkpoint, dtype) for one in parts])
                for i in range(size[0])
            ]
            return torch.stack(experts)
        if part == "weight" and len(size) == 2:
            made = checkpoint.matrix(where, (size[0], size[1]), self.device, dtype)
            return made.dequantised(dtype) if isinstance(made, QuantisedLinear) else made
        return checkpoint.read(name, size, self.device, dtype)


def config_of_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """A model's, of which only a layer with attention is left, and with experts where the model has any."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = config.mlp_layer_types[-1:]
    for name in ("first_k_dense_replace", "mlp_only_layers"):
        if hasattr(config, name):
            setattr(config, name, 0 if name.startswith("first") else [])
    return config
