"""The table in the terminal: readable at any width, and never a speed without its quality."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from semspec.bench.compare_to import compare_to
from semspec.bench.summary import summarise
from semspec.bench.table import figure, notes
from semspec.bench.terminal import render, render_comparison
from tests.bench.test_summary import LOOP, many, plain, run_of


def made(scored: bool = True) -> dict[str, Any]:
    def score(right: bool) -> bool | None:
        return right if scored else None

    samples = many(
        20,
        none=lambda i: {"correct": score(True)},
        exact=lambda i: {"correct": score(True), "seconds": 0.5},
        **{
            "fly:window=4,theta=.3": lambda i: {"correct": score(i >= 8), "seconds": 0.25},
            "loopy": lambda i: {"correct": score(True), "seconds": 0.2, "tokens": LOOP},
        },
    )
    return summarise(run_of("exact", "fly:window=4,theta=.3", "loopy"), samples)


def shown(summaries: list[dict[str, Any]], width: int, colour: bool = False) -> str:
    out = StringIO()
    Console(file=out, width=width, force_terminal=colour, color_system="standard" if colour else None).print(
        render(summaries)
    )
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_it_fits_and_nothing_is_cut_off(width: int) -> None:
    text = shown([made()], width)
    assert max(len(line) for line in text.splitlines()) <= width
    for words in (
        "2.00x",
        "[2.00, 2.00]",
        "4.00x",
        "token for token",
        "worse",
        "p=0.023",
        "100.0",
        "speedup",
        "pocket with draft pocket-draft on CPU",
    ):
        assert words in text
    assert "…" not in text
    assert ("loops, %" in text) == (width >= 132) == ("More columns on a wider terminal" not in text)
    assert "tau" in text, "at any width"


@pytest.mark.parametrize("width", [32, 40, 50, 60, 79])
def test_below_80_columns_it_is_split_and_every_figure_has_its_arm(width: int) -> None:
    text = shown([made()], width)
    assert max(len(line) for line in text.splitlines()) <= width
    for words in ("correct, %", "100.0", "worse,", "2.00x", "4.00x", "speedup", "s/correct", "tau", "token for token"):
        assert words in text, words
    tables = text.count("━") or sum(set(line.strip()) == {"─"} for line in text.splitlines())
    names = sum(line.strip().startswith("exact") for line in text.splitlines())
    assert tables > 1 and names == tables, "exact is named in each"


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_comparison_with_one_method_fits_as_well(width: int) -> None:
    samples = many(20, none=plain, exact=plain, **{"fly:window=4": lambda i: {"correct": i >= 8, "seconds": 0.25}})
    found = compare_to(run_of("exact", "fly:window=4"), samples, "exact")
    out = StringIO()
    Console(file=out, width=width).print(render_comparison(found, "exact"))
    text = out.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width and "against exact" in text
    for words in ("fly:window=4", "-40.0", "0 : 8", "fewer passes", "4.00x"):
        assert words in text, (words, text)


def test_the_verdict_is_beside_the_speed_in_red() -> None:
    text = shown([made()], 140, colour=True)
    worse = next(line for line in text.splitlines() if "4.00x" in line)
    red = "".join(re.findall(r"\x1b\[1;31m(.*?)\x1b\[0m", worse))
    assert red.split() == ["worse,", "p=0.023", "4.00x"]
    good = next(line for line in text.splitlines() if "2.00x" in line)
    assert "\x1b[1;31m" not in good


def test_p_values_of_several_arms_are_corrected_and_the_table_says_so() -> None:
    """Eight lost and none gained of 20: p = 2 / 2^8, and there are three arms."""
    assert made()["arms"]["fly:window=4,theta=.3"]["mcnemar_p"] == 2 / 2**8
    assert made()["arms"]["fly:window=4,theta=.3"]["mcnemar_p_holm"] == 3 * 2 / 2**8
    assert "p values are corrected for 3 comparisons (Holm)." in notes(made())


def test_a_looping_arm_has_a_time_but_no_speedup() -> None:
    text = shown([made()], 80)
    assert "5.00x" in text and "time 5.00x" in text and "none" in text
    assert "No speedup is stated for loopy: loops in 100.0 % of outputs, the target alone in 0.0 %." in notes(made())


def test_an_unscored_task_does_not_use_the_word_in_its_table() -> None:
    text = shown([made(scored=False)], 140)
    head = next(line for line in text.splitlines() if "seconds" in line)
    assert "time ratio" in head and "speedup" not in head
    assert "unmeasured" in text
    assert "No speedup is stated for exact, fly:window=4,theta=.3: the task has no scorer" in text


def test_a_run_on_a_busy_machine_says_so() -> None:
    summary = made()
    assert not any("busy" in note for note in notes(summary | {"core_share": 0.9}))
    told = "The machine was busy when this run began: one thread got 45% of a core, so times say little."
    assert told in notes(summary | {"core_share": 0.45})


def test_several_runs_have_their_own_labels() -> None:
    other = made() | {"label": "decisions: pocket, cost: 32B/1.5B on H200"}
    text = shown([made(), other], 140)
    assert (
        text.index("(pocket with draft pocket-draft on CPU)") < text.index("cost of 32B/1.5B on H200")
        and text.count("exact") == 2
    )


def test_markup_in_names_is_text() -> None:
    run = run_of("[red]x[/red][")
    text = shown([summarise(run, many(6, none=plain, **{"[red]x[/red][": plain}))], 140)
    assert "[red]x[/red][" in text


def test_an_empty_run() -> None:
    assert "none" in shown([summarise(run_of("exact"), [])], 80)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "0.012"), (0.604, "0.604"), (3.14159, "3.14"), (31.4159, "31.4"), (314.159, "314.2")]
)
def test_figures_have_the_digits_that_matter(value: float, text: str) -> None:
    assert figure({"value": value}) == text
