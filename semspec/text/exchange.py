"""Two models with different tokenizers: what each reads of the other's tokens.

Where only special tokens differ (`ids`), ids are exchanged, and special tokens are mapped by what they mean: the same
name, the end of a turn, the markers of thinking. Where vocabularies differ (`text`), text is exchanged: it is spelled
in the other's tokens (speller.py, reader.py), and only special tokens are mapped. A special token of the target without
a counterpart is not read by the draft; one of the draft ends the proposal before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from semspec.errors import ModelError
from semspec.text.speller import Speller
from semspec.text.tokenizer import difference, thinking_markers

NEARLY = 0.99  # share of the plain tokens that must have the same ids for ids to be exchanged
SAMPLED = 512  # tokens of each vocabulary whose text the other must be able to spell
MAX_STOPS = 16  # sets of stop tokens to remember
UNSPELLED = 0.5  # share of these from which a pair is refused


@dataclass(frozen=True)
class Side:
    """What there is to know about one model of a pair besides its weights."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int  # rows of its head
    eos: frozenset[int] = frozenset()

    @cached_property
    def entries(self) -> dict[int, str]:
        return {i: token for token, i in self.tokenizer.get_vocab().items() if i < self.vocab_size}

    def name(self, token: int) -> str:
        return self.entries.get(token, f"id {token}")  # a config may name an end that the tokenizer does not have

    @cached_property
    def added(self) -> frozenset[int]:
        """Tokens outside the plain vocabulary."""
        named = {*self.tokenizer.get_added_vocab().values(), *self.tokenizer.all_special_ids, *self.eos}
        return frozenset(i for i in named if i < self.vocab_size)

    @cached_property
    def control(self) -> frozenset[int]:
        """Those that are no text: the ends of turns, roles, padding."""
        special = (i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        return frozenset({*special, *self.tokenizer.all_special_ids, *self.eos})

    @cached_property
    def thinking(self) -> tuple[int, int] | None:
        markers = thinking_markers(self.tokenizer)
        return markers if markers and max(markers) < self.vocab_size else None

    @property
    def end(self) -> int | None:
        """The token that ends a turn. A tokenizer may have one that its model has not."""
        own, known = self.tokenizer.eos_token_id, [i for i in self.eos if i < self.vocab_size]
        return own if own in known or (not self.eos and own in self.entries) else min(known, default=None)

    def meaning(self, other: Side) -> dict[int, int | None]:
        """Which of the other's tokens mean the same as this one's tokens outside the plain vocabulary; None: a control
        token that none does. The rest is text and is spelled."""
        names = {token: i for i, token in other.entries.items()}
        found: dict[int, int | None] = {}
        for i in sorted(self.added):
            if self.entries.get(i) in names:
                found[i] = names[self.entries[i]]
            elif i in self.eos and other.end is not None:
                found[i] = other.end
            elif self.thinking and other.thinking and i in self.thinking:
                found[i] = other.thinking[self.thinking.index(i)]
            elif i in self.control:
                found[i] = None
        return found


@dataclass
class Exchange:
    target: Side
    draft: Side
    to_draft: dict[int, int | None] = field(init=False)  # tokens that are not spelled, and what they become
    to_target: dict[int, int | None] = field(init=False)
    kind: Literal["ids", "text"] = field(init=False)
    _stops: dict[frozenset[int], frozenset[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.to_draft, self.to_target = self.target.meaning(self.draft), self.draft.meaning(self.target)
        self.target_speller = Speller(self.target.tokenizer)
        self.draft_speller = Speller(self.draft.tokenizer, self.draft.vocab_size)
        ours, theirs = self.target.entries, self.draft.entries
        outside = self.target.added | self.draft.added
        plain = {i for i in ours.keys() | theirs.keys() if i not in outside}
        same = {i: i for i in plain if ours.get(i) == theirs.get(i)}
        self.kind = "ids" if plain and len(same) >= NEARLY * len(plain) else "text"
        if self.kind == "ids":
            self.to_draft |= same
            self.to_target |= same
        else:
            self._refuse_unspelled("target", self.target, self.draft_speller)
            self._refuse_unspelled("draft", self.draft, self.target_speller)

    def _refuse_unspelled(self, name: str, side: Side, other: Speller) -> None:
        own = self.target_speller if name == "target" else self.draft_speller
        ids = [i for i in sorted(side.entries) if i not in side.added]
        texts = [own.bytes_of(i).decode(errors="ignore").strip() for i in ids[:: max(1, len(ids) // SAMPLED)]]
        texts = [text for text in texts if text]
        unknown, lost = other.tokenizer.unk_token_id, list[str]()
        for text in texts:
            tokens = other.tokens(text)
            if not tokens or unknown in tokens:
                lost.append(text)
        if not texts or len(lost) > UNSPELLED * len(texts):
            which = f", such as {lost[0]!r}" if lost else ""
            raise ModelError(
                f"the tokenizers have too little in common: {len(lost)} of {len(texts)} tokens of the {name}{which}, "
                "cannot be spelled by the other model; take a draft model for the same languages"
            )

    @staticmethod
    def of(target: Side, draft: Side) -> Exchange | None:
        """None: both models have the same tokens, and there is nothing to translate."""
        differs = difference(target.tokenizer, draft.tokenizer, target.vocab_size, draft.vocab_size)
        return Exchange(target, draft) if differs else None

    def facts(self) -> dict[str, Any]:
        """What is exchanged and what is mapped to what, in names of tokens."""
        ours, theirs = self.target.name, self.draft.name
        named = [(ours(t), d if d is None else theirs(d)) for t, d in self.to_draft.items() if t in self.target.added]
        only = [theirs(d) for d, t in self.to_target.items() if t is None]
        return {
            "exchange": self.kind,
            "shared_tokens": len(self.shared[0]),
            "shared_share": self.shared_share,
            "mapped": {own: other for own, other in named if other is not None and other != own},
            "not_read_by_draft": [own for own, other in named if other is None],
            "never_proposed": only,
        }

    # -- from the draft's tokens to the target's

    def translate(self, own: Sequence[int], pending: bytes = b"") -> tuple[list[int], list[int]]:
        """The draft's tokens in the target's, as far as these can spell them, and how many of the draft's are needed up
        to each. `pending`: bytes of an unfinished character that the target has written already."""
        tokens, ends, begin = list[int](), list[int](), 0
        for i, token in enumerate(own):
            if token not in self.to_target:
                continue
            if not self._spell(own, begin, i, pending, tokens, ends):
                return tokens, ends
            mapped, begin, pending = self.to_target[token], i + 1, b""
            if mapped is None:
                return tokens, ends
            tokens.append(mapped)
            ends.append(i + 1)
            if token in self.draft.eos:
                return tokens, ends
        self._spell(own, begin, len(own), pending, tokens, ends)
        return tokens, ends

    def _spell(
        self, own: Sequence[int], begin: int, end: int, pending: bytes, tokens: list[int], ends: list[int]
    ) -> bool:
        """Add the target's tokens for own[begin:end]; False if they do not spell all of it."""
        parts = [self.draft_speller.bytes_of(token) for token in own[begin:end]]
        data, at = b"".join(parts), list(accumulate(map(len, parts)))
        if not data.startswith(pending):
            return False
        first, data = _finish_character(pending, data)
        text = _whole_characters(data)
        found: list[int | None] = [self._by_bytes.get(first)] if first else []
        if None in found:
            found = [self._by_bytes.get(first[i : i + 1]) for i in range(len(first))]
        found += self.target_speller.tokens(text)
        unknown, vocab, spell, written = (
            self._unknown,
            self.target.vocab_size,
            self.target_speller.bytes_of,
            len(pending),
        )
        for token in found:
            if token is None or token == unknown or token >= vocab:
                return False
            written += len(spell(token))
            tokens.append(token)
            ends.append(min(begin + bisect_left(at, written) + 1, end))
        return len(text.encode()) == len(data)

    @cached_property
    def _unknown(self) -> int | None:
        """Asked for in every round, and a tokenizer looks it up each time."""
        found: int | None = self.target.tokenizer.unk_token_id
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """The target's plain tokens by what they add to a text."""
        spell, added = self.target_speller.bytes_of, self.target.added
        return {spell(i): i for i in sorted(self.target.entries, reverse=True) if i not in added}

    def stops(self, stop: frozenset[int]) -> frozenset[int]:
        """The draft's tokens in which one of these tokens of the target may end."""
        if stop not in self._stops:
            spell = self.draft_speller.bytes_of
            last = {self.target_speller.bytes_of(t)[-1:] for t in stop if t not in self.to_draft} - {b""}
            near = (d for d in self.draft.entries if any(byte in spell(d) for byte in last))
            found = {d for d in near if not stop.isdisjoint(self.target_speller.tokens(_whole_characters(spell(d))))}
            found |= {d for d, t in self.to_target.items() if t in stop}
            if len(self._stops) == MAX_STOPS:
                self._stops.clear()
            self._stops[stop] = frozenset(found)
        return self._stops[stop]

    # -- tokens that both have, for rules that compare distributions

    @cached_property
    def shared(self) -> tuple[Tensor, Tensor]:
        """[S] the target's ids and [S] the draft's ids of tokens that add the same bytes to a text or mean the same."""
        pairs = {d: t for d, t in self.to_target.items() if t is not None}
        if self.kind == "text":
            for d in self.draft.entries:
                if d not in self.draft.added and (t := self._by_bytes.get(self.draft_speller.bytes_of(d))) is not None:
                    pairs[d] = t
        once = {t: d for d, t in sorted(pairs.items(), reverse=True)}  # several ends of a turn may mean one
        return torch.tensor(list(once), dtype=torch.long), torch.tensor(list(once.values()), dtype=torch.long)

    @cached_property
    def shared_target(self) -> dict[int, int]:
        """From the draft's ids of such tokens to the target's."""
        ours, theirs = self.shared
        return dict(zip(theirs.tolist(), ours.tolist(), strict=True))

    @property
    def shared_share(self) -> float:
        """How much of the smaller vocabulary both have."""
        return len(self.shared[0]) / max(1, min(len(self.target.entries), len(self.draft.entries)))

    def rows_for_target(self, logits: Tensor) -> Tensor:
        """The draft's logits over the target's vocabulary, -inf for tokens that the draft does not have. [n, V]"""
        ours, theirs = (ids.to(logits.device) for ids in self.shared)
        rows = logits.new_full((len(logits), self.target.vocab_size), -torch.inf)
        return rows.index_copy(1, ours, logits.index_select(1, theirs))


def _whole_characters(data: bytes) -> str:
    """The text of these bytes up to the first that is part of no whole character."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def _finish_character(pending: bytes, data: bytes) -> tuple[bytes, bytes]:
    """The bytes that complete the character which `pending` begins, and those after it. `data` begins with pending."""
    end = len(pending)
    while pending and end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return data[len(pending) : end], data[end:]
