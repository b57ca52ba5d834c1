"""A runner for every other causal language model that transformers knows: slower, with the same contract.

Each slot has a cache of its own, and each sequence a pass of its own. Models with a recurrent state cannot undo a
rejected draft, so they are refused, by name, before their weights are read.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from semspec.errors import ModelError
from semspec.model.attention_metadata import AttentionMetadata, SequenceChunk
from semspec.model.base_runner import BaseRunner
from semspec.model.cache import Slots
from semspec.model.config import AttentionSpec
from semspec.model.decode import decode_by_score
from semspec.model.placement import on_its_device
from semspec.types import Decode, DecodeOutput, Score, ScoreOutput

PROBE = [1, 2, 3, 4, 5, 6]


def refuse_without_truncation(config: PreTrainedConfig, name: str) -> None:
    """Refuse models that transformers does not know or whose past cannot be truncated, from their config alone."""
    try:
        model = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as error:
        raise ModelError(
            f"{name}: {config.model_type!r} is no causal language model that transformers knows"
        ) from error
    why = None
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        why = "a running state"
    else:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
        odd = sorted(kind.__name__ for kind in kinds if kind not in (DynamicLayer, DynamicSlidingWindowLayer))
        if odd:
            why = f"a {odd[0]}"
    if why:
        raise ModelError(
            f"{name}: {config.model_type!r} remembers the past as {why}, which cannot be truncated when a draft is "
            "rejected; take a model whose layers all keep keys and values"
        )


class TransformersRunner(BaseRunner):
    """See types.Runner for the contract."""

    def __init__(self, model: PreTrainedModel, slots: int, capacity: int, vocab: int | None = None) -> None:
        config = model.config.get_text_config(decoder=True)
        self.model = model.eval()
        self.vocab_size, self.num_layers, self.max_seq_len = (
            vocab or config.vocab_size,
            config.num_hidden_layers,
            capacity,
        )
        self._slots = Slots(slots, capacity)
        self._caches = [DynamicCache() for _ in range(slots)]
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._probe()
        self.trees = self._takes_trees()

    @staticmethod
    def load(
        path: Path, device: torch.device, dtype: torch.dtype, slots: int, capacity: int, vocab: int | None = None
    ) -> TransformersRunner:
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
        except Exception as error:  # transformers raises many kinds here
            raise ModelError(f"{path}: transformers cannot load it: {error}") from error
        if found["missing_keys"]:  # transformers initialises at random what is missing
            missing = sorted(found["missing_keys"])
            raise ModelError(f"{path}: the checkpoint lacks {len(missing)} tensors of its config, such as {missing[0]}")
        return TransformersRunner(model.to(device), slots, capacity, vocab)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def free(self) -> int:
        return self._slots.free

    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        slot = self._slots.acquire()
        self._caches[slot] = DynamicCache()
        return slot

    def release(self, slot: int) -> None:
        self._slots.release(slot)
        self._caches[slot] = DynamicCache()

    def length(self, slot: int) -> int:
        return self._slots.lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        self._slots.truncate(slot, length)
        for layer in self._caches[slot].layers:
            if layer.keys is not None and layer.keys.numel():
                layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self._slots.compact(slot, start, rows)
        at = torch.tensor([*range(start), *(start + row for row in rows)], device=self.device)
        for layer in self._caches[slot].layers:
            if layer.keys is not None and layer.keys.numel():
                layer.keys, layer.values = layer.keys[..., at, :], layer.values[..., at, :]

    def copy(self, source: int, target: int, length: int) -> None:
        self._caches[target] = copy.deepcopy(self._caches[source])
        self._slots.lengths[target] = self._slots.lengths[source]
        self.truncate(target, length)

    @on_its_device
    @torch.inference_mode()
    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self._slots.extend([(r.slot, len(r.tokens)) for r in requests])
        return [self._score(r) for r in requests]

    def _score(self, r: Score) -> ScoreOutput:
        count = len(r.tokens)
        options: dict[str, Any] = {"logits_to_keep": max(r.logits_to_keep, 1)} if self._keeps_logits else {}
        if r.parents:
            chunk = SequenceChunk(r.slot, self.length(r.slot) - count, count, r.parents)
            ((_, mask),) = AttentionMetadata([chunk], self.device, {}).masks(AttentionSpec(None, None))
            assert mask is not None
            hidden = torch.zeros(mask.shape, device=self.device, dtype=self.model.dtype)
            options["attention_mask"] = hidden.masked_fill(~mask, torch.finfo(hidden.dtype).min)[None, None]
            options["position_ids"] = torch.tensor([chunk.positions()[-count:]], device=self.device)
        out = self.model(
            torch.tensor([r.tokens], device=self.device),
            past_key_values=self._caches[r.slot],
            use_cache=True,
            output_hidden_states=bool(r.layers),
            **options,
        )
        logits = out.logits[0, out.logits.shape[1] - r.logits_to_keep :, : self.vocab_size]
        return ScoreOutput(logits, {layer: out.hidden_states[layer][0, count - r.kept_states :] for layer in r.layers})

    @on_its_device
    @torch.inference_mode()
    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        return decode_by_score(self, requests)

    def _probe(self) -> None:
        """Configs do not tell everything: truncate a draft and see whether the model forgets it."""
        slot, tokens = self.acquire(), [t % self.vocab_size for t in PROBE]
        whole = self.score([Score(self, slot, tokens, len(tokens))])[0].logits
        self.truncate(slot, 2)
        try:
            self.score([Score(self, slot, tokens[:1] * 3, 3)])  # a draft that is rejected
            self.truncate(slot, 2)
            again = self.score([Score(self, slot, tokens[2:], len(tokens) - 2)])[0].logits
        except Exception as error:
            raise ModelError(f"{self._name}: its cache cannot be truncated: {error}") from error
        finally:
            self.release(slot)
        if not torch.allclose(whole[2:].float(), again.float(), atol=0.05 * float(whole.float().std()), rtol=0.05):
            raise ModelError(
                f"{self._name}: after its cache was truncated it gives other logits than before; a rejected draft "
                "cannot be undone"
            )

    def _takes_trees(self) -> bool:
        """Tried out: not every model takes masks and positions of one's own."""
        if any(isinstance(layer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=self.model.config).layers):
            return False  # one mask serves all layers
        slot, tokens = self.acquire(), [t % self.vocab_size for t in PROBE]
        try:
            whole = self.score([Score(self, slot, tokens, len(tokens))])[0].logits
            self.truncate(slot, 2)
            # Two tokens of a branch that goes wrong, then the text as it was.
            branches, parents = [*tokens[3:5], *tokens[2:]], (-1, 0, -1, 2, 3, 4)
            again = self.score([Score(self, slot, branches, 4, parents=parents)])[0].logits
        except Exception:
            return False
        finally:
            self.release(slot)
        return torch.allclose(whole[2:].float(), again.float(), atol=0.05 * float(whole.float().std()), rtol=0.05)

    @property
    def _name(self) -> str:
        return f"{self.model.config.model_type} ({type(self.model).__name__})"
