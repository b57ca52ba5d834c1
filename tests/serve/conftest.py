from __future__ import annotations

from collections.abc import Iterator

import pytest

import semspec
from semspec import Pair
from semspec.model.prefix_cache import PrefixCache
from semspec.serve.limits import Limits, Settings
from tests.serve.live import Live, serving


@pytest.fixture(scope="session")
def pocket_pair() -> Pair:
    return semspec.load("pocket", device="cpu", slots=4, context=512).wrapped(PrefixCache)


@pytest.fixture(scope="module")
def pocket(pocket_pair: Pair) -> Iterator[Live]:
    """The shipped pair, every rule allowed."""
    settings = Settings(name="pocket", allow_lossy=True, limits=Limits(new_tokens=300))
    with serving(lambda: pocket_pair, settings) as live:
        yield live


@pytest.fixture(scope="module")
def tiny(target_folder, draft_folder) -> Iterator[Live]:
    """A tiny pair with few slots, a short queue and keys for nobody: made to be abused."""
    limits = Limits(new_tokens=900, queue=6, body_bytes=20_000, choices=4, draft_tokens=16, prompt_tokens=200)
    load = lambda: semspec.load(target_folder, draft_folder, device="cpu", slots=2)  # noqa: E731
    with serving(load, Settings(name="tiny", limits=limits)) as live:
        yield live
