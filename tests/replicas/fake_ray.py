"""As much of Ray Serve as `semspec.replicas.on_ray` uses, in threads of the test: actors on an event loop of their own.

`make test-ray` holds the same tests against Ray itself, which is not installed where the quick suite runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any


class ActorDied(Exception):
    pass


class Actor:
    """A replica of a deployment, until it ends."""

    names = itertools.count()

    def __init__(self, cluster: Cluster, kind: type) -> None:
        self.replica_id = SimpleNamespace(unique_id=f"replica-{next(self.names)}")
        self.cluster, self.ended, self.running = cluster, asyncio.Event(), False

        class Own(kind):  # type: ignore[misc, valid-type]
            def _ended(own, number: int) -> None:  # its process would end here
                if not own.processes.supervisor.stopping:
                    self.end()

        self.kind = Own
        self.begun = asyncio.ensure_future(self.begin())

    async def begin(self) -> None:
        self.instance = self.kind.__new__(self.kind)
        await self.instance.__init__(*self.cluster.arguments)
        self.instance.reconfigure(self.cluster.options["user_config"])
        self.running = True

    def end(self) -> None:
        self.begun.cancel()
        if self in self.cluster.actors:
            self.cluster.actors.remove(self)
            self.cluster.router.on_replica_actor_died(self.replica_id)
            self.ended.set()
            self.cluster.actors.append(Actor(self.cluster, self.cluster.kind))
            self.stopped = asyncio.ensure_future(self.instance.processes.stop(0))  # nothing of an actor outlives it

    async def next(self, answer: Any) -> Any:
        asked, ended = asyncio.ensure_future(anext(answer)), asyncio.ensure_future(self.ended.wait())
        await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if self.ended.is_set():
            asked.cancel()
            raise ActorDied
        return await asked


class Response:
    def __init__(self, cluster: Cluster, sent: Any) -> None:
        self.cluster, self.actor, self.cancelled, self.over = cluster, None, False, False
        self.sent = sent

    async def _next(self) -> Any:
        router = self.cluster.router
        if self.actor is None:
            running = [actor for actor in self.cluster.actors if actor.running]
            pending = SimpleNamespace(args=[self.sent])
            self.actor = (await router.choose_replicas(running, pending))[0][0]
            router.on_request_routed(pending, self.actor.replica_id, self)
            self.answer = self.actor.instance.answer(self.sent)
        try:
            return await self.actor.next(self.answer)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        if self.actor is not None and not self.over:
            self.over = True
            self.cluster.router.on_request_completed(self.actor.replica_id, "")

    async def __anext__(self) -> Any:
        self.future = self.cluster.submit(self._next())
        return await asyncio.wrap_future(self.future)

    def cancel(self) -> None:
        if not self.over:
            self.future.cancel()
            self.cluster.submit(self._close())

    async def _close(self) -> None:
        self.end()
        with contextlib.suppress(RuntimeError):
            await self.answer.aclose()


class Cluster:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.actors: list[Actor] = []
        self.name = ""
        self.answer = SimpleNamespace(remote=lambda sent: Response(self, sent))

    def submit(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    # -- ray.serve

    def deployment(self, kind: type, **options: Any) -> Any:
        self.kind, self.options = kind, options
        return SimpleNamespace(bind=lambda *arguments: arguments)

    def run(self, arguments: tuple[Any, ...], name: str, **_: Any) -> None:
        self.arguments = arguments
        self.submit(self._run(name)).result()

    async def _run(self, name: str) -> None:
        if self.name == name:
            for actor in self.actors:
                actor.instance.reconfigure(self.options["user_config"])
            return
        self.name = name
        self.router = self.options["request_router_config"].request_router_class()
        self.router.initialize_state()
        self.actors = [Actor(self, self.kind) for _ in range(self.options["num_replicas"])]
        await asyncio.gather(*(actor.begun for actor in self.actors))

    def status(self) -> Any:
        running = sum(actor.running for actor in self.actors)
        states = {"RUNNING": running, "STARTING": len(self.actors) - running}
        deployments = {self.options["name"]: SimpleNamespace(replica_states=states)} if self.name else {}
        return SimpleNamespace(applications={self.name: SimpleNamespace(deployments=deployments)})

    def get_deployment_handle(self, deployment: str, name: str) -> Any:
        assert (deployment, name) == (self.options["name"], self.name)
        return SimpleNamespace(options=lambda stream: self)

    def delete(self, name: str) -> None:
        async def end() -> None:
            await asyncio.gather(*(actor.instance.__del__() for actor in self.actors))

        assert name == self.name
        self.submit(end()).result()


class RequestRouter:
    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Ray's own bookkeeping."""


def modules(cluster: Cluster) -> dict[str, ModuleType]:
    def module(name: str, **members: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(members)
        return made

    serve = module(
        "ray.serve", start=lambda **_: None, **{name: getattr(cluster, name) for name in dir(cluster) if name in SERVE}
    )
    names = dict.fromkeys(("PendingRequest", "ReplicaID", "RunningReplica"), object)
    return {
        "ray": module(
            "ray", init=lambda **_: None, shutdown=lambda: None, cluster_resources=lambda: {"CPU": 2.0}, serve=serve
        ),
        "ray.serve": serve,
        "ray.serve.config": module("ray.serve.config", RequestRouterConfig=SimpleNamespace),
        "ray.serve.request_router": module("ray.serve.request_router", RequestRouter=RequestRouter, **names),
    }


SERVE = ("deployment", "run", "status", "get_deployment_handle", "delete")


@contextlib.contextmanager
def installed() -> Any:
    """Until then nobody has imported the real one."""
    cluster = Cluster()
    made = modules(cluster)
    sys.modules.update(made)
    try:
        yield cluster
    finally:
        for name in (*made, "semspec.replicas.on_ray"):
            sys.modules.pop(name, None)
        cluster.loop.call_soon_threadsafe(cluster.loop.stop)
        cluster.thread.join(20)
