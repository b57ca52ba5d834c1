"""The page: whole in itself, harmless whatever a model wrote, and opened by a real browser."""

from __future__ import annotations

import builtins
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from semspec.bench.colours import colour_of
from semspec.bench.examples import EXAMPLES
from semspec.bench.labels import overlap
from semspec.bench.names import described, natural, task_name
from semspec.bench.plots import THEMES, _Style, front
from semspec.bench.report import write_report
from semspec.bench.summary import summarise
from semspec.bench.table import title as title_of
from semspec.errors import BadRequest
from semspec.loop.stats import Stats
from semspec.verify import REGISTRY
from tests.bench.test_summary import LABEL, LOOP, arm, many, run_of

pytest.importorskip("matplotlib", reason="the report needs matplotlib; pip install 'semspec[bench]'")
from matplotlib.figure import Figure
from matplotlib.text import Text
from playwright.sync_api import sync_playwright

HOSTILE = """<script>alert(1)</script><img src=x onerror="alert(2)">'"&</pre></details>"""
PNGS = {"accuracy.png", "speed.png", "pareto.png", "lengths.png", "acceptance.png", "positions.png"}


def drafted() -> Stats:
    stats = Stats()
    for accepted in (0, 2, 4):
        stats.observe(4, accepted)
    return stats


def made(scored: bool = True, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    def score(right: bool) -> bool | None:
        return right if scored else None

    run = run_of("exact", "fly:window=4,theta=.3", "loopy") | {"created": "2026-11-16T10:00:00+00:00"}
    samples = many(
        20,
        none=lambda i: {"correct": score(True)},
        exact=lambda i: {"correct": score(True), "seconds": 0.5, "stats": drafted(), "origins": "ddddt" * 4},
        **{
            "fly:window=4,theta=.3": lambda i: {"correct": score(i >= 8), "seconds": 0.25, "stats": drafted()},
            "loopy": lambda i: {"correct": score(True), "seconds": 0.2, "tokens": LOOP, "finish_reason": "length"},
        },
    )
    samples = [s | changes for s in samples]
    return run, samples, summarise(run, samples)


class Elements(HTMLParser):
    """Tags and attributes as a browser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words: figures take most of a report's time."""
    monkeypatch.setattr("semspec.bench.report.draw", lambda summary: {})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([made()], tmp_path_factory.mktemp("report"))


def test_a_page_and_its_figures(page: Path) -> None:
    assert page.name == "report.html" and {p.name for p in page.parent.glob("*.png")} == PNGS
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in page.parent.glob("*.png"))
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2 * len(PNGS)
    assert text.count("<figcaption>") == len(PNGS) and LABEL not in text.partition("<details><summary>Conf")[0]


def test_nothing_is_loaded_from_anywhere(page: Path) -> None:
    for tag, attributes in Elements(page.read_text()).tags:
        assert tag not in ("script", "link", "iframe", "object", "base")
        for name in ("src", "srcset", "href", "action"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert not re.search(r"url\(|@import|https?://", page.read_text())


def test_a_worse_arm_is_marked_beside_its_speed(page: Path) -> None:
    rows = {name: quality for quality, name in re.findall(r'<tr class="(\w+)" data-arm="([^"]*)"', page.read_text())}
    assert rows == {"none": "baseline", "exact": "equivalent", "fly:window=4,theta=.3": "worse", "loopy": "worse"}
    row = re.search(r'<tr class="worse" data-arm="fly.*?</tr>', page.read_text())
    assert row and "4.00x" in row[0] and "worse, p=0.023" in row[0]
    loopy = re.search(r'<tr class="worse" data-arm="loopy.*?</tr>', page.read_text())
    assert loopy and "none" in loopy[0] and "time 5.00x" in loopy[0]
    assert "loops: 5 tokens, 20 times from token 10" in page.read_text()


def test_an_unscored_run_does_not_speak_of_speedup_in_its_table(tmp_path: Path) -> None:
    text = write_report([made(scored=False)], tmp_path).read_text()
    table = re.search(r'<table class="headline">.*?</table>', text)
    assert table and "time ratio" in table[0] and "speedup" not in table[0]
    assert not (tmp_path / "accuracy.png").exists() and (tmp_path / "speed.png").exists()


def test_hostile_texts_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    run, samples, _ = made(text=HOSTILE)
    samples = [s | {"problem": f"{HOSTILE}{s['index']}", "group": HOSTILE + str(s["index"] % 2)} for s in samples]
    run["arms"].append(run["arms"][1] | {"name": HOSTILE})
    samples += [s | {"arm": HOSTILE} for s in samples if s["arm"] == "exact"]
    run |= {"label": HOSTILE + "$x^$", "config": {"task": HOSTILE, "target": HOSTILE}}
    text = write_report([(run, samples, summarise(run, samples))], tmp_path).read_text()
    for tag, attributes in Elements(text).tags:
        assert tag != "script"
        assert not any(name.startswith("on") for name in attributes)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "Content-Security-Policy" in text


def test_odd_characters_do_not_stop_a_report(tmp_path: Path) -> None:
    run, samples, _ = made(text="汉字 🙂 \ud800 \x00 $\\frac{1}{2}$")
    run["label"] = "decisions: 汉字 $\\frac$, cost: \x07"
    assert write_report([(run, samples, summarise(run, samples))], tmp_path).stat().st_size > 1000


def test_several_runs_in_one_page(tmp_path: Path) -> None:
    again = made()
    again[2]["label"] = "decisions: pocket, cost: 32B/1.5B on H200"
    text = write_report([made(), again], tmp_path).read_text()
    assert text.count('<table class="headline">') == 2
    pair = "pocket with draft pocket-draft"
    assert f"<h1>pocket: {pair} on CPU; decisions of {pair}, cost of 32B/1.5B on H200</h1>" in text
    assert (tmp_path / "run1-accuracy.png").exists() and (tmp_path / "run2-accuracy.png").exists()


def test_a_run_without_samples_has_a_page(tmp_path: Path) -> None:
    run = run_of("exact") | {"finished": False}
    text = write_report([(run, [], summarise(run, []))], tmp_path).read_text()
    assert "not finished" in text and "<img" not in text


def test_without_matplotlib_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadRequest, match=r"pip install 'semspec\[bench\]'"):
        write_report([made()], tmp_path)


