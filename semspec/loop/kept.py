"""Slots that outlive a sequence: what a conversation's next turn need not compute again.

A sequence that ends leaves its slots here instead of releasing them, together with the tokens they hold. The next one
takes them over, cut back to where its own prompt begins to differ. So nothing is ever reused that a fresh start would
not have computed from the same tokens, whatever a chat template does to earlier turns.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from semspec.types import Acquire, Runner


class Kept:
    """The slots of one conversation between its turns. While a turn runs, they are the turn's."""

    def __init__(self) -> None:
        self._slots: list[tuple[Runner, int, list[int]]] = []
        self.reused = 0  # tokens that the last sequence's target did not have to read

    def acquire(self, runners: Sequence[Runner], prompt: list[int]) -> Generator[Acquire, list[int], list[int]]:
        """A slot on each runner: one from here, holding the longest beginning of the prompt it can, or an empty one."""
        taken = [self._take(runner, prompt) for runner in runners]
        try:
            missing = [runner for runner, slot in zip(runners, taken, strict=True) if slot is None]
            fresh = iter((yield Acquire(missing)) if missing else ())
        except BaseException:  # it ended before it began
            got = [(runner, slot) for runner, slot in zip(runners, taken, strict=True) if slot is not None]
            self.keep([runner for runner, _ in got], [slot for _, slot in got], prompt)
            raise
        slots = [next(fresh) if slot is None else slot for slot in taken]
        self.reused = runners[0].length(slots[0])
        return slots

    def _take(self, runner: Runner, prompt: list[int]) -> int | None:
        found = next((i for i, (owner, _, _) in enumerate(self._slots) if owner is runner), None)
        if found is None:
            return None
        _, slot, tokens = self._slots.pop(found)
        # The last token is fed in any case: what it predicts is the first thing asked for.
        runner.truncate(slot, shared(tokens, prompt[:-1]))
        return slot

    def keep(self, runners: Sequence[Runner], slots: Sequence[int], context: list[int]) -> None:
        """Take slots over from a sequence. Each holds a beginning of its context, perhaps with a draft behind it."""
        for runner, slot in zip(runners, slots, strict=True):
            length = min(runner.length(slot), len(context))
            runner.truncate(slot, length)
            self._slots.append((runner, slot, context[:length]))

    def release(self) -> None:
        """Give all slots back."""
        while self._slots:
            runner, slot, _ = self._slots.pop()
            runner.release(slot)

    def __del__(self) -> None:
        self.release()


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
