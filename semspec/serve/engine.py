"""The one thread that decodes. It owns the pair; the rest of the server talks to it through queues.

Calls from the event loop are put into the engine's inbox and made between two ticks of the Executor, so nothing needs
a lock. What comes out of a tick goes to the event loop in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal

from semspec.errors import BadRequest, SemspecError
from semspec.loop.work import Task
from semspec.model.threads import busy
from semspec.options import Options
from semspec.pair import Pair
from semspec.serve import memory
from semspec.serve.admission import Admission, Places, fairest
from semspec.serve.deltas import Delta, Finished, delta_of, special_tokens
from semspec.serve.http_errors import HttpError, gave_way, too_late
from semspec.serve.in_flight import InFlightRequest, SequenceState
from semspec.serve.limits import Limits
from semspec.serve.warm_up import measure_budget, warm_up

log = logging.getLogger("semspec.serve")
State = Literal["loading", "ready", "draining", "failed", "stopped"]
Prompts = Sequence[tuple[list[int], Options]]
News = list[tuple[InFlightRequest, Delta | Finished | Exception]]
STOP_SECONDS = 10.0  # in which the pass under way has to end


class Engine:
    def __init__(
        self,
        load: Callable[[], Pair],
        limits: Limits | None = None,
        on_finish: Callable[[Finished], None] = lambda finished: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load, self.on_finish, self.clock = load, on_finish, clock
        self.on_loaded: Callable[[Pair], None] = lambda pair: None  # before anybody is told that it is ready
        self.limits = limits or Limits()
        self.queue, self.draft_tokens = self.limits.queue, self.limits.draft_tokens
        self.admission = Admission(self.limits)
        self.trim = memory.Trimmer()
        self.state: State = "loading"
        self.error: BaseException | None = None
        self.pair: Pair | None = None
        self.slots = 0
        self.url = ""  # where it is served
        self.target_seconds_per_token = 0.0  # without drafts, as measured at the start
        self.busy = ""  # a warning, if the machine was too busy to measure anything
        self.live = 0  # sequences accepted and not ended; counted on the event loop
        self._mean_seconds = 1.0  # that a sequence has been taking lately
        self.accepted: set[InFlightRequest] = set()  # the event loop's side
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._requests: list[InFlightRequest] = []  # the thread's side
        self._specials: dict[int, str] = {}
        self._thread = threading.Thread(target=self._run, name="semspec-engine", daemon=True)

    # -- the event loop's side

    def start(self) -> None:
        """Begin to load. Called on the event loop, to which everything is handed over."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def _become_ready(self) -> None:
        """What the process has now, and what it will have at most, is said once."""
        if self.state == "loading":
            assert self.pair is not None
            has = memory.expected(self.pair, self.draft_tokens)
            self.trim.at_most_mib = has.get("at_most_mib")
            self.state = "ready"
            log.info("ready", extra={"fields": {"url": self.url, "slots": self.slots, **has}})

    def drain(self) -> None:
        """Accept nothing any more; what runs goes on."""
        if self.state in ("loading", "ready"):
            self.state = "draining"

    def fail_all(self, why: str) -> None:
        """End whatever was accepted, with an error that its clients get at once, whatever the thread is doing."""
        for request in list(self.accepted):
            error = HttpError(503, why, "shutting_down")
            if request.submitted is not None and not request.submitted.done():
                request.submitted.set_exception(error)
            request.messages.put_nowait(error)

    def stop(self) -> None:
        """End the thread; while a model loads it does not listen, and is not waited for."""
        self.drain()
        self._inbox.put(self._stop)
        if self.pair is not None or self.error is not None:
            self._thread.join(STOP_SECONDS)

    @property
    def stopped(self) -> bool:
        return not self._thread.is_alive()

    @property
    def running(self) -> int:
        """Slots in use."""
        return self.slots - self.pair.target.free if self.pair else 0

    @property
    def waiting(self) -> int:
        return max(0, self.live - self.slots)

    @property
    def idle(self) -> bool:
        """Whether every answer has been generated and handed to its client."""
        return not (self.live or self.accepted)

    def check_ready(self) -> None:
        if self.state != "ready":
            reasons = {"loading": "the model is being loaded", "draining": "the server is shutting down"}
            reason = reasons.get(self.state, "the server has failed and has to be started again")
            raise HttpError(503, f"{reason}; try again in a moment", self.state, retry_after=2)

    @property
    def cache_usage(self) -> float:
        """The share of the cache's tokens that requests hold; beginnings that they share count for each."""
        if self.pair is None or not self.slots:
            return 0.0
        running = [s for r in self.accepted for s in r.sequences if s.started is not None and not s.done]
        held = sum(len(s.ticket.job.prompt) + s.written for s in running)
        return min(1.0, held / memory.cache_tokens(self.pair.target, self.slots))

    def check_capacity(self, count: int = 1, client: str = "") -> list[InFlightRequest]:
        """Refuse what cannot be accepted now. Where there is no room, others may have to give way to this one."""
        self.check_ready()
        places = Places(self.slots, self.slots + self.queue, self.live, self._mean_seconds)
        return places.for_another(client, count, self.accepted)

    def accept(
        self, count: int, deadline: float, client: str = "", key: str | None = None, priority: int = 0
    ) -> InFlightRequest:
        """Make room for so many sequences, before any work is done for them. Give it back with `release`."""
        give_way = self.check_capacity(count, client)
        now = self.clock()
        self.admission.check(client, now, self.accepted)
        for other in give_way:
            self._drive_out(other)
        request = InFlightRequest(self, now, now + deadline, count, client, key, priority)
        self.accepted.add(request)
        self.live += count
        return request

    def _drive_out(self, request: InFlightRequest) -> None:
        request.gave_way = True
        self.accepted.discard(request)
        self.live -= request.count  # at once, or the next to come would drive out another
        if request.submitted is not None:
            self._inbox.put(partial(self._end, request, gave_way()))
        elif request.preparing is not None:
            request.preparing.cancel()  # who prepares it says why

    async def submit(self, request: InFlightRequest, prompts: Prompts) -> None:
        """When this returns, the options are known to be good and the sequences wait for slots."""
        self.check_ready()
        request.submitted = self._loop.create_future()
        self._inbox.put(partial(self._submit, request, prompts))
        await request.submitted

    def release(self, request: InFlightRequest) -> None:
        """It is answered, or nobody wants it any more: then its slots are free before the next pass."""
        if request not in self.accepted:
            return
        self.accepted.remove(request)
        if request.submitted is None:
            self.live -= request.count
        elif request.finished < request.count:
            self._inbox.put(partial(self._end, request, None))

    # -- the thread's side

    def _run(self) -> None:
        try:
            self.pair = self._load()
            self.slots = self.pair.target.free
            self._specials = special_tokens(self.pair)
            self.pair.executor.choose_by(self._choose)
            self.busy = busy()
            self.target_seconds_per_token = warm_up(self.pair)
            measure_budget(self.pair)
            self.on_loaded(self.pair)
            self._post(self._become_ready)
            while self.state != "stopped":
                self.trim(idle=not self._requests)
                self._obey(wait=not self._requests)
                if self._requests:
                    self._tick(self.pair)
        except BaseException as error:
            if not (self.state == "loading" and isinstance(error, SemspecError)):  # those are told by who started it
                log.error("the engine has failed", exc_info=True)
            self.error, self.state = error, "failed"
            for request in list(self._requests):
                self._end(request, SemspecError("the server has failed"))
            while self.state != "stopped":  # whoever still asks gets an answer
                self._obey(wait=True)

    def _obey(self, wait: bool) -> None:
        """Make the calls in the inbox; with nothing else to do, wait a while for one."""
        with contextlib.suppress(Empty):
            if wait:
                self._inbox.get(timeout=memory.TRIM_SECONDS)()
            while True:
                self._inbox.get_nowait()()

    def _stop(self) -> None:
        for request in list(self._requests):
            self._end(request, HttpError(503, "the server has been shut down", "shutting_down"))
        self.state = "stopped"

    def _submit(self, request: InFlightRequest, prompts: Prompts) -> None:
        try:
            if self.pair is None or self.error is not None:
                raise SemspecError("the server has failed")
            tickets = self.pair.submit(prompts, request.grammar)
        except Exception as error:
            self._post(partial(self._answer_submit, request, error))
            return
        before: object = None
        for i, (ticket, (prompt, _)) in enumerate(zip(tickets, prompts, strict=True)):
            request.sequences.append(SequenceState(ticket, i, prompt is not before))
            before = prompt
        self._requests.append(request)
        self._post(partial(self._answer_submit, request, None))

    def _choose(self, waiting: Sequence[Task]) -> Task:
        assert self.pair is not None
        return fairest(waiting, self._requests) if self.pair.target.free else waiting[0]

    def _tick(self, pair: Pair) -> None:
        start = self.clock()
        try:
            pair.executor.tick()
        except Exception:  # the Executor has ended all its sequences; new ones may fare better
            log.error("a tick failed", exc_info=True)
        end = self.clock()
        news: News = []
        for request in list(self._requests):
            try:
                news += self._collect(pair, request, start, end)
            except Exception as error:  # of its text or counts: nobody else's business
                log.error("an answer failed: %s", type(error).__name__, exc_info=True)
                self._end(request, error)
        if news:
            self._post(partial(self._deliver, news))

    def _collect(self, pair: Pair, request: InFlightRequest, start: float, end: float) -> News:
        """What the last tick brought for a request."""
        news: News = []
        for sequence in request.sequences:
            if sequence.done:
                continue
            task = sequence.ticket.task
            if sequence.started is None and task.started:
                sequence.started = start
            for event in sequence.ticket.collect():
                forms = request.prompt_forms
                delta = delta_of(pair, sequence.choice, event, sequence.written, self._specials, forms)
                delta.stopped_by = sequence.ticket.text.stopped_by if event.finish_reason == "stop" else None
                news.append((request, delta))
                sequence.count(event, start, end)
            if task.error is not None:
                if not isinstance(task.error, BadRequest):  # a client's own contradiction is no failure of ours
                    log.error("a sequence failed: %s", type(task.error).__name__, exc_info=task.error)
                self._end(request, task.error)
                return []
            if task.done:
                news.append((request, self._close(request, sequence, end)))
        if all(sequence.done for sequence in request.sequences):
            self._requests.remove(request)
        elif end > request.deadline:
            self._end(request, too_late())
            return []
        return news

    def _close(
        self, request: InFlightRequest, sequence: SequenceState, now: float, outcome: str | None = None
    ) -> Finished:
        """Count a sequence that has ended, whatever the outcome."""
        finished = sequence.close(request, now, outcome)
        self._post(partial(self._count, request, finished))
        return finished

    def _end(self, request: InFlightRequest, error: Exception | None) -> None:
        """Cancel what remains of a request. Its slots are free when this returns."""
        if request not in self._requests:
            return
        assert self.pair is not None
        self._requests.remove(request)
        outcome = "aborted" if error is None else "deadline" if getattr(error, "status", 0) == 504 else "error"
        for sequence in request.sequences:
            if not sequence.done:
                self.pair.executor.cancel(sequence.ticket.task)
                sequence.ticket.collect()
                self._close(request, sequence, self.clock(), outcome)
        if error is not None:
            self._post(partial(self._deliver, [(request, error)]))

    # -- from the thread to the event loop

    def _post(self, call: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(call)

    def _answer_submit(self, request: InFlightRequest, error: Exception | None) -> None:
        if error is not None and not request.gave_way:
            self.live -= request.count
        assert request.submitted is not None
        if request.submitted.done():  # its client has left, or the server is ending
            return
        if error is None:
            request.submitted.set_result(None)
        else:
            request.submitted.set_exception(error)

    @staticmethod
    def _deliver(news: News) -> None:
        for request, message in news:
            request.messages.put_nowait(message)

    def _count(self, request: InFlightRequest, finished: Finished) -> None:
        self.live -= not request.gave_way
        self._mean_seconds += 0.1 * (finished.seconds - finished.queued - self._mean_seconds)
        self.on_finish(finished)
