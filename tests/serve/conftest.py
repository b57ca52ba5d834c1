from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import semspec
from semspec import Pair
from semspec.model.prefix_cache import PrefixCache
from semspec.serve.limits import Limits, Settings
from tests.serve.browser import CHROMIUM
from tests.serve.live import WAIT, Live, serving


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, pocket: Live, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, as wide as the test's parameter says; whatever a test does, nothing may go wrong in it."""
    width = getattr(request, "param", 1280)
    context = browser.new_context(viewport={"width": width, "height": 800}, accept_downloads=True)
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=pocket.url)
    context.set_default_timeout(WAIT * 1000)
    tab, errors, elsewhere = context.new_page(), [], []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    told = ("status of 400", "net::ERR_FAILED")  # what a test makes fail, the browser says for itself
    tab.on("console", lambda m: m.type == "error" and not any(t in m.text for t in told) and errors.append(m.text))
    tab.on("dialog", lambda dialog: errors.append(dialog.message))
    tab.on("request", lambda r: elsewhere.append(r.url) if not r.url.startswith((pocket.url, "blob:")) else None)
    tab.goto(pocket.url)
    tab.locator(".example").first.wait_for()
    yield tab
    assert not errors and not elsewhere, "no error, and nothing is fetched from anywhere else"
    context.close()
