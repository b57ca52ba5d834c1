"""A prefix cache around a runner: what one slot holds of a prompt, no other computes again.

Chats send their earlier turns with every question, applications the same instructions, and `n` answers have one prompt.
A released slot keeps its KV entries until somebody needs it; where a cache has pages, they are parked without the slot,
so that more texts are cached than run, as long as there are free pages. A new sequence gets the longest prefix of its
prompt that any slot holds: the slot itself if nobody uses it and the prompt goes on from it, else a copy, so that two
conversations with the same instructions do not take turns in evicting each other. Only the rest is fed. Slots are
searched again whenever a prompt is fed, since others may hold more of it by then; of equal prompts in one pass, one is
computed and the others get copies. Decoders do not notice: a slot begins empty and its whole prompt is fed to it; what
is there already is left out of the pass. Hidden states for a drafter are cached with the tokens; a prefix without them
is recomputed. So is one whose sliding-window layers have freed what its next token would see (`min_length`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from semspec.errors import SemspecError
from semspec.model.hidden_states import CachedHiddenStates
from semspec.model.prefix_index import BLOCK, common_prefix
from semspec.model.remembered_texts import RememberedTexts
from semspec.model.rows import after, rest
from semspec.model.wrapper import RunnerWrapper
from semspec.types import Decode, DecodeOutput, Handover, Runner, Score, ScoreOutput

MAX_LOST = 4  # tokens at the end of a slot that a prompt may differ in and still take it over instead of copying it


class PrefixCache(RememberedTexts):
    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._lengths: dict[int, int] = {}  # of slots in use, as their users see them, if they are not preempted
        self._lost: dict[int, list[int]] = {}  # what preempted slots held; their lengths are what is recomputed
        self.queries = self.hits = 0  # prompt tokens looked up, and found
        self.reused = 0  # tokens that the last acquired slot had

    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        if not self.free:
            raise SemspecError(f"all {len(self._lengths)} slots are taken; release one or load the model with more")
        slot = self._slot_for(prompt, salt)
        if slot in self._idle:
            self._idle.remove(slot)
        self._lengths[slot] = 0
        try:
            self._begin(slot, prompt, salt)
        except BaseException:  # an interrupt, perhaps while entries were copied
            self.release(slot)
            raise
        return slot

    def _begin(self, slot: int, prompt: Sequence[int], salt: str) -> None:
        """The slot holds what is known of this prompt, and nothing else."""
        if self._index.salts[slot] != salt:
            self._cut(slot, 0)
            self._index.salt(slot, salt)
        self._adopt(slot, prompt)
        shared = self._usable(slot, common_prefix(self._index.tokens[slot], prompt))
        self._cut(slot, shared)  # what nobody will use takes room
        self.reused = min(shared, max(len(prompt) - 1, 0))

    def _slot_for(self, prompt: Sequence[int], salt: str) -> int:
        """One that holds what the prompt goes on from, or nothing, or else the least recently used."""
        tokens = self._index.tokens
        shared = {slot: count for slot, count in self._common(prompt, salt).items() if slot in self._idle}
        best = min(shared, key=lambda slot: len(tokens[slot]) - shared[slot], default=None)
        if best is not None and len(tokens[best]) - shared[best] <= MAX_LOST and self._is_slot(best):
            return best
        if not self.inner.free:
            return next(slot for slot in self._idle if self._is_slot(slot))
        slot = self.inner.acquire()
        if best is not None and len(tokens[best]) - shared[best] <= MAX_LOST:
            self._unpark(best, slot, shared[best])
        else:
            self._index.add(slot)
        return slot

    def _adopt(self, slot: int, text: Sequence[int], layers: Sequence[int] = ()) -> None:
        """Copy the longest beginning of this text that another slot has, if it is longer than the slot's own; where
        `layers` are wanted, only as far as their states are known."""
        held = self._index.tokens[slot]
        begins = self._usable(slot, len(held)) and text[: len(held)] == held
        if begins and not self._index.goes_on(slot, text):
            return  # as for every piece of a prompt but the first: to search for all of it would be quadratic
        shared = self._common(text, self._index.salts[slot])
        if layers:
            known = {s: min(n, self._states[s].covers(layers)) for s, n in shared.items() if s in self._states}
            shared = {s: n for s, n in known.items() if self._usable(s, n)}
        best = max(shared, key=lambda other: shared[other], default=slot)
        own = self._usable(slot, common_prefix(held, text))
        if best == slot or shared[best] - max(own, self._lengths[slot]) < BLOCK:
            return
        self._index.cut(slot, 0)  # until the copy is complete
        self._states.pop(slot, None)
        self.inner.copy(best, slot, shared[best])
        self._index.append(slot, text[: shared[best]])
        if best in self._states:
            self._states[slot] = self._states[best].first(shared[best])

    def release(self, slot: int) -> None:
        del self._lengths[slot]
        self._lost.pop(slot, None)
        self._cut(slot, self._usable(slot, len(self._index.tokens[slot])))  # a pass that failed may have left more
        self._keep(slot)

    def can_admit(self, prompt: Sequence[int], salt: str = "") -> bool:
        shared = self._common(prompt, salt)
        return not self._lacks([(None, len(prompt) - max(shared.values(), default=0))], shared)

    def lacks_room(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        more = [(slot, count if slot is None else self._more(slot, count)) for slot, count in tokens]
        return self._lacks(more, without=without)

    def _more(self, slot: int, count: int) -> int:
        """What the slot inside will have more when so many tokens are fed, and before them all that it has lost."""
        there = len(self._index.tokens[slot]) - self._lengths[slot]
        return max(0, count + len(self.tokens_to_recompute(slot)) - there)

    def _lacks(
        self, tokens: Sequence[tuple[int | None, int]], wanted: Collection[int] = (), without: Sequence[int] = ()
    ) -> bool:
        """Idle slots give way where that helps, the least recently used first, but those that are wanted last."""
        if not self.inner.lacks_room(tokens, without):
            return False
        idle, enough = sorted(self._idle, key=lambda slot: slot in wanted), 1
        while self.inner.lacks_room(tokens, [*idle[:enough], *without]):  # few mostly are, and all take long to look at
            if enough >= len(idle):
                return True
            enough *= 2
        for slot in idle[:enough]:
            self._drop(slot)
            if not self.inner.lacks_room(tokens, without):
                break
        return False

    def _make_room(self, tokens: Sequence[tuple[int, int]]) -> None:
        """No pass may fail because of what is only remembered, even if nobody asked whether there is room."""
        if self._places:
            self._lacks(tokens)

    def park(self, slot: int) -> int | None:
        return None  # it parks what is released

    def preempt(self, slot: int) -> bool:
        held = self._index.tokens[slot][: self._lengths[slot]]
        if not self._index.tokens[slot]:
            return False
        if held:  # else it has only what others computed
            self._lost.setdefault(slot, held)
        self._lengths[slot] = 0
        self._cut(slot, 0)
        return True

    def tokens_to_recompute(self, slot: int) -> list[int]:
        return self._lost[slot][self._lengths[slot] :] if slot in self._lost else []

    def length(self, slot: int) -> int:
        return len(self._lost[slot]) if slot in self._lost else self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= self.length(slot), "truncation beyond what the slot holds"
        if slot in self._lost:
            del self._lost[slot][length:]
            length = min(length, self._lengths[slot])
            self._settle(slot)
        elif self.windowed and 0 < length < self._lengths[slot]:
            self._cut_or_lose(slot, length)  # at once: what it can be cut to may be more when it is fed
            return
        if length == 0 < self._lengths[slot]:  # nothing of it is wanted again, nor what others have of its beginning
            for other in self._index.common(self._index.tokens[slot][:BLOCK], self._index.salts[slot]):
                if other in self._idle:
                    self._drop(other)
                else:
                    self._index.hide(other)
            self._cut(slot, 0)
        self._lengths[slot] = length

    def _cut_or_lose(self, slot: int, length: int) -> None:
        """A slot that cannot go on from there is recomputed, as a preempted one is."""
        if not self._usable(slot, length):
            self._lost[slot] = self._index.tokens[slot][:length]
            length = 0
        self._lengths[slot] = length
        self._cut(slot, length)

    def _settle(self, slot: int) -> None:
        """A preempted slot that has been recomputed is like any other."""
        if slot in self._lost and len(self._lost[slot]) <= self._lengths[slot]:
            del self._lost[slot]

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        held = self._index.tokens[slot][start:]
        self._index.cut(slot, start)  # until it is done
        self.inner.compact(slot, start, rows)
        self._index.append(slot, [held[row] if held[row] >= 0 else ~held[row] for row in rows])
        self._lengths[slot] = start + len(rows)
        if slot in self._states:
            self._states[slot] = self._states[slot].kept(start, rows)

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        if len(requests) == 1:
            return self._score(requests)
        now, later = list[Score](), list[Score]()
        for request in requests:
            long = len(request.tokens) - request.logits_to_keep >= BLOCK
            (later if long and self._prefilled_by(request, now) else now).append(request)
        rows = dict(zip(map(id, now), self._score(now), strict=True))
        if later:
            rows |= dict(zip(map(id, later), self.score(later), strict=True))
        return [rows[id(request)] for request in requests]

    def _prefilled_by(self, request: Score, others: Sequence[Score]) -> bool:
        """Whether others in the same pass compute this one's prefix: prompts, not rounds of long texts."""
        salts, slot = self._index.salts, request.slot
        prompts = [other for other in others if len(other.tokens) >= BLOCK and salts[other.slot] == salts[slot]]
        if not prompts:
            return False
        text = self._text(request, request.logits_to_keep)
        known = common_prefix(self._index.tokens[slot], text)
        return any(common_prefix(self._text(other), text) - known >= BLOCK for other in prompts)

    def _text(self, request: Score, keep: int = 0) -> list[int]:
        """What the slot will hold after a feed, without the last `keep` tokens."""
        before = self._index.tokens[request.slot][: self._lengths[request.slot]]
        return before + request.tokens[: len(request.tokens) - keep]

    def _score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        remembered, counts, feeds = list[dict[int, Tensor]](), list[int](), list[Score]()
        for request in requests:
            if len(request.tokens) - request.logits_to_keep >= BLOCK:
                text = self._text(request, request.logits_to_keep)
                # A slot that has all of it may have more of the prompt than others, and be of use at its end only.
                if self._index.tokens[request.slot][: len(text)] != text:
                    self._adopt(request.slot, text, request.layers if request.states else ())
            found = self._found(request)
            self.queries += len(request.tokens) - request.logits_to_keep
            counts.append(found)
            remembered.append(self._remembered(request, found))
            self._lengths[request.slot] += found
            if found < len(request.tokens):
                more = self._ready(request.slot)
                left = rest(request, found) if found else request
                feeds.append(replace(left, tokens=[*more, *left.tokens]) if more else left)
        self._make_room([(feed.slot, len(feed.tokens)) for feed in feeds])
        rows = self.inner.score(feeds) if feeds else []
        for feed, row in zip(feeds, rows, strict=True):  # only a pass that succeeded leaves entries to rely on
            chain = max(len(feed.tokens) - len(feed.parents), 0)  # a tree is no text: no prompt begins with ~tokens
            self._append(feed.slot, [*feed.tokens[:chain], *(~token for token in feed.tokens[chain:])])
            if feed.states and self._remembers(feed.slot):
                first = self._lengths[feed.slot] - feed.kept_states
                self._states.setdefault(feed.slot, CachedHiddenStates()).append(first, row.hidden)
        for request in requests:
            self._settle(request.slot)
        fed = dict(zip((feed.slot for feed in feeds), rows, strict=True))
        rows = [
            after(states, fed.get(r.slot) or ScoreOutput(torch.empty(0, self.vocab_size, device=self.device)))
            for r, states in zip(requests, remembered, strict=True)
        ]
        for row, found in zip(rows, counts, strict=True):
            row.cached = max(found - row.again, 0)
            self.hits += row.cached
        return rows

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        # Their noise belongs to the positions that the runner inside is at.
        requests = [replace(r, runner=self.inner, tokens=[*self._ready(r.slot), *r.tokens]) for r in requests]
        self._make_room([(r.slot, len(r.tokens) + r.n - 1) for r in requests])
        outputs = self.inner.decode(requests)
        for request, out in zip(requests, outputs, strict=True):
            if request.slot in self._states and len(request.tokens) == 1:  # rows are those of the tokens fed
                self._states[request.slot].append(self._lengths[request.slot], out.hidden)
            self._append(request.slot, [*request.tokens, *out.tokens[:-1]])
        return outputs

    def begin(self, handovers: Sequence[Handover], drafts: Tensor) -> None:
        if any(h.slot in self._lost for h in handovers):
            return  # it is fed something else first
        for h in handovers:
            self._cut(h.slot, self._lengths[h.slot])  # as `_ready` does where any length can be gone on from
        if not self._lacks([(h.slot, len(h.tokens) + len(drafts)) for h in handovers]):
            self.inner.begin(handovers, drafts)

    def expect(self, request: Score) -> None:
        """Drop now what will be recomputed although the slot has it: pages that it shares with others are no room for
        that, which `lacks_room` has to know."""
        slot, at = request.slot, self._lengths[request.slot]
        if slot not in self._lost and at < len(self._index.tokens[slot]):
            length = at + self._found(request)
            if self._usable(slot, length) == length:
                self._cut(slot, length)

    def _found(self, request: Score) -> int:
        """How many of these tokens the slot holds already; tokens whose rows are wanted are fed in any case."""
        most, at = len(request.tokens) - request.logits_to_keep, self._lengths[request.slot]
        found = common_prefix(self._index.tokens[request.slot][at : at + most], request.tokens)
        if request.states:
            known = self._states[request.slot].covers(request.layers) if request.slot in self._states else 0
            found = min(found, max(len(request.tokens) - request.states, known - at, 0))
        return found

    def _remembered(self, request: Score, found: int) -> dict[int, Tensor]:
        """The states of those of the first `found` tokens that the request wants them of."""
        first, at = len(request.tokens) - request.states, self._lengths[request.slot]
        if not request.states or found <= first:
            return {}
        return self._states[request.slot].between(at + first, at + found, request.layers)

    def _ready(self, slot: int) -> list[int]:
        """Make the slot inside hold what its user thinks; returns what it has to be fed again before anything else."""
        length = self._lengths[slot]
        again = [] if self._usable(slot, length) == length else self._index.tokens[slot][:length]
        self._lengths[slot] -= len(again)
        self._cut(slot, self._lengths[slot])
        return [token if token >= 0 else ~token for token in again]

    def _append(self, slot: int, tokens: Sequence[int]) -> None:
        self._index.append(slot, tokens)
        self._lengths[slot] += len(tokens)


def has_cache(runner: Runner) -> bool:
    return isinstance(runner, PrefixCache) or (isinstance(runner, RunnerWrapper) and has_cache(runner.inner))
