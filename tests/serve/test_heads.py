"""A server that drafts with a head, chains and trees: the text is the target's, and clients who leave leak nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import semspec
from semspec import Pair
from semspec.model.heads.runner import ENOUGH, HeadRunner
from semspec.options import Options
from semspec.serve.limits import Limits, Settings
from tests.serve.live import WAIT, Live, serving, until

CLIENTS = 6


@pytest.fixture(params=["eagle:pocket", "eagle:pocket,tree=12"], ids=["chain", "tree"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Live, Pair]]:
    pair = semspec.load("pocket", device="cpu", slots=4, context=512).cached()
    options = Options(drafter=request.param, num_draft_tokens=4)
    pair.load_drafter(options)
    limits = Limits(queue=64, new_tokens=200)
    with serving(lambda: pair, Settings(name="p", limits=limits, defaults=options)) as live:
        yield live, pair


def body(i: int, **more: Any) -> dict[str, Any]:
    question = f"Mia has {i + 3} bags with 6 pens each. Tom has 5 more pens than Mia. How many pens does Tom have?"
    asked = {"model": "p", "messages": [{"role": "user", "content": question}], "max_tokens": 30, "temperature": 0}
    return asked | more


def ask(live: Live, i: int, **more: Any) -> dict[str, Any]:
    answer = live.post("/v1/chat/completions", body(i, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def leave(live: Live, i: int) -> None:
    """Ask for a long answer, and hang up after so many lines of it."""
    asked = body(i, stream=True, max_tokens=200, ignore_eos=True)
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=asked, timeout=WAIT) as answer:
        for line, _ in enumerate(answer.iter_lines()):
            if line >= i % 4:
                return


def leaked(live: Live, pair: Pair) -> int:
    """Slots of the head that are still held when the target has all of its own back."""
    assert live.idle() and pair.target.free == 4
    (head,) = pair.resources._heads.values()
    return ENOUGH - head.runner.free


def test_clients_get_the_targets_text_and_those_who_leave_leak_nothing(served: tuple[Live, Pair]) -> None:
    live, pair = served
    alone = [ask(live, i, speculation={"off": True}) for i in range(CLIENTS)]
    drafted = live.metric("semspec:spec_decode_num_draft_tokens_total")
    with ThreadPoolExecutor(2 * CLIENTS) as clients:
        leaving = [clients.submit(leave, live, i) for i in range(CLIENTS)]
        answers = list(clients.map(lambda i: ask(live, i), range(CLIENTS)))
        for client in leaving:
            client.result()
    assert answers == alone
    assert live.metric("semspec:spec_decode_num_draft_tokens_total") > drafted, "the head drafted"
    assert leaked(live, pair) == 0
    assert [ask(live, i) for i in range(2)] == alone[:2], "and it goes on"


def test_a_slot_that_is_not_given_back_would_be_noticed(
    served: tuple[Live, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, pair = served
    monkeypatch.setattr(HeadRunner, "release", lambda self, slot: None)
    leave(live, 1)
    assert until(lambda: leaked(live, pair) == 1)
