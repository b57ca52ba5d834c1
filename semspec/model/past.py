"""What a slot of a model of transformers remembers of its text, which can be truncated to any length.

Keys and values of a position are dropped with it. A recurrent state is that of one length only, and no draft can be
subtracted from it. So some former states are kept, as checkpoints: a slot that is truncated goes back to the last of
them that is no longer than it, and the tokens since then are read once more, before what is fed next.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from semspec.model.cache import kv_bytes_per_token

CHECKPOINTS = 4  # of a slot, each with all states
SPACING = 16  # tokens between two of them, at least; as many may be read once more after every rejected draft
FREE = (0.0, math.inf)
INDEXED = getattr(cache_utils, "DynamicIndexedLayer", None)  # has other keys too, by which it chooses what to read
PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, INDEXED)  # have what belongs to one position each, and nothing else
WINDOWED_STATE = getattr(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", None)


def cache_name(model: type[PreTrainedModel] | PreTrainedModel) -> str | None:
    """The argument of its passes that a cache is given as."""
    arguments = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in arguments), None)


def odd_layers(config: PreTrainedConfig) -> list[str]:
    """Kinds of layers whose past is neither keys and values nor a recurrent state."""
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return sorted(kind.__name__ for kind in kinds if kind not in PLAIN and not _recurrent(kind))


def _recurrent(kind: type) -> bool:
    base = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
    return base is not None and issubclass(kind, base)


def reads_alone(model: PreTrainedModel) -> bool:
    """Whether a state goes on by one token as by several. Transformers forgets the limits of a Mamba-2 layer's time
    step where it reads a single one: the target's own text would not be what it says of a draft."""
    limits = (tuple(getattr(module, "time_step_limit", None) or FREE) for module in model.modules())
    return all(limit == FREE for limit in limits)


def bytes_of_past(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[int, int]:
    """(of a token's keys and values, of a slot's states), by a pass of the model without its weights: how wide a state
    is, every family writes in words of its own. Where that fails, by the heads of the config."""
    try:
        with torch.device("meta"), torch.inference_mode():
            # Other products of experts want numbers, or sizes that go with float32 on no device.
            made = {"dtype": dtype, "experts_implementation": "batched_mm"}
            model = AutoModelForCausalLM.from_config(config, **made).eval()
            past = Past(config)
            model(torch.zeros(1, 1, dtype=torch.long), **{cache_name(model) or "": past.cache}, use_cache=True)
    except Exception:  # transformers raises many kinds here
        queries = getattr(config, "num_attention_heads", None) or 1
        heads = getattr(config, "num_key_value_heads", None) or queries
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // queries
        return kv_bytes_per_token(config.num_hidden_layers, heads, head_dim, dtype), 0
    kept = [getattr(layer, name, None) for layer in past.cache.layers for name in ("keys", "values", "indexer_keys")]
    states = [tensor for state in past.states() for value in state.values() for tensor in _tensors(value)]
    # A checkpoint is made before another one goes.
    return sum(t.nbytes for t in kept if t is not None), sum(t.nbytes for t in states) * (CHECKPOINTS + 2)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in (value.values() if isinstance(value, dict) else [value]) if isinstance(t, Tensor)]


class Past:
    def __init__(self, config: PreTrainedConfig, alone: bool = True) -> None:
        """`alone`: whether one token may be read by itself, see `reads_alone`."""
        self.cache, self._alone = DynamicCache(config=config), alone
        layers = self.cache.layers
        for i, layer in enumerate(layers):  # windows keep everything: what has left one may be wanted again
            if type(layer) is DynamicSlidingWindowLayer:
                layers[i] = DynamicLayer()
            elif type(layer) is WINDOWED_STATE:
                layers[i] = cache_utils.LinearAttentionAndFullAttentionLayer(layer.number_of_states)
        self._recurrent = [layer for layer in layers if _recurrent(type(layer))]
        if not self._recurrent and not any(type(layer) is INDEXED for layer in layers):
            self.cache = DynamicCache()
        self._tokens = list[int]()  # of the slot, if there are states
        self._read = 0  # how many of these the states are of
        self._reading = False  # also after a pass that failed, which may have changed some of the states
        self._checkpoints = [(0, self.states())]

    @property
    def recurrent(self) -> bool:
        return bool(self._recurrent)

    @property
    def again(self) -> list[int]:
        """What has to be read before anything else."""
        return self._tokens[self._read :]

    @property
    def joinable(self) -> bool:
        """Whether it may be read with others: it has read something, and nothing has gone wrong or is read twice."""
        return self._alone and not self._reading and self.cache_length > 0

    @property
    def cache_length(self) -> int:
        """Tokens that the cache is of."""
        return self._read if self._recurrent else self.cache.get_seq_length()

    @contextmanager
    def reading(self, tokens: Sequence[int]) -> Iterator[None]:
        """A pass over `again` and these."""
        if self._recurrent:
            if self._reading:
                self.truncate(len(self._tokens))
            if self._read == len(self._tokens) >= self._checkpoints[-1][0] + SPACING:
                self._checkpoints.append((self._read, self.states()))
                self._thin()
            if not self._alone and self._read and len(self.again) + len(tokens) == 1:
                self.keep(slice(self._go_back(self._read - 1)))
            self._reading = True
        yield
        if self._recurrent:
            self._tokens += tokens
            self._read, self._reading = len(self._tokens), False

    def truncate(self, length: int) -> None:
        if self._recurrent:
            del self._tokens[length:]
            if self._read <= length and not self._reading:
                return
            while self._checkpoints[-1][0] > length:
                self._checkpoints.pop()
            length = self._go_back(length)
        self.keep(slice(length))

    def _go_back(self, most: int) -> int:
        """The states are those of the last checkpoint that is no longer than this; returns how long it is."""
        length, states = next(made for made in reversed(self._checkpoints) if made[0] <= most)
        for layer, state in zip(self._recurrent, copy.deepcopy(states), strict=True):
            vars(layer).update(state)
        self._read, self._reading = length, False
        return length

    def keep(self, positions: slice | torch.Tensor) -> None:
        for layer in self.cache.layers:
            keys = getattr(layer, "keys", None)
            if keys is not None and keys.numel():
                layer.keys, layer.values = keys[..., positions, :], layer.values[..., positions, :]
            index = getattr(layer, "indexer_keys", None)
            if index is not None and index.numel():
                layer.indexer_keys = index[:, positions]
            places = getattr(layer, "indexer_position_ids", None)
            if places is not None:
                layer.indexer_position_ids = places[..., positions]

    def states(self) -> list[dict[str, Any]]:
        return [
            copy.deepcopy({name: value for name, value in vars(layer).items() if name not in ("keys", "values")})
            for layer in self._recurrent
        ]

    def _thin(self) -> None:
        """Of too many checkpoints the one goes without which least more is read, as a share of how far back it is."""
        lengths = [length for length, _ in self._checkpoints]
        if len(lengths) > 1 + CHECKPOINTS:
            gaps = [(c - a) / (lengths[-1] - a) for a, c in zip(lengths, lengths[2:], strict=False)]
            del self._checkpoints[1 + gaps.index(min(gaps))]
