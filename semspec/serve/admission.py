"""Who gets a place: limits of each client, and fair shares where there is not room for all.

A client is an API key, or an address where there are no keys. When every place is taken, a client with fewer places
than another gets some from it: the other's latest requests that have not begun are refused. Free slots go to the client
that has the fewest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from semspec.errors import BadRequest
from semspec.loop.work import Task
from semspec.serve.http_errors import HttpError
from semspec.serve.in_flight import InFlightRequest
from semspec.serve.limits import Limits

MAX_BUCKETS = 10_000  # clients whose rates are remembered


class Admission:
    """Decides on the event loop; keeps what it needs to know of each client's rate."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._left: dict[str, tuple[float, float]] = {}  # client -> requests left, and when that was

    def check(self, client: str, now: float, accepted: Iterable[InFlightRequest]) -> None:
        """Refuse a request beyond its client's own limits; else count it."""
        most, rate = self.limits.client_requests, self.limits.client_rate
        if most is not None and sum(request.client == client for request in accepted) >= most:
            raise HttpError(429, f"{most} requests of yours are running or waiting; send more later", "busy", 1)
        if rate is None:
            return
        left, since = self._left.get(client, (float(rate), now))
        left = min(rate, left + (now - since) * rate / 60)
        if left < 1:
            wait = math.ceil((1 - left) * 60 / rate)
            raise HttpError(429, f"more than {rate} requests a minute; try again later", "rate_limit", wait)
        if len(self._left) >= MAX_BUCKETS:
            self._left = {c: (n, t) for c, (n, t) in self._left.items() if n + (now - t) * rate / 60 < rate}
        self._left[client] = left - 1, now


@dataclass(frozen=True, slots=True)
class Places:
    """How many sequences there is room for, running and waiting, and how many there are."""

    slots: int
    all: int
    taken: int
    mean_seconds: float  # that a sequence has been taking lately

    def for_another(self, client: str, count: int, accepted: Collection[InFlightRequest]) -> list[InFlightRequest]:
        """Refuse what there is no room for, unless other requests have to give way to it: those are returned."""
        if count > self.all:
            raise BadRequest(
                f"{count} answers are asked for at once; this server never has room for more than {self.all}, "
                "running and waiting"
            )
        missing = self.taken + count - self.all
        if missing <= 0:
            return []
        give_way = victims(client, count, missing, accepted)
        if not give_way:
            rounds = (self.taken + count - self.slots) / self.slots
            wait = min(60, max(1, math.ceil(rounds * self.mean_seconds)))
            raise HttpError(429, f"{self.taken} sequences are running or waiting; try again later", "busy", wait)
        return give_way


def victims(client: str, count: int, missing: int, accepted: Collection[InFlightRequest]) -> list[InFlightRequest]:
    """The requests that give way to `count` sequences of this client, for which so many places are missing; none where
    places are shared fairly. Prompts of some may still be tokenized, or their grammars compiled: that may take long."""
    held: Counter[str] = Counter()
    for request in accepted:
        held[request.client] += request.count
    own = held[client] + count
    waiting = [r for r in accepted if r.client != client and not r.begun]
    found: list[InFlightRequest] = []
    while sum(r.count for r in found) < missing:
        # Whoever gives way still has as much afterwards as the one who gets it: two clients never take turns at this.
        unfair = [r for r in waiting if r not in found and held[r.client] - r.count >= own]
        if not unfair:
            return []
        found.append(max(unfair, key=lambda r: (held[r.client], r.arrived)))
        held[found[-1].client] -= found[-1].count
    return found


def fairest(waiting: Sequence[Task], requests: Iterable[InFlightRequest]) -> Task:
    """Which sequence gets the next slot: of the client with the fewest, by its own priorities, in order of arrival."""
    order = {id(task): i for i, task in enumerate(waiting)}
    running: Counter[str] = Counter()
    candidates: list[tuple[InFlightRequest, Task]] = []
    for request in requests:
        for sequence in request.sequences:
            task = sequence.ticket.task
            if id(task) in order:
                candidates.append((request, task))
            elif not sequence.done:
                running[request.client] += 1
    if not candidates:
        return waiting[0]
    # Candidates of one client are compared by priority, of two clients never: else a number would pass the others.
    client = min(candidates, key=lambda c: (running[c[0].client], order[id(c[1])]))[0].client
    own = [c for c in candidates if c[0].client == client]
    return min(own, key=lambda c: (c[0].priority, order[id(c[1])]))[1]
