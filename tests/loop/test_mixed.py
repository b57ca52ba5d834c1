"""Everything at once, in caches that are too small for it: whatever else runs, is cancelled or gives way, an answer is
what the same request gets alone, drafters that read the target get its states, and nothing is left behind."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from semspec import verify
from semspec.draft import CascadeDrafter, EarlyExit, ModelDrafter, NgramDrafter, NoDrafter
from semspec.draft.tree import CHAIN, TreeOptions
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.side_by_side import Alternation
from semspec.loop.stats import Stats
from semspec.loop.thinking import Thinking
from semspec.loop.work import Task
from semspec.model.prefix_cache import PrefixCache
from semspec.sampling.logit_options import LogitOptions
from semspec.sampling.processors import Processors
from semspec.types import Drafter, DraftRequest, ProposalGenerator, Runner, Sampling
from tests.fakes import FakeRunner, chain
from tests.test_every_rule import VOCAB, near

CAPACITY = 90
TARGET = chain(VOCAB, seed=1, memory=CAPACITY)  # so that a wrong token anywhere in a slot shows
DRAFT = near(TARGET, chain(VOCAB, seed=9, memory=CAPACITY))
WORDS = {"ba": [2, 0], " ba": [0, 2, 0]}
RULES = ["exact", "none", "sampling", "traversal", "typical", "exact:couple=true", "fly:window=1"]
OPTIONS: list[dict[str, Any] | None] = [
    None,
    {"presence_penalty": 0.8, "repetition_penalty": 1.3},
    {"allowed_token_ids": (0, 1, 2, 4, 5), "min_tokens": 3},
    {"bad_words": ("ba",), "logit_bias": {3: -2.0, 1: 1.0}},
]


class Reading(ModelDrafter):
    """Knows which states the target gives for which text."""

    layers = (0, 2)

    def __init__(self, runner: Runner, tree: TreeOptions = CHAIN) -> None:
        super().__init__(runner, tree=tree)
        self.seen: list[int] = []

    def observe(self, tokens: list[int], hidden: dict[int, Tensor]) -> None:
        for i, token in enumerate(tokens):
            self.seen.append(token)
            assert all(torch.equal(hidden[n][i], torch.tensor(TARGET(self.seen)) + n) for n in self.layers)

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        assert self.seen == context[: len(self.seen)]
        return super().propose(context, request)


@dataclass
class Request:
    prompt: list[int]
    rule: str
    drafter: str
    k: int
    n: int
    sampling: Sampling
    options: dict[str, Any] | None
    thinking: tuple[int, int, bool, int | None, bool] | None
    logprobs: int | None
    prompt_logprobs: int | None
    salt: str
    tree: TreeOptions
    stop: frozenset[int]

    @staticmethod
    def drawn(rng: random.Random, bases: list[list[int]]) -> Request:
        n = rng.randint(1, 40)
        prompt = rng.choice(bases)[: rng.randint(1, 45)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
        return Request(
            prompt[: CAPACITY - n],
            rng.choice(RULES),
            rng.choice(["model", "tree", "ngram", "ngram tree", "reading", "reading tree", "cascade", "exiting"]),
            rng.choice([1, 2, 4, 8]),
            n,
            Sampling(rng.choice([0.0, 0.8]), rng.choice([0, 5]), rng.choice([1.0, 0.9]), seed=rng.randrange(1000)),
            rng.choice(OPTIONS),
            rng.choice([None, (8, 9, True, 5, False), (8, 9, False, None, True)]),
            rng.choice([None, 2]),
            rng.choice([None, None, 1]),
            rng.choice(["", "", "a"]),
            TreeOptions(rng.choice([3, 12, 40]), 0, rng.choice([2, 4])),
            frozenset(rng.choice([[], [], [6]])),
        )

    def decoder(self, target: Runner, draft: Runner) -> Decoder:
        kinds: dict[str, Drafter] = {
            "model": ModelDrafter(draft),
            "tree": ModelDrafter(draft, tree=self.tree),
            "ngram": NgramDrafter(),
            "ngram tree": NgramDrafter(tree=self.tree),
            "reading": Reading(draft),
            "reading tree": Reading(draft, self.tree),
            "cascade": CascadeDrafter(draft, NgramDrafter(), 3),
            "exiting": ModelDrafter(draft, EarlyExit(min_p=0.3)),
        }
        processors = None
        if self.options is not None:
            each = LogitOptions(**self.options).processors(self.prompt, VOCAB, self.stop, WORDS.__getitem__)
            processors = Processors(len(self.prompt), each)
        job = Job(
            list(self.prompt), verify.make(self.rule), self.k, self.n, self.sampling, self.stop,
            thinking=self.thinking and Thinking(*self.thinking), logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs, processors=processors, salt=self.salt,
        )  # fmt: skip
        return Decoder(job, target, NoDrafter() if self.rule == "none" else kinds[self.drafter], Stats())


def answer(task: Task) -> tuple[list[int], list[tuple[int, float]]]:
    if task.error is not None:
        raise task.error
    logprobs = [lp for event in task.events for lp in event.logprobs or []]
    return [t for e in task.events for t in e.tokens], [(lp.token, round(lp.logprob, 4)) for lp in logprobs]


def alone(request: Request) -> tuple[list[int], list[tuple[int, float]]]:
    executor, runners = Executor(), [FakeRunner(language, VOCAB, max_seq_len=CAPACITY) for language in (TARGET, DRAFT)]
    decoder = request.decoder(*runners)
    task = executor.submit(decoder.decode(), decoder.stats)
    executor.run()
    return answer(task)


@pytest.mark.parametrize("seed", range(24))
def test_whatever_else_runs_an_answer_is_the_one_alone(seed: int) -> None:
    mixed(seed, torch.device("cpu"), Alternation())


def mixed(seed: int, target_device: torch.device, alternation: Alternation) -> None:
    rng = random.Random(seed)
    bases = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(2)]
    room, window = rng.choice([100, 110, 130]), rng.choice([None, None, 8])
    target = PrefixCache(
        FakeRunner(TARGET, VOCAB, slots=4, max_seq_len=CAPACITY, room=room, window=window, device=target_device)
    )
    draft = PrefixCache(FakeRunner(DRAFT, VOCAB, slots=4, max_seq_len=CAPACITY, room=rng.choice([100, 120])))
    executor = Executor(chunk=rng.choice([2, 8]), budget=rng.choice([5, 16, 64, 512]))
    executor.alternation = alternation
    requests = [Request.drawn(rng, bases) for _ in range(rng.randint(4, 8))]
    waiting, tasks, cancelled = list(requests), list[Task](), set[int]()
    while waiting or executor.tasks:
        while waiting and (rng.random() < 0.4 or not executor.tasks):
            decoder = waiting.pop(0).decoder(target, draft)
            tasks.append(executor.submit(decoder.decode(), decoder.stats))
        if rng.random() < 0.03 and not tasks[which := rng.randrange(len(tasks))].done:
            cancelled.add(which)
            executor.cancel(tasks[which])
        executor.tick()
    for i, (request, task) in enumerate(zip(requests, tasks, strict=True)):
        (tokens, logprobs), (want, wanted) = answer(task), alone(request)
        if i in cancelled:
            want, wanted = want[: len(tokens)], wanted[: len(logprobs)]
        assert (tokens, logprobs) == (want, wanted), request
    for cache in (target, draft):
        assert cache.free == 4 and not cache._lost and not cache._lengths
        cache.close()
        assert not cache._index._holders and not cache._states and not cache._index.tokens
        pools = cache.inner.pages.pools  # type: ignore[attr-defined]
        assert cache.inner.free == 4 and all(pool.blocks.free == pool.blocks.blocks for pool in pools)
