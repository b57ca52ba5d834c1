"""The page with answers that are made up: long chats, Markdown, hostile texts, what is kept and sent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve.browser import answering, ask, browser_only, done, saying, stream
from tests.serve.live import Live, until

pytestmark = browser_only
LONG = "\n\n".join(f"Paragraph {i} of an answer that takes its room." for i in range(12))
HOSTILE = """<img src=x onerror="alert(1)"><script>alert(2)</script>
[a](javascript:alert(3)) [b](data:text/html,x) ![c](http://example.org/x.png) [d](//example.org) </div></p>
**<b>bold</b>** `<i>` ~~<u>x</u>~~ [ok](http://example.org/?a=1&b="2")

| <svg onload=alert(4)> | b |
|---|---|
| <iframe src=/> | <a href="javascript:alert(5)">x</a> |
"""
MARKDOWN = """# Title
Some *words* and **strong _ones_**, `a * b`, 2 * 3 * 4, snake_case_name.
Next line.

- one
- two
  1. inner
  2. again
- [x](http://example.org/)

> quoted
> **twice**

```python
def f(x):  # *no* marks
    return x
```

| a | b |
|--:|---|
| 1 | `2` |

---
done"""
BELOW = "(() => { const t = document.querySelector('#talk'); return t.scrollHeight - t.scrollTop - t.clientHeight })()"


def inside(page: Any) -> str:
    """The markup of the last answer's text, without classes and the like."""
    return page.evaluate(
        """() => { const node = [...document.querySelectorAll('.answer .markdown')].at(-1).cloneNode(true);
        for (const e of node.querySelectorAll('.code-head')) e.remove();
        for (const e of [...node.querySelectorAll('.token')]) e.replaceWith(...e.childNodes);
        for (const e of node.querySelectorAll('*')) for (const a of [...e.attributes]) e.removeAttribute(a.name);
        node.normalize(); return node.innerHTML }"""
    )


def test_it_follows_ten_turns_until_one_scrolls_up(page: Any):
    answering(page, lambda body: saying(LONG))
    for i in range(10):
        ask(page, f"question {i}")
        done(page)
        assert until(lambda: page.evaluate(BELOW) < 5)
    last, form = page.locator(".answer").last.bounding_box(), page.locator("#composer").bounding_box()
    assert last["y"] + last["height"] <= form["y"] and page.locator(".turn").count() == 10
    assert page.locator(".detail[open]").count() == 1, "only the latest shows its chart"
    page.hover("#talk")
    page.mouse.wheel(0, -3000)
    page.locator("#latest").wait_for(state="visible")
    before = page.evaluate("document.querySelector('#talk').scrollTop")
    page.locator("#latest").click()
    assert until(lambda: page.evaluate(BELOW) < 5)
    assert page.evaluate("document.querySelector('#talk').scrollTop") > before and page.locator("#latest").is_hidden()


FOLDED = """async () => {
    const { Chat } = await import("/page/chat.js");
    const [talk, turns, latest] = ["div", "div", "button"].map((kind) => document.createElement(kind));
    talk.style.cssText = "height: 300px; overflow: auto";
    talk.append(turns);
    document.body.append(talk, latest);
    const chat = new Chat({ talk, turns, latest, menu: { target_seconds_per_token: 1 }, actions: [] });
    const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    turns.style.height = "2000px";
    chat.follow();
    for (let i = 0; i < 4; i += 1) await frame(); // until the view is at rest
    turns.style.height = "1000px";
    chat.follow();
    turns.style.height = "3000px"; // before the browser has told of any scrolling
    await frame();
    await frame();
    return [chat.following, latest.hidden];
}"""


def test_it_goes_on_following_where_a_former_turn_was_folded_and_text_has_come_since(page: Any):
    assert page.evaluate(FOLDED) == [True, True]


def test_two_methods_in_mid_chat_get_the_same_history(page: Any):
    words = {"exact": "It is 12.", "fly": "I make it 1,2."}
    asked = answering(page, lambda body: saying(words[body["speculation"]["verifier"]], seconds=0.5))
    page.check("#remember")
    ask(page, "first")
    done(page)
    page.check("#compare")
    page.get_by_label("verifier").nth(1).select_option("fly")
    for question in ("second", "third"):
        ask(page, question)
        done(page)
    one, *pairs = [body["messages"] for body in asked]
    assert one == [{"role": "user", "content": "first"}]
    for first, second in (pairs[:2], pairs[2:]):
        assert first == second, "both see what the first method has said"
    said = {"role": "assistant", "content": "It is 12."}
    assert pairs[2] == [
        {"role": "user", "content": "first"}, said, {"role": "user", "content": "second"}, said,
        {"role": "user", "content": "third"},
    ]  # fmt: skip


def thoughtful(thought: str, answer: str) -> str:
    return stream([(thought, "draft", "reasoning"), (answer, "draft", "content")])


def test_it_says_whether_two_answers_agree(page: Any):
    cases = [
        (saying("It is 12."), saying("It is 12."), "The same text, letter for letter."),
        (thoughtful("so 12", "12"), thoughtful("thus 12", "12"), "The same answer, after other thoughts."),
        (saying("It is 1,200."), saying("So 3 * 400 = 1200"), "Different words, the same number: 1200."),
        (saying("It is 12."), saying("It is -12."), "Different answers: 12 and -12."),
        (saying("yes"), saying("no"), "Different answers."),
    ]
    answers = iter([text for one, two, _ in cases for text in (one, two)])
    answering(page, lambda body: next(answers))
    page.check("#compare")
    for _, _, verdict in cases:
        ask(page)
        done(page)
        assert page.locator(".verdict").last.inner_text().startswith(f"{verdict} ")
        assert "as many tokens a second" in page.locator(".verdict").last.inner_text()


def test_markdown_is_drawn_and_tokens_keep_their_origin(page: Any):
    pieces = [MARKDOWN[i : i + 7] for i in range(0, len(MARKDOWN), 7)]
    kinds = ("draft", "relaxed", "target")
    answering(page, lambda body: stream(*[[(piece, kinds[i % 3], "content")] for i, piece in enumerate(pieces)]))
    ask(page)
    done(page)
    assert inside(page) == (
        "<h3>Title</h3><p>Some <em>words</em> and <strong>strong <em>ones</em></strong>, <code>a * b</code>, "
        "2 * 3 * 4, snake_case_name.\nNext line.</p><ul><li>one</li><li>two<ol><li>inner</li><li>again</li></ol></li>"
        "<li><a>x</a></li></ul><blockquote><p>quoted\n<strong>twice</strong></p></blockquote>"
        "<div><pre><code>def f(x):  # *no* marks\n    return x</code></pre></div><div><table>"
        "<tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>2</code></td></tr></table></div><hr><p>done</p>"
    )
    assert page.locator(".token.relaxed[data-why]").count() and page.locator(".token.draft").count()
    page.get_by_title("Copy this code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "def f(x):  # *no* marks\n    return x"
    page.get_by_title("Copy the answer").click()
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN


def test_no_text_is_too_odd_to_be_drawn(page: Any):
    odd = [
        "*" * 9000,
        "[" * 9000 + "](",
        "> " * 3000,
        "- " * 3000 + "x",
        "`" * 9001 + "a",
        "**a " * 3000,
        "[a](" * 3000,
    ]
    odd += [
        "1. " * 3000,
        "\n" * 5000,
        "```" + " " * 9000 + "`",
        "|" * 5000 + "\n" + "|-" * 5000,
        "_" * 9000,
        "\\" * 9000,
    ]
    texts = iter(odd)

    def in_pieces(body: dict[str, Any]) -> str:
        text = next(texts)
        return stream(*[[(text[i : i + 500], "draft", "content")] for i in range(0, len(text), 500)])

    answering(page, in_pieces)
    for _ in odd:
        ask(page)
        done(page)
    assert page.locator(".answer").count() == len(odd) and not page.locator(".error").count()


def test_hostile_texts_are_shown_and_not_obeyed(page: Any):
    answering(page, lambda body: stream([(HOSTILE, "relaxed", "content"), (HOSTILE, "draft", "reasoning")]))
    ask(page, HOSTILE)
    done(page)
    page.locator(".answer .token.relaxed").first.focus()
    assert "<i>y</i>" in page.locator("#tip").inner_text() and "<b>x</b>" in page.locator("#tip").inner_text()
    harmless(page)
    page.reload()
    page.locator(".answer").wait_for()
    harmless(page)


def harmless(page: Any) -> None:
    assert page.locator("#turns :is(img, script, iframe, b, u, form, object, [onload], [onerror])").count() == 0
    links = page.evaluate("[...document.querySelectorAll('#turns a')].map((a) => [a.protocol, a.rel, a.target])")
    assert links and all(link == ["http:", "noopener noreferrer nofollow", "_blank"] for link in links)
    text = page.locator(".answer").inner_text()
    assert "<img src=x" in text and "javascript:alert(3)" in text


def test_a_chat_survives_a_reload_and_can_be_forgotten(page: Any):
    rounds = [[("thought ", "draft", "reasoning")], [("**It", "target", "content"), (" is** 12", "relaxed", "content")]]
    asked = answering(page, lambda body: stream(*rounds))
    page.check("#remember")
    page.fill("#system", "Be brief.")
    ask(page, "first")
    done(page)
    before = inside(page), page.locator(".figures").inner_text(), page.locator(".answer header").inner_text()
    page.reload()
    page.locator(".answer").wait_for()
    assert before == (inside(page), page.locator(".figures").inner_text(), page.locator(".answer header").inner_text())
    page.check("#remember")
    ask(page, "second")
    done(page)
    assert [m["content"] for m in asked[-1]["messages"]] == ["Be brief.", "first", "**It is** 12", "second"]
    assert asked[-1]["messages"][0]["role"] == "system"
    page.fill("#system", "")
    page.click("#clear")
    page.locator(".example").first.wait_for()
    page.reload()
    page.locator(".example").first.wait_for()
    assert page.locator(".turn").count() == 0 and page.evaluate("Object.keys(localStorage).length") == 0


def test_an_answer_may_end_inside_its_thinking_or_not_come_at_all(page: Any):
    answering(page, lambda body: stream([("Hmm", "draft", "reasoning")], finish="length"))
    ask(page)
    done(page)
    assert page.locator(".note").inner_text().startswith("Cut off inside its thinking at 300 tokens")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page)
    done(page)
    assert "cannot be reached" in page.locator(".note.error").inner_text()
    asked = answering(page, lambda body: saying("fine"))
    page.check("#remember")
    ask(page, "last")
    done(page)
    assert [m["role"] for m in asked[-1]["messages"]] == ["user", "assistant", "user"], "what failed is no history"


def test_a_browser_that_forbids_storage_can_chat(page: Any):
    page.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('forbidden') } })")
    page.reload()
    page.locator(".example").first.wait_for()
    answering(page, lambda body: saying("fine"))
    ask(page)
    page.locator(".answer").filter(has_text="fine").wait_for()
    page.click("#theme")


