"""Connections that stay silent, drip, do not read, or are half closed: none is held for ever, and none is cut early."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest

import semspec
from semspec import BadRequest
from semspec.serve.limits import Limits, Settings
from tests.serve.live import WAIT, Live, serving, until

SHORT = Limits(
    header_seconds=0.5, body_seconds=0.5, idle_seconds=1.0, delivery_seconds=0.5, client_connections=12, new_tokens=800
)
PATIENT = replace(SHORT, header_seconds=WAIT, body_seconds=WAIT, idle_seconds=WAIT)
LONG: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
SOON = 60  # seconds in which a connection is closed whose time is up, which takes about one


@pytest.fixture(scope="module")
def hasty(pair: semspec.Pair) -> Iterator[Live]:
    with serving(lambda: pair, Settings(name="tiny", limits=SHORT)) as live:
        yield live


@pytest.fixture(scope="module")
def patient(pair: semspec.Pair) -> Iterator[Live]:
    """Waits for requests as long as a busy machine may need to send them; answers have to be read soon."""
    with serving(lambda: pair, Settings(name="tiny", limits=PATIENT)) as live:
        yield live


@pytest.fixture(scope="module")
def locked(pair: semspec.Pair) -> Iterator[Live]:
    with serving(lambda: pair, Settings(name="tiny", keys=("key",), limits=PATIENT)) as live:
        yield live


def connect(live: Live, small: bool = False) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(WAIT)
    connection.connect((host, int(port)))
    return connection


def narrow(live: Live) -> None:
    """Let the server's side of a new connection buffer little."""
    (theirs,) = live.server.server_state.connections
    theirs.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def head(path: str, *lines: str, method: str = "POST", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: localhost", *lines, "", ""]).encode()


def request(body: dict[str, Any], version: str = "1.1", path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    lines = ("content-type: application/json", f"content-length: {len(content)}")
    return head(path, *lines, version=version) + content


def rest(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


def pour(connection: socket.socket, data: bytes, most: int, pause: float = 0.0) -> int:
    """Send until the server has had enough; how many bytes that took."""
    sent = 0
    while sent < most:
        try:
            sent += connection.send(data)
        except OSError:
            return sent
        time.sleep(pause)
    raise AssertionError("the server read on")


def drip(connection: socket.socket, first: bytes, data: bytes = b"a") -> None:
    with suppress(OSError):  # its time may be up already
        connection.sendall(first)
    pour(connection, data, SOON * 20, pause=0.05)


def seen(connection: socket.socket, text: bytes) -> bool:
    found = b""
    while text not in found and (part := connection.recv(65536)):
        found += part
    return text in found


def test_silent_connections_are_closed(hasty: Live):
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(hasty)) for _ in range(5)]
        assert [rest(c) for c in connections] == [b""] * 5


def test_half_a_header_is_not_waited_for(hasty: Live, patient: Live, monkeypatch: pytest.MonkeyPatch):
    half = b"GET /health HTTP/1.1\r\nhost: "
    with connect(hasty) as connection:
        drip(connection, half)
    assert until(lambda: not patient.server.server_state.connections)
    with connect(patient) as connection:  # nor one that comes after a whole request
        connection.sendall(head("/health", method="GET"))
        assert b" 200 " in connection.recv(1000)
        (theirs,) = patient.server.server_state.connections
        monkeypatch.setattr(type(theirs), "limits", SHORT)
        drip(connection, half)


def test_a_body_that_drips_is_not_waited_for(pair: semspec.Pair):
    limits = replace(SHORT, header_seconds=WAIT)
    with serving(lambda: pair, Settings(limits=limits)) as live, connect(live) as connection:
        drip(connection, head("/tokenize", "content-type: application/json", "content-length: 10000"), b" ")
        assert b" 408 " in connection.recv(1000)


def test_an_idle_connection_is_closed_and_a_busy_one_is_not(pair: semspec.Pair):
    limits = replace(PATIENT, idle_seconds=SHORT.idle_seconds)
    with serving(lambda: pair, Settings(name="tiny", limits=limits)) as live, connect(live) as connection:
        with live.held():
            connection.sendall(request(LONG | {"max_tokens": 3}))
            assert until(live.submitted)
            time.sleep(1.5 * SHORT.idle_seconds)  # longer than the idle may take
        assert seen(connection, b'"completion_tokens":3')
        rest(connection)


@pytest.mark.parametrize("key", ["wrong", "key"])
def test_a_refused_body_is_not_read_on(locked: Live, key: str):
    announced = 1 << 33
    with connect(locked) as connection:
        lines = ("content-type: application/json", f"content-length: {announced}", f"x-api-key: {key}")
        connection.sendall(head("/v1/completions", *lines))
        status = b" 401 " if key == "wrong" else b" 413 "
        assert status in connection.recv(1000)
        pour(connection, b"a" * 65536, 1 << 26)  # buffers hold a few MiB


def test_a_refused_body_that_is_short_does_not_cost_the_connection(locked: Live):
    with connect(locked) as connection:
        connection.sendall(head("/tokenize", "content-type: application/json", "content-length: 3"))
        assert b" 401 " in connection.recv(1000)
        connection.sendall(b"abc" + head("/health", method="GET"))
        assert seen(connection, b" 200 ")


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_reads_is_given_up(
    patient: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
):
    caplog.set_level(logging.INFO, "semspec.serve")
    server = patient.server.server_state
    assert until(lambda: not server.connections)
    body = LONG | {"max_tokens": 400, "stream": stream, "logprobs": 20}
    with connect(patient, small=True) as connection:
        assert until(lambda: len(server.connections) == 1)
        narrow(patient)
        connection.sendall(request(body))
        assert until(lambda: not server.connections) and patient.idle()
    statuses = lambda: [r.fields["status"] for r in caplog.records if r.message == "request"]  # type: ignore[attr-defined] # noqa: E731
    assert until(lambda: (499 if stream else 200) in statuses())


def test_a_slow_reader_is_given_up_after_the_deadline(patient: Live, monkeypatch: pytest.MonkeyPatch):
    """It reads now and then, so that no single write takes too long."""
    server, engine = patient.server.server_state, patient.engine
    assert until(lambda: not server.connections)
    with connect(patient, small=True) as connection:
        assert until(lambda: len(server.connections) == 1)
        narrow(patient)
        with patient.held():
            connection.sendall(request(LONG | {"n": 8, "stream": True, "logprobs": 20}))
            assert until(patient.submitted)
            late = time.monotonic() + engine.limits.deadline  # as it is then for all but who writes the answer
            clock = lambda: late if threading.current_thread().name != "semspec-engine" else time.monotonic()  # noqa: E731
            monkeypatch.setattr(engine, "clock", clock)
        parts = (time.sleep(0.05) or connection.recv(400) for _ in range(SOON * 20))
        assert not all(parts), "it was closed"
    assert patient.idle()


def test_a_server_that_ends_waits_for_answers_to_be_read(pair: semspec.Pair):
    limits = Limits(drain=WAIT, delivery_seconds=WAIT)
    with serving(lambda: pair, Settings(limits=limits, name="tiny")) as live, connect(live, small=True) as connection:
        assert until(lambda: len(live.server.server_state.connections) == 1)
        narrow(live)
        connection.sendall(request(LONG | {"stream": True, "logprobs": 20}))
        assert until(lambda: live.metric("semspec:generation_tokens_total") == 100) and live.idle()
        live.server.drain()
        time.sleep(0.5)  # some ticks
        assert not live.server.should_exit, "the answer is generated, but not delivered"
        assert seen(connection, b"data: [DONE]")
        assert until(lambda: live.server.should_exit)


def test_one_client_has_so_many_connections_and_no_more(hasty: Live):
    assert until(lambda: not hasty.server.server_state.connections)
    limits = PATIENT
    with serving(lambda: hasty.engine.pair, Settings(limits=limits)) as live, ExitStack() as stack:  # type: ignore[arg-type,return-value]
        held = [stack.enter_context(connect(live)) for _ in range(limits.client_connections)]
        assert until(lambda: len(live.server.server_state.connections) == limits.client_connections)
        refusal = live.get("/health")
        assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "connections"
        held[0].close()
        assert until(lambda: len(live.server.server_state.connections) < limits.client_connections)
        assert live.get("/health").status_code == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_half_closed_socket_gets_its_answer(patient: Live, stream: bool, version: str):
    with connect(patient) as connection:
        connection.sendall(request(LONG | {"stream": stream}, version))
        connection.shutdown(socket.SHUT_WR)
        answer = rest(connection)
    assert b" 200 " in answer and (b"data: [DONE]" if stream else b'"completion_tokens":100') in answer
    assert patient.idle()


def test_a_half_closed_socket_gets_nothing_but_objects_as_lines(patient: Live):
    asked = {"model": "tiny", "prompt": "the", "raw": True, "options": {"num_predict": 400, "ignore_eos": True}}
    with connect(patient) as connection:
        connection.sendall(request(asked, "1.0", "/api/generate"))
        first = b""
        while b'"done"' not in first:
            first += connection.recv(1)
        connection.shutdown(socket.SHUT_WR)
        _, _, lines = (first + rest(connection)).partition(b"\r\n\r\n")
    told = [json.loads(line) for line in lines.splitlines()]
    assert told[-1]["done"] and told[-1]["eval_count"] == 400
    assert patient.idle()


@pytest.mark.parametrize("half", [head("/health", method="GET")[:-2], request(LONG)[:-2]])
def test_half_a_request_before_the_end_is_not_answered(patient: Live, half: bytes):
    with connect(patient) as connection:
        connection.sendall(half)
        connection.shutdown(socket.SHUT_WR)
        assert b" 200 " not in rest(connection)


def test_clients_that_wait_and_leave_are_noticed(pair: semspec.Pair):
    """Also those who wait for a slot, to whom nothing is written."""
    with serving(lambda: pair, Settings(name="tiny", limits=Limits(new_tokens=900))) as live:
        with live.slowed(0.1), ExitStack() as stack:
            running = [stack.enter_context(connect(live)) for _ in range(live.engine.slots)]
            for connection in running:
                connection.sendall(request(LONG | {"max_tokens": 900, "stream": True, "speculation": {"off": True}}))
            assert until(lambda: live.engine.live == live.engine.slots)
            for stream in (True, False):
                with connect(live) as waiting:
                    waiting.sendall(request(LONG | {"stream": stream}))
                    assert until(lambda: live.engine.live == live.engine.slots + 1)
                assert until(lambda: live.engine.live <= live.engine.slots)
        assert live.idle()


@pytest.mark.parametrize("name", ["deadline", "drain", "header_seconds", "body_seconds", "delivery_seconds"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_seconds_are_numbers(name: str, value: float):
    with pytest.raises(BadRequest, match=name):
        Limits(**{name: value})


def test_many_requests_on_one_connection(patient: Live):
    assert until(lambda: not patient.server.server_state.connections)
    with httpx.Client(base_url=patient.url, timeout=WAIT) as client:
        for _ in range(5):
            assert client.post("/v1/completions", json=LONG | {"max_tokens": 2}).status_code == 200
        assert len(patient.server.server_state.connections) == 1
