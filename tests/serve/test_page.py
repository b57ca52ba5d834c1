"""The page in a real browser, answered by the pocket pair."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import semspec
from semspec import pocket as world
from semspec.serve.app import PAGE
from semspec.serve.limits import Settings
from semspec.serve.menu import GENERAL
from tests.checkpoints import make_model, make_tokenizer, save
from tests.serve.browser import ASK, answering, ask, browser_only, done, figure, shown, stream
from tests.serve.live import Live, serving


def answer(live: Live, **speculation: Any) -> tuple[str, dict[str, Any]]:
    """The API's, with drafts of 4: where lengths are learnt, rounds are never the same twice."""
    body: dict[str, Any] = {"model": "pocket", "temperature": 0, "max_tokens": 100, "seed": 0}
    speculation |= {"num_draft_tokens": 4}
    body["messages"] = [{"role": "user", "content": ASK}]
    told = live.post("/v1/chat/completions", body | {"speculation": speculation}).json()
    message = told["choices"][0]["message"]
    return re.sub(r"\s+", "", message.get("reasoning_content", "") + message["content"]), told["metrics"]


@browser_only
def test_an_answer_is_shown_by_origin_with_its_figures(page: Any, pocket: Live):
    page.fill("#longest", "100")
    page.get_by_label("draft length").fill("4")
    ask(page)
    done(page)
    lane = page.locator(".answer")
    text, metrics = answer(pocket, verifier="exact")
    told = metrics["speculative_decoding"]
    assert shown(lane) == text
    assert lane.locator(".token.draft").count() and lane.locator(".token.target").count()
    assert lane.locator(".thinking").count() == 1 and lane.locator(".badge").inner_text() == "lossless"
    tokens = figure(lane, "tokens")
    assert figure(lane, "passes") == pytest.approx(tokens / told["num_target_passes"], abs=0.01)
    assert figure(lane, "accepted") == round(100 * told["draft_acceptance_rate"])
    label = page.locator(".bars").get_attribute("aria-label")
    assert label.endswith(", ".join(f"{i}: {n}" for i, n in enumerate(told["acceptance_histogram"])))


@browser_only
def test_two_methods_side_by_side_and_why_a_token_was_relaxed(page: Any, pocket: Live):
    page.fill("#longest", "100")
    page.check("#compare")
    second = page.locator(".method").nth(1)
    second.get_by_label("verifier").select_option("random")
    second.get_by_label("share of mismatches accepted", exact=True).fill("0.9")
    for length in page.get_by_label("draft length").all():
        length.fill("4")
    ask(page)
    page.locator(".verdict").filter(has_text="as many tokens a second").wait_for()
    text, metrics = answer(pocket, verifier="random", rate=0.9)
    one, two = page.locator(".answer").all()
    assert shown(two) == text and shown(one) == answer(pocket, verifier="exact")[0]
    assert "share of mismatches accepted 0.9, draft length 4" in two.locator("header").inner_text()
    relaxed = two.locator(".token.relaxed[data-why]")
    assert relaxed.count() == metrics["speculative_decoding"]["relaxed_tokens"] > 0
    relaxed.first.focus()
    tip = page.locator("#tip")
    assert "relaxed: " in tip.inner_text() and "the target would have written" in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    relaxed.last.hover()
    assert tip.is_visible()


