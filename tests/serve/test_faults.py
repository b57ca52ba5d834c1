"""Clients that leave at any moment, nonsense, rules that raise: the server keeps serving and every slot comes back."""

from __future__ import annotations

import json
import logging
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from semspec.serve.deltas import Delta, delta_of
from semspec.serve.logs import JsonFormatter
from semspec.verify import REGISTRY, Decisions, DraftBatch, Rule
from semspec.verify.checked import option_fields
from semspec.verify.exact import Exact
from tests.serve.live import JSON, WAIT, Live, until

LONG: dict[str, Any] = {"model": "tiny", "prompt": "the quick", "max_tokens": 800, "ignore_eos": True, "temperature": 0}


def connect(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT)


def raw(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def answer(live: Live, **more: Any) -> httpx.Response:
    return live.post("/v1/completions", LONG | {"max_tokens": 20} | more)


def test_two_hundred_clients_killed_at_random_moments(tiny: Live):
    expected, rng = answer(tiny).json()["choices"][0]["text"], random.Random(0)
    for i in range(200):
        body = LONG | {"stream": rng.random() < 0.5, "n": rng.choice([1, 1, 2])}
        body["speculation"] = {"verifier": rng.choice(["none", "exact", "block"])}
        message = raw(json.dumps(body).encode())
        with connect(tiny) as connection:
            connection.sendall(message if rng.random() < 0.8 else message[: rng.randrange(len(message))])
            time.sleep(rng.choice([0, 0.001, 0.01, 0.03]))
            if rng.random() < 0.3:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # reset, not closed
        if i % 50 == 25:
            assert until(lambda: answer(tiny).status_code == 200), "in between it answers others"
    assert tiny.idle()
    assert answer(tiny).json()["choices"][0]["text"] == expected
    assert tiny.metric("semspec:request_failure_total") > 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_a_pass(tiny: Live, stream: bool):
    before, body = (
        tiny.metric("semspec:generation_tokens_total"),
        LONG | {"stream": stream, "speculation": {"off": True}},
    )
    with tiny.held(after=3):
        with connect(tiny) as connection:
            connection.sendall(raw(json.dumps(body).encode()))
            assert until(lambda: tiny.engine.running == 1)
        assert until(lambda: not tiny.engine.accepted), "it is noticed while a pass is made"
    assert tiny.idle() and until(lambda: tiny.metric("semspec:generation_tokens_total") > before)
    written = tiny.metric("semspec:generation_tokens_total") - before
    assert written < 200, "passes before it left, the one that was being made, and hardly any more of 800 tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"{}", b'{"model": "tiny"}', b'{"prompt": 3}',
        b'{"model": "tiny", "prompt": "\\ud800"}', b'{"model": "\\ud800", "prompt": "x"}',
        b'{"model": "tiny", "prompt": "x", "\\ud800": 1}', b'{"model": "tiny", "prompt": [[1], "x"]}',
        b'{"model": "tiny", "prompt": "x", "speculation": {"draft_max_entropy": NaN}}',
        b'{"model": "tiny", "prompt": [-1]}', b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "speculation": {"\\ud800": 1}}', b"[" * 9000,
        b'{"model": "tiny", "prompt": "x", "speculation": []}', b'{"model": "tiny", "prompt": [], "n": 1}',
        b'{"model": "tiny", "prompt": "x", "stop": "\\ud800"}', b'{"model": "tiny", "prompt": [[]]}',
        b'{"model": "tiny", "prompt": "x", "speculation": {"verifier": "\\ud800"}}',
    ],
)  # fmt: skip
def test_nonsense_is_a_4xx(tiny: Live, body: bytes):
    refusal = httpx.post(tiny.url + "/v1/completions", content=body, headers=JSON, timeout=WAIT)
    assert 400 <= refusal.status_code < 500 and refusal.json()["error"]["message"]
    assert tiny.idle()


def test_a_form_is_not_a_request(tiny: Live):
    """A page of another site can send this without asking first, so it must not be obeyed."""
    body = json.dumps(LONG).encode()
    for kind in ({"content-type": "text/plain"}, {}):
        refusal = httpx.post(tiny.url + "/v1/completions", content=body, headers=kind, timeout=WAIT)
        assert refusal.status_code == 400


@pytest.mark.parametrize("temperature", [1e-45, 1e-5, 1e-3, 100.0])
def test_no_temperature_breaks_it(tiny: Live, temperature: float):
    assert answer(tiny, temperature=temperature, speculation={"verifier": "block"}).status_code == 200


class Broken(RuntimeError):
    pass


@dataclass(frozen=True)
class Raises(Rule):
    name = "raises"
    lossless = True
    rounds: int = 3

    def verify(self, drafts: DraftBatch) -> Decisions:
        if int(drafts.round.max()) >= self.rounds:
            raise Broken("the secret prompt")
        return Exact().verify(drafts)


