"""The eight stories of the pocket world, as tables.

A theme says what its quantities are called, how the prompt states each kind of fact, and which quantities come from
two plain numbers (a *source*: price times count, speed times hours, dozens, hours to minutes, ages in n years).
Every fact names the person it is about first, so that a small model can learn one way to look things up.
The tables are the only place where this wording lives: the writer and the parser are both derived from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .lexicon import GOODS, PRODUCTS, THINGS


@dataclass(frozen=True)
class Source:
    """A quantity computed from two numbers of the prompt. `b` may be a fixed unit factor the prompt never states."""

    op: str
    text: tuple[str, ...]
    a: tuple[int, int]
    b: tuple[int, int]


@dataclass(frozen=True)
class Theme:
    """One story. In every string {x} is the person the fact is about, {p} and {q} are people it refers to,
    {c} is a number, {a} and {b} the two numbers of a source, {item} the thing the problem is about."""

    key: str
    items: tuple[str, ...]
    names: tuple[str, ...]  # paraphrases of a quantity; the first one is its canonical name
    given: tuple[str, ...]
    more: tuple[str, ...]
    fewer: tuple[str, ...]
    times: tuple[str, ...]
    share: tuple[str, ...]
    both: tuple[str, ...]
    gap: tuple[str, ...]
    sources: tuple[Source, ...]
    ask: tuple[str, ...]


THEMES: tuple[Theme, ...] = (
    Theme(
        key="things",
        items=THINGS,
        names=(
            "{x}'s number of {item}",
            "the number of {item} {x} has",
            "how many {item} {x} has",
            "what {x} has in {item}",
            "all {item} of {x}",
        ),
        given=("{x} has {c} {item}.", "{x}'s basket holds {c} {item}."),
        more=("{x} has {c} more {item} than {p}.", "{x} has as many {item} as {p} and {c} more."),
        fewer=("{x} has {c} fewer {item} than {p}.", "{x} has as many {item} as {p} but {c} fewer."),
        times=("{x} has {c} times as many {item} as {p}.",),
        share=("{x} gets one of {c} equal shares of {p}'s {item}.", "{x} has 1/{c} as many {item} as {p}."),
        both=("{x} has as many {item} as {p} and {q} together.",),
        gap=("{x} has as many {item} as {p} has more than {q}.",),
        sources=(
            Source(
                "mul",
                ("{x} has {a} dozen {item}.", "{x} fills {a} boxes with a dozen {item} each."),
                (2, 8),
                (12, 12),
            ),
            Source(
                "mul",
                ("{x} has {a} bags of {b} {item}.", "{x} holds {b} {item} in each of {a} bags."),
                (2, 9),
                (3, 12),
            ),
        ),
        ask=("How many {item} does {x} have?",),
    ),
    Theme(
        key="shop",
        items=GOODS,
        names=(
            "{x}'s bill",
            "the amount {x} spends",
            "how much {x} pays",
            "what {x} pays",
            "all that {x} spends",
        ),
        given=("{x} pays {c} dollars.", "{x} spends {c} dollars."),
        more=("{x} pays {c} dollars more than {p}.", "{x} pays what {p} pays and {c} dollars extra."),
        fewer=("{x} pays {c} dollars less than {p}.", "{x} pays what {p} pays less a coupon of {c} dollars."),
        times=("{x} pays {c} times as much as {p}.",),
        share=("{x} pays one of {c} equal parts of {p}'s bill.", "{x} pays 1/{c} as much as {p}."),
        both=("{x} pays as much as {p} and {q} together.",),
        gap=("{x} pays as much as {p} pays more than {q}.",),
        sources=(
            Source(
                "mul",
                (
                    "{x} buys {a} {item} for {b} dollars each.",
                    "{x} buys {a} {item} at a price of {b} dollars.",
                ),
                (2, 9),
                (2, 15),
            ),
            Source("sub", ("{x} hands over {a} dollars and gets {b} back.",), (20, 100), (1, 19)),
        ),
        ask=("How many dollars does {x} pay?", "How much does {x} spend?"),
    ),
    Theme(
        key="trip",
        items=("road",),
        names=(
            "{x}'s distance",
            "the distance {x} travels",
            "how far {x} goes",
            "what {x} covers",
            "all the way of {x}",
        ),
        given=("{x} travels {c} miles.", "{x} goes {c} miles."),
        more=("{x} travels {c} miles more than {p}.", "{x} goes as far as {p} and {c} miles on."),
        fewer=("{x} travels {c} miles less than {p}.", "{x} stops {c} miles short of {p}'s distance."),
        times=("{x} travels {c} times as far as {p}.",),
        share=("{x} travels 1/{c} as far as {p}.", "{x} does one of {c} equal legs of {p}'s trip."),
        both=("{x} travels as far as {p} and {q} together.",),
        gap=("{x} travels as far as {p} goes beyond {q}.",),
        sources=(
            Source(
                "mul",
                ("{x} drives {a} hours at {b} miles an hour.", "{x} goes {b} miles an hour for {a} hours."),
                (2, 5),
                (4, 40),
            ),
            Source("mul", ("{x} runs {a} rounds of {b} miles.",), (2, 9), (2, 9)),
        ),
        ask=("How many miles does {x} travel?", "How far does {x} go?"),
    ),
    Theme(
        key="ages",
        items=("year",),
        names=(
            "{x}'s age",
            "the age of {x}",
            "how old {x} is",
            "what {x} counts in years",
            "all the years of {x}",
        ),
        given=("{x} is {c} years old.", "{x} is aged {c}."),
        more=("{x} is {c} years older than {p}.",),
        fewer=("{x} is {c} years younger than {p}.",),
        times=("{x} is {c} times as old as {p}.",),
        share=("{x} is 1/{c} as old as {p}.",),
        both=("{x} is as old as {p} and {q} together.",),
        gap=("{x} is as old as {p} is older than {q}.",),
        sources=(
            Source(
                "add",
                ("{x} was {a} just {b} years ago.", "{x} was {a} years old {b} years ago."),
                (4, 60),
                (2, 20),
            ),
            Source(
                "sub",
                ("{x} will be {a} in {b} years.", "{x} will be {a} years old in {b} years."),
                (24, 80),
                (2, 20),
            ),
        ),
        ask=("How old is {x}?", "What is {x}'s age?"),
    ),
    Theme(
        key="work",
        items=PRODUCTS,
        names=(
            "{x}'s output of {item}",
            "the number of {item} {x} makes",
            "how many {item} {x} makes",
            "what {x} makes in {item}",
            "all {item} made by {x}",
        ),
        given=("{x} makes {c} {item}.", "{x} is the maker of {c} {item}."),
        more=("{x} makes {c} more {item} than {p}.", "{x} makes as many {item} as {p} and {c} more."),
        fewer=("{x} makes {c} fewer {item} than {p}.", "{x} makes as many {item} as {p} but {c} fewer."),
        times=("{x} makes {c} times as many {item} as {p}.",),
        share=("{x} makes 1/{c} as many {item} as {p}.",),
        both=("{x} makes as many {item} as {p} and {q} together.",),
        gap=("{x} makes as many {item} as {p} makes more than {q}.",),
        sources=(
            Source(
                "mul",
                ("{x} makes {b} {item} an hour for {a} hours.", "{x} works {a} hours and makes {b} {item} in each."),
                (2, 9),
                (2, 15),
            ),
            Source("sub", ("{x} makes {a} {item} but {b} of them break.",), (20, 90), (1, 15)),
        ),
        ask=("How many {item} does {x} make?",),
    ),
    Theme(
        key="time",
        items=("minute",),
        names=(
            "{x}'s minutes",
            "the time {x} needs",
            "how long {x} takes",
            "what {x} needs in minutes",
            "all the minutes of {x}",
        ),
        given=("{x} needs {c} minutes.", "{x} takes {c} minutes."),
        more=("{x} needs {c} minutes more than {p}.", "{x} is done {c} minutes after {p}'s time."),
        fewer=("{x} needs {c} minutes less than {p}.", "{x} is done {c} minutes before {p}'s time."),
        times=("{x} needs {c} times as long as {p}.",),
        share=("{x} needs 1/{c} as long as {p}.",),
        both=("{x} needs as long as {p} and {q} together.",),
        gap=("{x} needs as long as {p} needs beyond {q}.",),
        sources=(
            Source("mul", ("{x} needs {a} hours.", "{x} takes {a} hours."), (2, 5), (60, 60)),
            Source(
                "mul",
                ("{x} does {a} rounds of {b} minutes.", "{x} needs {b} minutes for each of {a} rounds."),
                (2, 9),
                (2, 15),
            ),
        ),
        ask=("How many minutes does {x} need?", "How long in minutes does {x} take?"),
    ),
    Theme(
        key="rope",
        items=("rope",),
        names=(
            "{x}'s rope",
            "the length of {x}'s rope",
            "how long {x}'s rope is",
            "what {x} holds in rope",
            "all the rope of {x}",
        ),
        given=("{x}'s rope is {c} cm long.", "{x} holds a rope of {c} cm."),
        more=("{x}'s rope is {c} cm longer than {p}'s.", "{x} ties {c} cm to a rope like {p}'s."),
        fewer=("{x}'s rope is {c} cm shorter than {p}'s.", "{x} cuts {c} cm off a rope like {p}'s."),
        times=("{x}'s rope is {c} times as long as {p}'s.",),
        share=("{x}'s rope is 1/{c} as long as {p}'s.", "{x} holds one of {c} equal pieces of {p}'s rope."),
        both=("{x}'s rope is as long as those of {p} and {q} together.",),
        gap=("{x}'s rope is as long as {p}'s reaches beyond {q}'s.",),
        sources=(
            Source(
                "mul",
                ("{x}'s rope is {a} metres long.", "{x} holds a rope of {a} metres."),
                (2, 4),
                (100, 100),
            ),
            Source(
                "mul",
                ("{x} ties {a} cords of {b} cm.", "{x}'s rope is made of {a} cords of {b} cm."),
                (2, 9),
                (3, 15),
            ),
        ),
        ask=("How many cm long is {x}'s rope?",),
    ),
    Theme(
        key="stay",
        items=("day",),
        names=(
            "{x}'s stay",
            "the days {x} stays",
            "how long {x} stays",
            "what {x} spends in days",
            "all the days of {x}",
        ),
        given=("{x} stays {c} days.", "{x}'s visit lasts {c} days."),
        more=("{x} stays {c} days longer than {p}.", "{x} stays as long as {p} and {c} days on."),
        fewer=("{x} stays {c} days less than {p}.", "{x} leaves {c} days short of {p}'s stay."),
        times=("{x} stays {c} times as long as {p}.",),
        share=("{x} stays 1/{c} as long as {p}.",),
        both=("{x} stays as long as {p} and {q} together.",),
        gap=("{x} stays as long as {p} stays beyond {q}.",),
        sources=(
            Source("mul", ("{x} stays {a} weeks.", "{x}'s visit lasts {a} weeks."), (2, 12), (7, 7)),
            Source(
                "add",
                ("{x} stays {a} days, then {b} more.", "{x} comes for {a} days and adds {b}."),
                (5, 60),
                (2, 20),
            ),
        ),
        ask=("How many days does {x} stay?",),
    ),
)

THEME_BY_KEY: dict[str, Theme] = {theme.key: theme for theme in THEMES}