@browser_only
def test_a_stopped_answer_stays_and_frees_the_slot(page: Any, pocket: Live):
    with pocket.held_writing():  # so that there is time to press a key
        page.get_by_label("draft length").fill("1")  # the first round is then marks only
        ask(page)
        page.locator(".answer .token").first.wait_for()
        page.keyboard.press("Escape")
        done(page)
    assert page.locator(".note").inner_text() == "Stopped." and pocket.idle()
    before = shown(page.locator(".answer"))
    page.check("#remember")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "And again?")
    done(page)
    roles = [message["role"] for message in request.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"] and shown(page.locator(".answer").first) == before


@browser_only
def test_what_is_refused_is_said_and_can_be_asked_again(page: Any):
    page.fill("#longest", "5000")
    ask(page)
    done(page)
    assert "at most 300" in page.locator(".note.error").inner_text()
    page.fill("#longest", "20")
    page.get_by_role("button", name="ask again").click()
    page.locator(".note").filter(has_text="Cut off at 20 tokens").wait_for()
    assert page.locator(".turn").count() == 1 and figure(page, "tokens") == 20


@browser_only
def test_thinking_can_be_cut_short(page: Any):
    page.get_by_label("longest thinking").fill("10")
    ask(page)
    done(page)
    thought, said = page.locator(".answer .markdown").all_inner_texts()
    assert len(thought.split()) <= 10 and said


@browser_only
def test_examples_are_drawn_from_the_models_world(page: Any):
    texts = page.locator(".example").all_inner_texts()
    assert texts == [world.problem(i, n, "test").text for i, n in enumerate((3, 3, 4, 5))]
    page.get_by_role("button", name="other examples").click()
    page.locator(".example").first.filter(has_not_text=texts[0]).wait_for()
    assert not set(texts) & set(page.locator(".example").all_inner_texts())
    assert not page.is_checked("#remember"), "it was trained on single questions"
    page.locator(".example").first.click()
    done(page)
    expected = world.problem(4, 3, "test")
    assert page.locator(".question").inner_text() == expected.text
    assert str(expected.answer) in page.locator(".answer .markdown").last.inner_text()


def test_every_rule_and_option_has_words_for_people(pocket: Live):
    for rule in pocket.get("/v1/methods").json()["verifiers"]:
        assert rule["title"] != rule["name"] and 10 < len(rule["about"]) < 120, rule["name"]
        for option in rule["options"]:
            assert option["label"] != option["name"].replace("_", " ") and len(option["label"]) < 50, option


def test_examples_of_other_models_are_general(tiny: Live):
    assert tiny.get("/v1/examples").json() == {
        "chat": True, "examples": list(GENERAL), "one_question": False, "about": "",
    }  # fmt: skip
    assert tiny.get("/v1/examples?seed=-1").status_code == 400


@browser_only
@pytest.mark.parametrize("page", [1280, 390], indirect=True)
def test_the_picker_is_in_view_with_names_for_people_and_few_options(page: Any, pocket: Live):
    menu = {rule["name"]: rule for rule in pocket.get("/v1/methods").json()["verifiers"]}
    picker = page.get_by_label("verifier")
    assert picker.is_visible() and "Exact match (exact)" in picker.inner_text()
    assert page.locator("#fold").is_visible() == (page.viewport_size["width"] == 390)
    if page.locator("#fold").is_visible():
        page.click("#fold")
    for name, rule in menu.items():
        picker.select_option(name)
        about = page.locator(".method .about").inner_text()
        assert rule["about"][1:] in about and about.startswith("lossless" if rule["lossless"] else "lossy")
        fields = page.locator(".method .option:visible")
        assert fields.count() <= 3, name
        assert not any("_" in text for text in page.locator(".method label").all_text_contents())
    picker.select_option("semantic+")
    page.get_by_label("lowest judge-probe probability").fill("0.99")
    page.locator(".more summary").click()
    page.get_by_label("accept a rejected step's prefix if target agrees").select_option("no")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page)
    done(page)
    assert request.value.post_data_json["speculation"] == {
        "verifier": "semantic+", "threshold": 0.99, "keep": False, "trace": True
    }  # fmt: skip


@browser_only
@pytest.mark.parametrize("page", [390], indirect=True)
def test_it_fits_a_phone(page: Any):
    page.click("#fold")
    page.check("#compare")
    for more in page.locator(".more summary").all():
        more.click()
    width = "(name) => document.querySelector(name).getBoundingClientRect().right"
    assert page.evaluate(width, ".option") == page.evaluate(width, ".settings"), "as wide as the rest"
    page.click("#fold")
    ask(page)
    page.locator(".verdict").filter(has_text="as many").wait_for()
    for element in ("html", "#panel", "#talk"):
        beyond = "(name) => { const e = document.querySelector(name); return e.scrollWidth - e.clientWidth }"
        assert page.evaluate(beyond, element) <= 0, element


