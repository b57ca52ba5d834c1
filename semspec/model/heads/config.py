"""What a published EAGLE-3 head is: its tensors under one set of names, and its config in one form.

Trainers write two layouts (`midlayer.*`, `layers.0.*`) and two configs (flat, speculators), and configs are often
wrong. Where a tensor says how large something is, or whether it exists, it is believed, not the config.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from semspec.errors import ModelError
from semspec.model.config import Family, Shape
from semspec.model.quantised import QuantisedLinear
from semspec.model.weights import Checkpoint

LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
NESTED = ("eagle_config", "transformer_layer_config")  # where options may stand, after the top level
COPIED = [
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias",
    "mlp_bias",
]  # fmt: skip


class HeadTensors:
    """The tensors of a head's checkpoint under the names of the `layers.0` layout."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.folder = checkpoint, checkpoint.folder
        self._stored = {canonical(name): name for name in checkpoint.names}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __iter__(self) -> Any:
        return iter(self._stored)

    def size(self, name: str) -> tuple[int, ...]:
        if name not in self._stored:
            raise ModelError(f"{self.folder}: the checkpoint has no tensor {name}; it is no EAGLE-3 head")
        found = self.checkpoint.size(self._stored[name])
        if not found:
            raise ModelError(f"{self.folder}: {name} is a single number; the checkpoint is damaged")
        return found

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.checkpoint.read(self._stored.get(name, name), shape, device, dtype)

    def matrix(
        self, name: str, size: tuple[int, int], device: torch.device, dtype: torch.dtype
    ) -> QuantisedLinear | Tensor:
        stored = self._stored.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")
        return self.checkpoint.matrix(stored, size, device, dtype)

    def integers(self, name: str, count: int, device: torch.device) -> Tensor:
        return self.checkpoint.integers(self._stored[name], count, device)


def canonical(name: str) -> str:
    name = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
    first, dot, rest = name.partition(".")
    return LEGACY.get(first, first) + dot + rest


@dataclass(frozen=True, slots=True)
class HeadConfig:
    shape: Shape  # of the head itself; `vocab_size` is its own
    layers: tuple[int, ...]  # of the target, whose states it reads, before it is known what an id counts
    named: bool  # by the config; else these are the usual ones
    fused: bool  # these states go through `fc`; else it reads the state after the final norm, as it is
    norm_before_residual: bool  # the residual stream begins with the normalised state
    norm_output: bool  # what it feeds back is normalised

    @staticmethod
    def read(tensors: HeadTensors, target_depth: int, target_width: int) -> HeadConfig:
        config, folder = read_json(tensors.folder), tensors.folder
        _refuse_others(config, tensors)
        option = partial(option_of, config)
        speculators = "speculators_model_type" in config or "speculators_config" in config
        residual = option("norm_before_residual")
        fused = "fc.weight" in tensors and option("use_aux_hidden_state") is not False
        layers, named = layer_ids(option("eagle_aux_hidden_state_layer_ids"), target_depth), True
        if not fused:
            layers = (target_depth,)
        elif layers is None:
            layers, named = usual_layers(target_depth), False
        if fused:
            inputs = tensors.size("fc.weight")[-1]
            if inputs != len(layers) * target_width:
                ids = "the config names" if named else "the config names no layers, the usual ones are"
                raise ModelError(
                    f"{folder}: fc reads {inputs} numbers, {inputs / target_width:g} states of this target's width "
                    f"{target_width}; {ids} {', '.join(map(str, layers))}. The head is for another target, or its "
                    "eagle_aux_hidden_state_layer_ids are wrong"
                )
        for flag, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
            if option(flag) and name not in tensors:
                raise ModelError(f"{folder}: the config asks for {flag}, and there is no tensor {name}")
        return HeadConfig(
            head_shape(option, tensors),
            layers,
            named,
            fused,
            speculators if residual is None else bool(residual),
            bool(option("norm_output")),
        )


def option_of(config: dict[str, Any], key: str) -> Any:
    places = [config, *(config[place] for place in NESTED if isinstance(config.get(place), dict))]
    return next((place[key] for place in places if place.get(key) is not None), None)


def read_json(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{folder}: the config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder}: the config.json is no table of options")
    return config


def _refuse_others(config: dict[str, Any], tensors: HeadTensors) -> None:
    if "dflash_config" in config or config.get("speculators_model_type") == "dflash":
        raise ModelError(f"{tensors.folder}: a one-pass block head; use it with dflash:PATH")
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ModelError(f"{tensors.folder}: a draft head of type {kind!r}; supported: eagle3")
    if "mask_hidden" in tensors:
        raise ModelError(f"{tensors.folder}: the head drafts all tokens in one pass (P-EAGLE), which is not supported")
    width = tensors.size("norm.weight")[0]
    inputs = tensors.size("layers.0.self_attn.q_proj.weight")[-1]
    if inputs != 2 * width:
        raise ModelError(
            f"{tensors.folder}: its attention reads {inputs} numbers, where an EAGLE-3 head of width {width} reads "
            f"{2 * width}; heads of EAGLE-1 and 2 are not supported"
        )


def layer_ids(ids: Any, depth: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    whole = isinstance(ids, list) and ids and all(type(i) is int and 0 <= i <= depth for i in ids)
    if not whole:
        raise ModelError(
            f"the layer ids of its config are {ids!r:.80}; they should be a list of layers of the target, which has "
            f"{depth}: the head is for another target"
        )
    return tuple(ids)


def usual_layers(depth: int) -> tuple[int, ...]:
    return (min(2, depth), depth // 2, max(depth - 3, 0))


def head_shape(option: Any, tensors: HeadTensors) -> Shape:
    names = [re.fullmatch(r"layers\.(\d+)\.post_attention_layernorm\.weight", name) for name in tensors]
    depth = 1 + max((int(name[1]) for name in names if name), default=0)
    copied = {key: value for key in COPIED if (value := option(key)) is not None}
    copied |= {"attention_bias": "layers.0.self_attn.q_proj.bias" in tensors, "num_hidden_layers": depth}
    copied |= {"vocab_size": tensors.size("lm_head.weight")[0] if "lm_head.weight" in tensors else 1}
    try:
        shape = Shape.of(LlamaConfig.from_dict(copied), str(tensors.folder))
    except ModelError:
        raise
    except Exception as error:  # a config may hold anything
        raise ModelError(f"{tensors.folder}: the config.json is damaged: {error}") from error
    family = Family(qk_norm="layers.0.self_attn.q_norm.weight" in tensors)
    return replace(shape, family=family, out_bias="layers.0.self_attn.o_proj.bias" in tensors)
