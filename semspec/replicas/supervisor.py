"""Processes of one kind, kept running: each on a port of its own, asked for its health, replaced when it ends.

A port is bound here, before there is a process, and let go when that has ended and nothing is sent there any more: no
other program can be at it and be given clients' requests and keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from semspec.serve.forwarded import LISTENER, PARENT, SECRET

log = logging.getLogger("semspec.serve")
LOOK_SECONDS = 0.2  # between two looks at a replica
ASK_SECONDS = 5.0  # in which it has to tell its health
FIRST_REST, LONGEST_REST = 0.5, 30.0  # seconds before one that ended at once is started again
STEADY_SECONDS = 60.0  # one that ran for so long has not ended at once
PATIENCE = 1800.0  # seconds without health, loading included, after which a replica is ended


def bound() -> socket.socket:
    """A socket at a free port, bound by its number: a port that the kernel has chosen itself is given to others as soon
    as a replica shuts its copy of the socket down."""
    while True:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            port = trial.getsockname()[1]
        listener = socket.socket()
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:  # somebody was faster
                raise
        else:
            return listener


@dataclass
class Replica:
    number: int
    port: int = 0
    process: Process | None = None
    ready: bool = False
    starts: int = 0
    began: float = 0.0
    rest: float = FIRST_REST
    listener: socket.socket | None = None
    ended: asyncio.Future[int] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass
class Supervisor:
    command: Callable[[int], list[str]]  # port -> what to run; the socket itself is inherited
    count: int
    on_replaced: Callable[[int], None] = lambda number: None
    replicas: list[Replica] = field(default_factory=list)
    stopping: bool = False
    patience: float = PATIENCE
    secret: str = field(default_factory=secrets.token_hex, repr=False)

    def __post_init__(self) -> None:
        self.replicas = [Replica(number) for number in range(self.count)]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> list[int]:
        return [replica.number for replica in self.replicas if replica.ready]

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(replica)) for replica in self.replicas]

    async def _keep(self, replica: Replica) -> None:
        """Run it again and again."""
        async with httpx.AsyncClient(timeout=ASK_SECONDS, trust_env=False) as client:
            while not self.stopping:
                try:
                    process = await self._launch(replica)
                except OSError as error:  # no memory, no port, too many files: it may pass
                    fields = {"replica": replica.number, "why": error.strerror}
                    log.error("a replica cannot be started", extra={"fields": fields})
                else:
                    await self._watch(client, replica, process)
                    if self.stopping:
                        return
                    fields = {"replica": replica.number, "status": process.returncode}
                    log.error("a replica has ended", extra={"fields": fields})
                steady = time.monotonic() - replica.began > STEADY_SECONDS
                replica.rest = FIRST_REST if steady else min(2 * replica.rest, LONGEST_REST)
                await asyncio.sleep(replica.rest)

    async def _watch(self, client: httpx.AsyncClient, replica: Replica, process: Process) -> None:
        """Until it ends; one that is not healthy for too long is ended."""
        seen = replica.began
        while process.returncode is None:
            replica.ready = await self._healthy(client, replica) and process.returncode is None
            seen = time.monotonic() if replica.ready else seen
            if time.monotonic() - seen > self.patience and not self.stopping:
                log.error("a replica is not healthy, and is ended", extra={"fields": {"replica": replica.number}})
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            await asyncio.sleep(LOOK_SECONDS)
        replica.ready = False
        self.on_replaced(replica.number)

    async def _launch(self, replica: Replica) -> Process:
        listener = bound()
        try:
            replica.port, number = listener.getsockname()[1], listener.fileno()
            replica.starts += 1
            replica.began = time.monotonic()
            environment = os.environ | {SECRET: self.secret, PARENT: str(os.getpid()), LISTENER: str(number)}
            process = await asyncio.create_subprocess_exec(
                *self.command(replica.port), env=environment, pass_fds=[number]
            )
        except BaseException:
            listener.close()
            raise

        def ended(_: object) -> None:
            """At once: whoever has connected since would wait for nobody."""
            replica.ready = False
            listener.close()

        replica.process, replica.listener, replica.ended = process, listener, asyncio.ensure_future(process.wait())
        replica.ended.add_done_callback(ended)
        return process

    async def _healthy(self, client: httpx.AsyncClient, replica: Replica) -> bool:
        try:
            return (await client.get(f"{replica.url}/health")).status_code == 200
        except httpx.HTTPError:
            return False

    def reload(self) -> None:
        """Pass SIGHUP on; one that is not ready yet might not expect it, and end."""
        for replica in self.replicas:
            if replica.ready and replica.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    replica.process.send_signal(signal.SIGHUP)

    async def stop(self, seconds: float) -> None:
        """Tell all to end, which lets them finish what they answer, and end those that take longer."""
        self.stopping = True
        running = [r.process for r in self.replicas if r.process is not None and r.process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        ending = [asyncio.ensure_future(process.wait()) for process in running]
        if ending:
            await asyncio.wait(ending, timeout=seconds)
        for process in running:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