@browser_only
def test_the_theme_is_kept(page: Any):
    before = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    after = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.reload()
    page.locator(".example").first.wait_for()
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == after != before


@browser_only
@pytest.mark.parametrize(
    ("page", "longest", "wide"), [(390, 57, 3), (1280, 57, 3), (390, 19, 1), (390, 300, 28)], indirect=["page"]
)
def test_drafts_of_any_length_have_room_in_the_picture(page: Any, longest: int, wide: int):
    accepted = [0, 0, 5, longest]
    rounds = [[("a ", "draft", "content")] * (n + 1) for n in accepted]
    answering(page, lambda body: stream(*rounds, drafted=longest))
    ask(page)
    done(page)
    page.locator(".detail").evaluate("(e) => { e.open = true }")
    bars = page.locator(".bars").first
    assert bars.evaluate("(e) => e.scrollWidth - e.clientWidth") <= 0 < bars.locator("div").count() <= 20
    label = bars.get_attribute("aria-label")
    assert label.endswith(", ".join(f"{n}: {accepted.count(n)}" for n in range(longest + 1)))
    titles = [bar.get_attribute("title") for bar in bars.locator("div").all()]
    told = [re.fullmatch(r"(\d+)(?: to (\d+))? accepted: (\d+) rounds", title).groups() for title in titles]
    spans = [(int(a), int(b or a), int(count)) for a, b, count in told]
    assert spans[0] == (0, 0, 2) and all(b - a == wide - 1 for a, b, _ in spans[1:])
    assert [sum(a <= n <= b for n in accepted) for a, b, _ in spans] == [count for *_, count in spans]
    caption = page.locator(".histogram figcaption").first.inner_text()
    assert caption.endswith(f"0, then {wide} numbers a bar") == (wide > 1)


@browser_only
def test_the_verdict_says_what_was_relaxed_whichever_method_was_faster(page: Any):
    exact = stream([("no", "draft", "content")], seconds=0.5)
    fly = stream([("yes", "relaxed", "content"), (".", "target", "content")], seconds=4.0)
    answers = iter([exact, fly])
    answering(page, lambda body: next(answers))
    page.check("#compare")
    page.get_by_label("verifier").nth(1).select_option("fly")
    ask(page)
    done(page)
    verdict = page.locator(".verdict").inner_text()
    assert verdict == "Different answers. exact wrote 4.00× as many tokens a second as fly; fly relaxed 1 of 2 tokens."


@browser_only
def test_nobody_is_the_faster_one_by_a_hundredth(page: Any):
    answers = iter([stream([("no", "draft", "content")], seconds=seconds) for seconds in (0.5, 0.51)])
    answering(page, lambda body: next(answers))
    page.check("#compare")
    page.get_by_label("verifier").nth(1).select_option("fly")
    ask(page)
    done(page)
    verdict = page.locator(".verdict").inner_text()
    assert verdict == "The same text, letter for letter. exact and fly wrote about as many tokens a second."


@browser_only
def test_while_the_model_is_loaded_the_page_says_so_and_keeps_what_is_written(page: Any):
    states = iter(["loading", "loading", "loading", "ready"])
    page.route("**/health", lambda route: route.fulfill(json={"status": next(states, "ready")}))
    page.reload()
    waiting = page.locator("#wait").get_by_text("The model is being loaded. This page goes on by itself")
    waiting.wait_for()
    assert page.locator("#send").is_disabled() and page.locator("#save").is_disabled()
    ask(page)
    assert page.input_value("#prompt") == ASK, "kept until there is somebody to ask"
    page.locator(".example").first.wait_for()
    page.locator("#send:enabled").wait_for()
    assert not waiting.is_visible() and page.input_value("#prompt") == ASK


@browser_only
def test_speeds_that_were_timed_on_a_busy_machine_are_told_as_such(page: Any, pocket: Live, monkeypatch):
    told = page.locator("#model").filter(has_text="timed on a busy machine")
    for warning, count in (("", 0), ("one thread gets 13% of a core", 1)):
        monkeypatch.setattr(pocket.engine, "busy", warning)
        page.reload()
        page.locator(".example").first.wait_for()
        assert told.count() == count


