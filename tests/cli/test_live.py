"""What an answer leaves on a terminal and in a pipe, seen through a small terminal of our own."""

from __future__ import annotations

import io
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from tqdm import tqdm

from semspec.cli.live import Writer, coloured, fit
from semspec.cli.progress import loading
from semspec.types import Event, Origin

CODES = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(.)", re.DOTALL)
FIGURES = ["12 tokens", "34.5/s", "tau 2.10", "7/9 drafted accepted"]


class Screen:
    """A terminal without an upper end: the codes that rich uses, and no others."""

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.at, self.column = width, [""], 0, 0

    def feed(self, output: str) -> list[str]:
        for numbers, code, character in CODES.findall(output):
            if code == "A":
                self.at -= int(numbers)
                assert self.at >= 0, "above the first row"
            elif code == "K":
                assert numbers == "2"
                self.rows[self.at] = ""
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self.at, self.column = self.at + 1, 0
                self.rows += [""] * (self.at - len(self.rows) + 1)
            elif character:
                assert character >= " ", "a control character reached the terminal"
                assert self.column < self.width, "the row is full, so this would wrap and the next redraw go astray"
                row = self.rows[self.at].ljust(self.column)
                self.rows[self.at] = row[: self.column] + character + row[self.column + 1 :]
                self.column += 1
            else:
                assert code in ("m", "h", "l"), f"an unknown code {code!r}"
        return self.rows


def terminal(width: int) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=10, color_system="standard", highlight=False
    )


def event(text: str, origin: Origin = "target") -> Event:
    return Event([1], [origin], spans=[(text, origin)])


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@settings(max_examples=200)
@given(st.lists(st.text("ab \n\x1b\x07[", max_size=12), max_size=12), st.integers(4, 30))
def test_the_answer_is_all_that_is_left_however_it_was_cut_and_however_narrow_it_is(pieces: list[str], width: int):
    console, screen = terminal(width), Screen(width)
    with Writer(console, lambda: FIGURES) as writer:
        for piece in pieces:
            writer.write(event(piece))
    left = [row.rstrip() for row in screen.feed(written(console))]
    whole = coloured([event("".join(pieces))])
    shown = [row.plain.rstrip() for row in whole.wrap(Console(width=width), width)]
    if any(len(word) > width for word in whole.plain.split()):  # where it is broken depends on when it was seen
        assert "".join("".join(left).split()) == "".join("".join(shown).split())
    else:
        assert "\n".join(left).rstrip() == "\n".join(shown).rstrip()


@pytest.mark.parametrize("width", [8, 20, 50, 120])
def test_the_figures_are_one_row_below_the_text(width: int):
    console, screen = terminal(width), Screen(width)
    with Writer(console, lambda: FIGURES) as writer:
        for word in ["many", "words", "that", "are", "written", "one", "after", "another"]:
            writer.write(event(word + " "))
            rows = [row.rstrip() for row in Screen(width).feed(written(console)) if row.strip()]
            assert rows[-1] == fit(FIGURES, width) and sum("tokens" in row for row in rows) <= 1
    assert not any("tau" in row for row in screen.feed(written(console)))


@settings(max_examples=200)
@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 60))
def test_figures_give_way_from_the_last_on(parts: list[str], width: int):
    line = fit(parts, width)
    assert len(line) <= width and (" · ".join(parts)).startswith(line) and line
    kept = line.split(" · ")
    if len(kept) < len(parts) and kept[0] == parts[0]:
        assert len(" · ".join(parts[: len(kept) + 1])) > width, "the next would have fitted"


def test_a_pipe_gets_the_text_as_it_is_and_nothing_else():
    pipe = Console(file=io.StringIO(), width=10)
    with Writer(pipe, lambda: FIGURES) as writer:
        for piece in ("a long line, longer than ten\n", "\x1b[1m\x07 and\r\v codes"):
            writer.write(event(piece, "draft"))
    assert written(pipe) == "a long line, longer than ten\n\x1b[1m\x07 and\r\v codes\n"


def test_origins_have_their_colours_and_controls_are_harmless():
    text = coloured([event("drafted", "draft"), event("loose", "relaxed"), event("plain\x1b[2J\x9b")])
    assert text.plain == "draftedlooseplain␛[2J�"
    assert [str(span.style) for span in text.spans] == ["green", "yellow", "default"]
    assert isinstance(text, Text)


@pytest.mark.parametrize("where", ["terminal", "pipe", "quiet"])
def test_what_is_seen_while_a_model_is_loaded(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if where == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes anything for one
    with loading(quiet=where == "quiet") as report:
        if report is not None:
            report("weights 1 kB")
    out, err = capsys.readouterr()
    assert not out and ("loading models" in err) == (where == "terminal")
    assert where == "terminal" or err == {"pipe": "weights 1 kB\n", "quiet": ""}[where]
    if where == "terminal":
        assert err.endswith("\r\x1b[2K"), "the line is gone afterwards"


def test_a_readers_bar_is_drawn_in_the_line_that_says_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with loading() as report:
        assert report is not None
        report("weights 1 kB")
        with tqdm(total=3, desc="reading", leave=False, mininterval=0, file=sys.stderr) as bar:
            for _ in range(3):
                bar.update()
    lines = capsys.readouterr().err.split("\n")
    assert len(lines) == 2 and "weights 1 kB" in lines[0], "nothing but the plan is left on the screen"
    assert lines[1].count("reading") >= 3 and lines[1].endswith("\r\x1b[2K")
