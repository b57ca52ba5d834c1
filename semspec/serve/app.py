"""The routes. Everything they need is in one Service; completions.py makes the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import semspec
from semspec.serve import http_errors, menu, speculation
from semspec.serve.answers import ChatAnswer, TextAnswer
from semspec.serve.auth import Keys
from semspec.serve.completions import Service
from semspec.serve.engine import Engine
from semspec.serve.hosts import HostCheck
from semspec.serve.limits import BodyLimit, Settings
from semspec.serve.logs import Journal
from semspec.serve.metrics import Metrics
from semspec.serve.schema.requests import ChatRequest, CompletionRequest, TokenizeRequest, taking_unknown
from semspec.serve.tools import families

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer."}
}


def make_app(engine: Engine, metrics: Metrics, settings: Settings) -> FastAPI:
    speculation.check_defaults(settings)
    families.check_name(settings.tool_parser)
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        engine.stop()
        service.close()

    app = FastAPI(title="semspec", version=semspec.__version__, lifespan=lifespan, redoc_url=None, docs_url=None)
    app.state.engine = engine
    http_errors.install(app)
    _completions(app, service)
    _information(app, service, metrics)
    _page(app)
    # The last added is the first to see a request.
    app.add_middleware(BodyLimit, max_bytes=settings.limits.body_bytes, seconds=settings.limits.body_seconds)
    if settings.keys:
        app.add_middleware(Keys, keys=settings.keys)
    if settings.cors:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(HostCheck, hosts=settings.hosts, origins=settings.cors)
    app.add_middleware(Journal, metrics=metrics)
    return app


def _completions(app: FastAPI, service: Service) -> None:
    async def check_capacity() -> None:
        service.engine.check_capacity()

    capacity = Depends(check_capacity)  # runs before the body is validated

    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a chat."""
        return await service.answer(request, body, ChatAnswer)

    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        return await service.answer(request, body, TextAnswer)

    for path, endpoint, kind in (
        ("/v1/chat/completions", chat, ChatRequest),
        ("/v1/completions", complete, CompletionRequest),
    ):
        endpoint.__annotations__["body"] = taking_unknown(kind) if service.settings.ignore_unknown else kind
        app.post(path, responses=RESPONSES, dependencies=[capacity])(endpoint)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a text, or of a chat as the model sees it."""
        if body.model is not None:
            service.check_model(body.model)
        return await service.tokenize(body)


def _information(app: FastAPI, service: Service, metrics: Metrics) -> None:
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
        return menu.menu(settings) | {
            "model": settings.name,
            "target_seconds_per_token": engine.target_seconds_per_token,
            "has_draft_model": engine.pair is not None and engine.pair.draft is not None,
            "thinks": engine.pair is not None and engine.pair.resources.thinking is not None,
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

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": semspec.__version__}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


class PageFiles(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


def _page(app: FastAPI) -> None:
    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/page", PageFiles(directory=PAGE), name="page")
