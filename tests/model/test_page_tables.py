"""Block tables against lists of tokens: whatever is extended, truncated, forked, parked and freed, every slot and every
place holds its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.model.page_tables import PageTables

SLOTS, SIZE, BLOCKS = 4, 3, 14
Step = tuple[str, int, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "truncate", "fork", "preempt", "shrink", "park", "unpark", "drop"]),
        st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), st.integers(0, 9),
    ),
    max_size=40,
)  # fmt: skip


def wrong_after(history: list[Step], tables: PageTables) -> str | None:
    """What goes wrong in the memory of a device that obeys the tables, against a plain list for each slot. Of places,
    which come after the slots, the device knows nothing."""
    memory: list[list[int]] = [[-1] * SIZE for _ in range(BLOCKS)]
    held: list[list[int]] = [[] for _ in range(SLOTS)]
    device: list[dict[int, int]] = [{} for _ in range(SLOTS)]  # the tables as a device knows them
    token, parked = 0, dict[int, list[int]]()  # what each place holds
    for kind, slot, other, n in history:
        changes = []
        if kind == "extend":
            needed, free = tables.needed(slot, len(held[slot]), n), tables.free
            if needed > free:
                continue
            changes = tables.extend(slot, len(held[slot]), n)
            if free - tables.free != needed:
                return "it took other than it said it would"
        elif kind == "truncate":
            del held[slot][n:]
        elif kind == "fork" and slot != other:
            held[other] = held[slot][:n]
            changes = tables.fork(slot, other, min(n, len(held[slot])))
        elif kind == "park":
            place = next((p for p in range(SLOTS, len(tables.tables)) if p not in parked), len(tables.tables))
            if place == len(tables.tables):
                tables.add()
            tables.fork(slot, place, len(held[slot]))
            tables.shrink(slot, 0)
            parked[place], held[slot] = held[slot], []
        elif kind == "unpark" and parked:
            place = sorted(parked)[other % len(parked)]
            held[slot] = parked[place][:n]
            changes = tables.fork(place, slot, len(held[slot]))
            if n % 2:  # it may stay, for others
                tables.shrink(place, 0)
                del parked[place]
        elif kind == "drop" and parked:
            del parked[place := sorted(parked)[other % len(parked)]]
            tables.shrink(place, 0)
        elif kind == "preempt":
            held[slot] = []
            tables.shrink(slot, 0)
        elif kind == "shrink":
            for one, tokens in enumerate(held):
                tables.shrink(one, len(tokens))
        for change in changes:
            if change.copied is not None:
                memory[change.block] = list(memory[change.copied])
            device[change.slot][change.entry] = change.block
        if kind == "extend":
            for _ in range(n):
                at, token = len(held[slot]), token + 1
                memory[device[slot][at // SIZE]][at % SIZE] = token
                held[slot].append(token)
        for one, tokens in enumerate(held):
            if [memory[device[one][at // SIZE]][at % SIZE] for at in range(len(tokens))] != tokens:
                return f"slot {one} does not hold its tokens"
        for place, tokens in parked.items():
            if [memory[tables.tables[place][at // SIZE]][at % SIZE] for at in range(len(tokens))] != tokens:
                return f"place {place} does not hold its tokens"
    used = {block for table in tables.tables for block in table}
    return None if tables.free == BLOCKS - len(used) else "a block was lost"


@settings(max_examples=300)
@given(steps)
def test_every_slot_holds_its_tokens(history: list[Step]) -> None:
    tables = PageTables(SLOTS, BLOCKS, SIZE)
    assert wrong_after(history, tables) is None
    for slot in range(len(tables.tables)):
        tables.shrink(slot, 0)
    assert tables.free == BLOCKS, "no block is lost"


def test_truncation_keeps_blocks_and_shared_ones_are_copied_when_written() -> None:
    tables = PageTables(2, 8, 4)
    assert [c.block for c in tables.extend(0, 0, 10)] == [0, 1, 2] and tables.needed(0, 5, 7) == 0
    assert [c.block for c in tables.fork(0, 1, 6)] == [0, 1] and tables.free == 5
    assert tables.needed(1, 6, 1) == 1
    (change,) = tables.extend(1, 6, 1)
    assert (change.entry, change.block, change.copied) == (1, 3, 1)
    assert tables.extend(0, 8, 4) == [], "blocks of one's own are written in place"


def _written_in_place(tables: PageTables) -> None:
    fork = tables.fork

    def forked(source: int, target: int, length: int) -> list:
        changes = fork(source, target, length)
        for change in changes:
            tables._users[change.block] = 1  # nobody knows that it is shared
        return changes

    tables.fork = forked  # type: ignore[method-assign]


def _copied_nothing(tables: PageTables) -> None:
    extend = tables.extend
    tables.extend = lambda *a: [c._replace(copied=None) for c in extend(*a)]  # type: ignore[method-assign]


def _freed_while_shared(tables: PageTables) -> None:
    def shrink(slot: int, length: int) -> None:
        table, end = tables.tables[slot], -(-length // SIZE)
        tables._free += table[end:]
        del table[end:]

    tables.shrink = shrink  # type: ignore[method-assign]


def _parked_without_a_share(tables: PageTables) -> None:
    fork = tables.fork

    def forked(source: int, target: int, length: int) -> list:
        changes = fork(source, target, length)
        for change in changes:
            tables._users[change.block] -= target >= SLOTS  # as if a place were no user
        return changes

    tables.fork = forked  # type: ignore[method-assign]


FAULTY: list[Step] = [("extend", 0, 0, 7), ("fork", 0, 1, 7), ("extend", 1, 0, 2), ("extend", 0, 0, 1)]
FREED: list[Step] = [("extend", 0, 0, 7), ("fork", 0, 1, 7), ("preempt", 1, 0, 0), ("extend", 2, 0, 9)]
PARKED: list[Step] = [
    ("extend", 0, 0, 7),
    ("park", 0, 0, 0),
    ("extend", 1, 0, 9),
    ("unpark", 0, 0, 4),
    ("extend", 0, 0, 2),
]


@pytest.mark.parametrize(
    ("fault", "history"),
    [
        (_written_in_place, FAULTY),
        (_copied_nothing, FAULTY),
        (_freed_while_shared, FREED),
        (_parked_without_a_share, PARKED),
        (_written_in_place, PARKED),
        (_copied_nothing, PARKED),
    ],
)
def test_faults_are_noticed(fault: Callable[[PageTables], None], history: list[Step]) -> None:
    assert wrong_after(history, PageTables(SLOTS, BLOCKS, SIZE)) is None
    tables = PageTables(SLOTS, BLOCKS, SIZE)
    fault(tables)
    assert wrong_after(history, tables) is not None