def test_an_answer_is_asked_for_again_with_other_noise(page: Any):
    answers = iter(["one", "two"])
    asked = answering(page, lambda body: saying(next(answers)))
    page.fill("#temperature", "0.7")
    ask(page, "first")
    done(page)
    page.get_by_role("button", name="ask again").click()
    page.locator(".answer").filter(has_text="two").wait_for()
    assert page.locator(".turn").count() == 1
    assert [body["seed"] for body in asked] == [0, 1] and asked[0]["messages"] == asked[1]["messages"]


def test_an_answer_as_a_link_and_as_a_file(page: Any, pocket: Live, tmp_path: Path):
    answering(page, lambda body: stream([("why", "draft", "reasoning"), (HOSTILE, "relaxed", "content")]))
    ask(page, "mine?")
    done(page)
    page.get_by_role("button", name="copy link").click()
    page.get_by_role("button", name="copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    assert urlsplit(link).path == "/" and urlsplit(link).fragment.startswith("chat=")
    with page.expect_download() as download:
        page.locator(".turn").get_by_role("button", name="save").click()
    download.value.save_as(tmp_path / "answer.md")
    text = (tmp_path / "answer.md").read_text()
    assert (
        "## mine?" in text
        and "> why" in text
        and "**Exact match (exact)**: 2 tokens" in text
        and HOSTILE.strip() in text
    )
    page.click("#clear")
    ask(page, "other")
    done(page)
    page.goto(link)
    page.locator("#shared").wait_for()
    assert page.locator(".question").inner_text() == "mine?" and page.locator("#composer").is_hidden()
    harmless(page)
    page.get_by_role("button", name="close").click()
    assert page.locator(".question").inner_text() == "other" and "#" not in page.url


@pytest.mark.parametrize(
    "turns", ['[{"question": {"a": 1}, "answers": [{"spans": [{"text": 5, "origin": "x y"}]}]}]', "[null]", "5"]
)
def test_what_is_kept_is_hostile_until_checked(page: Any, turns: str):
    page.evaluate('(t) => localStorage.setItem(\'semspec.chat.pocket\', `{"turns": ${t}, "system": 3}`)', turns)
    page.reload()
    page.locator("#model").filter(has_text="target only").wait_for()
    answering(page, lambda body: saying("fine"))
    ask(page)
    page.locator(".answer").filter(has_text="fine").wait_for()


def test_the_chart_has_the_method_beside_the_target_alone(page: Any, pocket: Live):
    page.check("#compare")
    page.get_by_label("verifier").nth(1).select_option("none")
    page.fill("#longest", "60")
    ask(page)
    page.locator(".verdict").filter(has_text="as many tokens").wait_for()
    chart = page.locator(".chart")
    assert chart.locator("path.line").count() == 2 and chart.locator("path.alone").count() == 1
    rates = [float(text) for text in page.locator("[data-figure=rate]").all_inner_texts()]
    label = chart.locator("svg").get_attribute("aria-label")
    told = re.fullmatch(r"tokens a second: Exact match ([\d.]+), Target only ([\d.]+), target only ([\d.]+)", label)
    assert told is not None
    for one, rate in zip(told.groups(), (*rates, rates[1]), strict=True):  # each is rounded from what was measured
        assert abs(float(one) - rate) <= (0.6 if rate >= 20 else 0.1)


def test_an_answer_without_drafts_is_not_called_slower_than_the_target(page: Any):
    slow = [("word ", "target", "content")] * 20
    answering(page, lambda body: stream(*[[span] for span in slow], drafted=0, seconds=60.0))
    ask(page)
    done(page)
    assert page.locator("[data-figure=times]").inner_text() == "1.00×", "it is the target's own, now"
    assert page.locator(".chart svg").get_attribute("aria-label").endswith("target only 0.3")


def test_an_answer_of_one_round_has_its_line(page: Any):
    answering(page, lambda body: saying("It is 12.", seconds=0.5))
    ask(page)
    done(page)
    (line,) = [path.get_attribute("d") for path in page.locator("path.line").all()]
    heights = [place.split()[1] for place in line.removeprefix("M").split("L")]
    assert len(heights) == 2 and len(set(heights)) == 1, "its overall speed, from the beginning to the end"


def test_on_a_phone_the_answer_is_not_scrolled_away_by_its_chart(page: Any):
    page.set_viewport_size({"width": 390, "height": 800})
    answering(page, lambda body: saying("It is 12."))
    ask(page)
    done(page)
    assert page.locator(".detail").count() == 1 and page.locator(".detail[open]").count() == 0
    page.locator(".detail summary").click()
    page.locator("path.line").wait_for(state="attached")  # it is drawn once its place has a width
    assert page.locator("path.line").count() == 1
