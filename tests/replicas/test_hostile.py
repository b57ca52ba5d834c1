"""What hostile or unlucky clients and machines do to several replicas: each is refused, and the rest go on."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from semspec.errors import BadRequest
from semspec.replicas.backend import Answer, NoneReady, Sent
from semspec.replicas.ingress import LOST, LOST_TWICE, Ingress
from semspec.replicas.supervisor import Supervisor, bound
from semspec.serve.engine import Engine
from semspec.serve.forwarded import HEADER, LISTENER, PARENT, ForwardedClient, inherited, introduced, starter
from semspec.serve.limits import Limits, Settings
from semspec.serve.server import Server
from tests.replicas import running as replicas
from tests.replicas.running import LIMITS, Running
from tests.serve.live import WAIT, until


def rest(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def test_a_request_that_ends_replicas_is_tried_twice_at_most() -> None:
    with Running(count=3) as running:
        answer = running.post({"poison": True})
        assert answer.status_code == 502 and answer.json()["error"]["message"] == LOST_TWICE
        assert answer.headers["x-should-retry"] == "false"
        assert running.post({"prompt": "a"}).status_code == 200, "one replica never saw it"
        assert sum(r.starts for r in running.supervisor.replicas) <= 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_place_back(running: Running, stream: bool) -> None:
    left = running.opened({"hold": "/no/such/file", "stream": stream})
    assert until(lambda: running.ingress.busy == 1)
    left.close()
    assert until(lambda: running.ingress.busy == 0)


def test_bodies_are_limited_in_time_and_size() -> None:
    with Running(Settings(limits=Limits(body_bytes=5_000, body_seconds=0.2, drain=10)), count=1) as running:
        late = running.opened({"prompt": "a"}, announced=1000)
        assert b"408" in late.recv(1000).splitlines()[0]
        late.close()
        answer = running.post({"prompt": "a" * 6_000})
        assert answer.status_code == 413 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_half_closes_gets_its_error_event(running: Running) -> None:
    client = running.opened({"stream": True, "hold": "/no/such/file"})
    received = client.recv(65536)
    while b"data:" not in received:
        received += client.recv(65536)
    client.shutdown(socket.SHUT_WR)
    number = next(n for n, busy in running.router.in_flight.items() if busy)
    os.kill(running.pid(number), signal.SIGKILL)
    assert LOST.encode() in received + rest(client)
    client.close()


def test_paths_are_passed_on_as_sent_or_refused(running: Running) -> None:
    for path in ("/%01", "/a%3Fb", "/v1/models?a=%26"):
        assert running.get(path).json()["path"] == path
    with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT) as client:
        client.sendall(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = rest(client)
    assert answer.splitlines()[0].split()[1] == b"400" and b"Traceback" not in answer


def test_a_redirect_does_not_lead_to_the_replica(running: Running) -> None:
    """Whose address is none for clients; a server redirects paths that end with a slash too many."""
    answer = running.get("/moved")
    assert answer.status_code == 307 and answer.headers["location"] == "/there?a=%26"
    assert running.get("/moved", follow_redirects=True).json()["path"] == "/there?a=%26"


def test_a_replica_that_cannot_start_or_never_gets_healthy_is_tried_again() -> None:
    tried: list[int] = []

    def command(port: int) -> list[str]:
        tried.append(port)
        supervisor.patience = 0.5 if len(tried) == 2 else 600
        return [["/no/such/program"], ["sleep", "600"], replicas.command(port)][len(tried) - 1]

    supervisor = Supervisor(command, 1)

    async def run() -> bool:
        supervisor.start()
        async with asyncio.timeout(WAIT):
            while not supervisor.ready:
                await asyncio.sleep(0.05)
        await supervisor.stop(10)
        return True

    assert asyncio.run(run()) and supervisor.replicas[0].starts == 3


def taken(port: int) -> bool:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False


def test_nobody_else_can_be_at_a_replicas_port() -> None:
    """From before its process has begun, which may take minutes to listen, until it is known to have ended."""
    seen: list[tuple[int, bool]] = []

    def command(port: int) -> list[str]:
        seen.append((port, taken(port)))
        return ["sleep", "600"]  # which never listens

    async def run() -> None:
        supervisor = Supervisor(command, 1)
        (replica,) = supervisor.replicas
        supervisor.start()
        async with asyncio.timeout(WAIT):
            while replica.process is None:
                await asyncio.sleep(0.01)
            listener = replica.listener
            assert seen == [(replica.port, True)] and taken(replica.port)
            replica.process.kill()
            while len(seen) == 1:
                await asyncio.sleep(0.01)
        assert listener.fileno() == -1 and seen[1][1], "the first is let go, and the second held"
        await supervisor.stop(WAIT)

    asyncio.run(run())


def test_a_replica_that_stops_listening_refuses_at_once() -> None:
    """Its socket is open in the process in front, too, while it still takes a while to end; nobody may wait for it, and
    nobody else be at its port."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        with bound() as held:
            address = held.getsockname()
            config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
            server = Server(config, Engine(lambda: None, Limits()), Limits())  # type: ignore[arg-type]
            serving = asyncio.create_task(server.serve([held.dup()]))
            while not server.started:
                await asyncio.sleep(0.01)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{address[1]}", timeout=5) as client:
                assert (await client.get("/health")).status_code == 200
                server.should_exit = True
                await serving
                with pytest.raises(httpx.ConnectError):
                    await client.get("/health")
            assert taken(address[1])

    asyncio.run(run())


