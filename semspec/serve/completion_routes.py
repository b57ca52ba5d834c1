"""Routes that make the models work, in the shapes of several APIs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from semspec.errors import BadRequest
from semspec.serve.anthropic import MessagesAnswer
from semspec.serve.completions import Service, client_of
from semspec.serve.ollama import OllamaAnswer, OllamaTextAnswer, loaded
from semspec.serve.openai import ChatAnswer, TextAnswer
from semspec.serve.responses import ResponsesAnswer
from semspec.serve.schema.anthropic import CountRequest, MessagesRequest
from semspec.serve.schema.ollama import OllamaChat, OllamaGenerate
from semspec.serve.schema.requests import ChatRequest, CompletionRequest, RequestBase, taking_unknown
from semspec.serve.schema.responses import ResponsesRequest
from semspec.serve.schema.tokenize import DetokenizeRequest, TokenizeRequest

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer."}
}
LINES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "application/x-ndjson": {}}, "description": "The answer."}
}


def add(app: FastAPI, service: Service) -> None:
    async def check_capacity(request: Request) -> None:
        service.engine.check_capacity(client=client_of(request))

    capacity = [Depends(check_capacity)]  # runs before the body is validated
    lenient = service.settings.ignore_unknown
    chat_kind: Any = taking_unknown(ChatRequest) if lenient else ChatRequest
    text_kind: Any = taking_unknown(CompletionRequest) if lenient else CompletionRequest

    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a chat."""
        return await service.answer(request, body, ChatAnswer)

    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        return await service.answer(request, body, TextAnswer)

    for path, endpoint, kind in (
        ("/v1/chat/completions", chat, chat_kind),
        ("/v1/completions", complete, text_kind),
    ):
        endpoint.__annotations__["body"] = kind
        app.post(path, responses=RESPONSES, dependencies=capacity)(endpoint)

    @app.post("/v1/responses", responses=RESPONSES, dependencies=capacity)
    async def respond(request: Request, body: ResponsesRequest) -> Response:
        """Answer a chat in the shape of OpenAI's Responses."""
        shape = partial(ResponsesAnswer, asked=body.asked())
        return await service.answer(request, translated(body.chat, chat_kind), shape)

    @app.post("/v1/messages", responses=RESPONSES, dependencies=capacity)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Answer a chat in the shape of Anthropic's Messages."""
        return await service.answer(request, translated(body.chat, chat_kind), MessagesAnswer)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: CountRequest) -> dict[str, int]:
        """How many tokens the model would read for these messages, as Anthropic's client asks."""
        chat = translated(body.chat, chat_kind)
        service.check_model(chat.model)
        return {"input_tokens": await service.count(chat, client_of(request))}

    @app.post("/api/chat", responses=LINES, dependencies=capacity)
    async def ollama_chat(request: Request, body: OllamaChat) -> Response:
        """Answer a chat as Ollama does."""
        if not body.messages:
            service.check_model(body.name)
            return JSONResponse(loaded(OllamaAnswer, body.name))
        return await service.answer(request, translated(body.chat, chat_kind), OllamaAnswer)

    @app.post("/api/generate", responses=LINES, dependencies=capacity)
    async def ollama_generate(request: Request, body: OllamaGenerate) -> Response:
        """Answer a question as Ollama does; raw: continue a text."""
        if not body.prompt:
            service.check_model(body.name)
            return JSONResponse(loaded(OllamaTextAnswer, body.name))
        given = translated(body.completion, text_kind) if body.raw else translated(body.chat, chat_kind)
        return await service.answer(request, given, OllamaTextAnswer)

    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        """The tokens of a text, or of a chat as the model sees it."""
        if body.model is not None:
            service.check_model(body.model)
        return await service.tokenize(body, client_of(request))

    @app.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        """The text of some tokens."""
        if body.model is not None:
            service.check_model(body.model)
        return await service.detokenize(body, client_of(request))


def translated(translate: Callable[[Any], RequestBase], kind: type[RequestBase]) -> Any:
    """A body of another API as one of ours; what is wrong with that is the client's mistake."""
    try:
        given: Any = translate(kind)
        if given.candidates != 1:
            raise BadRequest("this API gives one answer; leave n and best_of out")
        if tells_more(given):
            raise BadRequest("this API's answers have no place for logprobs, an echo or a trace; leave them out")
        return given
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found) from None


def tells_more(given: ChatRequest | CompletionRequest) -> bool:
    """Whether an answer of OpenAI's would have more in it than text and calls."""
    traced = given.speculation is not None and given.speculation.trace
    echoed = isinstance(given, CompletionRequest) and given.echo
    return traced or echoed or bool(given.prompt_forms) or given.num_top_logprobs is not None
