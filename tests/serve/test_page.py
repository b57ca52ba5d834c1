"""The page in a real browser: what people see while the pair writes."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semspec.serve.app import PAGE
from tests.serve.live import Live

ASK = "Mia has 4 bags with 6 pens each. How many pens does Mia have?"
CHROMIUM = shutil.which("chromium")
browser_only = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to open the page with")


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
    width = getattr(request, "param", 1280)
    context = browser.new_context(viewport={"width": width, "height": 800})
    context.set_default_timeout(30_000)
    tab, errors, elsewhere = context.new_page(), [], []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda m: errors.append(m.text) if m.type == "error" and "status of 400" not in m.text else None)
    tab.on("request", lambda r: elsewhere.append(r.url) if not r.url.startswith(pocket.url) else None)
    tab.goto(pocket.url)
    tab.locator(".lane").wait_for()
    yield tab
    assert not errors and not elsewhere, "no error, and nothing is fetched from anywhere else"
    context.close()


def ask(page: Any, text: str = ASK) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def done(page: Any) -> None:
    page.locator("#send").wait_for(state="visible")


def figure(lane: Any, name: str) -> float:
    return float(lane.locator(f"[data-figure={name}]").inner_text().replace("−", "-").replace("%", ""))


def shown(lane: Any) -> str:
    return re.sub(r"\s+", "", "".join(lane.locator(".message .token").all_inner_texts()))


def answer(live: Live, **speculation: Any) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": "pocket", "temperature": 0, "max_tokens": 100, "seed": 0}
    body["messages"] = [{"role": "user", "content": ASK}]
    told = live.post("/v1/chat/completions", body | {"speculation": speculation}).json()
    message = told["choices"][0]["message"]
    return re.sub(r"\s+", "", message.get("reasoning_content", "") + message["content"]), told["metrics"]


@browser_only
def test_an_answer_is_shown_by_origin_with_its_figures(page: Any, pocket: Live):
    page.fill("#longest", "100")
    ask(page)
    done(page)
    lane = page.locator(".lane")
    text, metrics = answer(pocket, verifier="exact")
    told = metrics["speculative_decoding"]
    assert shown(lane) == text
    assert lane.locator(".token.draft").count() and lane.locator(".token.target").count()
    assert lane.locator(".thinking").count() == 1 and lane.locator(".badge").inner_text() == "lossless"
    tokens = figure(lane, "tokens")
    assert figure(lane, "passes") == pytest.approx(tokens / told["num_target_passes"], abs=0.01)
    assert figure(lane, "accepted") == round(100 * told["draft_acceptance_rate"])
    label = lane.locator(".bars").get_attribute("aria-label")
    counts = ", ".join(f"{i}: {n}" for i, n in enumerate(told["acceptance_histogram"]))
    assert label.endswith(counts)


@browser_only
def test_two_methods_side_by_side_and_why_a_token_was_relaxed(page: Any, pocket: Live):
    page.fill("#longest", "100")
    page.check("#compare")
    second = page.locator(".lane").nth(1)
    second.locator("summary").click()
    second.get_by_label("verifier").select_option("random")
    second.get_by_label("rate").last.fill("0.9")
    second.get_by_label("rate").last.press("Tab")
    assert second.locator("summary").inner_text().startswith("random · rate 0.9")
    ask(page)
    page.locator("#comparison").filter(has_text="as many tokens a second").wait_for()
    text, metrics = answer(pocket, verifier="random", rate=0.9)
    assert shown(second) == text and shown(page.locator(".lane").first) == answer(pocket, verifier="exact")[0]
    relaxed = second.locator(".token.relaxed[data-why]")
    assert relaxed.count() == metrics["speculative_decoding"]["relaxed_tokens"] > 0
    relaxed.first.focus()
    tip = page.locator("#tip")
    assert "relaxed: " in tip.inner_text() and "the target would have written" in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    relaxed.last.hover()
    assert tip.is_visible()


@browser_only
def test_escape_stops_the_answer_and_frees_the_slot(page: Any, pocket: Live, monkeypatch: pytest.MonkeyPatch):
    pair = pocket.engine.pair
    assert pair is not None
    tick = pair.executor.tick
    with monkeypatch.context() as slowly:  # so that there is time to press a key
        slowly.setattr(pair.executor, "tick", lambda: (time.sleep(0.3), tick()))
        ask(page)
        stop(page, pocket)
    ask(page, "And again?")
    done(page)
    assert page.locator(".error").count() == 1


def stop(page: Any, pocket: Live) -> None:
    page.locator(".lane .token").first.wait_for()
    page.keyboard.press("Escape")
    done(page)
    assert page.locator(".error").inner_text() == "stopped" and pocket.idle()


@browser_only
def test_what_is_refused_is_said(page: Any):
    page.fill("#longest", "5000")
    ask(page)
    done(page)
    assert "at most 300" in page.locator(".error").inner_text()


@browser_only
@pytest.mark.parametrize("page", [390], indirect=True)
def test_it_fits_a_phone(page: Any):
    page.check("#compare")
    for lane in page.locator(".lane summary").all():
        lane.click()
    width = page.evaluate("() => document.documentElement.scrollWidth")
    assert width <= 390


@browser_only
def test_the_theme_is_kept(page: Any):
    before = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    after = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.reload()
    page.locator(".lane").wait_for()
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == after != before


def test_the_page_is_whole_in_itself(pocket: Live):
    page = pocket.get("/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    for name in re.findall(r'(?:href|src)="(/[^"]*)"', page.text):
        assert pocket.get(name).status_code == 200, name
    for file in Path(PAGE).iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text, file
    assert json.dumps(pocket.get("/v1/methods").json())
