"""From a request to its answer: checked, tokenized, decoded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from semspec import verify
from semspec.errors import BadRequest
from semspec.options import Options
from semspec.pair import Pair
from semspec.sampling.logit_options import MAX_BIAS
from semspec.serve import speculation
from semspec.serve.answers import Answer
from semspec.serve.chat_format import ChatPlan
from semspec.serve.engine import Engine
from semspec.serve.http_errors import HttpError, gave_way, too_late
from semspec.serve.in_flight import InFlightRequest
from semspec.serve.limits import Settings
from semspec.serve.openai import TextAnswer
from semspec.serve.schema.requests import ChatRequest, CompletionRequest
from semspec.serve.schema.tokenize import DetokenizeRequest, TokenizeRequest
from semspec.serve.streaming import AnswerStream, begun, collect, unless_gone
from semspec.serve.tokenization import Tokenization
from semspec.text.structured import CALLS, Compiled

MAX_TOKENIZE = 8  # requests of /tokenize at a time


class Service:
    """Answers requests with one engine."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.started = int(time.time())
        self._tokenization: Tokenization | None = None
        self._tokenizing = 0  # requests of /tokenize
        self._turn = asyncio.Lock()  # one of them at a time: a long text takes seconds, for which completions wait

    def prepare(self, pair: Pair) -> None:
        """On the engine's thread, before it is ready: to copy a large tokenizer takes a second."""
        self._tokenization = Tokenization(pair, self.settings.tool_parser)

    @property
    def tokenization(self) -> Tokenization:
        if self._tokenization is None:
            self.engine.check_ready()
        assert self._tokenization is not None
        return self._tokenization

    async def answer(
        self, http: Request, body: ChatRequest | CompletionRequest, shape: Callable[..., Answer]
    ) -> Response:
        """The response to a completion request, in the shape that its endpoint has."""
        answer, request = await unless_gone(http, self._start(http, body, shape))
        if body.stream:
            await unless_gone(http, begun(request))  # what fails before has a status of its own
            answer.cached_tokens = request.cached_tokens
            http.scope["takes_comments"] = answer.media_type == "text/event-stream"
            return AnswerStream(http, answer, request, self.settings.limits.delivery_seconds)
        return JSONResponse(await unless_gone(http, collect(answer, request, http)))

    async def _start(
        self, http: Request, body: ChatRequest | CompletionRequest, shape: Callable[..., Answer]
    ) -> tuple[Answer, InFlightRequest]:
        """Checks come in the order of their cost: nothing is tokenized for a request that cannot be accepted."""
        limits = self.settings.limits
        self.check_model(body.model)
        options = body.onto(speculation.apply(body.speculation, self.settings))
        options = replace(options, logprobs=body.num_top_logprobs)
        if self.settings.private_prompts:
            options = replace(options, cache_salt=json.dumps([client_of(http), options.cache_salt]))
        plan = self.tokenization.plan(body) if isinstance(body, ChatRequest) else None
        count = body.candidates * len(body.prompts)
        if count > limits.choices:
            raise BadRequest(f"{count} answers are asked for at once; this server gives at most {limits.choices}")
        if plan is not None and plan.grammar is not None:
            options = self._held_to(plan.grammar, options)
        for prompt in body.prompts:
            self.tokenization.check_size(prompt, plan)
        journal = http.scope["journal"]
        if self._overloaded(options, body.seed):
            options, journal["drafts"] = replace(options, verifier="none"), "off"
        deadline = min(limits.deadline, body.deadline or limits.deadline)
        request = self.engine.accept(count, deadline, client_of(http), http.scope.get("key"), body.priority)
        request.preparing = asyncio.current_task()
        try:
            async with asyncio.timeout(deadline):  # others' grammars may come first
                request.grammar = await self._compiled(options)
            prompts = [await self.tokenization.encode(prompt, plan) for prompt in body.prompts]
            scored = sum(min(len(prompt), options.prompt_logprobs_last or len(prompt)) for prompt in prompts)
            self._check_prompt_logprobs(scored * body.candidates, options.prompt_logprobs)
            request.prompt_forms = body.prompt_forms
            sequences = []
            for prompt in prompts:
                length, seeds = self._length(prompt, body), [_seed(body.seed, i) for i in range(body.candidates)]
                sequences += [(prompt, options.for_sequence(length, seed)) for seed in seeds]
            journal |= {"prompt_tokens": sum(map(len, prompts)), "choices": count, "stream": bool(body.stream)}
            if self.settings.log_prompts:
                journal["prompt"] = body.model_dump(include={"messages", "prompt"})
            await self.engine.submit(request, sequences)
            return await self._shaped(body, shape, plan, [prompt for prompt, _ in sequences], journal), request
        except BaseException as error:
            self.engine.release(request)
            if request.gave_way and isinstance(error, asyncio.CancelledError):
                raise gave_way() from None
            if isinstance(error, TimeoutError):
                raise too_late() from None
            raise

    async def _shaped(
        self, body: ChatRequest | CompletionRequest, shape: Callable[..., Answer], plan: ChatPlan | None,
        prompts: list[list[int]], journal: dict[str, Any],
    ) -> Answer:  # fmt: skip
        """The answer that will be, one choice for each of these prompts."""
        how = body.speculation
        answer = shape(
            journal["id"], self.settings.name, [self.tokenization.choice(prompt, plan) for prompt in prompts],
            body.candidates, trace=bool(how and how.trace), detailed=bool(how and how.detailed),
            include_usage=body.include_usage, prompt_tokens=journal["prompt_tokens"],
        )  # fmt: skip
        if isinstance(body, CompletionRequest) and isinstance(answer, TextAnswer):
            answer.best, answer.tells_logprobs = body.n, body.logprobs is not None
            for i, (choice, prompt) in enumerate(zip(answer.choices, prompts, strict=True)):
                if body.echo:
                    await self.tokenization.echo(choice, body.prompts[i // body.candidates], prompt, body.logprobs)
        return answer

    def _held_to(self, grammar: str, options: Options) -> Options:
        """For an answer that has begun as a call already: it is no longer the time to think."""
        if options.structured_outputs is not None:
            raise BadRequest("an answer that has to be a call has no other form; leave response_format out")
        bias = dict(options.logit_bias or {})
        if self.tokenization.markers is not None:
            bias[self.tokenization.markers[0]] = -MAX_BIAS
        return replace(options, structured_outputs={CALLS: grammar}, logit_bias=bias)

    def _overloaded(self, options: Options, seed: int | None) -> bool:
        """Whether drafts cost more than they save, and nobody can tell from the answer that there were none."""
        most, rule = self.settings.limits.speculating, verify.make(options.verifier)
        repeatable = rule.same_text or seed is None or not options.temperature
        return most is not None and self.engine.live >= most and rule.speculates and rule.lossless and repeatable

    async def _compiled(self, options: Options) -> Compiled | None:
        """The grammar, ready before the engine needs it: it may take a second, on a thread of its own."""
        if (grammar := options.grammar()) is None:
            return None
        assert self.engine.pair is not None
        return await asyncio.to_thread(self.engine.pair.compile_grammar, grammar)

    def check_model(self, name: str) -> None:
        if name != self.settings.name:
            raise HttpError(404, f"there is no model {name!r} here; this server has {self.settings.name!r}", "no_model")

    @property
    def _draft(self) -> str | None:
        """The draft model's name; a pair that is loaded by one name has no other."""
        has_draft = self.engine.pair is not None and self.engine.pair.draft is not None
        return self.settings.draft or (self.settings.name if has_draft else None)

    def card(self) -> dict[str, Any]:
        """The model as /v1/models reports it."""
        length = self.engine.pair.target.max_seq_len if self.engine.pair else None
        return {
            "id": self.settings.name, "object": "model", "created": self.started, "owned_by": "semspec",
            "max_model_len": length, "target": self.settings.name, "draft": self._draft,
        }  # fmt: skip

    async def tokenize(self, body: TokenizeRequest, client: str) -> Response:
        self.tokenization.check_own()
        chat = None if body.messages is None else self.tokenization.plan(body.chat(self.settings.name))
        async with self._tokenizing_turn(client):  # however long the text: who splits one up wants to know
            tokens = await self.tokenization.encode(body.to_encode, chat)
            found = {"count": len(tokens), "tokens": tokens, "max_model_len": self.card()["max_model_len"]}
            if body.return_token_strs:
                found["token_strs"] = await self.tokenization.token_texts(tokens)
            return await self.tokenization.apart(JSONResponse, found)  # it may be long

    async def count(self, body: ChatRequest, client: str) -> int:
        """The tokens of a chat's prompt, as its answer would report them."""
        plan, (prompt,) = self.tokenization.plan(body), body.prompts
        self.tokenization.check_size(prompt, plan)
        async with self._tokenizing_turn(client):
            return len(await self.tokenization.encode(prompt, plan))

    async def detokenize(self, body: DetokenizeRequest, client: str) -> Response:
        self.tokenization.check_own()
        async with self._tokenizing_turn(client):
            return JSONResponse({"prompt": await self.tokenization.text(body.tokens)})

    @asynccontextmanager
    async def _tokenizing_turn(self, client: str) -> AsyncIterator[None]:
        if self._tokenizing >= MAX_TOKENIZE:  # else completions would wait for these
            raise HttpError(429, "many texts are being tokenized; try again later", "busy", retry_after=1)
        self.engine.admission.check(client, self.engine.clock(), self.engine.accepted)
        self._tokenizing += 1
        try:
            async with self._turn:
                yield
        finally:
            self._tokenizing -= 1

    def close(self) -> None:
        if self._tokenization is not None:
            self._tokenization.close()

    def _check_prompt_logprobs(self, tokens: int, top: int | None) -> None:
        most = self.settings.limits.prompt_logprobs
        if top is not None and tokens * (top + 1) > most:
            raise BadRequest(
                f"logprobs of {tokens} tokens of prompts, counted for each answer, are asked for, with {top} of the "
                f"likeliest; this server gives at most {most} in all: ask for fewer, or for fewer answers at once"
            )

    def _length(self, prompt: list[int], body: ChatRequest | CompletionRequest) -> int:
        """As many new tokens as are asked for, or as the context has room for."""
        limits, pair = self.settings.limits, self.engine.pair
        assert pair is not None
        if limits.prompt_tokens is not None and len(prompt) > limits.prompt_tokens:
            raise BadRequest(f"the prompt has {len(prompt)} tokens; this server takes at most {limits.prompt_tokens}")
        most, max_new_tokens = (
            max(1, min(limits.new_tokens, pair.target.max_seq_len - len(prompt))),
            body.max_new_tokens,
        )
        if max_new_tokens is None or (isinstance(body, ChatRequest) and body.length_gives_way):
            max_new_tokens = min(max_new_tokens or most, most)
        if max_new_tokens > limits.new_tokens:
            raise BadRequest(
                f"{max_new_tokens} new tokens are asked for; this server generates at most {limits.new_tokens}"
            )
        return max_new_tokens


def client_of(http: Request) -> str:
    """Whose request it is: an API key's name, or an address."""
    key = http.scope.get("key")
    return f"key {key}" if key is not None else (http.client.host if http.client else "")


def _seed(seed: int | None, i: int) -> int | None:
    """Each of several answers has noise of its own; the first has that of the request."""
    return None if seed is None else (seed + i + 2**63) % 2**64 - 2**63
