"""Shapes of a derivation: which step builds on which, before any story is told.

A shape of n steps is a list of n tuples, one a step, naming what the step is computed from:
`()` two plain numbers of the prompt, `(i,)` step i and a number, `(i, j)` two earlier steps; GIVEN (-1) is a
quantity that the prompt states outright. The last step is the one asked for and needs all others. Wide shapes matter:
where several steps are ready at once, the next *meaning* is open, which is what semantic verifiers are about.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

GIVEN = -1
Step = tuple[int, ...]


def _first(rng: Random) -> Step:
    """A step that needs no other step."""
    return () if rng.random() < 0.6 else (GIVEN,)


def _run(out: list[Step], length: int, rng: Random) -> int:
    """Append a chain of `length` steps; the index of its last step."""
    out.append(_first(rng))
    for _ in range(length - 1):
        out.append((len(out) - 1,))
    return len(out) - 1


def _chain(n: int, rng: Random) -> list[Step]:
    out: list[Step] = [_first(rng)]
    while len(out) < n:
        last = len(out) - 1
        out.append((last, GIVEN) if rng.random() < 0.25 else (last,))
    return out


def _fork(n: int, rng: Random) -> list[Step]:
    out: list[Step] = []
    left_length = 1 + int((rng.random() + rng.random()) / 2 * (n - 2))  # the arms are rather even
    left = _run(out, left_length, rng)
    right = _run(out, n - 1 - left_length, rng)
    out.append((left, right))
    return out


def _trident(n: int, rng: Random) -> list[Step]:
    out: list[Step] = []
    lengths = [1, 1, 1]
    for _ in range(n - 5):
        lengths[int(rng.random() * 3)] += 1
    ends = [_run(out, length, rng) for length in lengths]
    out.append((ends[0], ends[1]))
    out.append((len(out) - 1, ends[2]))
    return out


def _comb(n: int, rng: Random) -> list[Step]:
    out: list[Step] = [_first(rng)]
    last = 0
    while len(out) + 2 <= n:
        out.append(_first(rng))
        out.append((last, len(out) - 1))
        last = len(out) - 1
    if len(out) < n:
        out.append((last,))
    return out


def _diamond(n: int, rng: Random) -> list[Step]:
    out: list[Step] = [_first(rng)]
    while len(out) + 3 <= n:
        top = len(out) - 1
        out += [(top,), (top,), (top + 1, top + 2)]
    while len(out) < n:
        out.append((len(out) - 1,))
    return out


def _ladder(n: int, rng: Random) -> list[Step]:
    out: list[Step] = [_first(rng), _first(rng), (0, 1)]
    while len(out) < n:
        last = len(out) - 1
        if len(out) + 2 <= n and rng.random() < 0.5:
            out += [_first(rng), (last, last + 1)]
        else:
            out.append((last, last - 1) if rng.random() < 0.6 else (last,))
    return out


def _tree(n: int, rng: Random) -> list[Step]:
    leaves = (n + 1) // 2
    out: list[Step] = [_first(rng) for _ in range(leaves)]
    ready = list(range(leaves))
    while len(ready) > 1:
        pair = (ready.pop(0), ready.pop(0))
        out.append(pair)
        ready.append(len(out) - 1)
    if len(out) < n:
        out.append((len(out) - 1,))
    return out


def _star(n: int, rng: Random) -> list[Step]:
    rays = n // 2
    out: list[Step] = [_first(rng)]
    out += [(0,) for _ in range(rays)]
    last = 1
    for ray in range(2, rays + 1):
        out.append((last, ray))
        last = len(out) - 1
    while len(out) < n:
        out.append((len(out) - 1,))
    return out


SHAPES: dict[str, tuple[int, Callable[[int, Random], list[Step]]]] = {
    "chain": (3, _chain),
    "fork": (3, _fork),
    "trident": (5, _trident),
    "comb": (3, _comb),
    "diamond": (4, _diamond),
    "ladder": (3, _ladder),
    "tree": (3, _tree),
    "star": (4, _star),
}
"""Shape name -> (fewest steps it makes sense with, builder)."""
MOST_STEPS = 10
FEWEST_STEPS = 3


def shape(name: str, steps: int, rng: Random) -> list[Step]:
    """The steps of the named shape; exactly `steps` of them, all needed by the last."""
    fewest, build = SHAPES[name]
    if not fewest <= steps <= MOST_STEPS:
        raise ValueError(f"shape {name!r} takes {fewest} to {MOST_STEPS} steps, not {steps}")
    return build(steps, rng)
