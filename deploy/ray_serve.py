"""The server on Ray Serve, for replicas on several machines: `serve run ray_serve:app`, in this folder.

SEMSPEC_TARGET, SEMSPEC_DRAFT and SEMSPEC_REPLICAS say what is served and how often (pocket, 2 times), SEMSPEC_SLOTS and
SEMSPEC_GPUS what each replica has (8, 0), SEMSPEC_HOSTS by which names clients call it, with commas between, and
SEMSPEC_API_KEY their key. On one machine `semspec serve --replicas N` does the same without Ray, and sends a prompt to
the replica that has read most of it before; Ray takes the less busy of two. Tried with Ray 2.60, which is not among the
package's requirements.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ray import serve

NAMES = ("TARGET", "DRAFT", "REPLICAS", "SLOTS", "GPUS", "HOSTS", "API_KEY")
GIVEN = {name: os.environ.get(f"SEMSPEC_{name}") for name in NAMES}
TARGET, REPLICAS, SLOTS = GIVEN["TARGET"] or "pocket", int(GIVEN["REPLICAS"] or 2), int(GIVEN["SLOTS"] or 8)


def build() -> Any:
    """The application, in the replica's process."""
    from semspec.model.prefix_cache import PrefixCache
    from semspec.pair.loading import load
    from semspec.serve import memory
    from semspec.serve.app import make_app
    from semspec.serve.engine import Engine
    from semspec.serve.hosts import host_names
    from semspec.serve.limits import Settings
    from semspec.serve.metrics import Metrics

    memory.configure()
    hosts = host_names(filter(None, (GIVEN["HOSTS"] or "").split(",")))
    settings = Settings(name=Path(TARGET).name, hosts=hosts, keys=tuple(filter(None, [GIVEN["API_KEY"]])))
    metrics = Metrics(settings.name)
    engine = Engine(
        lambda: load(TARGET, GIVEN["DRAFT"], slots=SLOTS).wrapped(PrefixCache), settings.limits, metrics.finish
    )
    metrics.watch(engine)
    app = make_app(engine, metrics, settings)
    started = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        """A replica gets requests when this has begun: when its models are loaded."""
        async with started(app) as state:
            while engine.state == "loading":
                await asyncio.sleep(0.1)
            watching = asyncio.create_task(end_with(engine))
            yield state
            watching.cancel()

    app.router.lifespan_context = lifespan
    return app


async def end_with(engine: Any) -> None:
    """Ray replaces a replica that ends."""
    while engine.state != "failed":
        await asyncio.sleep(1)
    print(f"semspec: {engine.error}", file=sys.stderr, flush=True)
    os._exit(1)


@serve.deployment(
    num_replicas=REPLICAS, max_ongoing_requests=1000, graceful_shutdown_timeout_s=45, health_check_period_s=2,
    ray_actor_options={"num_cpus": 0.5, "num_gpus": float(GIVEN["GPUS"] or 0)},
)  # fmt: skip
@serve.ingress(build)
class Replica:
    pass


app = Replica.bind()  # type: ignore[attr-defined]
