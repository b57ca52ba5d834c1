"""Sizes that passes are padded to, so that few graphs serve everything, and which sequences share a pass.

Padding costs little as long as a pass is bound by reading the weights: it reads all of them for one token as for many.
A prompt's tail of 60 tokens beside seven single tokens would be padded to 8 x 64 rows, though, and 33 drafts to 64. So
sequences are put into several passes wherever the rows saved are worth another read of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

# Tokens of one sequence; often a draft of 8 or 16 and one before.
QUERIES = (1, 2, 4, 6, 9, 12, 16, 17, 24, 33, 48, 64)
FEEDS = (1, 2, 16, 64)  # of what a draft is fed: it has missed any number of tokens when it catches up, but seldom
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_ROWS = 1024  # of a padded pass: 64 checks of a draft of 8 read the weights once
MAX_QUERIES = QUERIES[-1]  # a longer feed runs without graphs
READ = 192  # rows whose arithmetic takes as long as reading the weights once; on an H200, from passes of 9 to 576 rows


def bucket(n: int, sizes: tuple[int, ...]) -> int:
    return next(size for size in sizes if size >= n)


def feed_bucket(n: int, batch: int) -> int:
    """Few sizes, as long as their rows cost no second read: each is captured in the answer that first needs it."""
    size = bucket(n, FEEDS)
    return size if batch * size <= READ else bucket(n, QUERIES)


def passes(lengths: Sequence[int]) -> list[list[int]]:
    """The sequences that share a pass, by their places in `lengths`, for all passes; those of one pass in order."""
    sizes, total = [bucket(n, QUERIES) for n in lengths], len(lengths)
    rows = bucket(total, BATCHES) * max(sizes) if total <= BATCHES[-1] else MAX_ROWS + 1
    if rows <= min(MAX_ROWS, READ + sum(sizes)):  # more passes could save no more than a read
        return [list(range(total))]
    order = sorted(range(total), key=lambda i: -sizes[i])  # a pass is as wide as its first
    # What the sequences from each one on cost, in rows, and how many share the next pass. Fewer never cost more, so a
    # pass takes as many as are padded to the same size.
    costs, counts = [0] * (total + 1), [0] * total
    for i in reversed(range(total)):
        widest = sizes[order[i]]
        choices = (n for n in BATCHES if n * widest <= MAX_ROWS)
        costs[i], counts[i] = min((READ + n * widest + costs[min(i + n, total)], -n) for n in choices)
    found, i = list[list[int]](), 0
    while i < total:
        found.append(sorted(order[i : i - counts[i]]))
        i -= counts[i]
    return found
