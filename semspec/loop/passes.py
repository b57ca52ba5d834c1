"""What a runner's next pass feeds: the sequences that its cache has room for, and how much of each.

Older sequences come first. Where room is short, the youngest are preempted: their entries are dropped, and recomputed
before anything else is fed to them, once there is room for all they need. No text changes by that: its noise is a
function of the position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt

from semspec.loop.work import RecomputeWork, Task, Work
from semspec.model.wrapper import unwrap
from semspec.types import Runner, Score

MAX_ROUND_TOKENS = 64  # more tokens to feed than this count as a prompt, not as a round
ROUNDS = 2  # budgets that rounds may take: a second pass would read all weights again
MIN_CHUNK = 16  # tokens of a prompt in a pass, however long they take
NO_ROOM = "the KV cache is full, and nothing in it can be preempted; load the models with more cache_tokens"


@dataclass(frozen=True, slots=True)
class Growth:
    """How what a prompt's token costs grows with the text before it, in tokens without any: 1 + position / reach."""

    reach: float = inf
    most: float = inf  # that prompts may cost in one pass

    def cost(self, position: int, count: int) -> float:
        return count * (1 + (position + count / 2) / self.reach)

    def count(self, position: int, cost: float) -> float:
        """How many tokens from there on cost so much."""
        if self.reach == inf or cost == inf:
            return cost
        far = self.reach + position
        return sqrt(far * far + 2 * self.reach * max(cost, 0.0)) - far


NO_GROWTH = Growth()


def fitting(runner: Runner, work: list[Work], tasks: Sequence[Task]) -> list[Work]:
    """Those that there is room for, perhaps none; some younger sequences may be preempted for them."""
    if not runner.lacks_room(_needs(work)):
        return work
    age = {task: i for i, task in enumerate(tasks)}
    taken = list[Work]()
    for item in sorted(work, key=lambda item: age[item.task]):
        younger = [task for task in reversed(tasks) if age[task] > age[item.task]]
        while runner.lacks_room(_needs([*taken, item])):
            victim = next((task for task in younger if _preempted(runner, task)), None)
            if victim is None:
                alone = not taken and not any(_holds(runner, task) for task in tasks if task is not item.task)
                return [item] if alone else taken  # what does not even fit alone gets the runner's own error
            victim.stats.preempted += 1
        taken.append(item)
    return taken


def _holds(runner: Runner, task: Task) -> bool:
    """Whether it takes room in this runner's cache, perhaps with a prefix that others have computed."""
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


def drafts(work: Iterable[Work | RecomputeWork]) -> bool:
    return any(item.request.drafting for item in work)


def needs_ragged_pass(runner: Runner, item: Work, chunk: int) -> bool:
    """Whether it feeds more than a decode of a few tokens does."""
    return item.scores or item.waiting > chunk or bool(runner.tokens_to_recompute(item.request.slot))


def ragged(
    runner: Runner, work: Sequence[Work], budget: int, growth: Growth = NO_GROWTH
) -> list[tuple[Work | RecomputeWork, Score]]:
    """Prompt chunks, score rows and one row for each decoding sequence. Rounds go first, up to two budgets, so that a
    decoding sequence waits for this pass only; prompts get what is left of one budget, a quarter of it at least, and
    fewer tokens far into a long text, where each costs more."""
    lost = {item: runner.tokens_to_recompute(item.request.slot) for item in work}
    prompts = [w for w in work if w.waiting + len(lost[w]) > MAX_ROUND_TOKENS]
    rounds = [w for w in work if w.waiting + len(lost[w]) <= MAX_ROUND_TOKENS]
    chunks = list[tuple[Work | RecomputeWork, Score]]()

    def take(item: Work, limit: int) -> int:
        """How many tokens were taken of it."""
        again = RecomputeWork(item, lost[item], limit) if lost[item] else None
        chunk = again.request if again else item.next_pass(limit)
        chunks.append((again or item, chunk))
        return len(chunk.tokens)

    left = ROUNDS * budget
    for item in rounds:
        left -= take(item, left) if left > 0 else 0
    taken = ROUNDS * budget - left
    left = max(budget - taken, budget // 4, 1)
    cost = growth.most * left / budget
    for item in prompts:
        at = runner.length(item.request.slot) - len(lost[item])
        limit = int(min(left, max(growth.count(at, cost), 0 if item is not prompts[0] else MIN_CHUNK)))
        if limit > 0:
            count = take(item, limit)
            left, cost = left - count, cost - growth.cost(at, count)
    return chunks
