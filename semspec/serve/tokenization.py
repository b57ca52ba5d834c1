"""Tokenizes prompts, on a thread and with a tokenizer of its own, so that long ones delay nobody else."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from semspec.errors import BadRequest
from semspec.pair import Pair
from semspec.remote.pieces import RemoteTokenizer
from semspec.serve.answers import Choice
from semspec.serve.chat_format import ChatPlan, plan
from semspec.serve.reasoning import Splitter
from semspec.serve.schema.requests import ChatRequest
from semspec.serve.tools.families import style_of
from semspec.text.chat import PLAIN, knows
from semspec.text.prompts import encode_for_pair
from semspec.text.token_bytes import TokenBytes
from semspec.text.tokenizer import Prompt, encode, opens_thinking, thinking_markers

T = TypeVar("T")


class Tokenization:
    def __init__(self, pair: Pair, tool_parser: str = "auto") -> None:
        # A tokenizer may not be used by two threads at once, and the pair's belongs to the engine.
        self._exchange = copy.deepcopy(pair.exchange)
        self._tokenizer = self._exchange.target.tokenizer if self._exchange else copy.deepcopy(pair.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="semspec-tokenizer")
        self.style = style_of(self._tokenizer, tool_parser)
        self.markers = thinking_markers(self._tokenizer)
        self._most_characters = pair.target.max_seq_len * max(map(len, self._tokenizer.get_vocab()))

    def check_own(self) -> None:
        """Of two servers as a pair only the texts are known here, and how many tokens they have."""
        if isinstance(self._tokenizer, RemoteTokenizer):
            raise BadRequest("this pair is two servers, whose tokens are not known here; ask the target's own server")

    @property
    def abilities(self) -> list[str]:
        """What the model can do, in Ollama's words."""
        tools = ["tools"] if knows(self._tokenizer, "tools") else []
        servers = isinstance(self._tokenizer, RemoteTokenizer)  # which may not tell, and are then believed to
        thinks = self._tokenizer.thinks if servers else self.markers is not None
        return ["completion", *tools, *(["thinking"] if thinks else [])]

    @property
    def limits_thinking(self) -> bool:
        """Whether max_thinking_tokens can be had; servers have no such thing."""
        return self.markers is not None and not isinstance(self._tokenizer, RemoteTokenizer)

    def plan(self, body: ChatRequest) -> ChatPlan:
        return plan(self._tokenizer, self.style, body)

    def check_size(self, prompt: Prompt | list[int], chat: ChatPlan | None = None) -> None:
        """Refuse what has more characters than the context's tokens can spell: to tokenize it may take seconds."""
        texts = [prompt] if isinstance(prompt, str) else [p["content"] for p in prompt if isinstance(p, dict)]
        tools = chat.form.tools if chat is not None and chat.form.tools else []
        count = sum(map(len, texts)) + len(json.dumps(tools))
        if count > self._most_characters:
            raise BadRequest(
                f"the prompt has {count} characters, more than fit into this model's context; send at most "
                f"{self._most_characters}, or fewer if they are many tokens"
            )

    async def encode(self, prompt: Prompt | list[int], chat: ChatPlan | None = None) -> list[int]:
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return prompt
        return await self.apart(self._encode, prompt, chat)

    def _encode(self, prompt: Prompt | list[int], chat: ChatPlan | None) -> list[int]:
        """A chat is read by each model through its own template."""
        form = PLAIN if chat is None else chat.form
        if self._exchange is None:
            tokens = encode(self._tokenizer, prompt, form)
        else:
            tokens = encode_for_pair(self._exchange, prompt, form)
        return tokens if chat is None or not chat.opening else tokens + self._opening(tokens, chat.opening)

    def _opening(self, prompt: list[int], opening: str) -> list[int]:
        """How the answer begins, after the thinking if the prompt has opened it."""
        closing = []
        if self.markers is not None and opens_thinking(self._tokenizer, prompt, self.markers):
            closing = [self.markers[1]]
        return closing + self._tokenizer.encode(opening, add_special_tokens=False)

    async def token_texts(self, tokens: list[int]) -> list[str]:
        """Each token as the tokenizer's vocabulary has it."""
        return await self.apart(self._tokenizer.convert_ids_to_tokens, tokens)

    async def apart(self, work: Callable[..., T], *given: Any) -> T:
        """What takes long is done on this thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    async def text(self, tokens: list[int]) -> str:
        if max(tokens) >= len(self._tokenizer):
            raise BadRequest(f"there is a token {max(tokens)}, and this model has tokens below {len(self._tokenizer)}")
        return await self.apart(self._tokenizer.decode, tokens)

    async def echo(self, choice: Choice, given: Prompt | list[int], tokens: list[int], logprobs: int | None) -> None:
        """The answer begins with the prompt, and its logprobs with those of the prompt."""
        choice.echo = given if isinstance(given, str) else await self.text(tokens)
        if logprobs is not None:
            choice.echo_first = await self.apart(TokenBytes(self._tokenizer).of, tokens[0])

    def choice(self, prompt: list[int], chat: ChatPlan | None) -> Choice:
        """An answer as it will be read; some templates begin the thinking in the prompt."""
        if chat is None:
            return Choice(Splitter(enabled=False))
        parses = chat.names is not None or chat.style.always
        specials = chat.style.specials if parses else frozenset()
        thinking = self.markers is not None and opens_thinking(self._tokenizer, prompt, self.markers)
        return Choice(
            Splitter(thinking, enabled=self.markers is not None, specials=specials),
            chat.style.parser(chat.names or frozenset()) if parses else None,
            chat.style.call_id,
            chat.single,
            chat.opening,
        )

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
