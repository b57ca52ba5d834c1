"""A runner for every other causal language model that transformers knows: slower, with the same contract.

Each slot has a cache of its own, and each sequence a pass of its own. Models with a recurrent state go back to a former
one after a rejected draft (`past.py`). What cannot be undone at all is refused, by name, before weights are read.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from semspec.errors import ModelError
from semspec.model.attention_metadata import AttentionMetadata, SequenceChunk
from semspec.model.base_runner import BaseRunner
from semspec.model.cache import Slots
from semspec.model.config import AttentionSpec, read_config
from semspec.model.decode import decode_by_score
from semspec.model.dequantised import dequantised
from semspec.model.past import SPACING, Past, cache_name, odd_layers, reads_alone
from semspec.model.placement import on_its_device
from semspec.model.quantisation import Quantisation
from semspec.model.weights import Checkpoint
from semspec.types import Decode, DecodeOutput, Score, ScoreOutput

PROBE = [1, 2, 3, 4, 5, 6, 7]
END = 8  # tokens of a prompt that are read after a checkpoint: others may have all but these in common with it
ROUNDING = 0.05  # of the spread of a row of logits


def class_of(config: PreTrainedConfig, name: str) -> type[PreTrainedModel]:
    try:
        return AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as error:
        raise ModelError(
            f"{name}: {config.model_type!r} is no causal language model that transformers knows"
        ) from error


def refuse_without_truncation(config: PreTrainedConfig, name: str) -> None:
    """Refuse models that transformers does not know or whose past cannot be undone, from their config alone."""
    why = None
    if cache_name(class_of(config, name)) is None:
        why = "a running state"
    elif odd := odd_layers(config):
        why = f"a {odd[0]}"
    if why:
        raise ModelError(
            f"{name}: {config.model_type!r} remembers the past as {why}, which cannot be truncated when a draft is "
            "rejected; take a model whose layers keep keys and values, or a recurrent state in a cache of transformers"
        )


class TransformersRunner(BaseRunner):
    """See types.Runner for the contract."""

    def __init__(self, model: PreTrainedModel, slots: int, capacity: int, vocab: int | None = None) -> None:
        self._config = config = model.config.get_text_config(decoder=True)
        self.model = model.eval()
        self.vocab_size, self.num_layers, self.max_seq_len = (
            vocab or config.vocab_size,
            config.num_hidden_layers,
            capacity,
        )
        self._slots = Slots(slots, capacity)
        self._alone = reads_alone(model)
        self._pasts = [self._past() for _ in range(slots)]
        self._cache_name = cache_name(model) or ""
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._probe()
        self.trees = self._takes_trees()

    @staticmethod
    def load(
        path: Path, device: torch.device, dtype: torch.dtype, slots: int, capacity: int, vocab: int | None = None
    ) -> TransformersRunner:
        try:
            if Quantisation.read(path) is None:
                made = AutoModelForCausalLM.from_pretrained(
                    path, dtype=dtype, use_safetensors=True, output_loading_info=True
                )
            else:
                made = _dequantised(path, dtype)
            model, found = made
        except ModelError:
            raise
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

    def _past(self) -> Past:
        return Past(self._config, self._alone)

    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        slot = self._slots.acquire()
        self._pasts[slot] = self._past()
        return slot

    def release(self, slot: int) -> None:
        self._slots.release(slot)
        self._pasts[slot] = self._past()

    def length(self, slot: int) -> int:
        return self._slots.lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        self._slots.truncate(slot, length)
        self._pasts[slot].truncate(length)

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self._slots.compact(slot, start, rows)
        at = torch.tensor([*range(start), *(start + row for row in rows)], device=self.device)
        self._pasts[slot].keep(at)  # of trees, which models with states do not take

    def copy(self, source: int, target: int, length: int) -> None:
        self._pasts[target] = copy.deepcopy(self._pasts[source])
        self._slots.lengths[target] = self._slots.lengths[source]
        self.truncate(target, length)

    @on_its_device
    @torch.inference_mode()
    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self._slots.extend([(r.slot, len(r.tokens)) for r in requests])
        return [self._score(r) for r in requests]

    def _score(self, r: Score) -> ScoreOutput:
        past, tokens, options = self._pasts[r.slot], r.tokens, dict[str, Any]()
        again = len(past.again)
        if again > SPACING:
            self._read(past, [], 0)  # so that the next rejected draft need not go back as far
        parts = list[Any]()
        if past.recurrent and 0 < r.logits_to_keep <= END and len(tokens) > SPACING:
            parts.append(self._read(past, tokens[:-END], 0, output_hidden_states=bool(r.layers)))
            tokens = tokens[-END:]
        if r.parents:
            count = len(r.tokens)
            chunk = SequenceChunk(r.slot, self.length(r.slot) - count, count, r.parents)
            ((_, mask),) = AttentionMetadata([chunk], self.device, {}).masks(AttentionSpec(None, None))
            assert mask is not None
            hidden = torch.zeros(mask.shape, device=self.device, dtype=self.model.dtype)
            options["attention_mask"] = hidden.masked_fill(~mask, torch.finfo(hidden.dtype).min)[None, None]
            options["position_ids"] = torch.tensor([chunk.positions()[-count:]], device=self.device)
        out = self._read(past, tokens, r.logits_to_keep, output_hidden_states=bool(r.layers), **options)
        logits = out.logits[0, out.logits.shape[1] - r.logits_to_keep :, : self.vocab_size]
        parts.append(out)
        states = {layer: torch.cat([part.hidden_states[layer][0] for part in parts]) for layer in r.layers}
        kept = {layer: rows[len(rows) - r.kept_states :] for layer, rows in states.items()}
        return ScoreOutput(logits, kept, again=again)

    def _read(self, past: Past, tokens: list[int], keep: int, **options: Any) -> Any:
        if self._keeps_logits:
            options["logits_to_keep"] = max(keep, 1)
        options[self._cache_name] = past.cache
        with past.reading(tokens):
            return self.model(torch.tensor([past.again + tokens], device=self.device), use_cache=True, **options)

    @on_its_device
    @torch.inference_mode()
    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        return decode_by_score(self, requests)

    def _probe(self) -> None:
        """Configs do not tell everything: truncate a draft and see whether the model forgets it."""
        slot, tokens = self.acquire(), [t % self.vocab_size for t in PROBE]
        try:
            whole = self.score([Score(self, slot, tokens, len(tokens))])[0].logits
            self.truncate(slot, 2)
            self.score([Score(self, slot, tokens[:1] * 3, 3)])  # a draft that is rejected
            self.truncate(slot, 2)
            pieces = tokens[2:3], tokens[3:6], tokens[6:]  # a state goes on by one token, by several, and by one
            again = torch.cat([self.score([Score(self, slot, p, len(p))])[0].logits for p in pieces])
        except Exception as error:
            raise ModelError(f"{self._name}: its cache cannot be truncated: {error}") from error
        finally:
            self.release(slot)
        if not _agree(whole[2:], again):
            raise ModelError(
                f"{self._name}: in pieces, with a rejected draft between them, it gives other logits than in one pass; "
                "drafts can be neither checked nor undone; take another model, or another release of transformers"
            )

    def _takes_trees(self) -> bool:
        """Tried out: not every model takes masks and positions of one's own."""
        layers = DynamicCache(config=self.model.config).layers
        if self._pasts[0].recurrent or any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers):
            return False  # one mask serves all layers, and a state has no branches
        slot, tokens = self.acquire(), [t % self.vocab_size for t in PROBE]
        try:
            whole = self.score([Score(self, slot, tokens, len(tokens))])[0].logits
            self.truncate(slot, 2)
            # Two tokens of a branch that goes wrong, then the text as it was.
            branches, parents = [*tokens[3:5], *tokens[2:]], (-1, 0, -1, 2, 3, 4, 5)
            again = self.score([Score(self, slot, branches, 5, parents=parents)])[0].logits
        except Exception:
            return False
        finally:
            self.release(slot)
        return _agree(whole[2:], again)

    @property
    def _name(self) -> str:
        return f"{self.model.config.model_type} ({type(self.model).__name__})"


def _dequantised(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = read_config(path)
    model, own = class_of(config, str(path)), config.get_text_config(decoder=True)
    config = own if model.config_class is type(own) else config
    for one in (config, own):
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    with Checkpoint(path) as checkpoint:
        tensors = dequantised(checkpoint, dtype)
        return model.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True)


def _agree(whole: Tensor, again: Tensor) -> bool:
    """Rows of logits, but for rounding. It is the median row that counts: rounding may send a token to another expert,
    and change one row by much; what is wrong changes all after it."""
    whole, again = whole.float(), again.float()
    spread = (whole - whole.mean(-1, keepdim=True)).norm(dim=-1)
    return bool(((whole - again).norm(dim=-1) / spread.clamp(min=1e-6)).median() <= ROUNDING)
