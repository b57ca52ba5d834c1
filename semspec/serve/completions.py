"""From a request to its answer: checked, decoded, and sent whole or as events, for as long as the client stays."""

from __future__ import annotations

import asyncio
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
from semspec.serve.http_errors import HttpError, as_http_error
from semspec.serve.in_flight import InFlightRequest
from semspec.serve.limits import Settings
from semspec.serve.reasoning import Splitter
from semspec.serve.schema.requests import ChatRequest, CompletionRequest, TokenizeRequest
from semspec.serve.tokenization import Tokenization

T = TypeVar("T")
MAX_TOKENIZE = 8  # requests of /tokenize at a time


class Service:
    """Answers requests with one engine."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.started = int(time.time())
        self._tokenization: Tokenization | None = None
        self._tokenizing = 0  # requests of /tokenize

    @property
    def tokenization(self) -> Tokenization:
        if self._tokenization is None:
            self.engine.check_ready()
            assert self.engine.pair is not None
            self._tokenization = Tokenization(self.engine.pair)
        return self._tokenization

    async def answer(self, http: Request, body: ChatRequest | CompletionRequest) -> Response:
        """The response to a completion request."""
        answer, request = await unless_gone(http, self._start(http, body))
        if body.stream:
            return EventStream(http, answer, request, body.include_usage, self.settings.limits.delivery_seconds)
        return JSONResponse(await unless_gone(http, collect(answer, request, http)))

    async def _start(self, http: Request, body: ChatRequest | CompletionRequest) -> tuple[Answer, InFlightRequest]:
        """Checks come in the order of their cost: nothing is tokenized for a request that cannot be accepted."""
        limits = self.settings.limits
        self.check_model(body.model)
        options = body.onto(speculation.apply(body.speculation, self.settings))
        options = replace(options, logprobs=body.num_top_logprobs)
        chat = isinstance(body, ChatRequest)
        count = body.n * (1 if chat else len(body.prompts))
        if count > limits.choices:
            raise BadRequest(f"{count} answers are asked for at once; this server gives at most {limits.choices}")
        for prompt in body.prompts:
            self.tokenization.check_size(prompt)
        request = self.engine.accept(count, min(limits.deadline, body.deadline or limits.deadline))
        try:
            prompts = [await self.tokenization.encode(prompt) for prompt in body.prompts]
            sequences = []
            for prompt in prompts:
                fitted = self._fit(prompt, options, body.max_new_tokens)
                sequences += [(prompt, replace(fitted, seed=_seed(body.seed, i))) for i in range(body.n)]
            journal = http.scope["journal"]
            journal |= {"prompt_tokens": sum(map(len, prompts)), "choices": count, "stream": bool(body.stream)}
            if self.settings.log_prompts:
                journal["prompt"] = body.model_dump(include={"messages", "prompt"})
            await self.engine.submit(request, sequences)
        except BaseException:
            self.engine.release(request)
            raise
        splitters = [self.tokenization.splitter(prompt) if chat else Splitter(enabled=False) for prompt, _ in sequences]
        how = body.speculation
        answer = (ChatAnswer if chat else TextAnswer)(
            journal["id"], self.settings.name, [Choice(s) for s in splitters], body.n,
            trace=bool(how and how.trace), detailed=bool(how and how.detailed),
        )  # fmt: skip
        return answer, request

    def check_model(self, name: str) -> None:
        if name != self.settings.name:
            raise HttpError(404, f"there is no model {name!r} here; this server has {self.settings.name!r}", "no_model")

    def card(self) -> dict[str, Any]:
        """The model as /v1/models reports it."""
        length = self.engine.pair.target.capacity if self.engine.pair else None
        return {
            "id": self.settings.name, "object": "model", "created": self.started, "owned_by": "semspec",
            "max_model_len": length,
        }  # fmt: skip

    async def tokenize(self, body: TokenizeRequest) -> Response:
        if self._tokenizing >= MAX_TOKENIZE:  # else completions would wait for these
            raise HttpError(429, "many texts are being tokenized; try again later", "busy", retry_after=1)
        self._tokenizing += 1
        try:
            tokens = await self.tokenization.encode(body.to_encode)
            found = {"count": len(tokens), "tokens": tokens, "max_model_len": self.card()["max_model_len"]}
            if body.return_token_strs:
                found["token_strs"] = await self.tokenization.token_texts(tokens)
            return await self.tokenization.apart(JSONResponse, found)  # it may be long
        finally:
            self._tokenizing -= 1

    def close(self) -> None:
        if self._tokenization is not None:
            self._tokenization.close()

    def _fit(self, prompt: list[int], options: Options, max_new_tokens: int | None) -> Options:
        """With as many new tokens as are asked for, or as the context has room for."""
        limits, pair = self.settings.limits, self.engine.pair
        assert pair is not None
        if limits.prompt_tokens is not None and len(prompt) > limits.prompt_tokens:
            raise BadRequest(f"the prompt has {len(prompt)} tokens; this server takes at most {limits.prompt_tokens}")
        if max_new_tokens is not None and max_new_tokens > limits.new_tokens:
            raise BadRequest(
                f"{max_new_tokens} new tokens are asked for; this server generates at most {limits.new_tokens}"
            )
        if max_new_tokens is None:
            max_new_tokens = max(1, min(limits.new_tokens, pair.target.capacity - len(prompt)))
        return replace(options, max_new_tokens=max_new_tokens)


def _seed(seed: int | None, i: int) -> int | None:
    """Each of several answers has noise of its own; the first has that of the request."""
    return None if seed is None else (seed + i + 2**63) % 2**64 - 2**63


async def collect(answer: Answer, request: InFlightRequest, http: Request) -> dict[str, Any]:
    async with request:
        try:
            async for message in request:
                answer.take(message)
        except Exception as error:
            raise as_http_error(error) from error
    note(http.scope, answer.finished)
    return answer.whole()


async def events(answer: Answer, request: InFlightRequest, usage: bool) -> AsyncIterator[str]:
    """Server-sent events. An answer that fails ends with an error and without [DONE]."""
    nothing = {"usage": None} if usage else {}
    for chunk in answer.opening():
        yield _event(chunk | nothing)
    try:
        async for message in request:
            part = answer.chunk(message)
            if part is not None:
                yield _event(part | nothing)
    except Exception as error:
        yield _event(as_http_error(error).body)
        return
    if usage:
        yield _event(answer.closing())
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def note(scope: Scope, finished: list[Finished]) -> None:
    """What the log may know of an answer."""
    if finished:
        scope["journal"] |= {
            "completion_tokens": sum(end.stats.tokens for end in finished),
            "verifier": finished[0].verifier,
            "relaxed": sum(end.stats.relaxed for end in finished),
            "outcome": finished[0].outcome,
            "queue_ms": round(1000 * max(end.queued for end in finished), 1),
            "first_token_ms": round(1000 * min(end.first_token for end in finished), 1),
        }


class EventStream(Response):
    """Sends events while the client listens; however it ends, the request's slots are given back."""

    media_type = "text/event-stream"

    def __init__(
        self, http: Request, answer: Answer, request: InFlightRequest, usage: bool, delivery_seconds: float
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.http, self.answer, self.request, self.usage = http, answer, request, usage
        self.delivery_seconds = delivery_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = self.request.deadline - self.request.engine.clock() + self.delivery_seconds
        async with self.request:
            try:
                async with asyncio.timeout(left):  # a client that reads slowly is not waited for any longer
                    await unless_gone(self.http, self._send(send))
                    if scope.get("gone"):  # while the rest of the answer was written to nobody
                        raise Gone
            except (OSError, Gone):  # a TimeoutError is an OSError
                scope["journal"]["status"] = Gone.STATUS
        if self.request.finished < self.request.count:
            scope["journal"].setdefault("outcome", "cut short")
        note(scope, self.answer.finished)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in events(self.answer, self.request, self.usage):
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Gone(HttpError):
    """The client has left; nobody will read this."""

    STATUS = 499  # nginx's

    def __init__(self) -> None:
        super().__init__(self.STATUS, "the client has closed the connection", "gone")


async def unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do it, unless the client leaves before it is done: then it is cancelled."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise Gone
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