@pytest.mark.parametrize("width", [1280, 500])
def test_it_opens_in_a_browser(page: Path, tmp_path: Path, width: int) -> None:
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("chromium is not installed; apt-get install chromium, then run this test again")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    picture, size = tmp_path / "page.png", f"--window-size={width},1600"

    def browse(profile: str, *what: str) -> str:
        words = [chromium, *flags, f"--user-data-dir={tmp_path / profile}", size, *what, page.as_uri()]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout

    browse("one", f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    seen = Elements(browse("two", "--dump-dom")).tags
    assert [a["data-arm"] for tag, a in seen if "data-arm" in a] == ["none", "exact", "fly:window=4,theta=.3", "loopy"]
    assert sum(tag == "img" for tag, _ in seen) == len(PNGS)


def before_details(text: str) -> str:
    """What one reads without unfolding anything."""
    return text.partition("<details><summary>Configuration")[0]


@pytest.mark.usefixtures("without_figures")
def test_the_title_names_models_and_date_and_no_path(tmp_path: Path) -> None:
    run, samples, _ = made()
    place = "/home/me/models/Small-1B-Q4.gguf"
    hub = "/home/me/.cache/hub/models--org--Draft-0.1B/snapshots/0a1b2c"
    run["label"] = f"decisions: {place} + {hub}, cost: {place} + {hub} on H200"
    text = write_report([(run, samples, summarise(run, samples))], tmp_path).read_text()
    title = re.search("<title>(.*)</title>", text)
    assert (
        title and title[1] == "pocket: Small-1B-Q4 with draft org/Draft-0.1B on H200, 2026-11-16: speed beside quality"
    )
    assert (
        "<h1>pocket: Small-1B-Q4 with draft org/Draft-0.1B on H200</h1>" in text and "20 problems, 2026-11-16" in text
    )
    assert "/home" not in before_details(text) and "decisions" not in before_details(text)
    run["config"] = run["config"] | {"task": "jsonl:path=/home/me/prompts.txt,match=number"}
    summary = summarise(run, samples)
    text = write_report([(run, samples, summary)], tmp_path).read_text()
    assert "<h1>prompts.txt, match=number: Small-1B-Q4" in text and "/home" not in before_details(text)
    assert title_of(summary).startswith("prompts.txt, match=number, 20 problems")
    assert task_name("jsonl:/home/me/prompts.txt") == "prompts.txt" and task_name("pocket:steps=5") == "pocket:steps=5"


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("decisions: pocket, cost: pocket on CPU", "pocket with draft pocket-draft on CPU"),
        (
            "decisions: pocket, cost: 32B/1.5B on NVIDIA H200",
            "decisions of pocket with draft pocket-draft, cost of 32B/1.5B on NVIDIA H200",
        ),
        ("decisions: org/a + ./b/, cost: org/a + ./b/ on CPU", "org/a with draft b on CPU"),
        ("of another kind", "of another kind"),
    ],
)
def test_what_was_run_in_words(label: str, words: str) -> None:
    assert described({"label": label}) == words


