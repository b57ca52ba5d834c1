"""The Executor answers the requests of all live sequences. It schedules passes, not sequences.

In each tick, every runner with work makes one pass, drafts first: their proposals are scored in the same tick, with
whatever is waiting already, so that sequences synchronise. If any sequence waits for a score or is in prefill, the pass
is ragged: prompt chunks, score rows, and one row per decoding sequence. If all are decoding, it is a fused decode of a
few tokens, so that no score waits longer; a single sequence decodes all its tokens at once. Rules verify in one call.
A draft model on another device may make its pass beside the target's instead (side_by_side.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from semspec.errors import BadRequest, SemspecError
from semspec.loop import scored
from semspec.loop.batch_length import BatchLengths
from semspec.loop.costs import PassCosts
from semspec.loop.live_tasks import LiveTasks
from semspec.loop.passes import NO_ROOM, ROUNDS, Growth, drafts, fitting, needs_ragged_pass, ragged, youngest
from semspec.loop.rule_graphs import RuleGraphs
from semspec.loop.side_by_side import Alternation, Pass, SideBySide, beside, is_beside
from semspec.loop.stopwatch import Stopwatch
from semspec.loop.verifying import verdicts
from semspec.loop.work import DecodeWork, GrowWork, Part, RecomputeWork, ScoreWork, Task, Work, work_of
from semspec.sampling.draw import NOTHING, next_tokens
from semspec.sampling.processors import no_token
from semspec.types import (
    Acquire,
    Decode,
    DecodeOutput,
    Event,
    Grow,
    Request,
    Runner,
    Score,
    Verdict,
    VerifyRequest,
)

UNDER_WAY = "a pass is under way: a rule or referee may not use the pair that calls it"
PASSES = (Score, Decode, Grow)
Served = list[tuple[Work | RecomputeWork, Part]]  # what a pass has done


class Executor(LiveTasks):
    def __init__(self, chunk: int = 8, budget: int = 512, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.chunk = chunk  # tokens of a fused decode while there are other sequences
        self.budget = budget  # tokens in one pass; of rounds, up to twice as many (passes.ragged)
        self.growth = Growth()  # makes prompt chunks smaller far into a long text, where that was measured
        self.clock = clock
        self.rules = RuleGraphs()
        self.costs = PassCosts()
        self.lengths = BatchLengths(self.costs)
        self.alternation = Alternation()
        self._side_by_side = SideBySide(clock)
        self._waiting: deque[Task] = deque()  # for slots, in order of arrival
        self._work: dict[int, list[Work]] = {}  # id of runner -> what it has to do
        self._verify_requests: list[tuple[Task, VerifyRequest]] = []

    def tick(self) -> None:
        """Advance every sequence as far as it goes, then make one pass on every runner that has work."""
        if is_beside():  # would wait for the lock, whose owner waits for this pass
            raise SemspecError(UNDER_WAY)
        with self.exclusive():
            if self._busy > 1:
                raise SemspecError(UNDER_WAY)
            self._drop_discarded()
            try:
                self._tick()
            except BaseException:
                # An interrupt may come between feeding a slot and recording it: no sequence is in a known state.
                for task in list(self.tasks):
                    self._end(task, SemspecError("decoding was interrupted in the middle of a pass; ask again"))
                raise

    def _tick(self) -> None:
        watch, busy, verifying = Stopwatch(self.clock), 0.0, 0.0
        live = list(self.tasks)
        self.costs.begin(sum(1 for task in live if task.slots or not task.requests))  # with a slot, or new
        self.alternation.begin()
        self._advance(live)
        while self._verify_requests:  # cheap, and what follows can still join this tick's passes
            seconds, captured = self._verify()
            busy, verifying = busy + seconds + captured, verifying + seconds
            self._advance(live)
        stuck, moved = list[Runner](), False
        for some in self._turns():
            stuck += [work[0].request.runner for work in some]
            taken = self._passes(some)
            moved |= taken is not None
            busy += taken or 0.0
            self._advance(live)
        if not moved and (task := youngest(stuck, self.tasks)):
            self._end(task, SemspecError(NO_ROOM))
        seconds, captured = watch.read()
        host = max(seconds + captured - busy, 0.0)
        self.costs.end(host + verifying)
        share = host / max(len(live), 1)
        for task in live:
            task.stats.seconds["host"] += share
        if not captured:  # each way has sizes of its own, and the first of them would decide
            self.alternation.end(seconds)

    def cancel(self, task: Task) -> None:
        if is_beside():  # as from inside its own round
            self._discarded.append(task)
        else:
            super().cancel(task)

    # -- sequences

    def _advance(self, tasks: Iterable[Task]) -> None:
        # By turns: all have told what came of their drafts before anybody asks for the next lengths of all.
        ready = deque(tasks)
        while ready:
            task = ready.popleft()
            if not task.done and task.answered:
                self._resume(task)
                ready.append(task)
            if not ready and self._waiting and self._grant(chosen := self._choose(self._waiting)):
                ready.append(chosen)
        if self._waiting and len(self._waiting) == len(self.tasks):  # no sequence is left that could free a slot
            error = SemspecError("this needs more slots at once than there are; load the models with more slots")
            self._end(self._waiting[0], error)

    def _resume(self, task: Task) -> None:
        """Send a sequence its results and take its next requests."""
        answer = None
        if task.requests:
            results = task.results
            answer = results[0] if task.single else tuple(results[i] for i in range(len(task.requests)))
            task.requests, task.results = [], {}
        try:
            yielded = task.decoding.send(answer)
        except StopIteration:
            return self._end(task)
        except Exception as error:  # fails this sequence only
            return self._end(task, error)
        if isinstance(yielded, Event):
            task.events.append(yielded)
            return
        task.single = not isinstance(yielded, tuple)
        task.requests = list(yielded) if isinstance(yielded, tuple) else [yielded]
        for request in task.requests:
            if isinstance(request, Acquire):
                self._waiting.append(task)
            elif isinstance(request, VerifyRequest):
                self._verify_requests.append((task, request))
            elif isinstance(request, PASSES):
                self._work.setdefault(id(request.runner), []).append(work_of(task, request))
            else:
                return self._end(task, TypeError(f"a decoding generator yielded {request!r}, which is no request"))

    def _grant(self, task: Task) -> bool:
        """Give a waiting sequence all the slots it requested, if they are free; False: it has to wait."""
        (request,) = task.requests
        assert isinstance(request, Acquire)
        needed = [sum(other is runner for other in request.runners) for runner in request.runners]
        if any(runner.free < n for runner, n in zip(request.runners, needed, strict=True)):
            return False
        prompts, salt = request.prompts or [()] * len(needed), request.salt
        if not all(runner.can_admit(prompt, salt) for runner, prompt in zip(request.runners, prompts, strict=True)):
            return False
        slots: list[int] = []
        try:
            for runner, prompt in zip(request.runners, prompts, strict=True):
                slots.append(runner.acquire(prompt, salt))
        except BaseException as error:
            for runner, slot in zip(request.runners, slots, strict=False):
                runner.release(slot)
            if not isinstance(error, Exception):
                raise
            self._end(task, error)
            return True
        self._waiting.remove(task)
        task.results[0] = slots
        task.slots, task.started = list(zip(request.runners, slots, strict=True)), True
        task.prompt = len(prompts[0]) if prompts else 0  # what drafts without a model asks for no slot
        return True

    def _answer(self, task: Task, request: Request, result: Any) -> None:
        if not task.done:
            at = 0 if task.single else next(i for i, r in enumerate(task.requests) if r is request)
            task.results[at] = result

    def _free(self, task: Task) -> None:
        if task in self._waiting:
            self._waiting.remove(task)
        self._verify_requests = [(t, r) for t, r in self._verify_requests if t is not task]
        for runner, work in self._work.items():
            self._work[runner] = [w for w in work if w.task is not task]
        sound = task.error is None or isinstance(task.error, BadRequest)  # what was computed
        if not sound and getattr(task.decoding, "gi_frame", None):  # else it has released its slots itself
            for owner, slot in task.slots:  # what was computed may be the cause, such as NaN: no cache may keep it
                owner.truncate(slot, 0)
        if task.requests and isinstance(task.requests[0], Acquire):  # granted, and not told yet
            for owner, slot in task.slots:
                owner.release(slot)
        try:
            task.decoding.close()  # its `finally` releases the slots
        except Exception as failure:
            task.error = task.error or failure

    # -- verification

    def _verify(self) -> tuple[float, float]:
        """Verify all waiting drafts, rule by rule. Returns the seconds it took, without captures and of captures."""
        watch = Stopwatch(self.clock)
        waiting, self._verify_requests = self._verify_requests, []
        for task, request, answer in verdicts(self.rules, waiting):
            if isinstance(answer, Verdict):
                self._answer(task, request, answer)
            else:
                self._end(task, answer)
        seconds, captured = watch.read()
        for task, _ in waiting:
            task.stats.seconds["verify"] += seconds / len(waiting)
            task.stats.seconds["capture"] += captured / len(waiting)
        return seconds, captured

    # -- passes

    def _turns(self) -> Iterator[list[list[Work]]]:
        """The work of every runner, drafts first; together that of two which make their passes beside each other."""
        # A sequence that has its draft joins the target's pass of this tick. If it waited for the next tick, two halves
        # of a batch would alternate for ever, and each round would cost two target passes: too many on one device.
        done = set[int]()  # ids of runners, as in _work
        for key in sorted(self._work, key=lambda key: not drafts(self._work[key])):
            if key in done or not (work := self._work[key]):
                continue
            target = beside(work)
            halves = target and self.alternation.halves(work, target, self._work.get(id(target), []), self.tasks)
            done |= {id(target)} if halves else set()
            yield [some for some in halves if some] if halves else [work]

    def _passes(self, some: list[list[Work]]) -> float | None:
        """A pass on each of these runners. Returns the seconds they took; None: no room for any of this."""
        watch = Stopwatch(self.clock)
        all_served, shares = self._side_by_side.make([self._pass(work) for work in some])
        seconds, captured = watch.read()
        for served, share in zip(all_served, shares, strict=True):
            if not served:
                continue
            parts, live = [part for _, part in served], [item.request for item, _ in served if not item.task.done]
            made = self.costs.drafted if drafts(item for item, _ in served) else self.costs.passed
            told = None if captured else share * seconds  # it was made twice, and the device may have waited
            made(parts, told, sum(each.runner.length(each.slot) for each in live))
            for item, _ in served:
                item.task.stats.seconds["draft" if item.request.drafting else "score"] += share * seconds / len(served)
                item.task.stats.seconds["capture"] += share * captured / len(served)
        return None if all(served is None for served in all_served) else seconds + captured

    def _pass(self, work: list[Work]) -> Pass[Served | None]:
        runner = work[0].request.runner
        if not (work := fitting(runner, work, self.tasks)):
            return None
        feeding = [item for item in work if needs_ragged_pass(runner, item, self.chunk)]
        feeding = work if feeding and not drafts(work) else feeding  # in one pass, which reads the weights once
        served = (yield from self._ragged_pass(runner, feeding)) if feeding else []
        left = [item for item in work if item not in feeding and not item.task.done]
        if decoding := [item for item in left if isinstance(item, DecodeWork)]:
            served += yield from self._decode(runner, decoding)  # in the ragged pass it would get one token
        if growing := [item for item in left if isinstance(item, GrowWork)]:
            served += yield from self._grow(runner, growing)
        return served

    def _ragged_pass(self, runner: Runner, work: list[Work]) -> Pass[Served]:
        chunks = ragged(runner, work, self.budget, self.growth)
        try:
            rows = yield partial(scored.score, runner, [chunk for _, chunk in chunks])
            decoding = [
                (w, r) for (w, p), r in zip(chunks, rows, strict=True) if isinstance(w, DecodeWork) and p.logits_to_keep
            ]
            outputs = next_tokens([w.request for w, _ in decoding], [r for _, r in decoding])
        except Exception as error:
            self._fail((item.task for item, _ in chunks), error)
            return []
        for (item, chunk), row in zip(chunks, rows, strict=True):
            if not item.request.drafting and not isinstance(item, RecomputeWork):
                item.task.stats.target_passes += chunk.logits_to_keep > 0
                unread = item.task.prompt - (runner.length(chunk.slot) - len(chunk.tokens))  # before this pass
                item.task.stats.cached_tokens += max(min(row.cached, unread), 0)
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
        return list[tuple[Work | RecomputeWork, Part]](chunks)

    def _decode(self, runner: Runner, decodes: list[DecodeWork]) -> Pass[Served]:
        """All sequences decode a few tokens; a single one decodes all it requested."""
        n = self.chunk if len(self.tasks) > 1 else max(w.request.n for w in decodes)
        requests = [w.next_decode(n) for w in decodes]
        if len(decodes) < len(self.tasks) - len(self._waiting):  # others may want to share the target's pass
            requests = [replace(r, handover=None) if r.handover else r for r in requests]
        try:
            out = yield partial(runner.decode, requests)
        except Exception as error:
            self._fail((w.task for w in decodes), error)
            return []
        for item, result in zip(decodes, out, strict=True):
            if self._broken(item, result):
                continue
            item.take(result)
            if not item.request.drafting:
                item.task.stats.target_passes += len(result.tokens)
            if item.finished:
                self._finish(runner, item)
        return list(zip(decodes, out, strict=True))

    def _grow(self, runner: Runner, work: list[GrowWork]) -> Pass[Served]:
        """All trees grow to their ends."""
        try:
            yield partial(scored.grow, runner, [w.request for w in work], ROUNDS * self.budget)
        except Exception as error:
            self._fail((w.task for w in work), error)
            return []
        for item in work:
            self._finish(runner, item)
        return [(item, item.request) for item in work]

    def _broken(self, item: DecodeWork, out: DecodeOutput) -> bool:
        """End a sequence for which no token could be drawn."""
        if (lowest := min(out.tokens)) < 0:
            self._end(item.task, no_token(item.request.history, lowest != NOTHING))
        return lowest < 0

    def _finish(self, runner: Runner, item: Work) -> None:
        if not item.task.done:  # else another of its requests has failed
            self._work[id(runner)].remove(item)
            self._answer(item.task, item.request, item.result)

    def _fail(self, tasks: Iterable[Task], error: Exception) -> None:
        """End the sequences that were in a failed call, and no others."""
        for task in list(tasks):
            if not task.done:
                self._end(task, error)
