"""Drafters that read the target: every token's states arrive once, in order, whatever happens around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import semspec
from semspec import verify
from semspec.draft import ModelDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.thinking import Thinking
from semspec.model import ModelRunner
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import NoGraphs
from semspec.model.hf_runner import TransformersRunner
from semspec.model.kernels import reference_kernels
from semspec.model.prefix_cache import PrefixCache
from semspec.sparse import AttentionPlan, SparsePlan, apply
from semspec.types import Runner, Score
from tests.checkpoints import make_model, save
from tests.fakes import FakeRunner, blend, chain, greedy

VOCAB = 11
TARGET = chain(VOCAB, seed=3)
DRAFT = blend(chain(VOCAB, seed=4), TARGET, lambda context: len(context) % 3 != 0)


class Reading(ModelDrafter):
    """A draft model that also notes what it is told of the target."""

    def __init__(self, runner: Runner, layers: tuple[int, ...] = (0, 2)) -> None:
        super().__init__(runner)
        self.layers = layers
        self.tokens: list[int] = []
        self.states: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def observe(self, tokens: list[int], hidden: dict[int, Tensor]) -> None:
        assert set(hidden) == set(self.layers)
        self.tokens += tokens
        for layer, states in hidden.items():
            assert len(states) == len(tokens) > 0
            self.states[layer] += states


def job(rule: str, prompt: list[int], k: int, n: int, **more: Any) -> Job:
    return Job(prompt, verify.make(rule), k, n, **more)


def run(target: Runner, jobs: list[Job], executor: Executor | None = None) -> list[tuple[Reading, list[int]]]:
    """All of them as one batch."""
    executor = executor or Executor()
    draft = FakeRunner(DRAFT, VOCAB)
    made = []
    for one in jobs:
        stats, reading = Stats(), Reading(draft)
        task = executor.submit(Decoder(one, target, reading, stats).decode(), stats)
        made.append((task, reading, one))
    executor.run()
    for task, _, _ in made:
        if task.error:
            raise task.error
    return [(reading, one.prompt + [t for e in task.events for t in e.tokens]) for task, reading, one in made]


def expect(reading: Reading, text: list[int]) -> None:
    """All of the text but its last token, which nothing has read, with the states that a fake runner gives."""
    assert reading.tokens == text[:-1]
    for layer, states in reading.states.items():
        want = torch.tensor([TARGET(text[: i + 1]) for i in range(len(text) - 1)]) + layer
        assert torch.stack(states).equal(want)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["exact", "none", "fly:window=2", "sampling"]), st.integers(1, 30), st.integers(1, 25)
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 6),
    st.booleans(),
)
def test_states_of_all_tokens_arrive_once_and_in_order(rows: list[tuple[str, int, int]], k: int, cached: bool):
    """In batches, in chunks of prompts smaller than these, and through a prefix cache that has seen every prompt."""
    runner: Runner = FakeRunner(TARGET, VOCAB)
    runner = PrefixCache(runner) if cached else runner
    for _ in range(2 if cached else 1):
        jobs = [job(rule, [i % VOCAB for i in range(prompt)], k, n) for rule, prompt, n in rows]
        for reading, text in run(runner, jobs, Executor(chunk=3, budget=8)):
            expect(reading, text)


def test_a_prefix_cache_remembers_states_and_reads_a_prefix_without_them_again():
    runner = PrefixCache(fake := FakeRunner(TARGET, VOCAB))
    prompt = [i * 7 % VOCAB for i in range(40)]

    def fed(jobs: list[Job]) -> int:
        fake.diary.clear()
        for reading, text in run(runner, jobs):
            expect(reading, text)
        return sum(n for made in fake.diary for n in made.rows.values())

    once = job("exact", prompt, 4, 4)
    assert fed([once]) >= 40
    assert fed([once]) < 20, "the states of the prompt are remembered"
    stats, executor = Stats(), Executor()
    other = [9, *prompt]
    executor.submit(
        Decoder(job("exact", other, 4, 4), runner, ModelDrafter(FakeRunner(DRAFT, VOCAB)), stats).decode(), stats
    )
    executor.run()
    assert fed([job("exact", other, 4, 4)]) >= 41, "they were not asked for, so there are none"
    assert fed([job("exact", [*prompt[:20], 5], 4, 4)]) < 12, "a copy of a prefix has its states"


def test_forced_ends_of_thinking_and_logprobs_lose_no_state():
    for logprobs in (None, 2):
        thinking = Thinking(8, 9, True, 5, False)
        once = job("exact", [3, 1, 4], 3, 20, logprobs=logprobs, thinking=thinking)
        ((reading, text),) = run(FakeRunner(TARGET, VOCAB), [once])
        assert 9 in text
        expect(reading, text)


def test_a_cancelled_sequence_leaves_the_others_theirs():
    target, draft, executor = FakeRunner(TARGET, VOCAB), FakeRunner(DRAFT, VOCAB), Executor()
    pairs = []
    for prompt in ([1, 2, 3], [4, 5, 6, 7]):
        stats, reading = Stats(), Reading(draft)
        pairs.append(
            (executor.submit(Decoder(job("exact", prompt, 3, 20), target, reading, stats).decode(), stats), reading)
        )
    for _ in range(3):
        executor.tick()
    executor.cancel(pairs[0][0])
    executor.run()
    assert target.free == draft.free == 8
    expect(pairs[1][1], [4, 5, 6, 7, *greedy(TARGET, [4, 5, 6, 7], 20)])


def test_other_drafters_ask_for_nothing():
    class Watched(FakeRunner):
        def score(self, requests: Any) -> Any:
            assert all(r.states == 0 and r.layers == () for r in requests)
            return super().score(requests)

    stats, executor = Stats(), Executor()
    target = Watched(TARGET, VOCAB)
    executor.submit(
        Decoder(job("exact", [1] * 9, 4, 9), target, ModelDrafter(FakeRunner(DRAFT, VOCAB)), stats).decode(), stats
    )
    executor.run()
    assert stats.rounds


@pytest.mark.parametrize("kind", ["float32", "int8", "sparse", "transformers", "graphs"])
def test_every_runner_gives_states_of_all_tokens_and_logits_of_the_last(tmp_path: Path, kind: str):
    """Against a pass that keeps every row, and beside requests that want less."""
    folder = save(make_model("llama3"), tmp_path / "model")
    pair = semspec.load(folder, device="cpu", dtype="int8" if kind == "int8" else "float32", context=128)
    runner = pair.target
    if kind == "transformers":
        runner = TransformersRunner.load(folder, torch.device("cpu"), torch.float32, 4, 128)
    if kind == "graphs":
        assert isinstance(runner, ModelRunner)
        runner.use(GraphRunner(runner.transformer, runner.cache, reference_kernels(), NoGraphs()))
    if kind == "sparse":
        assert isinstance(runner, ModelRunner)
        apply(SparsePlan(attention=AttentionPlan(block=4, dense_below=8, rho=1.0)), runner)
    text, layers = [(i * 37) % 300 + 1 for i in range(24)], (1, 2, 3)
    slots = [runner.acquire() for _ in range(2)]
    (whole,) = runner.score([Score(runner, slots[0], text, len(text), layers)])
    runner.truncate(slots[0], 0)
    got = runner.score(
        [Score(runner, slots[0], text, 3, layers, states=20), Score(runner, slots[1], text[:5], 2, (2,))]
    )
    close = {"atol": 0.2 if kind == "int8" else 1e-4, "rtol": 0.05 if kind == "int8" else 1e-4}
    torch.testing.assert_close(got[0].logits, whole.logits[-3:], **close)
    for layer in layers:
        torch.testing.assert_close(got[0].hidden[layer], whole.hidden[layer][-20:], **close)
    torch.testing.assert_close(got[1].hidden[2], whole.hidden[2][3:5], **close)
    assert set(got[1].hidden) == {2} and got[1].logits.shape[0] == 2
    runner.truncate(slots[0], 0)
    (none,) = runner.score([replace(Score(runner, slots[0], text, 0, layers), states=24)])
    assert none.logits.shape[0] == 0 and none.hidden[3].shape == whole.hidden[3].shape
    torch.testing.assert_close(none.hidden[3], whole.hidden[3], **close)
    if kind == "int8":  # a few tokens are computed in NumPy, whoever asks: to the last bit the same
        runner.truncate(slots[0], 20)
        (few,) = runner.score([Score(runner, slots[0], text[20:23], 0, layers, states=3)])
        runner.truncate(slots[0], 20)
        (rows,) = runner.score([Score(runner, slots[0], text[20:23], 3, layers)])
        assert all(few.hidden[layer].equal(rows.hidden[layer]) for layer in layers) and not len(few.logits)