@browser_only
def test_a_server_that_is_gone_is_told_where_one_looks(page: Any):
    page.route("**/health", lambda route: route.abort())
    page.reload()
    page.get_by_text("The server cannot be reached. This page tries again every second.").wait_for()
    page.unroute("**/health")
    page.locator("#send:enabled").wait_for()


@browser_only
@pytest.mark.parametrize("page", [390], indirect=True)
def test_an_empty_chat_is_read_from_its_top(page: Any):
    assert page.locator("#talk").evaluate("(e) => e.scrollHeight - e.clientHeight") > 0, "examples need more room"
    page.set_viewport_size({"width": 380, "height": 700})
    page.wait_for_timeout(200)
    assert page.locator("#talk").evaluate("(e) => e.scrollTop") == 0


CONTRAST = """() => {
  const light = (c) => c.map((x) => (x /= 255) <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const numbers = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const ground = (e) => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return numbers(c) } };
  const found = {};
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.disabled || e.closest("option, svg")) continue;
    const [a, b] = [numbers(getComputedStyle(e).color), ground(e)].map(light).sort((x, y) => x - y);
    found[`${e.tagName} ${e.className} ${e.textContent.trim().slice(0, 20)}`] = (b + 0.05) / (a + 0.05);
  }
  return found }"""


@browser_only
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_readers_system_and_can_be_read(page: Any, scheme: str):
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.check("#compare")
    page.get_by_label("verifier").nth(1).select_option("fly")
    page.fill("#longest", "60")
    ask(page)
    page.locator(".verdict").filter(has_text="as many").wait_for()
    contrasts = page.evaluate(CONTRAST)
    assert len(contrasts) > 40 and {name: c for name, c in contrasts.items() if c < 4.5} == {}
    blinking = "(e) => { e.classList.add('writing'); return getComputedStyle(e.querySelector('.text'), '::after') }"
    assert page.locator(".answer").first.evaluate(f"(e) => ({blinking})(e).animationName") == "none"


@browser_only
def test_everything_is_reached_by_keyboard(page: Any):
    page.check("#compare")
    ask(page)
    page.locator(".verdict").filter(has_text="as many").wait_for()
    page.evaluate("() => document.activeElement.blur()")
    reached = set()
    for _ in range(90):
        page.keyboard.press("Tab")
        words = "() => { const e = document.activeElement; return e.id || e.className || e.textContent.trim() }"
        reached.add(page.evaluate(words))
    wanted = {"theme", "clear", "save", "compare", "temperature", "longest", "seed", "system", "talk", "prompt", "send"}
    assert wanted | {"rule"} <= reached and any("relaxed" in name for name in reached)


def test_the_page_is_whole_in_itself(pocket: Live):
    page = pocket.get("/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    for name in re.findall(r'(?:href|src)="(/[^"]*)"', page.text):
        assert pocket.get(name).status_code == 200, name
    for file in Path(PAGE).iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text, file
        assert not re.search(r"<[^>]* on\w+=", text), file
    assert json.dumps(pocket.get("/v1/methods").json())


@browser_only
def test_a_model_without_a_chat_template_goes_on_from_a_text(browser: Any, target_folder: Path, tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    folder = save(make_model("llama3.1"), tmp_path / "plain", tokenizer)
    load = lambda: semspec.load(folder, device="cpu", slots=2, context=256)  # noqa: E731
    with serving(load, Settings(name="plain")) as live:
        tab = browser.new_page()
        tab.goto(live.url)
        tab.locator(".example").first.wait_for()
        assert "no chat template" in tab.locator("#about").inner_text() and not tab.locator("#system").is_visible()
        tab.fill("#longest", "12")
        ask(tab, "the quick brown")
        done(tab)
        body = {"model": "plain", "prompt": "the quick brown", "max_tokens": 12, "temperature": 0, "seed": 0}
        text = live.post("/v1/completions", body).json()["choices"][0]["text"]
        assert shown(tab.locator(".answer")) == re.sub(r"\s+", "", text)
        tab.close()
