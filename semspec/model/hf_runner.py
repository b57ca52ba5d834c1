"""A runner for every other causal language model that transformers knows: slower, with the same contract.

Each slot has a cache of its own. Sequences that read equally many tokens share a pass if the model takes that
(`joined.py`); others have each their own. Models with a recurrent state go back to a former one after a rejected draft
(`past.py`). What cannot be undone at all is refused, by name, before weights are read.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from semspec.errors import ModelError
from semspec.model.attention_metadata import AttentionMetadata, SequenceChunk
from semspec.model.base_runner import BaseRunner
from semspec.model.cache import Slots
from semspec.model.config import AttentionSpec
from semspec.model.decode import decode_by_score
from semspec.model.hf_loading import read_model
from semspec.model.joined import give_back, joined, padding_mask, reads_by_the_longest
from semspec.model.past import SPACING, Past, cache_name, reads_alone
from semspec.model.placement import on_its_device
from semspec.types import Decode, DecodeOutput, Score, ScoreOutput

PROBE = [1, 2, 3, 4, 5, 6, 7]
MAX_JOINED = 64  # tokens of each text in a pass over several; a prompt has enough for a pass of its own
END = 8  # tokens of a prompt that are read after a checkpoint: others may have all but these in common with it
PADDED = 1023  # tokens, up to which texts of any length share a pass
MAX_KEYS = 1 << 16  # of all texts in a pass: transformers copies each layer's, for all heads of its queries
ROUNDING = 0.05  # of the spread of a row of logits


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
        arguments = inspect.signature(model.forward).parameters
        self._keeps_logits, self._takes_positions = "logits_to_keep" in arguments, "position_ids" in arguments
        self._takes_mask = "attention_mask" in arguments and any(map(_has_keys, DynamicCache(config=config).layers))
        # Whether texts may share a pass; None: it is tried out when two first could.
        self._joins: bool | None = False if reads_by_the_longest(model) else None
        self._probe()
        self.trees = self._takes_trees()

    @staticmethod
    def load(
        path: Path, device: torch.device, dtype: torch.dtype, slots: int, capacity: int, vocab: int | None = None
    ) -> TransformersRunner:
        return TransformersRunner(read_model(path, dtype).to(device), slots, capacity, vocab)

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
        again = {r.slot: len(self._pasts[r.slot].again) for r in requests}
        for slot, count in again.items():
            if count > SPACING:
                self._read(self._pasts[slot], [], 0)  # so that the next rejected draft need not go back as far
        rows = dict[int, ScoreOutput]()  # by slot
        for together in self._together(requests):
            each = self._score_joined(together) if len(together) > 1 else [self._score(together[0])]
            for r, row in zip(together, each, strict=True):
                row.again, rows[r.slot] = again[r.slot], row
        return [rows[r.slot] for r in requests]

    def _together(self, requests: Sequence[Score]) -> list[list[Score]]:
        """Those that one pass can serve: short, of equally many tokens, and after texts of about the same length, since
        all are padded to the longest; and not too many tokens in all, as the memory for them is nobody's plan."""
        parts = dict[tuple[int, ...], list[Score]]()
        for r in requests:
            past = self._pasts[r.slot]
            count = len(past.again) + len(r.tokens)
            alone = r.parents or count > MAX_JOINED or _ends_prompt(r, past) or not past.joinable
            doublings = max(past.cache_length, PADDED).bit_length()
            parts.setdefault((r.slot,) if alone or self._joins is False else (count, doublings), []).append(r)
        if self._joins is None and any(len(part) > 1 for part in parts.values()):
            self._joins = self._joins_right()
            return self._together(requests)
        sizes = {key: max(1, MAX_KEYS >> key[-1]) for key in parts}  # of doublings; a text alone is one in any case
        return [part[i : i + sizes[key]] for key, part in parts.items() for i in range(0, len(part), sizes[key])]

    def _score_joined(self, requests: list[Score]) -> list[ScoreOutput]:
        pasts = [self._pasts[r.slot] for r in requests]
        keep = max(r.logits_to_keep for r in requests)
        states = any(r.layers for r in requests)
        out = self._read_joined(pasts, [r.tokens for r in requests], keep, output_hidden_states=states)
        return [self._output(r, [out], i) for i, r in enumerate(requests)]

    def _score(self, r: Score) -> ScoreOutput:
        past, tokens, options = self._pasts[r.slot], r.tokens, dict[str, Any]()
        parts = list[Any]()
        if _ends_prompt(r, past):
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
        return self._output(r, [*parts, out], 0)

    def _output(self, r: Score, parts: list[Any], i: int) -> ScoreOutput:
        """Of the `i`th text of one pass, or of one that was read in parts."""
        last = parts[-1].logits
        logits = last[i, last.shape[1] - r.logits_to_keep :, : self.vocab_size]
        states = {layer: torch.cat([part.hidden_states[layer][i] for part in parts]) for layer in r.layers}
        return ScoreOutput(logits, {layer: rows[len(rows) - r.kept_states :] for layer, rows in states.items()})

    def _read(self, past: Past, tokens: list[int], keep: int, **options: Any) -> Any:
        if self._keeps_logits:
            options["logits_to_keep"] = max(keep, 1)
        options[self._cache_name] = past.cache
        with past.reading(tokens):
            return self.model(torch.tensor([past.again + tokens], device=self.device), use_cache=True, **options)

    def _read_joined(self, pasts: list[Past], tokens: list[list[int]], keep: int, **options: Any) -> Any:
        """All of them in one pass, which reads the weights once."""
        lengths, caches = [past.cache_length for past in pasts], [past.cache for past in pasts]
        if self._keeps_logits:
            options["logits_to_keep"] = max(keep, 1)
        ids = torch.tensor([past.again + own for past, own in zip(pasts, tokens, strict=True)], device=self.device)
        if self._takes_mask:
            options["attention_mask"] = padding_mask(lengths, ids.shape[1], self.device)
        if self._takes_positions:
            first = torch.tensor(lengths, device=self.device)[:, None]
            options["position_ids"] = first + torch.arange(ids.shape[1], device=self.device)
        with ExitStack() as stack:
            for past, own in zip(pasts, tokens, strict=True):
                stack.enter_context(past.reading(own))
            cache = options[self._cache_name] = joined(caches, max(lengths))
            out = self.model(ids, use_cache=True, **options)
            give_back(cache, caches)
        return out

    @on_its_device
    @torch.inference_mode()
    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        return decode_by_score(self, requests)

    def _probe(self) -> None:
        """Configs do not tell everything: truncate a draft and see whether the model forgets it."""
        slot, tokens = self.acquire(), [t % self.vocab_size for t in PROBE]
        does = "a pass over a text alone, with the usual cache of transformers, fails"
        try:
            whole = self.score([Score(self, slot, tokens, len(tokens))])[0].logits
            does = "its cache cannot be truncated"
            self.truncate(slot, 2)
            self.score([Score(self, slot, tokens[:1] * 3, 3)])  # a draft that is rejected
            self.truncate(slot, 2)
            pieces = tokens[2:3], tokens[3:6], tokens[6:]  # a state goes on by one token, by several, and by one
            again = torch.cat([self.score([Score(self, slot, p, len(p))])[0].logits for p in pieces])
        except Exception as error:
            raise ModelError(f"{self._name}: {does}: {error}") from error
        finally:
            self.release(slot)
        if not _agree(whole[2:], again):
            raise ModelError(
                f"{self._name}: in pieces, with a rejected draft between them, it gives other logits than in one pass; "
                "drafts can be neither checked nor undone; take another model, or another release of transformers"
            )

    def _joins_right(self) -> bool:
        """Tried out: a pass over two texts of different lengths, and one after it."""
        tokens = [t % self.vocab_size for t in PROBE]
        texts, parts = (tokens[:3], tokens[1:6]), ((tokens[3:5], tokens[5:7]), (tokens[:1], tokens[2:3]))
        alone, together = ([self._past() for _ in texts] for _ in range(2))
        try:
            for past, text in zip([*alone, *together], texts * 2, strict=True):
                self._read(past, list(text), 1)
            for feed in parts:
                single = [self._read(past, own, len(own)).logits[0] for past, own in zip(alone, feed, strict=True)]
                both = self._read_joined(together, list(feed), len(feed[0])).logits
                if not all(map(_agree, single, both)):
                    return False
        except Exception:  # not every model takes masks and positions of one's own
            return False
        return True

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


def _ends_prompt(r: Score, past: Past) -> bool:
    """Whether a checkpoint is worth while before its last tokens."""
    return past.recurrent and 0 < r.logits_to_keep <= END and len(r.tokens) > SPACING


def _has_keys(layer: Any) -> bool:
    return isinstance(layer, DynamicLayer)


def _agree(whole: Tensor, again: Tensor) -> bool:
    """Rows of logits, but for rounding. It is the median row that counts: rounding may send a token to another expert,
    and change one row by much; what is wrong changes all after it."""
    whole, again = whole.float(), again.float()
    spread = (whole - whole.mean(-1, keepdim=True)).norm(dim=-1)
    return bool(((whole - again).norm(dim=-1) / spread.clamp(min=1e-6)).median() <= ROUNDING)
