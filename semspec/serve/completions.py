"""From a request to its answer: checked, decoded, and sent whole or as events, for as long as the client stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from semspec.errors import BadRequest
from semspec.options import Options
from semspec.serve import speculation
from semspec.serve.answers import Answer, ChatAnswer, Choice, TextAnswer
from semspec.serve.deltas import Finished
from semspec.serve.engine import Engine
from semspec.serve.http_errors import HttpError, refused
from semspec.serve.in_flight import InFlightRequest
from semspec.serve.limits import Settings
from semspec.serve.reasoning import Splitter
from semspec.serve.schema import ChatRequest, CompletionRequest, TokenizeRequest
from semspec.serve.tokenization import Texts

T = TypeVar("T")
COLDEST = 1e-4  # temperatures below this are greedy: dividing by them leaves nothing else


class Service:
    """Answers requests with one engine."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.started = int(time.time())
        self._texts: Texts | None = None

    @property
    def texts(self) -> Texts:
        """There once the model is."""
        if self._texts is None:
            self.engine.admit(0)
            assert self.engine.pair is not None
            self._texts = Texts(self.engine.pair)
        return self._texts

    async def answer(self, request: Request, asked: ChatRequest | CompletionRequest) -> Response:
        """The response to a completion request."""
        work = self._begin(request, asked)
        answer, flight = await unless_gone(request, work)
        if asked.stream:
            return EventStream(request, answer, flight, asked.include_usage)
        return JSONResponse(await unless_gone(request, collect(answer, flight, request)))

    async def _begin(self, request: Request, asked: ChatRequest | CompletionRequest) -> tuple[Answer, InFlightRequest]:
        limits, journal = self.settings.limits, request.scope["journal"]
        self.check_model(asked.model)
        options = self._options(asked)
        texts = self.texts
        if isinstance(asked, ChatRequest):
            prompts = [await texts.encode([m.plain() for m in asked.messages])]
        else:
            prompts = [await texts.encode(prompt) for prompt in asked.prompts]
        count = asked.n * len(prompts)
        if count > limits.choices:
            raise BadRequest(f"{count} answers are asked for at once; this server gives at most {limits.choices}")
        asking = []
        for prompt in prompts:
            fitted = self._fit(prompt, options, asked.wanted)
            asking += [(prompt, replace(fitted, seed=_seed(asked.seed, i))) for i in range(asked.n)]
        deadline = min(limits.deadline, asked.deadline or limits.deadline)
        journal |= {"prompt_tokens": sum(map(len, prompts)), "choices": count, "stream": bool(asked.stream)}
        if self.settings.log_prompts:
            journal["prompt"] = asked.model_dump(include={"messages", "prompt"})
        flight = await self.engine.submit(asking, deadline)
        chat = isinstance(asked, ChatRequest)
        splitters = [texts.splitter(prompt) if chat else Splitter(None) for prompt, _ in asking]
        how = asked.speculation
        answer = (ChatAnswer if chat else TextAnswer)(
            journal["id"], self.settings.name, [Choice(s) for s in splitters], asked.n,
            trace=bool(how and how.trace), detailed=bool(how and how.detailed),
        )  # fmt: skip
        return answer, flight

    def check_model(self, name: str) -> None:
        if name != self.settings.name:
            raise HttpError(404, f"there is no model {name!r} here; this server has {self.settings.name!r}", "no_model")

    def card(self) -> dict[str, Any]:
        """What /v1/models says."""
        length = self.engine.pair.target.capacity if self.engine.pair else None
        return {
            "id": self.settings.name, "object": "model", "created": self.started, "owned_by": "semspec",
            "max_model_len": length,
        }  # fmt: skip

    async def tokenize(self, asked: TokenizeRequest) -> dict[str, Any]:
        texts = self.texts
        chat = [m.plain() for m in asked.messages] if asked.messages is not None else None
        tokens = await texts.encode(chat if chat is not None else asked.prompt or "")
        found = {"count": len(tokens), "tokens": tokens, "max_model_len": self.card()["max_model_len"]}
        return found | ({"token_strs": await texts.spell(tokens)} if asked.return_token_strs else {})

    def close(self) -> None:
        if self._texts is not None:
            self._texts.close()

    def _options(self, asked: ChatRequest | CompletionRequest) -> Options:
        temperature = 1.0 if asked.temperature is None else asked.temperature
        return replace(
            speculation.apply(asked.speculation, self.settings),
            temperature=temperature if temperature >= COLDEST else 0.0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=max(asked.top_k, 0),  # -1 is vLLM's word for off
            min_p=asked.min_p,
            stop=asked.stops,
            stop_ids=asked.stop_token_ids,
            ignore_eos=asked.ignore_eos,
            logprobs=asked.rivals,
        )

    def _fit(self, prompt: list[int], options: Options, wanted: int | None) -> Options:
        """With as many new tokens as are wanted, or as there is room for."""
        limits, pair = self.settings.limits, self.engine.pair
        assert pair is not None
        if limits.prompt_tokens is not None and len(prompt) > limits.prompt_tokens:
            raise BadRequest(f"the prompt has {len(prompt)} tokens; this server takes at most {limits.prompt_tokens}")
        if wanted is not None and wanted > limits.new_tokens:
            raise BadRequest(f"{wanted} new tokens are asked for; this server writes at most {limits.new_tokens}")
        if wanted is None:
            wanted = max(1, min(limits.new_tokens, pair.target.capacity - len(prompt)))
        return replace(options, max_new_tokens=wanted)


