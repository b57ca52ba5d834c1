"""What the slots of a prefix cache hold, and what those have held that were released."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from semspec.model.hidden_states import CachedHiddenStates
from semspec.model.prefix_index import PrefixIndex
from semspec.model.wrapper import RunnerWrapper
from semspec.types import Runner

ONCE = "\0"  # begins the salt of a text that nobody asks for again: its slot is given back when it is released
STATES = 2 * 2**30  # bytes of states that are remembered, where nobody has planned them
PLACES = 256  # texts that are parked at most: all that begin alike are looked at when another one does


class RememberedTexts(RunnerWrapper):
    """Takes slots of the runner inside as it needs them, and keeps those that are released, or what they held: where a
    cache has pages, it is parked, and the slot is free."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._idle: list[int] = []  # slots and places that nobody uses, least recently used first
        self._places: set[int] = set()  # those of them that are no slots
        self._index = PrefixIndex()  # the tokens whose KV entries a slot or place has
        self._states: dict[int, CachedHiddenStates] = {}  # of these, where a drafter wanted them
        self.states_limit = STATES  # bytes; those of idle texts give way, the least recently used first
        self._calls: set[str] = set()  # salts of texts that are kept although they begin with ONCE, for now

    @property
    def free(self) -> int:
        return len(self._idle) - len(self._places) + self.inner.free

    @property
    def idle(self) -> list[int]:
        """Slots and places that hold what is only remembered."""
        return list(self._idle)

    def _keep(self, slot: int) -> None:
        """What it holds stays, if anybody may find it; the slot is free in any case."""
        if self._remembers(slot) and self._index.tokens[slot] and not self._index.is_hidden(slot):
            self._idle.append(self._parked(slot))
            self._limit_states()
        else:
            self._give_back(slot)

    def _limit_states(self) -> None:
        """A text without its states is still there for drafters that read none."""
        held = sum(states.nbytes for states in self._states.values())
        for slot in self._idle:
            if held <= self.states_limit:
                break
            if slot in self._states:
                held -= self._states.pop(slot).nbytes

    def _parked(self, slot: int) -> int:
        """The place where it is now, or the slot itself."""
        if len(self._places) == PLACES:
            self._drop(next(place for place in self._idle if not self._is_slot(place)))
        place = self.inner.park(slot)
        if place is None:
            return slot
        self._index.move(slot, place)
        if slot in self._states:
            self._states[place] = self._states.pop(slot)
        self._places.add(place)
        return place

    def remember(self, salts: Collection[str]) -> None:
        """Keep texts with these salts, which begin with ONCE, until they are forgotten: others will begin alike."""
        self._calls.update(salts)

    def forget(self, salts: Collection[str]) -> None:
        self._calls.difference_update(salts)
        for slot in [slot for slot in self._idle if not self._remembers(slot)]:
            self._drop(slot)

    def _remembers(self, slot: int) -> bool:
        salt = self._index.salts[slot]
        return not salt.startswith(ONCE) or salt in self._calls

    def _drop(self, slot: int) -> None:
        """Forget what an idle slot or a place holds."""
        self._idle.remove(slot)
        self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        self._places.discard(slot)
        self._index.drop(slot)
        self._states.pop(slot, None)
        self.inner.release(slot)

    def _is_slot(self, slot: int) -> bool:
        return slot not in self._places

    def _unpark(self, place: int, slot: int, length: int) -> None:
        """The slot holds what the place did, which then shares no page with it that it would have to copy."""
        try:
            self.inner.copy(place, slot, length)
        except BaseException:
            self.inner.release(slot)
            raise
        self._index.cut(place, length)
        self._index.move(place, slot)
        if place in self._states:
            self._states[slot] = self._states.pop(place).first(length)
        self._idle.remove(place)
        self._places.remove(place)
        self.inner.release(place)

    def _common(self, text: Sequence[int], salt: str) -> dict[int, int]:
        return self._index.common(text, salt, self.inner.min_length)

    def _usable(self, slot: int, length: int) -> int:
        """So many tokens of a slot, or none if it cannot go on from there."""
        return length if length >= self.inner.min_length(slot) else 0

    def _cut(self, slot: int, length: int) -> None:
        """The slot inside holds so many tokens, as its user thinks, and is ready to be fed. It is cut last: whenever an
        interrupt comes, what the index knows is there."""
        self._index.cut(slot, length)
        if slot in self._states:
            self._states[slot] = self._states[slot].first(length)
        self.inner.truncate(slot, length)

    def close(self) -> None:
        """Give idle slots back to the runner inside."""
        while self._idle:
            self._give_back(self._idle.pop())

    def __del__(self) -> None:
        self.close()
