"""Servers that fail, are slow, die or lie: what whoever asked gets to see."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import semspec
from semspec.errors import BatchFailed, RemoteError
from semspec.pair.remote import connect
from semspec.remote import connection
from tests.remote.conftest import CHAT, RIGHT
from tests.remote.fake import Fake

TARGETS = "\n\n".join(RIGHT)


def status(code: int, message: str = "not now") -> Callable[[dict[str, Any]], tuple[int, Any]]:
    return lambda body: (code, {"error": {"message": message}})


@pytest.mark.parametrize("code", [429, 500, 502, 503])
def test_a_busy_target_is_asked_again(target: Fake, draft: Fake, code: int) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    target.faults = [status(code)] * 3
    assert pair.generate(CHAT, verifier="likely-step", max_new_tokens=60).text == TARGETS
    target.faults = [status(code)] * 4
    with pytest.raises(RemoteError, match=f"target's server at {target.url} answered with status {code} 4 times"):
        pair.generate(CHAT, verifier="likely-step", max_new_tokens=60)
    assert not target.faults and not pair.executor.tasks and pair.target.free == 8


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("9" * 400, 20.0), ("Wed, 18 Nov 2026 04:00:00 GMT", 0.0), ("-3", 0.0), ("soon", 0.0), ("1e9", 0.0)],
)
def test_a_target_says_when_to_ask_again(
    target: Fake, header: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited so long, within bounds, and what is no number of seconds counts as none."""
    waited = list[float]()

    async def rest(wait: float) -> None:
        waited.append(wait)

    def busy(handler: Any) -> None:
        # It closes its connection, and says so: a client that used it once more would have to wait for another reason.
        head = ["HTTP/1.1 429 Busy", f"retry-after: {header}", "connection: close", "content-length: 0", "", ""]
        handler.wfile.write("\r\n".join(head).encode())

    pair = semspec.load(target.url)
    monkeypatch.setattr("semspec.remote.connection.asyncio.sleep", rest)
    target.faults = [lambda _: (429, busy)]
    assert pair.generate(CHAT, verifier="none", max_new_tokens=60).text == TARGETS
    assert waited == [max(seconds, connection.FIRST_WAIT)]


def test_a_request_that_is_wrong_is_not_sent_again(target: Fake, draft: Fake) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    target.asked.clear()
    target.faults = [status(400, "too long for me")]
    with pytest.raises(RemoteError, match="too long for me"):
        pair.generate(CHAT, verifier="none")
    assert len(target.asked) == 1


def test_a_slow_target_is_waited_for_up_to_a_limit(target: Fake, draft: Fake) -> None:
    pair = connect(target.url, draft.url, seconds=600)
    target.delay = 0.1
    assert pair.generate(CHAT, verifier="likely-step", max_new_tokens=60).text == TARGETS
    servers, target.most = pair.servers, 0  # it answers no completion any more
    prompt = pair.tokenizer.apply_chat_template(CHAT)
    servers.target.connection.seconds, servers.target.connection._client.timeout = 0.5, httpx.Timeout(0.5)
    target.asked.clear()
    with pytest.raises(BatchFailed, match=r"did not answer within 0\.5 seconds"):
        pair.generate([prompt], verifier="none")
    assert len(target.asked) == 1, "a busy server is not made busier"


def cut(handler: Any) -> None:
    """An answer that ends in its middle."""
    handler.wfile.write(b'HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"choices": [')