def test_a_server_listens_on_the_socket_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv(LISTENER, str(os.dup(bound.fileno())))
        with inherited() as listener:  # type: ignore[union-attr]
            assert listener.getsockname() == bound.getsockname() and not listener.get_inheritable()
        assert inherited() is None, "nobody is given it twice"


@pytest.mark.parametrize("given", ["abc", "", "-1", "99999", "1" * 30])
def test_a_socket_or_process_that_was_not_handed_over_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(LISTENER, given)
    with pytest.raises(BadRequest, match=rf"{LISTENER} is '{given}', .* unset it"):
        inherited()
    with open(os.devnull) as file:
        monkeypatch.setenv(LISTENER, str(file.fileno()))
        with pytest.raises(BadRequest, match="no socket"):
            inherited()
    monkeypatch.setenv(PARENT, "1.5")
    with pytest.raises(BadRequest, match="no process"):
        starter()
    monkeypatch.delenv(PARENT)
    assert starter() == os.getppid()


def test_hangups_reload_keys_everywhere_and_replicas_are_told_of_with_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n")
    with Running(Settings(limits=LIMITS, key_file=file), count=1) as running:
        assert running.get("/health").status_code == 200
        for path in ("/replicas", "/v1/models"):
            assert running.get(path).status_code == 401
            assert running.get(path, headers={"x-api-key": "first"}).status_code == 200
        file.write_text("second\n")
        running.server.handle_hangup(signal.SIGHUP, None)
        assert until(lambda: running.get("/replicas", headers={"x-api-key": "second"}).status_code == 200)
        assert until(lambda: running.get("/", headers={"x-api-key": "second"}).json()["reloads"] == 1)


def test_without_keys_a_hangup_does_nothing(running: Running) -> None:
    before = [running.pid(n) for n in range(2)]
    running.server.handle_hangup(signal.SIGHUP, None)
    assert running.get("/").json()["reloads"] == 0 and [running.pid(n) for n in range(2)] == before


def test_replicas_know_clients_by_their_addresses(running: Running) -> None:
    answer = running.get("/", headers={HEADER: "guess 10.0.0.1"}).json()
    assert answer["known"] == [True] and answer["clients"][0].endswith(" 127.0.0.1"), "a client cannot speak for others"

    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["client"][0])

    async def ask(headers: list[tuple[bytes, bytes]]) -> None:
        scope = {"type": "http", "headers": headers, "client": ("127.0.0.1", 1)}
        await ForwardedClient(app, "secret")(scope, None, None)  # type: ignore[arg-type]

    for headers in ([introduced("secret", "10.0.0.1")], [introduced("guess", "10.0.0.2")], []):
        asyncio.run(ask(headers))
    assert seen == ["10.0.0.1", "127.0.0.1", "127.0.0.1"]


class NotYet:
    """Replicas that still load."""

    count, ready = 2, 0

    async def ask(self, sent: Sent, tried: set[Any]) -> Answer:
        raise NoneReady


def test_an_address_is_alive_while_models_are_loaded() -> None:
    """Or whoever looks after it would end it before they are."""

    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(Ingress(NotYet(), Settings()).app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [(await client.get(path)).status_code for path in ("/live", "/ready", "/health", "/v1/models")]

    assert asyncio.run(statuses()) == [200, 503, 503, 503]


def test_the_address_has_the_limits_and_origins_it_was_given() -> None:
    limits = Limits(client_connections=1, drain=10)
    with Running(Settings(limits=limits, cors=("https://page.example",)), count=1) as running:
        page = {"origin": "https://page.example"}
        asked = running.get("/v1/models", headers=page)
        assert asked.headers["access-control-allow-origin"] == page["origin"]
        assert until(lambda: not running.server.server_state.connections)
        assert running.get("/v1/models", headers={"origin": "https://other.example"}).status_code == 403
        assert until(lambda: not running.server.server_state.connections)
        with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT):
            assert until(lambda: running.get("/health").status_code == 503)
        assert until(lambda: running.get("/health").status_code == 200)


def test_a_server_ends_with_the_process_that_started_it() -> None:
    """Else a supervisor that is killed would leave models in memory that nobody reaches."""

    def ends(parent: int | None) -> bool:
        config = uvicorn.Config(lambda: None, log_config=None)
        config.load()
        server = Server(config, Engine(lambda: None, Limits()), Limits(), parent=parent)  # type: ignore[arg-type]
        asyncio.run(server.on_tick(1))
        return server.should_exit

    assert [ends(None), ends(os.getppid()), ends(os.getpid())] == [False, False, True]