def test_a_verifier_that_raises_fails_its_own_request(tiny: Live, monkeypatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setitem(REGISTRY, "raises", Raises)
    caplog.set_level(logging.INFO, "semspec.serve")
    expected = answer(tiny).json()["choices"][0]["text"]
    whole = LONG | {"stream": True, "max_tokens": 300}
    with httpx.stream("POST", tiny.url + "/v1/completions", json=whole, timeout=WAIT) as other:
        lines = other.iter_lines()
        next(lines)
        failed = answer(tiny, speculation={"verifier": "raises", "rounds": 2, "num_draft_tokens": 4})
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
        assert "secret" not in failed.text
        body = LONG | {"speculation": {"verifier": "raises", "num_draft_tokens": 4}, "stream": True}
        with httpx.stream("POST", tiny.url + "/v1/completions", json=body, timeout=WAIT) as cut:
            said = [line for line in cut.iter_lines() if line]
        assert len(said) > 1 and "error" in json.loads(said[-1].removeprefix("data: "))
        assert list(filter(None, lines))[-1] == "data: [DONE]", "its neighbour was not disturbed"
    assert answer(tiny).json()["choices"][0]["text"] == expected and tiny.idle()
    logged = "\n".join(JsonFormatter().format(record) for record in caplog.records)
    assert "Broken" in logged and "secret" not in logged and "quick" not in logged


def test_the_log_tells_of_a_loop_without_its_words(caplog: pytest.LogCaptureFixture):
    logging.getLogger("semspec.loop.decoder").warning("%s: %s", "it looped", "a secret", extra={"public": "it looped"})
    assert "a secret" in caplog.text
    assert json.loads(JsonFormatter().format(caplog.records[0]))["event"] == "it looped"


def test_the_log_has_a_line_for_each_request_without_its_words(tiny: Live, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "semspec.serve")
    response = answer(tiny)

    def lines() -> list[dict[str, Any]]:  # others may come from who was answered before
        said = [json.loads(JsonFormatter().format(r)) for r in list(caplog.records) if r.message == "request"]
        return [line for line in said if line["id"] == response.headers["x-request-id"]]

    assert until(lambda: bool(lines()))
    (line,) = lines()
    assert line["status"] == 200 and line["path"] == "/v1/completions" and line["outcome"] == "length"
    assert line["completion_tokens"] == 20 and line["verifier"] == "exact"
    assert line["id"] == response.headers["x-request-id"] and response.json()["id"].endswith(line["id"])
    assert "quick" not in json.dumps(line)


EXTREMES = {
    int: (0, 2**31 - 1),
    float: (0.0, 1e-300, 1e308),
    str: ("", "x" * 200),
    bool: (True, False),
}


def test_an_answer_that_cannot_be_put_into_words_fails_alone(pocket: Live, monkeypatch: pytest.MonkeyPatch):
    def spoilt(pair: Any, choice: int, event: Any, start: int, *more: Any) -> Delta:
        if event.logprobs is not None:
            raise IndexError("no such token")
        return delta_of(pair, choice, event, start)

    monkeypatch.setattr("semspec.serve.engine.delta_of", spoilt)
    body = {"model": "pocket", "prompt": "Mia has 4", "max_tokens": 30, "ignore_eos": True}
    with ThreadPoolExecutor(2) as clients:
        good = clients.submit(pocket.post, "/v1/completions", body)
        bad = clients.submit(pocket.post, "/v1/completions", body | {"logprobs": 2})
    assert good.result().status_code == 200
    assert bad.result().status_code == 500 and bad.result().json()["error"]["code"] == "crash"
    assert pocket.idle() and pocket.engine.state == "ready"


@pytest.mark.parametrize("verifier", ["sampling", "fly"])
def test_a_seed_repeats_an_answer_with_repeatable_lengths_under_load(pocket: Live, verifier: str):
    def ask(seed: int) -> tuple[str, list[int]]:
        how = {"verifier": verifier, "num_draft_tokens": "auto-repeatable", "detailed": True}
        body = {"model": "pocket", "prompt": "Mia has 4 bags", "max_tokens": 60, "speculation": how, "seed": seed}
        answer = pocket.post("/v1/completions", body | {"temperature": 0.8, "ignore_eos": True}).json()
        return answer["choices"][0]["text"], answer["metrics"]["speculative_decoding"]["per_step_drafted"]

    alone = [ask(seed) for seed in range(3)]
    with ThreadPoolExecutor(6) as clients:
        assert list(clients.map(ask, [0, 1, 2] * 3)) == alone * 3


@pytest.mark.parametrize("name", REGISTRY)
def test_no_option_of_any_rule_breaks_it(pocket: Live, name: str):
    """Each is refused or works, also together with drafts whose length is left to the server."""
    for option in option_fields(REGISTRY[name]):
        for value in EXTREMES[type(option.default)]:
            how = {"verifier": name, option.name: value, "num_draft_tokens": "auto"}
            body = {"model": "pocket", "prompt": "Mia has 4", "max_tokens": 12, "speculation": how, "seed": 1}
            response = pocket.post("/v1/completions", body)
            assert response.status_code in (200, 400), (how, response.text)
    assert pocket.idle()