def dripping(handler: Any) -> None:
    """One that never ends, a byte at a time, so that each comes soon."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.02)


def test_an_answer_that_is_cut_is_asked_for_again(target: Fake, draft: Fake) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    target.faults = [lambda _: (200, cut)] * 3
    assert pair.generate(CHAT, verifier="likely-step", max_new_tokens=60).text == TARGETS
    target.faults = [lambda _: (200, cut)] * 4
    with pytest.raises(RemoteError, match="the target's server"):
        pair.generate(CHAT, verifier="likely-step", max_new_tokens=60)
    assert not target.faults and not pair.executor.tasks


def test_an_answer_that_drips_is_not_waited_for(target: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = connect(target.url, seconds=20.0)
    pair.servers.target.connection.seconds = 0.2
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.1)
    target.faults = [lambda _: (200, dripping)]
    with pytest.raises(RemoteError, match="did not answer within"):
        pair.generate(CHAT, verifier="none")


def test_a_redirect_is_not_followed(target: Fake, draft: Fake) -> None:
    """The key would be sent to whoever it names."""
    pair = semspec.load(target.url)
    draft.asked.clear()
    head = f"HTTP/1.1 307 Temporary Redirect\r\nlocation: {draft.url}/completions\r\ncontent-length: 0\r\n\r\n"
    target.faults = [lambda _: (307, lambda handler: handler.wfile.write(head.encode()))]
    with pytest.raises(RemoteError, match="status 307"):
        pair.generate(CHAT, verifier="none")
    assert not draft.asked


def test_a_dead_draft_leaves_the_target_writing_alone_and_the_stats_say_so(target: Fake, draft: Fake) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    stream = pair.stream(CHAT, verifier="likely-step", max_new_tokens=60)
    first = next(stream)
    assert first.accepted and not stream.stats.calls["draft lost"]
    draft.kill()
    rest = list(stream)
    result = stream.result()
    assert result.text == TARGETS and rest and result.finish_reason == "stop"
    assert result.stats.calls["draft lost"] == 1 and result.stats.to_dict()["calls"]["draft lost"] == 1
    # The next answers do not wait for it.
    again = pair.generate(CHAT, verifier="likely-step", max_new_tokens=60)
    assert again.text == TARGETS and again.stats.calls["draft"] == 0 and again.stats.calls["draft lost"] == 1


def test_a_draft_that_comes_back_is_asked_again(target: Fake, draft: Fake) -> None:
    pair = connect(target.url, draft.url)
    now = [0.0]
    pair.servers.clock = lambda: now[0]
    draft.faults = [status(503)] * 2
    assert pair.generate(CHAT, verifier="likely-step", max_new_tokens=60).stats.calls["draft lost"] == 1
    now[0] += 100
    stats = pair.generate(CHAT, verifier="likely-step", max_new_tokens=60).stats
    assert not stats.calls["draft lost"] and stats.step_outcomes["accepted"]


def test_a_text_that_the_draft_refuses_is_no_reason_to_leave_it(target: Fake, draft: Fake) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    draft.faults = [status(400, "too long for me")]
    refused = pair.generate(CHAT, verifier="likely-step", max_new_tokens=60)
    assert refused.text == TARGETS and refused.stats.calls["draft lost"] == 1
    assert pair.generate(CHAT, verifier="likely-step", max_new_tokens=60).stats.step_outcomes["accepted"]


def test_a_draft_that_is_not_there_at_the_start_is_an_error(target: Fake, draft: Fake) -> None:
    draft.kill()
    with pytest.raises(RemoteError, match=f"draft's server at {draft.url} cannot be reached"):
        semspec.load(target.url, draft=draft.url)


def choice(**more: Any) -> dict[str, Any]:
    return {"choices": [{"text": "a", "finish_reason": "length", "logprobs": None} | more]}


LOGPROBS = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0], "top_logprobs": [{}, {}]}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"<html>", "no valid JSON"),
        (b"[1, 2]", "no object"),
        (b"[" * 100_000, "no valid JSON"),
        ({}, "without choices"),
        (choice(text=None), "without a text"),
        (choice(), "no log-probabilities of the prompt"),
        (choice(logprobs={"tokens": ["a"] * 3, "token_logprobs": [-1.0]}), "not as many as tokens"),
        (choice(logprobs=LOGPROBS | {"top_logprobs": [{}]}), "not as many as tokens"),
        (choice(logprobs=LOGPROBS | {"tokens": ["a", 7]}), "no text"),
        (choice(logprobs=LOGPROBS | {"token_logprobs": [-1.0, "x"]}), "log-probability that is none"),
        (choice(logprobs=LOGPROBS | {"token_logprobs": [-1.0, 3.0]}), "log-probability that is none"),
        (choice(logprobs=LOGPROBS | {"token_logprobs": [-1.0, float("nan")]}), "NaN is no number"),
        (choice(logprobs=LOGPROBS | {"top_logprobs": [{}, {str(i): -1 for i in range(999)}]}), "another form"),
    ],
)
def test_a_target_that_lies_ends_the_answer_with_a_clear_error(target: Fake, draft: Fake, body: Any, word: str) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    target.faults = [lambda _: (200, body)]
    with pytest.raises(RemoteError, match=word) as caught:
        pair.generate(CHAT, verifier="likely-step", max_new_tokens=60)
    assert target.url in str(caught.value) and not pair.executor.tasks
    assert pair.generate(CHAT, verifier="likely-step", max_new_tokens=60).text == TARGETS


@pytest.mark.parametrize("rows", [[None, {"1": {"logprob": -1}}], {"a": 1}, [None, {}], [None, {"1": 2}], [3], None])
def test_the_same_in_the_other_form(target: Fake, draft: Fake, rows: Any) -> None:
    target.dialect = frozenset({"prompt_logprobs", "keeps_stop", "tokenize"})
    pair = semspec.load(target.url, draft=draft.url)
    target.faults = [lambda _: (200, choice(prompt_logprobs=rows))]
    with pytest.raises(RemoteError, match="the target's server"):
        pair.generate(CHAT, verifier="likely-step", max_new_tokens=60)


def test_tokens_that_do_not_spell_the_step_do_not_pass_it(target: Fake, draft: Fake) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    target.faults = [lambda _: (200, choice(logprobs=LOGPROBS, text="z"))]
    result = pair.generate(CHAT, verifier="accept-all-steps:lead=0,hand_over=false", max_new_tokens=60)
    assert result.stats.step_outcomes["rejected"] == 1 and result.text.startswith(RIGHT[0])


def test_an_endless_answer_is_cut(target: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = semspec.load(target.url)
    monkeypatch.setattr(connection, "MAX_BODY", 10_000)
    target.faults = [lambda _: (200, choice(text="a" * 20_000))]
    with pytest.raises(RemoteError, match="sends more than"):
        pair.generate(CHAT, verifier="none")


def test_no_key_is_ever_shown(target: Fake, draft: Fake, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    target.key, draft.key = "sk-target-1", "sk-draft-2"
    monkeypatch.setenv("SEMSPEC_TARGET_API_KEY", "sk-target-1")
    monkeypatch.setenv("SEMSPEC_DRAFT_API_KEY", "sk-draft-2")
    caplog.set_level(logging.DEBUG)
    pair = semspec.load(target.url, draft=draft.url)
    draft.key = "another"  # it now refuses, and quotes what it was sent
    result = pair.generate(CHAT, verifier="likely-step", max_new_tokens=60)
    assert result.text == TARGETS and result.stats.calls["draft lost"] == 1
    target.key = "another"
    with pytest.raises(RemoteError, match="status 401") as caught:
        pair.generate(CHAT, verifier="none")
    shown = caplog.text + str(caught.value) + repr(pair) + repr(vars(pair)) + json.dumps(result.stats.to_dict())
    assert "sk-" not in shown and "***" in shown
