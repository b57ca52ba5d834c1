"""Write down every pass and every verification of a run, so that the same can be done again at other sizes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.model import ModelRunner
from semspec.model.graphs import GraphCache
from semspec.model.heads.runner import StateRunner
from semspec.model.wrapper import RunnerWrapper, unwrap
from semspec.types import Decode, DecodeOutput, Runner, Score, ScoreOutput, SequenceGenerator, VerifyRequest

VERIFY, HEAD = "verify", "head"
Pass = tuple[str, str, list[tuple[int, ...]]]
"""A pass: the model, "score", "decode" or "keep", and for each sequence: tokens fed, tokens in its slot before, rows
kept or tokens written; for a score of a tree also the parents of its tokens, see tree.py; for a decode also how many it
was allowed to write, whether it kept the logits of each, whether it was greedy, and whether it could stop. A "keep"
leaves one path of a tree in a slot: nothing is fed; then come the tokens before the tree, and which of the tree's stay.
A pass of a head ("head") is a score or a decode. After the three numbers of any pass come: how many of the target's
states it has combined, how many are new to it, and how many of its own follow; then a tree's parents, or for a decode
whether it kept the logits of each token and whether it was greedy.
A verification: "verify", the rule's name, and for each sequence: tokens drafted, rows scored, if the draft's logits
are known, and after which tokens reasoning steps end; or, of a tree draft, its tokens' parents, the first of
which is -1."""


class Recorder(RunnerWrapper):
    def __init__(self, runner: Runner, name: str, passes: list[Pass]) -> None:
        super().__init__(runner)
        self.name, self.passes = name, passes

    @property
    def capture_seconds(self) -> float:
        """Spent until now on compiling kernels and capturing graphs."""
        runner = unwrap(self.inner)
        graphs = runner.graph_runner if isinstance(runner, ModelRunner) else None
        return graphs.launcher.seconds if graphs and isinstance(graphs.launcher, GraphCache) else 0.0

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        rows: list[tuple[int, ...]] = [
            (len(r.tokens), self.length(r.slot), r.logits_to_keep, *r.parents) for r in requests
        ]
        self.passes.append((self.name, "score", rows))
        return self.inner.score(requests)

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self.passes.append((self.name, "keep", [(0, self.length(slot), 0, start, *rows)]))
        self.inner.compact(slot, start, rows)

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        before = [self.length(r.slot) for r in requests]
        outputs = self.inner.decode(requests)
        rows: list[tuple[int, ...]] = [
            (len(r.tokens), b, len(o.tokens), r.n, int(r.keep_logits), int(r.sampling.greedy), int(bool(r.stop)))
            for r, b, o in zip(requests, before, outputs, strict=True)
        ]
        self.passes.append((self.name, "decode", rows))
        return outputs


class HeadRecorder(RunnerWrapper):
    """A draft head whose passes are written down. Its decodes are, whole: they are scores of one token each."""

    inner: StateRunner

    def __init__(self, head: StateRunner, passes: list[Pass]) -> None:
        super().__init__(head)
        self.passes, self.layers, self.longest = passes, head.layers, head.longest

    def observed(self, slot: int) -> int:
        return self.inner.observed(slot)

    def observe(self, slot: int, hidden: dict[int, Tensor]) -> None:
        self.inner.observe(slot, hidden)

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        rows: list[tuple[int, ...]] = [
            (len(r.tokens), self.length(r.slot), r.logits_to_keep, *self.inner.held(r.slot), *r.parents)
            for r in requests
        ]
        self.passes.append((HEAD, "score", rows))
        return self.inner.score(requests)

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        before = [(self.length(r.slot), self.inner.held(r.slot)) for r in requests]
        outputs = self.inner.decode(requests)
        rows: list[tuple[int, ...]] = [
            (len(r.tokens), length, len(o.tokens), *held, int(r.keep_logits), int(r.sampling.greedy))
            for r, (length, held), o in zip(requests, before, outputs, strict=True)
        ]
        self.passes.append((HEAD, "decode", rows))
        return outputs


class RecordingExecutor(Executor):
    """Reads along what sequences ask for, and notes verifications between the passes."""

    def __init__(self, passes: list[Pass]) -> None:
        super().__init__()
        self.passes = passes

    def submit(self, decoding: SequenceGenerator, stats: Stats) -> Task:
        return super().submit(self._recorded(decoding), stats)

    def _recorded(self, decoding: SequenceGenerator) -> SequenceGenerator:
        answer = None
        try:
            while True:
                try:
                    asked = decoding.send(answer)
                except StopIteration:
                    return
                for request in asked if isinstance(asked, tuple) else (asked,):
                    if isinstance(request, VerifyRequest):
                        self._note(request)
                answer = yield asked
        finally:
            decoding.close()

    def _note(self, request: VerifyRequest) -> None:
        """What is asked of one rule between two passes is verified in one call."""
        draft, name = request.draft, request.rule.name
        row = (
            len(draft.tokens),
            len(request.rows.logits),
            int(draft.logits is not None),
            *(draft.parents or draft.steps.ends),
        )
        if self.passes and self.passes[-1][:2] == (VERIFY, name) and self.passes[-1][2][0][2] == row[2]:
            self.passes[-1][2].append(row)
        else:
            self.passes.append((VERIFY, name, [row]))
