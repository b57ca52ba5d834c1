"""Replicas as a deployment of Ray Serve, on the machines of a cluster. The only importer of ray.

Ray starts replicas, places them, replaces those that end, and carries requests and answers. Each is an actor with one
server of its own beside it, the same as elsewhere. The one address stays ours: it keeps its promises about streams that
are cut, and sees the prompts by which requests are routed, which Ray's own proxy does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from semspec.replicas.backend import Answer, Lost, NoneReady, Sent
from semspec.replicas.processes import Processes
from semspec.replicas.router import Router, text_of
from semspec.replicas.supervisor import Supervisor

log = logging.getLogger("semspec.serve")
LOOK_SECONDS = 0.5  # between two looks at Ray's account of its replicas
HEALTH_SECONDS = 2.0  # between two looks of Ray's at a replica; one that ends is noticed at once
END_SECONDS = 15.0  # for a replica to end after its last answer
CPUS = 0.1  # that a replica reserves: Ray spreads them, and their number is the caller's choice
REMEMBERED = 10_000  # requests
REQUESTS = 100_000  # of one replica at a time: its server has limits of its own, and says so to clients
NAME = "Replica"
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # replicas' servers have a log of their own


class Replica:
    """The actor: one server, and a way to it."""

    async def __init__(  # type: ignore[misc]  # Ray waits for it
        self, words: list[str], folder: str, environment: dict[str, str], drain: float
    ) -> None:
        if os.path.isdir(folder):  # models may be named relative to it
            os.chdir(folder)
        os.environ.update(environment)
        self.processes = Processes(Supervisor(lambda port: [sys.executable, *words, "--port", str(port)], 1))
        self.drain, self.reloads = drain, 0
        self.processes.supervisor.on_replaced = self._ended
        self.processes.start()
        while not self.processes.ready:
            await asyncio.sleep(LOOK_SECONDS)

    def _ended(self, number: int) -> None:
        """Without its server it is none; Ray starts another."""
        if not self.processes.supervisor.stopping:
            os._exit(1)

    async def answer(self, sent: Sent) -> AsyncIterator[Any]:
        """Status and headers, then the parts of the body."""
        answer = await self.processes.ask(sent, set())
        try:
            yield answer.status, answer.headers
            async for part in answer.parts:
                yield part
        finally:
            await answer.close()

    def reconfigure(self, config: dict[str, int]) -> None:
        if config["reloads"] != self.reloads:
            self.reloads = config["reloads"]
            self.processes.reload()

    async def __del__(self) -> None:  # which Ray calls when a replica has nothing more to answer
        await self.processes.stop(self.drain)


class PrefixRouter(RequestRouter):
    """Our choice among Ray's replicas, in the process that asks."""

    def initialize_state(self) -> None:
        self.router: Router[str] = Router()
        self.sent: OrderedDict[tuple[str, str], None] = OrderedDict()  # requests, and to whom

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        sent: Sent = pending_request.args[0]
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        new = [name for name in named if (sent.name, name) not in self.sent]  # another may have ended without word
        best = named.pop(self.router.choose(new or list(named), text_of(sent.body)))
        return [[best], list(named.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self.router.begin(replica_id.unique_id)
        self.sent[pending_request.args[0].name, replica_id.unique_id] = None
        if len(self.sent) > REMEMBERED:
            self.sent.popitem(last=False)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self.router.end(replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.router.forget(replica_id.unique_id)


class RayReplicas:
    def __init__(self, words: list[str], count: int, drain: float, gpus: float | None = None) -> None:
        """Joins the cluster that RAY_ADDRESS or this machine has, or starts one here."""
        self.words, self.count, self.drain = words, count, drain
        self.name = f"semspec-{secrets.token_hex(4)}"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anyone unless asked for
        os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster that is started here: 15 is for batches
        ray.init(logging_level=logging.WARNING, include_dashboard=False)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config=QUIET)
        self.gpus = gpus if gpus is not None else float(ray.cluster_resources().get("GPU", 0) > 0)
        self.ready, self._states = 0, dict[str, int]()
        self._reloads = 0
        self._handle: Any = None
        self._tasks = set[asyncio.Task[None]]()

    def _deploy(self) -> None:
        deployment = serve.deployment(
            Replica, name=NAME, num_replicas=self.count, max_ongoing_requests=REQUESTS,
            graceful_shutdown_timeout_s=self.drain + END_SECONDS, health_check_period_s=HEALTH_SECONDS,
            user_config={"reloads": self._reloads},
            ray_actor_options={"num_cpus": CPUS, "num_gpus": self.gpus},
            request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        )  # fmt: skip
        own = {name: value for name, value in os.environ.items() if name.startswith("SEMSPEC_")}
        app = deployment.bind(self.words, os.getcwd(), own, self.drain)
        serve.run(app, name=self.name, route_prefix=None, logging_config=QUIET)

    def start(self) -> None:
        self._run(self._deployed())
        self._run(self._watch())

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deployed(self) -> None:
        try:
            await asyncio.to_thread(self._deploy)
        except Exception as error:
            log.error("Ray cannot run the replicas: %s", error)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # Ray is busy, or being shut down: the last that was seen stands
                await asyncio.to_thread(self._look)
            await asyncio.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        application = serve.status().applications.get(self.name)
        deployment = application.deployments.get(NAME) if application else None
        self._states = {str(state): many for state, many in (deployment.replica_states if deployment else {}).items()}
        self.ready = sum(many for state, many in self._states.items() if state.endswith("RUNNING"))
        if self.ready and self._handle is None:
            self._handle = serve.get_deployment_handle(NAME, self.name).options(stream=True)

    def describe(self) -> list[dict[str, Any]]:
        return [{"state": state.rpartition(".")[2].lower(), "replicas": many} for state, many in self._states.items()]

    async def ask(self, sent: Sent, tried: set[Any]) -> Answer:
        if self._handle is None or not self.ready:
            raise NoneReady
        tried.add(len(tried))  # Ray itself asks none again that has ended
        response = self._handle.answer.remote(sent)
        try:
            status, headers = await _next(response)
        except BaseException:
            response.cancel()
            raise

        async def parts() -> AsyncIterator[bytes]:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield await _next(response)

        async def close() -> None:
            response.cancel()  # does nothing to one that has ended

        return Answer(status, headers, parts(), close)

    def reload(self) -> None:
        self._reloads += 1
        self._run(self._deployed())

    async def stop(self, seconds: float) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(serve.delete, self.name)
        await asyncio.to_thread(ray.shutdown)


async def _next(response: Any) -> Any:
    try:
        return await anext(response)
    except (StopAsyncIteration, asyncio.CancelledError):
        raise
    except Exception as error:  # the actor has died, or its server, or Ray cannot reach it
        log.warning("Ray: %s", type(error).__name__)
        raise Lost from error
