"""States that a prefix cache remembers: against a plain list with an entry for each token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semspec.model.hidden_states import CachedHiddenStates

LAYERS = [(1, 2), (1, 2), (1, 2), (1,), (2, 3), (1, 2, 3)]
steps = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 10**6)), max_size=25)


def states(first: int, count: int, layers: tuple[int, ...]) -> dict[int, Tensor]:
    return {layer: torch.arange(first, first + count)[:, None] + 1000.0 * layer for layer in layers}


def covered(tokens: list[dict[int, float]], layers: tuple[int, ...]) -> int:
    return next((i for i, own in enumerate(tokens) if not set(layers) <= own.keys()), len(tokens))


@settings(max_examples=100)
@given(steps)
def test_whatever_is_done_every_token_has_its_own_states(made: list[tuple[int, int, int]]) -> None:
    remembered, tokens, fresh = CachedHiddenStates(), list[dict[int, float]](), 0
    copies = list[tuple[CachedHiddenStates, list[dict[int, float]]]]()
    for kind, count, which in made:
        at = which % (len(tokens) + 1)
        if kind < 2:
            layers, gap = LAYERS[which % len(LAYERS)], kind == 1 and which % 7 == 0
            new = states(fresh, count, layers)
            fits = not gap and covered(tokens, layers) == len(tokens) and count
            remembered.append(len(tokens) + gap, new)
            tokens += [{layer: h[i].item() for layer, h in new.items()} for i in range(count)] if fits else []
            fresh += count
        elif kind == 2:
            copies.append((remembered, list(tokens)))
            remembered, tokens = remembered.first(at), tokens[:at]
        else:
            copies.append((remembered, list(tokens)))
            rows = [i for i in range(len(tokens) - at) if (which >> i) & 1]
            layers = tuple(layer for layer in (1, 2, 3) if all(layer in own for own in tokens))
            remembered = remembered.kept(at, rows)
            kept = [{layer: tokens[at + row][layer] for layer in layers} for row in rows] if layers else []
            tokens = tokens[:at] + kept
    for one, want in [*copies, (remembered, tokens)]:  # nobody's states change with a copy's
        for layers in ((1,), (2,), (1, 2), (1, 2, 3)):
            n = covered(want, layers)
            assert one.covers(layers) == n
            for start in range(n):
                found = one.between(start, n, layers)
                assert all(found[i][:, 0].tolist() == [own[i] for own in want[start:n]] for i in layers)


def test_rounds_with_trees_take_the_memory_of_what_was_accepted() -> None:
    remembered, count = CachedHiddenStates(), 0
    for _ in range(40):
        remembered = remembered.first(count)
        remembered.append(count, states(count, 64, (1, 2)))  # a token and a tree of 63
        before = remembered
        remembered = remembered.kept(count + 1, [1, 4])
        count += 3
    assert remembered.covers((1, 2)) == count and remembered.nbytes == 2 * 4 * count
    assert remembered.first(count)._parts[0] is before._parts[0], "what comes before a round is not touched in it"
