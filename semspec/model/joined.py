"""What several slots of a model of transformers remember, as one cache: for a pass over all of them.

New keys and values go into each slot's own, and what attention sees is made of them for one layer at a time, so that no
second cache is held. Texts are aligned at their ends: shorter ones begin with padding, which the pass masks. Recurrent
states have no length; they are stacked, and each slot gets its own back after the pass.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

KEPT = ("keys", "values")  # stay with their slots


class _Keys:
    """Before a class of transformers' layers: keys and values of several of that class."""

    parts: list[Any]
    longest: int

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        made = [part.update(keys[i : i + 1], values[i : i + 1]) for i, part in enumerate(self.parts)]
        return _aligned([pair[0] for pair in made]), _aligned([pair[1] for pair in made])

    @property
    def keys(self) -> Tensor:  # of layers that share them
        return _aligned([part.keys for part in self.parts])

    @property
    def values(self) -> Tensor:
        return _aligned([part.values for part in self.parts])

    def get_seq_length(self) -> int:
        return self.longest

    def get_mask_sizes(self, queries: Any) -> tuple[int, int]:
        return self.longest + (queries if isinstance(queries, int) else len(queries)), 0


_KINDS: dict[type, type] = {}


def reads_by_the_longest(model: nn.Module) -> bool:
    """Whether a pass reads all of its texts as the longest of them has to be read, which no trial on short ones would
    tell: where rotary frequencies change with the length of a text, and in Llama 4, which counts padding as tokens."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", ())
        named = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(kind == "longrope" or "dynamic" in kind for kind in named):
            return True
        if getattr(module, "attn_temperature_tuning", False):
            return True
    return False


def joined(caches: Sequence[DynamicCache], longest: int) -> DynamicCache:
    """Of slots that have all read something, at most `longest` tokens."""
    cache = copy.copy(caches[0])
    cache.layers = [_joined(layers, longest) for layers in zip(*(c.layers for c in caches), strict=True)]
    return cache


def give_back(cache: DynamicCache, caches: Sequence[DynamicCache]) -> None:
    """The states that a pass has left."""
    for whole, *parts in zip(cache.layers, *(c.layers for c in caches), strict=True):
        found = {name: value for name, value in vars(whole).items() if name not in ("parts", "longest")}
        for i, part in enumerate(parts):
            vars(part).update({name: _part(value, i) for name, value in found.items()})


def padding_mask(lengths: Sequence[int], count: int, device: torch.device) -> Tensor:
    """[B, longest + count]: 0 where a shorter text has padding before `count` further tokens."""
    longest = max(lengths)
    return (torch.arange(longest + count) >= torch.tensor([longest - n for n in lengths])[:, None]).long().to(device)


def _joined(layers: tuple[Any, ...], longest: int) -> Any:
    kind = type(layers[0])
    if kind not in _KINDS:
        bases = (_Keys, kind) if issubclass(kind, DynamicLayer) else (kind,)
        _KINDS[kind] = type(f"Joined{kind.__name__}", bases, {})
    made: Any = object.__new__(_KINDS[kind])
    vars(made).update(
        {name: _stacked([vars(one)[name] for one in layers]) for name in vars(layers[0]) if name not in KEPT}
    )
    vars(made).update(parts=list(layers), longest=longest)
    return made


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _stacked([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    if any(value != values[0] for value in values):
        raise ValueError(f"layers of several texts differ in {values[0]!r}")
    return values[0]


def _part(value: Any, i: int) -> Any:
    if isinstance(value, dict):
        return {key: _part(one, i) for key, one in value.items()}
    return value[i : i + 1].clone() if isinstance(value, Tensor) else value


def _aligned(each: list[Tensor]) -> Tensor:
    longest = max(one.shape[-2] for one in each)
    made = each[0].new_zeros(len(each), each[0].shape[1], longest, each[0].shape[-1])
    for row, one in zip(made, each, strict=True):
        row[:, longest - one.shape[-2] :] = one[0]
    return made
