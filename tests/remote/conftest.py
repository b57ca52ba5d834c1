from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.remote.fake import Fake

QUESTION = "How many?"
CHAT = [{"role": "user", "content": QUESTION}]
RIGHT = ["Ana has 3 pens.", "Tom has 4 pens.", "The sum is 7."]
WRONG = ["Ana has 3 pens.", "Tom owns 5 pens.", "The sum is 8."]


def mark(step: str) -> str:
    """A target that knows what is right."""
    return "9" if step in RIGHT else "2"


@pytest.fixture
def target() -> Iterator[Fake]:
    with Fake({QUESTION: RIGHT}, mark) as fake:
        yield fake


@pytest.fixture
def draft() -> Iterator[Fake]:
    with Fake({QUESTION: WRONG}) as fake:
        yield fake


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between two tries in a test."""
    monkeypatch.setattr("semspec.remote.connection.FIRST_WAIT", 0.001)