@pytest.mark.usefixtures("without_figures")
def test_examples_have_their_question_and_answer_and_end(tmp_path: Path) -> None:
    run, samples, _ = made(text="begin " + "x" * 5000 + " the end: 12")
    asked = {"question": f"How many? {HOSTILE}", "answer": {"value": 12, "unit": HOSTILE}}
    samples = [s | asked if s["arm"] == "none" else s for s in samples]
    text = write_report([(run, samples, summarise(run, samples))], tmp_path).read_text()
    shown = before_details(text)
    assert shown.count("How many?") == EXAMPLES and "<b>Right answer:</b> {&quot;value&quot;: 12" in shown
    assert "the end: 12</pre>" in shown and "characters left out" in shown
    assert not any(tag == "script" for tag, _ in Elements(text).tags) and "max-height" not in text


def test_groups_come_as_one_counts() -> None:
    assert sorted(["10 steps", "3 steps", "level 2", "level 12", ""], key=natural) == [
        "", "3 steps", "10 steps", "level 2", "level 12",
    ]  # fmt: skip
    run, samples, _ = made()
    samples = [s | {"group": f"{3 + s['index'] % 9} steps"} for s in samples]
    found = summarise(run, samples)["arms"]["exact"]["groups"]
    assert list(found) == [f"{n} steps" for n in range(3, 12)]


def test_a_method_has_one_colour_in_every_report() -> None:
    other = run_of("typical", "fly:window=4,theta=.3", "exact:k=4", "mine")
    other["arms"].append(arm("draft", "draft"))
    theme = THEMES["light"]
    one, two = _Style(made()[2], theme).colours, _Style(summarise(other, []), theme).colours
    for name in one.keys() & two.keys():
        assert one[name] == two[name], name
    assert len(set(two.values())) == len(two) and theme["worse"] not in two.values()
    assert len({colour_of(rule, "method", "") for rule in REGISTRY}) == len(REGISTRY)


@pytest.mark.usefixtures("without_figures")
def test_the_drafts_tokens_are_the_drafts(tmp_path: Path) -> None:
    run, samples, _ = made()
    run["arms"].append(arm("draft", "draft"))
    samples += [s | {"arm": "draft"} for s in samples if s["arm"] == "none"]
    text = write_report([(run, samples, summarise(run, samples))], tmp_path).read_text()
    for name, letter in (("none", "t"), ("draft", "d")):
        card = re.search(f'<article class="card"><header>{name}</header>.*?</article>', text, re.DOTALL)
        assert card and re.findall('<rect class="(.)"', card[0]) == [letter]


def test_there_is_no_chart_of_zeros(tmp_path: Path) -> None:
    run = run_of("exact")
    nothing = Stats()
    nothing.observe(4, 0)
    wrong = many(20, none=lambda i: {"correct": False}, exact=lambda i: {"correct": False, "stats": nothing})
    summary = summarise(run, wrong)
    text = write_report([(run, wrong, summary)], tmp_path).read_text()
    assert {p.name for p in tmp_path.glob("*.png")} == {"speed.png", "lengths.png"}
    assert "No arm has a correct answer." in text


def test_names_in_the_plane_cover_nothing() -> None:
    figure = Figure(figsize=(5.2, 3.4), dpi=160, layout="constrained")
    run = run_of(*(f"fly:window={i},theta=0.3" for i in range(7)))
    samples = many(
        40,
        **{
            a["name"]: lambda i, at=at: {"correct": i >= at % 3, "seconds": 1 + at % 4 / 100, "tokens": [i]}
            for at, a in enumerate(run["arms"])
        },
    )
    axes = figure.add_subplot()
    assert front(_Style(summarise(run, samples), THEMES["light"]), axes)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without its line
    assert len(boxes) == 8
    tried = [overlap((a.x0, a.x1, a.y0, a.y1), (b.x0, b.x1, b.y0, b.y1)) for a, b in combinations(boxes, 2)]
    assert max(tried) < 0.05 * min(box.width * box.height for box in boxes)


@pytest.mark.parametrize(("width", "fits"), [(1280, True), (800, False)])
def test_a_table_fits_or_shows_that_it_scrolls(page: Path, width: int, fits: bool) -> None:
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("chromium is not installed; apt-get install chromium, then run this test again")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 800})
        tab.goto(page.as_uri())
        box = tab.locator(".wide").first
        assert box.evaluate("e => e.scrollWidth <= e.clientWidth") == fits
        assert "gradient" in box.evaluate("e => getComputedStyle(e).backgroundImage")
        box.focus()
        tab.keyboard.press("ArrowRight")
        tab.wait_for_timeout(200)
        assert box.evaluate("e => e.scrollLeft > 0") != fits
        browser.close()
