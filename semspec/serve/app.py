"""The application: routes and middleware around one Service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

import semspec
from semspec.pair import Pair
from semspec.serve import completion_routes, http_errors, information_routes, speculation
from semspec.serve.auth import Keys, KeyStore
from semspec.serve.completions import Service
from semspec.serve.engine import Engine
from semspec.serve.forwarded import ForwardedClient
from semspec.serve.hosts import HostCheck, UntypedBodies
from semspec.serve.limits import BodyLimit, Settings
from semspec.serve.logs import Journal
from semspec.serve.metrics import Metrics
from semspec.serve.tools import families

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
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

    def prepare(pair: Pair) -> None:
        """On the engine's thread: the event loop would answer nobody meanwhile, the first time that it is needed."""
        service.prepare(pair)
        app.openapi()

    engine.on_loaded = prepare
    http_errors.install(app)
    completion_routes.add(app, service)
    information_routes.add(app, service, metrics)
    _page(app)
    # The last added is the first to see a request.
    app.add_middleware(UntypedBodies)
    app.add_middleware(BodyLimit, max_bytes=settings.limits.body_bytes, seconds=settings.limits.body_seconds)
    if settings.keys or settings.key_file is not None:
        app.state.keys = KeyStore(settings.keys, settings.key_file)
        app.add_middleware(Keys, store=app.state.keys)
    if settings.cors:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(HostCheck, hosts=settings.hosts, origins=settings.cors)
    app.add_middleware(Journal, metrics=metrics)
    if settings.ingress_secret:
        app.add_middleware(ForwardedClient, secret=settings.ingress_secret)
    return app


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