def _seed(seed: int | None, i: int) -> int | None:
    """Every answer of several has noise of its own; the first has that of the request."""
    return None if seed is None else (seed + i + 2**63) % 2**64 - 2**63


async def collect(answer: Answer, flight: InFlightRequest, request: Request) -> dict[str, Any]:
    async with flight:
        try:
            async for message in flight:
                answer.take(message)
        except Exception as error:
            raise refused(error) from error
    note(request.scope, answer.ends)
    return answer.whole()


async def events(answer: Answer, flight: InFlightRequest, usage: bool) -> AsyncIterator[str]:
    """Server-sent events. An answer that fails half-way ends with an error and without [DONE]."""
    nothing = {"usage": None} if usage else {}
    for chunk in answer.opening():
        yield _event(chunk | nothing)
    try:
        async for message in flight:
            part = answer.chunk(message)
            if part is not None:
                yield _event(part | nothing)
    except Exception as error:
        yield _event(refused(error).body)
        return
    if usage:
        yield _event(answer.closing())
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def note(scope: Scope, ends: list[Finished]) -> None:
    """What the log may know of an answer."""
    if ends:
        scope["journal"] |= {
            "completion_tokens": sum(end.stats.tokens for end in ends),
            "verifier": ends[0].verifier,
            "relaxed": sum(end.stats.relaxed for end in ends),
            "outcome": ends[0].outcome,
            "queue_ms": round(1000 * max(end.queued for end in ends), 1),
            "first_token_ms": round(1000 * min(end.first_token for end in ends), 1),
        }


class EventStream(Response):
    """Sends events while the client listens; however it ends, the flight's slots are given back."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, answer: Answer, flight: InFlightRequest, usage: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.request, self.answer, self.flight, self.usage = request, answer, flight, usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.flight:
            with contextlib.suppress(OSError, Gone):
                await unless_gone(self.request, self._send(send))
        if self.flight.ended < self.flight.count:
            scope["journal"].setdefault("outcome", "cut short")
        note(scope, self.answer.ends)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in events(self.answer, self.flight, self.usage):
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Gone(HttpError):
    """The client has left; nobody will read this."""

    def __init__(self) -> None:
        super().__init__(499, "the client has closed the connection", "gone")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do it, unless the client leaves before it is done: then it is cancelled."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise Gone
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
