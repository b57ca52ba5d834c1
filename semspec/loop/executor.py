"""The Executor answers the requests of all live sequences. It schedules passes, not sequences.

In each tick, every runner with work makes one pass, drafts first: what they propose is scored in the same tick,
together with whatever waits already, so that sequences synchronise. If any sequence waits for a score or has a prompt
to read, the pass is ragged: prompt chunks, score rows, and one row for each sequence that is decoding. If all are only
decoding, it is a fused decode of a few tokens, so that nobody who comes to score waits longer than that; a single
sequence decodes all its tokens at once. Verification is one call for each rule.

Threads may share an executor: `lock` is held while anything changes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from semspec.errors import SemspecError
from semspec.loop.stats import Stats
from semspec.sampling.draw import logprobs_of, next_tokens
from semspec.types import (
    Acquire,
    Decode,
    DecodeOutput,
    Event,
    Request,
    Runner,
    Score,
    ScoreOutput,
    SequenceGenerator,
    Verdict,
    VerifyRequest,
)
from semspec.verify.base import collate, join_segments, verdicts

SHORT = 64  # tokens up to which a feed counts as a round's and not as a prompt

NOT_NUMBERS = (
    "the model's logits are not numbers (NaN), so no token can be drawn; its weights may be damaged, or its dtype too "
    "narrow: try --dtype float32"
)


class ScoreWork:
    """A Score, in passes of limited size."""

    def __init__(self, task: Task, request: Score) -> None:
        self.task, self.request = task, request
        self.fed = 0
        self.parts: list[ScoreOutput] = []

    @property
    def waiting(self) -> int:
        return len(self.request.tokens) - self.fed

    def next_pass(self, budget: int) -> Score:
        """The next chunk, with those of the wanted rows that are in it."""
        end = min(self.fed + budget, len(self.request.tokens))
        wanted = max(self.fed, len(self.request.tokens) - self.request.keep)
        tokens = self.request.tokens[self.fed : end]
        self.fed = end
        return replace(self.request, tokens=tokens, keep=max(0, end - wanted))

    def take(self, rows: ScoreOutput) -> None:
        if len(rows.logits) or not self.waiting:  # chunks of a prompt return nothing
            self.parts.append(rows)

    @property
    def result(self) -> ScoreOutput:
        return ScoreOutput.join(self.parts)


class DecodeWork:
    """A Decode: first its tokens are fed, then it generates."""

    def __init__(self, task: Task, request: Decode) -> None:
        self.task, self.request = task, request
        self.feed = request.tokens
        self.done: list[DecodeOutput] = []
        self.written = 0
        self.stopped = False

    @property
    def waiting(self) -> int:
        return len(self.feed)

    @property
    def finished(self) -> bool:
        return self.stopped or self.written >= self.request.n

    def next_pass(self, budget: int) -> Score:
        """The next chunk of the feed; the last row of the last chunk predicts a token."""
        tokens, self.feed = self.feed[:budget], self.feed[budget:]
        return Score(self.request.runner, self.request.slot, tokens, 0 if self.feed else 1, self.request.layers)

    def next_decode(self, n: int) -> Decode:
        return replace(self.request, tokens=self.feed, n=min(n, self.request.n - self.written))

    def take(self, out: DecodeOutput) -> None:
        self.done.append(out)
        self.written += len(out.tokens)
        self.stopped = out.tokens[-1] in self.request.stop
        self.feed = out.tokens[-1:]

    @property
    def result(self) -> DecodeOutput:
        return DecodeOutput.join(self.done)


Work = ScoreWork | DecodeWork


class Task:
    """One sequence in the Executor: its generator, what it waits for, and the events nobody has taken yet."""

    def __init__(self, decoding: SequenceGenerator, stats: Stats) -> None:
        self.decoding, self.stats = decoding, stats
        self.requests: list[Request] = []
        self.results: dict[int, Any] = {}  # request index -> result
        self.single = True  # the generator yielded one request, not a tuple
        self.events: deque[Event] = deque()
        self.done = False
        self.error: Exception | None = None

    @property
    def answered(self) -> bool:
        return len(self.results) == len(self.requests)


class Executor:
    def __init__(self, chunk: int = 8, budget: int = 512, clock: Callable[[], float] = time.perf_counter) -> None:
        self.chunk = chunk  # tokens of a fused decode while there are other sequences
        self.budget = budget  # tokens in one pass
        self.clock = clock
        self.tasks: list[Task] = []
        self._slots: deque[Task] = deque()  # waiting for slots, in order of arrival
        self._work: dict[int, list[Work]] = {}  # id of runner -> what it has to do
        self._verify_requests: list[tuple[Task, VerifyRequest]] = []
        self._discarded: deque[Task] = deque()
        self._ticking = False
        self.lock = threading.RLock()

    def submit(self, decoding: SequenceGenerator, stats: Stats) -> Task:
        """Take a sequence in. Nothing runs before the next tick."""
        task = Task(decoding, stats)
        with self.lock:
            self.tasks.append(task)
        return task

    def cancel(self, task: Task) -> None:
        """Stop a sequence wherever it is; its slots are free when this returns."""
        with self.lock:
            if not task.done:
                self._end(task)

    def discard(self, task: Task) -> None:
        """The same for destructors, which may run in the middle of a tick: waits for nothing, then it is done after."""
        self._discarded.append(task)
        if not self._ticking and self.lock.acquire(blocking=False):
            try:
                self._drop_discarded()
            finally:
                self.lock.release()

    def _drop_discarded(self) -> None:
        while self._discarded:
            self.cancel(self._discarded.popleft())

    def run(self) -> None:
        """Tick until every sequence is done."""
        while self.tasks:
            self.tick()

    def tick(self) -> None:
        """Advance every sequence as far as it goes, then make one pass on every runner that has work."""
        with self.lock:
            self._drop_discarded()
            self._ticking = True
            try:
                self._tick()
            except BaseException:
                # An interrupt may come between feeding a slot and recording it. No sequence can be trusted to go on.
                for task in list(self.tasks):
                    self._end(task, SemspecError("decoding was interrupted in the middle of a pass; ask again"))
                raise
            finally:
                self._ticking = False

    def _tick(self) -> None:
        began, busy = self.clock(), 0.0
        live = list(self.tasks)
        self._advance(live)
        while self._verify_requests:  # cheap, and what follows can still join this tick's passes
            busy += self._verify()
            self._advance(live)
        # Passes of a tick follow each other, so a sequence that is done drafting loses nothing by joining the target's
        # pass of this tick. If it waited for the next one, halves of a batch would alternate for ever, and each round
        # would cost two target passes.
        for runner in sorted(self._work, key=lambda runner: not self._drafts(runner)):
            if self._work[runner]:
                busy += self._pass(self._work[runner])
                self._advance(live)
        share = max(self.clock() - began - busy, 0.0) / max(len(live), 1)
        for task in live:
            task.stats.seconds["host"] += share

    # -- sequences

    def _advance(self, tasks: Iterable[Task]) -> None:
        ready = deque(tasks)
        while ready:
            task = ready.popleft()
            while not task.done and task.answered:
                self._resume(task)
            if not ready and self._slots and self._grant(self._slots[0]):
                ready.append(self._slots.popleft())
        if self._slots and len(self._slots) == len(self.tasks):  # no sequence is left that could free a slot
            self._end(self._slots[0], SemspecError("this needs more slots at once than there are; load more slots"))

    def _resume(self, task: Task) -> None:
        """Send a sequence its results and take its next requests."""
        results = [task.results[i] for i in range(len(task.requests))]
        answer = None if not results else results[0] if task.single else tuple(results)
        task.requests, task.results = [], {}
        try:
            asked = task.decoding.send(answer)
        except StopIteration:
            return self._end(task)
        except Exception as error:  # one sequence's failure is its own
            return self._end(task, error)
        if isinstance(asked, Event):
            task.events.append(asked)
            return
        task.single = not isinstance(asked, tuple)
        task.requests = list(asked) if isinstance(asked, tuple) else [asked]
        for request in task.requests:
            if isinstance(request, Acquire):
                self._slots.append(task)
            elif isinstance(request, VerifyRequest):
                self._verify_requests.append((task, request))
            elif isinstance(request, Score | Decode):
                work = ScoreWork(task, request) if isinstance(request, Score) else DecodeWork(task, request)
                self._work.setdefault(id(request.runner), []).append(work)
            else:
                return self._end(task, TypeError(f"a decoding generator yielded {request!r}, which is no request"))

    def _grant(self, task: Task) -> bool:
        """Give a waiting sequence all the slots it asked for, if they are free."""
        (request,) = task.requests
        assert isinstance(request, Acquire)
        needed = [sum(other is runner for other in request.runners) for runner in request.runners]
        if any(runner.free < n for runner, n in zip(request.runners, needed, strict=True)):
            return False
        task.results[0] = [runner.acquire(request.prompt) for runner in request.runners]
        return True

    def _answer(self, task: Task, request: Request, result: Any) -> None:
        if not task.done:
            task.results[next(i for i, r in enumerate(task.requests) if r is request)] = result

    def _end(self, task: Task, error: Exception | None = None) -> None:
        task.done, task.error = True, error
        self.tasks.remove(task)
        if task in self._slots:
            self._slots.remove(task)
        self._verify_requests = [(t, r) for t, r in self._verify_requests if t is not task]
        for runner, work in self._work.items():
            self._work[runner] = [w for w in work if w.task is not task]
        try:
            task.decoding.close()  # its `finally` releases the slots
        except Exception as failure:
            task.error = task.error or failure

    # -- verification

    def _verify(self) -> float:
        """Verify everything that waits, rule by rule. Returns the seconds it took."""
        began = self.clock()
        waiting, self._verify_requests = self._verify_requests, []
        groups: dict[tuple[Any, ...], list[tuple[Task, VerifyRequest]]] = {}
        for task, request in waiting:
            logits = request.rows.logits
            certain, fresh = request.draft.logits is None, request.state is None
            key = (request.rule, logits.shape[-1], logits.device, certain, fresh, id(request.protected))
            try:
                groups.setdefault(key, []).append((task, request))
            except TypeError as error:  # a rule that cannot be hashed
                self._end(task, error)
        for (rule, *_), group in groups.items():
            requests = [request for _, request in group]
            try:
                answers = join_segments(verdicts(rule.verify(collate(requests))), requests)
                for request, verdict in zip(requests, answers, strict=True):
                    self._add_logprobs(request, verdict)
            except Exception as error:  # a faulty rule fails the sequences that use it
                self._fail((task for task, _ in group), error)
                continue
            for (task, request), verdict in zip(group, answers, strict=True):
                drafted, vocab = len(request.draft.tokens), request.rows.logits.shape[-1]
                if 0 <= verdict.accepted <= drafted and 0 <= verdict.next < vocab:
                    self._answer(task, request, verdict)
                elif verdict.next < 0:
                    self._end(task, SemspecError(NOT_NUMBERS))
                else:
                    what = f"accepted {verdict.accepted} of {drafted}, then token {verdict.next}"
                    self._end(task, SemspecError(f"verifier {rule.name!r} gave an impossible verdict: {what}"))
        seconds = self.clock() - began
        for task, _ in waiting:
            task.stats.seconds["judge"] += seconds / len(waiting)
        return seconds

    @staticmethod
    def _add_logprobs(request: VerifyRequest, verdict: Verdict) -> None:
        if request.logprobs is not None:
            tokens = [*request.draft.tokens[: verdict.accepted], verdict.next]
            verdict.logprobs = logprobs_of(request.rows.logits[: len(tokens)], tokens, request.logprobs)

    # -- passes

    def _drafts(self, runner: int) -> bool:
        return any(item.request.drafting for item in self._work[runner])

    def _pass(self, work: list[Work]) -> float:
        """One pass on one runner. Returns the seconds it took."""
        runner = work[0].request.runner
        reading = [w for w in work if isinstance(w, ScoreWork) or w.waiting > self.chunk]
        began = self.clock()
        served = self._ragged_pass(runner, work) if reading else self._decode(runner, work)
        seconds = self.clock() - began
        for item in served:
            item.task.stats.seconds["draft" if item.request.drafting else "score"] += seconds / len(served)
        return seconds

    def _ragged_pass(self, runner: Runner, work: list[Work]) -> list[Work]:
        """Prompt chunks, score rows and one row for each decoding sequence, up to the budget."""
        short = [w for w in work if w.waiting <= SHORT]
        prompts = [w for w in work if w.waiting > SHORT]
        budget, chunks = self.budget, []
        for item in short + prompts:  # short ones go first, but leave a share to prompts
            limit = budget - (self.budget // 4 if prompts and item.waiting <= SHORT else 0)
            if limit > 0:
                chunk = item.next_pass(limit)
                budget -= len(chunk.tokens)
                chunks.append((item, chunk))
        try:
            rows = runner.score([chunk for _, chunk in chunks])
            decoding = [(w, r) for (w, p), r in zip(chunks, rows, strict=True) if isinstance(w, DecodeWork) and p.keep]
            outputs = next_tokens([w.request for w, _ in decoding], [r for _, r in decoding])
        except Exception as error:
            self._fail((item.task for item, _ in chunks), error)
            return [item for item, _ in chunks]
        for (item, chunk), row in zip(chunks, rows, strict=True):
            if chunk.keep and not item.request.drafting:
                item.task.stats.target_passes += 1
            if isinstance(item, ScoreWork):
                item.take(row)
                if not item.waiting:
                    self._finish(runner, item)
        for (item, _), out in zip(decoding, outputs, strict=True):
            if self._broken(item, out):
                continue
            item.take(out)
            if item.finished:
                self._finish(runner, item)
        return [item for item, _ in chunks]

    def _decode(self, runner: Runner, work: list[Work]) -> list[Work]:
        """All sequences decode a few tokens; a single one decodes all it wants."""
        decodes = [w for w in work if isinstance(w, DecodeWork)]
        most = self.chunk if len(self.tasks) > 1 else max(w.request.n for w in decodes)
        try:
            out = runner.decode([w.next_decode(most) for w in decodes])
        except Exception as error:
            self._fail((w.task for w in decodes), error)
            return list(decodes)
        for item, result in zip(decodes, out, strict=True):
            if self._broken(item, result):
                continue
            item.take(result)
            if not item.request.drafting:
                item.task.stats.target_passes += len(result.tokens)
            if item.finished:
                self._finish(runner, item)
        return list(decodes)

    def _broken(self, item: DecodeWork, out: DecodeOutput) -> bool:
        """End a sequence whose model gave NaN for logits: no token can be drawn from them."""
        if min(out.tokens) < 0:
            self._end(item.task, SemspecError(NOT_NUMBERS))
        return min(out.tokens) < 0

    def _finish(self, runner: Runner, item: Work) -> None:
        self._work[id(runner)].remove(item)
        self._answer(item.task, item.request, item.result)

    def _fail(self, tasks: Iterable[Task], error: Exception) -> None:
        """A call that failed ends the sequences that were in it, and no other."""
        for task in list(tasks):
            if not task.done:
                self._end(task, error)
