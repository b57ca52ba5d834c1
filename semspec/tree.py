"""Drafts that branch, as the parents of their tokens: parents[i] is the index of token i's parent, -1 the context.
Parents come before their children; no parents at all mean a chain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_TREE = 63  # tokens: with the one before them, a pass of 64, and a row of bits


def depths(parents: Sequence[int]) -> list[int]:
    """How many tokens come before each within the draft."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def lineages(parents: Sequence[int]) -> list[int]:
    """For each token a number whose bits are itself and its ancestors."""
    found: list[int] = []
    for i, parent in enumerate(parents):
        found.append(1 << i | (found[parent] if parent >= 0 else 0))
    return found


def path(parents: Sequence[int], last: int) -> tuple[int, ...]:
    """The tokens from the context to this one; -1: none."""
    found: list[int] = []
    while last >= 0:
        found.append(last)
        last = parents[last]
    return tuple(reversed(found))


def paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """From the context to each token without children, in the tokens' order."""
    inner = set(parents)
    return [path(parents, i) for i in range(len(parents)) if i not in inner]


def is_chain(parents: Sequence[int]) -> bool:
    return all(parent == i - 1 for i, parent in enumerate(parents))


def normal(parents: Sequence[int]) -> tuple[int, ...]:
    """As a draft has them: none for a chain."""
    return () if is_chain(parents) else tuple(parents)


def pruned(parents: Sequence[int], some: Iterable[int]) -> tuple[list[int], tuple[int, ...]]:
    """Those of some tokens whose ancestors are all among them, and their parents among themselves; of a chain none."""
    place: dict[int, int] = {}
    left: list[int] = []
    for i in sorted(some):
        parent = parents[i]
        if parent < 0 or parent in place:
            place[i] = len(left)
            left.append(place[parent] if parent >= 0 else -1)
    return list(place), normal(left)


def side_by_side(lengths: Sequence[int]) -> tuple[int, ...]:
    """The parents of chains of these lengths, one after the other, that all follow the context; of one chain none."""
    found: list[int] = []
    for length in lengths:
        found += [-1, *range(len(found), len(found) + length - 1)]
    return () if is_chain(found) else tuple(found)


def after_chain(count: int, parents: Sequence[int]) -> list[int]:
    """The parents of `count` tokens, each after the one before, and of a tree that follows the last of them."""
    return [*range(-1, count - 1), *(count + parent for parent in parents)]


def preorder(parents: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """The tokens in an order in which each is followed by its first child, and their parents in that order. An accepted
    path of first children then lies in the cache as it should."""
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(parents):
        children.setdefault(parent, []).append(i)
    order, waiting = list[int](), children.get(-1, [])[::-1]
    while waiting:
        order.append(i := waiting.pop())
        waiting += children.get(i, [])[::-1]
    place = {i: n for n, i in enumerate(order)}
    found = [place.get(parents[i], -1) for i in order]
    return order, normal(found)
