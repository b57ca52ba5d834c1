"""What a runner's next pass feeds: the sequences that its cache has room for, and how much of each.

Older sequences come first. Where room is short, the youngest are preempted: their entries are dropped, and read again
before anything else is fed to them, once there is room for all they need. Nothing of a text changes by that: its noise
is a function of the position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from semspec.loop.work import AgainWork, Task, Work
from semspec.model.wrapper import unwrap
from semspec.types import Runner, Score

MAX_ROUND_TOKENS = 64  # more tokens to feed than this count as a prompt, not as a round
ROUNDS = 2  # budgets that rounds may take: a second pass would read all weights again, and who waits for it waits twice
NO_ROOM = "the cache has no room for what runs, and nothing in it can give way; load more cache tokens"


def fitting(runner: Runner, work: list[Work], tasks: Sequence[Task]) -> list[Work]:
    """Those that there is room for, perhaps none; some younger sequences may be preempted for them."""
    if not runner.lacks(_needs(work)):
        return work
    age = {task: i for i, task in enumerate(tasks)}
    taken = list[Work]()
    for item in sorted(work, key=lambda item: age[item.task]):
        younger = [task for task in reversed(tasks) if age[task] > age[item.task]]
        while runner.lacks(_needs([*taken, item])):
            victim = next((task for task in younger if _preempted(runner, task)), None)
            if victim is None:
                alone = not taken and not any(_holds(runner, task) for task in tasks if task is not item.task)
                return [item] if alone else taken  # what does not even fit alone gets the runner's own words
            victim.stats.preempted += 1
        taken.append(item)
    return taken


def _holds(runner: Runner, task: Task) -> bool:
    """Whether it takes room in this runner's cache, perhaps with what others have read for it."""
    return any(unwrap(owner).length(slot) > 0 for owner, slot in _shared(runner, task))


def youngest(runners: Sequence[Runner], tasks: Sequence[Task]) -> Task | None:
    """Of those that take room in one of these runners' caches."""
    return next((task for task in reversed(tasks) if any(_holds(runner, task) for runner in runners)), None)


def _shared(runner: Runner, task: Task) -> list[tuple[Runner, int]]:
    """The task's slots in the cache of this runner, which others may have wrapped in their own ways."""
    return [(owner, slot) for owner, slot in task.slots if unwrap(owner) is unwrap(runner)]


def _needs(work: Sequence[Work]) -> list[tuple[int | None, int]]:
    return [(item.request.slot, item.remaining) for item in work]


def _preempted(runner: Runner, task: Task) -> bool:
    return any(owner.preempt(slot) for owner, slot in _shared(runner, task))


def drafts(work: Iterable[Work | AgainWork]) -> bool:
    return any(item.request.drafting for item in work)


def reads(runner: Runner, item: Work, chunk: int) -> bool:
    """Whether it feeds more than a decode of a few tokens does."""
    return item.scores or item.waiting > chunk or bool(runner.lost(item.request.slot))


def ragged(runner: Runner, work: Sequence[Work], budget: int) -> list[tuple[Work | AgainWork, Score]]:
    """Prompt chunks, score rows and one row for each decoding sequence. Rounds go first, up to two budgets, so that who
    writes waits for no more than this pass; prompts have what they leave of one, and a quarter of it at least."""
    lost = {item: runner.lost(item.request.slot) for item in work}
    prompts = [w for w in work if w.waiting + len(lost[w]) > MAX_ROUND_TOKENS]
    rounds = [w for w in work if w.waiting + len(lost[w]) <= MAX_ROUND_TOKENS]
    chunks = list[tuple[Work | AgainWork, Score]]()

    def take(items: Sequence[Work], left: int) -> int:
        """What is left after them."""
        for item in items:
            if left > 0:
                again = AgainWork(item, lost[item], left) if lost[item] else None
                chunk = again.request if again else item.next_pass(left)
                left -= len(chunk.tokens)
                chunks.append((again or item, chunk))
        return left

    taken = ROUNDS * budget - take(rounds, ROUNDS * budget)
    take(prompts, max(budget - taken, budget // 4, 1))
    return chunks
