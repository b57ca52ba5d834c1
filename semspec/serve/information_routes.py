"""Routes that tell of the server: models, methods, health, metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

import semspec
from semspec.serve import menu, ollama
from semspec.serve.completions import Service
from semspec.serve.metrics import Metrics
from semspec.serve.schema.ollama import OllamaShow

OPENMETRICS = "application/openmetrics-text"


def add(app: FastAPI, service: Service, metrics: Metrics) -> None:
    engine, settings = service.engine, service.settings

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.card()

    @app.get("/api/tags")
    async def ollama_models() -> dict[str, Any]:
        """The model, as Ollama lists it."""
        return {"models": [ollama.listed(service.card())]}

    @app.get("/api/ps")
    async def ollama_running() -> dict[str, Any]:
        """The same, once it is loaded."""
        return {"models": [ollama.running(service.card())] if engine.state == "ready" else []}

    @app.post("/api/show")
    async def ollama_show(body: OllamaShow) -> dict[str, Any]:
        """What the model can do and how long its context is, as Ollama tells it."""
        service.check_model(body.wanted)
        return ollama.shown(service.card(), service.tokenization.abilities)

    @app.get("/api/version")
    async def ollama_version() -> dict[str, str]:
        return await version()

    @app.get("/v1/methods")
    async def methods() -> dict[str, Any]:
        """Every verifier with its options, and what is allowed here."""
        return menu.menu(settings) | {
            "model": settings.name,
            "target_seconds_per_token": engine.target_seconds_per_token,
            "busy": engine.busy,
            "has_draft_model": engine.pair is not None and engine.pair.draft is not None,
            "thinks": engine.state == "ready" and service.tokenization.limits_thinking,
        }

    @app.get("/v1/examples")
    async def examples(seed: Annotated[int, Query(ge=0, lt=1 << 16)] = 0) -> dict[str, Any]:
        """Questions to begin with that suit the model."""
        return menu.examples(engine.pair, seed)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> JSONResponse:
        """200 when ready; 503 while loading, draining, or after a failure."""
        return JSONResponse({"status": engine.state}, 200 if engine.state == "ready" else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """The same as /health: whether requests are taken now."""
        return await health()

    @app.get("/live")
    async def live() -> JSONResponse:
        """200 unless the server has failed and has to be started again; it may still be loading, or draining."""
        alive = engine.state not in ("failed", "stopped")
        return JSONResponse({"status": "alive" if alive else engine.state}, 200 if alive else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": semspec.__version__}

    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        """For Prometheus; as OpenMetrics for those who accept that."""
        accepted = [kind.partition(";")[0].strip() for kind in request.headers.get("accept", "").split(",")]
        encode, kind = choose_encoder(OPENMETRICS if OPENMETRICS in accepted else "")  # versions may be any words
        return Response(encode(metrics.registry), media_type=kind)
