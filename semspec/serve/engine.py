"""The one thread that decodes. It owns the pair; the rest of the server talks to it through queues.

Whatever a request wants of the pair is put into the engine's inbox and done between two ticks of the Executor, so
nothing needs a lock. What comes out of a tick goes to the event loop in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

from semspec.errors import SemspecError
from semspec.model.prefix_cache import PrefixCache
from semspec.options import Options
from semspec.pair import Pair
from semspec.serve.deltas import Delta, Finished, delta_of
from semspec.serve.http_errors import HttpError
from semspec.serve.in_flight import InFlightRequest, SequenceState
from semspec.types import Acquire

log = logging.getLogger("semspec.serve")
State = Literal["loading", "ready", "draining", "failed", "stopped"]
Asking = Sequence[tuple[list[int], Options]]
WARM_UP = 24  # tokens written before the first request comes


def remembering(pair: Pair) -> Pair:
    """The same pair, with slots that remember the prompts they held."""
    pair.target = PrefixCache(pair.target)
    pair.draft = None if pair.draft is None else PrefixCache(pair.draft)
    return pair


class Engine:
    def __init__(
        self,
        load: Callable[[], Pair],
        queue: int = 256,
        on_end: Callable[[Finished], None] = lambda ended: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load, self.queue, self.on_end, self.clock = load, queue, on_end, clock
        self.state: State = "loading"
        self.error: BaseException | None = None
        self.pair: Pair | None = None
        self.slots = 0
        self.alone = 0.0  # seconds the target takes for a token by itself, as measured at the start
        self.live = 0  # sequences taken in and not ended; counted on the event loop
        self._usual = 1.0  # seconds a sequence takes, lately
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._flights: list[InFlightRequest] = []
        self._thread = threading.Thread(target=self._run, name="semspec-engine", daemon=True)

    # -- the event loop's side

    def start(self) -> None:
        """Begin to load. Called on the event loop, to which everything is handed over."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def drain(self) -> None:
        """Take nothing in any more; what runs goes on."""
        if self.state in ("loading", "ready"):
            self.state = "draining"

    def fail_all(self, why: str) -> None:
        """End whatever runs, with an error that the clients see."""
        self._inbox.put(partial(self._fail_all, why))

    def stop(self, timeout: float = 10.0) -> None:
        self.drain()
        self._inbox.put(self._halt)
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def running(self) -> int:
        """Slots in use."""
        return self.slots - self.pair.target.free if self.pair else 0

    @property
    def waiting(self) -> int:
        return max(0, self.live - self.slots)

    def admit(self, count: int) -> None:
        """Refuse what cannot be taken in now."""
        if self.state != "ready":
            words = {"loading": "the model is being loaded", "draining": "the server is shutting down"}
            said = words.get(self.state, "the server has failed and has to be started again")
            raise HttpError(503, f"{said}; try again in a moment", self.state, retry_after=2)
        if self.live + count > self.slots + self.queue:
            rounds = (self.live + count - self.slots) / self.slots
            wait = min(60, max(1, math.ceil(rounds * self._usual)))
            raise HttpError(429, f"{self.live} sequences are being answered or wait; try again later", "busy", wait)

    async def submit(self, asking: Asking, deadline: float) -> InFlightRequest:
        """Take a request in. When this returns, its options are known to be good and its sequences wait for slots."""
        self.admit(len(asking))
        now = self.clock()
        flight = InFlightRequest(self, now, now + deadline, len(asking))
        self.live += flight.count
        self._inbox.put(partial(self._take_in, flight, asking))
        try:
            await flight.taken_in
        except asyncio.CancelledError:
            self.abort(flight)
            raise
        return flight

    def abort(self, flight: InFlightRequest) -> None:
        """Nobody wants this any more: its slots are free before the next pass."""
        self._inbox.put(partial(self._end, flight, None))

    # -- the thread's side

    def _run(self) -> None:
        try:
            self.pair = self._load()
            self.slots = self.pair.target.free
            self._warm_up(self.pair)
            if self.state == "loading":
                self.state = "ready"
            while self.state != "stopped":
                self._obey(wait=not self._flights)
                if self._flights:
                    self._tick(self.pair)
        except BaseException as error:
            log.error("the engine has failed", exc_info=True)
            self.error, self.state = error, "failed"
            for flight in list(self._flights):
                self._end(flight, SemspecError("the server has failed"))
            while self.state != "stopped":  # nobody who still asks is left without an answer
                self._obey(wait=True)

    def _obey(self, wait: bool) -> None:
        """Do what the inbox says; with nothing else to do, wait for it."""
        if wait:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _fail_all(self, why: str) -> None:
        for flight in list(self._flights):
            self._end(flight, HttpError(503, why, "shutting_down"))

    def _halt(self) -> None:
        self._fail_all("the server has been shut down")
        self.state = "stopped"

    def _warm_up(self, pair: Pair) -> None:
        """The first passes are slow; nobody should wait for them. The last of these says what a token costs."""
        prompt = [min(1, pair.target.vocab - 1)] * 8
        most = min(WARM_UP, pair.target.capacity - len(prompt))
        for verifier in ("exact", "none", "none"):
            options = Options(verifier=verifier, max_new_tokens=most, ignore_eos=True)
            (ticket,) = pair.submit([(prompt, options)])
            began = time.perf_counter()
            pair.executor.run()
            self.alone = (time.perf_counter() - began) / most
            if ticket.task.error is not None:
                raise ticket.task.error

    def _take_in(self, flight: InFlightRequest, asking: Asking) -> None:
        try:
            if self.pair is None or self.error is not None:
                raise SemspecError("the server has failed")
            tickets = self.pair.submit(asking)
        except Exception as error:
            self._post(partial(self._answer_submit, flight, error))
            return
        flight.sequences = [SequenceState(ticket, i) for i, ticket in enumerate(tickets)]
        self._flights.append(flight)
        self._post(partial(self._answer_submit, flight, None))

    def _tick(self, pair: Pair) -> None:
        began = self.clock()
        try:
            pair.executor.tick()
        except Exception:  # the Executor has ended all its sequences; new ones may fare better
            log.error("a tick failed", exc_info=True)
        now = self.clock()
        news: list[tuple[InFlightRequest, Delta | Finished | Exception]] = []
        for flight in list(self._flights):
            news += self._look_after(pair, flight, began, now)
        if news:
            self._post(partial(self._deliver, news))

    def _look_after(
        self, pair: Pair, flight: InFlightRequest, began: float, now: float
    ) -> list[tuple[InFlightRequest, Any]]:
        """What the last tick, which took from `began` to `now`, brought for a request."""
        news: list[tuple[InFlightRequest, Any]] = []
        for sequence in flight.sequences:
            if sequence.done:
                continue
            task = sequence.ticket.task
            if sequence.began is None and task.requests and not isinstance(task.requests[0], Acquire):
                sequence.began = began
            for event in sequence.ticket.collect():
                sequence.began, sequence.first = sequence.began or began, sequence.first or now
                news.append((flight, delta_of(pair, sequence.choice, event, sequence.written)))
                sequence.written += len(event.tokens)
            if task.error is not None:
                log.error("a sequence failed: %s", type(task.error).__name__, exc_info=task.error)
                self._end(flight, task.error)
                return []
            if task.done:
                news.append((flight, self._close(flight, sequence, now)))
        if now > flight.deadline and not all(sequence.done for sequence in flight.sequences):
            self._end(flight, HttpError(504, "the answer was not complete at the request's deadline", "deadline"))
            return []
        if all(sequence.done for sequence in flight.sequences):
            self._flights.remove(flight)
        return news

    def _close(
        self, flight: InFlightRequest, sequence: SequenceState, now: float, outcome: str | None = None
    ) -> Finished:
        """Count a sequence that has come to its end, whatever that was."""
        sequence.done = True
        ended = Finished.of(sequence.ticket, sequence.choice, outcome)
        ended.queued = (sequence.began or now) - flight.arrived
        ended.first_token = (sequence.first or now) - flight.arrived
        ended.seconds = now - flight.arrived
        self._post(partial(self._counted, ended))
        return ended

    def _end(self, flight: InFlightRequest, error: Exception | None) -> None:
        """Cancel what remains of a request. Its slots are free when this returns."""
        if flight not in self._flights:
            return
        assert self.pair is not None
        self._flights.remove(flight)
        outcome = "aborted" if error is None else "deadline" if getattr(error, "status", 0) == 504 else "error"
        for sequence in flight.sequences:
            if not sequence.done:
                self.pair.executor.cancel(sequence.ticket.task)
                sequence.ticket.collect()
                self._close(flight, sequence, self.clock(), outcome)
        if error is not None:
            self._post(partial(self._deliver, [(flight, error)]))

    # -- from the thread to the event loop

    def _post(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # a loop that is closed wants to know nothing any more
            self._loop.call_soon_threadsafe(call)

    def _answer_submit(self, flight: InFlightRequest, error: Exception | None) -> None:
        if error is not None:
            self.live -= flight.count
        if flight.taken_in.done():  # its client has left in the meantime
            return
        if error is None:
            flight.taken_in.set_result(None)
        else:
            flight.taken_in.set_exception(error)

    @staticmethod
    def _deliver(news: list[tuple[InFlightRequest, Delta | Finished | Exception]]) -> None:
        for flight, message in news:
            flight.messages.put_nowait(message)

    def _counted(self, ended: Finished) -> None:
        self.live -= 1
        self._usual += 0.1 * (ended.seconds - ended.queued - self._usual)
        self.on_end(ended)
