"""HTTPS: with what files, and that nobody is held who never finishes a handshake, or counted too late."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import semspec
from semspec.cli.serve import check_tls
from semspec.errors import BadRequest
from semspec.serve.handshake import GOODBYE_SECONDS
from semspec.serve.limits import Limits, Settings
from tests.serve.live import WAIT, Live, serving, until
from tests.serve.scripted import scripted_pair

HELLO: dict[str, Any] = {"model": "s", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
SETTINGS = Settings(name="s", limits=Limits(new_tokens=500, header_seconds=WAIT))
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def pair() -> semspec.Pair:
    return scripted_pair({"hello": ["Good day."]})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, private = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(private), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, private


@pytest.fixture(scope="module")
def trusting(files: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files[0]))


def connect(live: Live) -> socket.socket:
    """Without any TLS."""
    return socket.create_connection(("127.0.0.1", int(live.engine.url.rpartition(":")[2])), WAIT)


def counted(live: Live) -> Counter[str]:
    return live.server.config.http_protocol_class.clients  # type: ignore[no-any-return,attr-defined]


def healthy(live: Live, trusting: ssl.SSLContext) -> bool:
    """Whether one more client is let in."""
    try:
        return httpx.get(f"{live.engine.url}/health", verify=trusting, timeout=WAIT).status_code == 200
    except httpx.TransportError:
        return False


def test_files_that_https_cannot_be_spoken_with_are_refused(files: tuple[Path, Path]):
    cert, private = files
    check_tls(cert, private)
    for wrong in ((cert, None), (private, cert), (cert.parent / "none", private)):
        with pytest.raises(BadRequest):
            check_tls(*wrong)


def test_answers_over_tls(pair: semspec.Pair, files: tuple[Path, Path], trusting: ssl.SSLContext):
    with serving(lambda: pair, SETTINGS, tls=files) as live:
        assert live.engine.url.startswith("https://")
        with httpx.Client(verify=trusting, base_url=live.engine.url, timeout=WAIT) as client:
            assert client.post("/v1/chat/completions", json=HELLO).status_code == 200
            with client.stream("POST", "/v1/chat/completions", json=HELLO | {"stream": True}) as stream:
                assert stream.read().decode().endswith("data: [DONE]\n\n")
        assert until(lambda: not counted(live))


def test_a_client_that_never_says_hello_is_not_waited_for(pair: semspec.Pair, files: tuple[Path, Path]):
    impatient = replace(SETTINGS, limits=replace(SETTINGS.limits, header_seconds=0.2))
    with serving(lambda: pair, impatient, tls=files) as live, connect(live) as silent:
        assert silent.recv(1) == b""
        assert until(lambda: not counted(live))


def test_a_client_that_never_says_goodbye_is_not_waited_for(
    pair: semspec.Pair, files: tuple[Path, Path], trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
):
    """The server closes a connection on which no request comes, and this client does not answer that. asyncio would
    wait for half a minute."""
    waits, begin = list[float](), asyncio.BaseEventLoop.start_tls

    async def seen(self: Any, *given: Any, **how: Any) -> Any:
        waits.append(how["ssl_shutdown_timeout"])
        return await begin(self, *given, **how)

    monkeypatch.setattr(asyncio.BaseEventLoop, "start_tls", seen)
    for seconds, most in ((2.0, 2.0), (WAIT, GOODBYE_SECONDS)):
        limits = replace(SETTINGS.limits, header_seconds=seconds)
        with (
            serving(lambda: pair, replace(SETTINGS, limits=limits), tls=files) as live,
            trusting.wrap_socket(connect(live), server_hostname="localhost"),
        ):
            assert until(lambda: waits and waits[-1] == most)  # noqa: B023
            assert seconds == WAIT or until(lambda: not counted(live))


@pytest.mark.parametrize("limit", ["client_connections", "connections"])
def test_handshakes_are_counted(pair: semspec.Pair, files: tuple[Path, Path], trusting: ssl.SSLContext, limit: str):
    """Clients are accepted in the order in which they come, so that the last of these finds the others there."""
    limits = replace(SETTINGS.limits, **{limit: 3})
    with serving(lambda: pair, replace(SETTINGS, limits=limits), tls=files) as live, ExitStack() as stack:
        silent, rude, half = (stack.enter_context(connect(live)) for _ in range(3))
        half.sendall(b"\x16\x03\x01")  # a hello begins like this
        assert not healthy(live, trusting), "three are there already"
        rude.sendall(HEALTH)
        assert until(lambda: healthy(live, trusting)), "one that speaks no TLS leaves its place"
        assert until(lambda: counted(live).total() == 2)
        another = stack.enter_context(connect(live))
        assert not healthy(live, trusting)
        for each in (silent, another, half):
            each.close()
            assert until(lambda: healthy(live, trusting))
        assert until(lambda: not counted(live))


@pytest.mark.parametrize("stays", [True, False])
def test_a_request_that_comes_with_the_end_of_the_handshake(
    pair: semspec.Pair, files: tuple[Path, Path], trusting: ssl.SSLContext, stays: bool
):
    with serving(lambda: pair, SETTINGS, tls=files) as live, connect(live) as raw:
        theirs, ours = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting.wrap_bio(theirs, ours, server_hostname="localhost")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(ours.read())
                theirs.write(raw.recv(65536))
        client.write(HEALTH)
        if not stays:
            with suppress(ssl.SSLWantReadError):
                client.unwrap()
        raw.sendall(ours.read())
        answer = b""
        while stays and b"\r\n\r\n" not in answer:
            try:
                answer += client.read(65536)
            except ssl.SSLWantReadError:
                theirs.write(raw.recv(65536))
        assert answer.startswith(b"HTTP/1.1 200" if stays else b"")
        raw.close()
        assert until(lambda: not counted(live)), "whoever leaves at once is not counted for ever"
