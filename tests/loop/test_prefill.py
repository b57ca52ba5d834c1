"""Long prompts beside sequences that write: nobody waits for more than one pass of each runner, counted in tokens."""

from __future__ import annotations

import pytest

from semspec import verify
from semspec.draft import ModelDrafter, NoDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from tests.fakes import FakeRunner, chain, greedy

VOCAB, PROMPT = 13, 2000
TARGET, DRAFT = chain(VOCAB, seed=1), chain(VOCAB, seed=2)


@pytest.mark.parametrize("rule", ["none", "exact"])
@pytest.mark.parametrize(("budget", "writers"), [(64, 3), (64, 12), (512, 3)])
def test_who_writes_gets_a_token_in_every_tick_while_a_prompt_is_read(rule: str, budget: int, writers: int) -> None:
    """With 12 writers of drafts, their rounds alone are more than three quarters of the budget."""
    target, draft = (FakeRunner(logits, VOCAB, slots=16) for logits in (TARGET, DRAFT))
    executor = Executor(budget=budget)

    def submit(prompt: list[int], tokens: int) -> Task:
        stats, drafter = Stats(), ModelDrafter(draft) if rule == "exact" else NoDrafter()
        decoder = Decoder(Job(prompt, verify.make(rule), 4, tokens), target, drafter, stats)
        return executor.submit(decoder.decode(), stats)

    running = [submit([i, 2], 400) for i in range(writers)]
    for _ in range(3):
        executor.tick()
    reader, ticks = submit([i % VOCAB for i in range(PROMPT)], 4), 0
    while not reader.events:
        before, passes = [task.stats.target_passes for task in running], len(target.diary)
        executor.tick()
        ticks += 1
        assert len(target.diary) - passes <= 1, "one pass a tick"
        rows = target.diary[-1].rows
        assert max(rows.values()) <= budget and sum(rows.values()) <= budget + 5 * writers
        if ticks > 1:  # before, a decode of several tokens may be under way
            assert all(task.stats.target_passes > n for task, n in zip(running, before, strict=True) if not task.done)
    assert ticks >= PROMPT / budget, "it was read in pieces"
    executor.run()
    assert [t for e in running[0].events for t in e.tokens] == greedy(TARGET, [0, 2], 400)
