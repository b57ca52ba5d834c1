"""The routes. Everything they need hangs on one Service; see completions.py for how an answer is made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import semspec
from semspec.serve import http_errors as refusals
from semspec.serve import speculation
from semspec.serve.auth import Keys
from semspec.serve.completions import Service
from semspec.serve.engine import Engine
from semspec.serve.limits import BodyLimit, Settings
from semspec.serve.logs import Journal
from semspec.serve.metrics import Metrics
from semspec.serve.schema import ChatRequest, CompletionRequest, TokenizeRequest

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer."}
}


def make_app(engine: Engine, metrics: Metrics, settings: Settings) -> FastAPI:
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        engine.stop()
        service.close()

    app = FastAPI(title="semspec", version=semspec.__version__, lifespan=lifespan, redoc_url=None, docs_url=None)
    app.state.engine = engine
    refusals.install(app)
    _answers(app, service)
    _facts(app, service, metrics)
    _page(app, service)
    # The last added is the first to see a request.
    app.add_middleware(BodyLimit, most=settings.limits.body_bytes, seconds=settings.limits.body_seconds)
    if settings.keys:
        app.add_middleware(Keys, keys=settings.keys)
    if settings.cors:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Journal, metrics=metrics)
    return app


def _answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat(request: Request, asked: ChatRequest) -> Response:
        """Answer a chat."""
        return await service.answer(request, asked)

    @app.post("/v1/completions", responses=STREAMED)
    async def complete(request: Request, asked: CompletionRequest) -> Response:
        """Go on with a text."""
        return await service.answer(request, asked)

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text, or of a chat as the model sees it."""
        if asked.model is not None:
            service.check_model(asked.model)
        return await service.tokenize(asked)


def _facts(app: FastAPI, service: Service, metrics: Metrics) -> None:
    engine, settings = service.engine, service.settings

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.card()

    @app.get("/v1/methods")
    async def methods() -> dict[str, Any]:
        """Every verifier with its options, and what is allowed here."""
        return speculation.menu(settings) | {
            "model": settings.name,
            "target_seconds_per_token": engine.alone,
            "has_draft_model": engine.pair is not None and engine.pair.draft is not None,
        }

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 when ready; 503 while loading, draining, or after a failure."""
        return JSONResponse({"status": engine.state}, 200 if engine.state == "ready" else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": semspec.__version__}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _page(app: FastAPI, service: Service) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=PAGE), name="page")
