"""The prefix caches of a pair, one around each model, for all who decode with it.

What a plain `generate` or `stream` reads is of no use to others: a seed's text should not depend, not even by rounding,
on what was asked before. So each call has a salt of its own, under which its prompts share what they begin with, and
its slots are given back when it ends. Sessions and `Pair.cached` have no such salt: their texts stay until somebody
needs the slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from semspec.loop.executor import Executor
from semspec.loop.job import Job
from semspec.model import ModelRunner
from semspec.model.prefix_cache import PrefixCache
from semspec.model.remembered_texts import ONCE
from semspec.model.wrapper import unwrap
from semspec.types import Runner


class PairCaches:
    def __init__(self, target: Runner, draft: Runner | None) -> None:
        self.target = PrefixCache(target)
        self.draft = None if draft is None else PrefixCache(draft)
        self._each = [cache for cache in (self.target, self.draft) if cache is not None]
        self._numbers = count()
        self._users: set[object] = set()  # sessions that have not been closed
        self._whole = any(_integers(runner) for runner in (target, draft))

    def salt(self, jobs: Sequence[Job]) -> None:
        """Have these share with each other and with nobody else: whatever they begin with alike. With integer weights,
        which make a larger difference of a rounded bit, only prompts that are the same."""
        call = next(self._numbers)
        for job in jobs:
            job.salt = f"{ONCE}{call} {hash(tuple(job.prompt)) if self._whole else ''} {job.salt}"

    @contextmanager
    def call(self, jobs: Sequence[Job], executor: Executor) -> Iterator[None]:
        """Until these are done, what one of them leaves is kept for the others."""
        salts = {salt for salt, users in Counter(job.salt for job in jobs).items() if users > 1}
        for cache in self._each:
            cache.remember(salts)
        try:
            yield
        finally:
            with executor.exclusive():
                for cache in self._each:
                    cache.forget(salts)

    def enter(self, user: object) -> None:
        self._users.add(user)

    def leave(self, user: object) -> None:
        """Slots are given back with the last one: raw users of a model, such as measurements, want them too."""
        self._users.discard(user)
        if not self._users:
            self.close()

    def dropped(self, user: object, executor: Executor) -> None:
        """The same for a destructor, which may run in the middle of a pass: then the slots stay, until somebody needs
        them."""
        self._users.discard(user)
        executor.between_ticks(lambda: self.leave(user))

    def close(self) -> None:
        for cache in self._each:
            cache.close()


def _integers(runner: Runner | None) -> bool:
    model = unwrap(runner)
    return isinstance(model, ModelRunner) and model.transformer.integers
