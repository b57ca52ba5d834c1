"""Sequences and their requests inside the Executor: what is done of each, and what comes next."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from semspec.loop.stats import Stats
from semspec.tree import MAX_TREE
from semspec.types import (
    Decode,
    DecodeOutput,
    Event,
    Grow,
    Request,
    Runner,
    Score,
    ScoreOutput,
    SequenceGenerator,
)


class ScoreWork:
    """A Score, in passes of limited size."""

    def __init__(self, task: Task, request: Score) -> None:
        self.task, self.request = task, request
        request.runner.expect(request)  # before anybody asks whether there is room for it
        self.fed = 0
        self.parts: list[ScoreOutput] = []

    scores = True

    @property
    def waiting(self) -> int:
        return len(self.request.tokens) - self.fed

    @property
    def remaining(self) -> int:
        """Tokens that the slot will have more when this is done, at most."""
        return self.waiting

    def next_pass(self, budget: int) -> Score:
        """The next chunk, with those of the requested rows that are in it. A tree is never cut, and comes with a short
        pass: a prompt is read before."""
        total, begin, tree = len(self.request.tokens), self.fed, self.request.parents
        end = min(begin + budget, total)
        if tree and end > total - len(tree):
            end = total if total - begin <= MAX_TREE + 1 else total - len(tree) - 1
        self.fed = end
        if end - begin == total >= self.request.states:  # as every round: to make another one takes time
            return self.request
        tokens = self.request.tokens[begin:end]
        keep, states = (max(0, end - max(begin, total - n)) for n in (self.request.logits_to_keep, self.request.states))
        return replace(
            self.request, tokens=tokens, logits_to_keep=keep, states=states, parents=tree if end == total else ()
        )

    def take(self, rows: ScoreOutput) -> None:
        if len(rows.logits) or rows.hidden or not self.waiting:  # else a chunk of a prompt, which returns nothing
            self.parts.append(rows)

    @property
    def result(self) -> ScoreOutput:
        return ScoreOutput.join(self.parts)


class DecodeWork:
    """A Decode: first its tokens are fed, then it generates."""

    def __init__(self, task: Task, request: Decode) -> None:
        self.task, self.request = task, request
        self.feed = request.tokens
        self.parts: list[DecodeOutput] = []
        self.generated = 0
        self.stopped = False

    scores = False

    @property
    def waiting(self) -> int:
        return len(self.feed)

    @property
    def remaining(self) -> int:
        return self.waiting + max(self.request.n - self.generated - 1, 0)

    @property
    def finished(self) -> bool:
        return self.stopped or self.generated >= self.request.n

    def next_pass(self, budget: int) -> Score:
        """The next chunk of the feed; the last row of the last chunk predicts a token."""
        tokens, self.feed = self.feed[:budget], self.feed[budget:]
        r, last = self.request, not self.feed
        return Score(r.runner, r.slot, tokens, int(last), r.layers, drafting=r.drafting)

    def next_decode(self, n: int) -> Decode:
        if not self.generated and n >= self.request.n and self.feed is self.request.tokens:
            return self.request
        return replace(self.request, tokens=self.feed, n=min(n, self.request.n - self.generated), handover=None)

    def take(self, out: DecodeOutput) -> None:
        self.parts.append(out)
        self.generated += len(out.tokens)
        self.stopped = out.tokens[-1] in self.request.stop
        self.feed = out.tokens[-1:]

    @property
    def result(self) -> DecodeOutput:
        return DecodeOutput.join(self.parts)


class GrowWork:
    """A Grow: all levels in one call, as a decode is."""

    scores = False
    waiting = 0  # nothing is fed before the tree
    result = None

    def __init__(self, task: Task, request: Grow) -> None:
        self.task, self.request = task, request

    @property
    def remaining(self) -> int:
        return self.request.growth.most_fed

    def next_pass(self, budget: int) -> Score:
        raise AssertionError("a tree grows in calls of its own")


Work = ScoreWork | DecodeWork | GrowWork
Part = Score | DecodeOutput | Grow  # of a pass: what was fed for a sequence, or written


def work_of(task: Task, request: Score | Decode | Grow) -> Work:
    if isinstance(request, Score):
        return ScoreWork(task, request)
    return DecodeWork(task, request) if isinstance(request, Decode) else GrowWork(task, request)


class RecomputeWork:
    """Some of what a preempted slot has lost, fed before the work that waits for it: text, then the tree that this work
    goes on with."""

    def __init__(self, item: Work, lost: list[int], limit: int) -> None:
        of, text = item.request, [token for token in lost if token >= 0]
        tokens = (text or [~token for token in lost])[:limit]
        self.task, self.request = item.task, Score(of.runner, of.slot, tokens, 0, drafting=of.drafting)
        if not text:
            assert isinstance(of, Score)
            left = len(of.tokens) + len(lost) - len(tokens)
            # With its rows, which nobody reads: what is fed without may be taken from another slot's text.
            self.request = replace(
                self.request, logits_to_keep=len(tokens), parents=of.parents[: len(of.parents) - left]
            )


class Task:
    """One sequence in the Executor: its generator, its open requests, and its events not consumed yet."""

    def __init__(self, decoding: SequenceGenerator, stats: Stats) -> None:
        self.decoding, self.stats = decoding, stats
        self.requests: list[Request] = []
        self.results: dict[int, Any] = {}  # request index -> result
        self.single = True  # the generator yielded one request, not a tuple
        self.events: deque[Event] = deque()
        self.slots: list[tuple[Runner, int]] = []  # that it was given
        self.started = False  # it has what it waited for, and runs
        self.prompt = 0  # tokens that its first slot is fed before anything that it writes, as far as it has said
        self.done = False
        self.error: Exception | None = None

    @property
    def answered(self) -> bool:
        return len(self.results) == len(self.requests)
