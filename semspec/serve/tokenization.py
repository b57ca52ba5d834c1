"""Tokenizes prompts, on a thread and with a tokenizer of its own, so that long ones delay nobody else."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from semspec.errors import BadRequest
from semspec.pair import Pair
from semspec.serve.reasoning import Splitter
from semspec.text.prompts import encode_for_pair
from semspec.text.tokenizer import Prompt, encode, opens_thinking, thinking_markers

T = TypeVar("T")


class Tokenization:
    def __init__(self, pair: Pair) -> None:
        # A tokenizer may not be used by two threads at once, and the pair's belongs to the engine.
        self._exchange = copy.deepcopy(pair.exchange)
        self._tokenizer = self._exchange.target.tokenizer if self._exchange else copy.deepcopy(pair.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="semspec-tokenizer")
        self.markers = thinking_markers(self._tokenizer)
        self._most_characters = pair.target.capacity * max(map(len, self._tokenizer.get_vocab()))

    def check_size(self, prompt: Prompt | list[int]) -> None:
        """Refuse what has more characters than the context's tokens can spell: to tokenize it may take seconds."""
        texts = [prompt] if isinstance(prompt, str) else [p["content"] for p in prompt if isinstance(p, dict)]
        count = sum(map(len, texts))
        if count > self._most_characters:
            raise BadRequest(
                f"the prompt has {count} characters, more than fit into this model's context; send at most "
                f"{self._most_characters}, or fewer if they are many tokens"
            )

    async def encode(self, prompt: Prompt | list[int]) -> list[int]:
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return prompt
        return await self.apart(self._encode, prompt)

    def _encode(self, prompt: Prompt | list[int]) -> list[int]:
        """A chat is read by each model through its own template."""
        return encode(self._tokenizer, prompt) if self._exchange is None else encode_for_pair(self._exchange, prompt)

    async def token_texts(self, tokens: list[int]) -> list[str]:
        """Each token as the tokenizer's vocabulary has it."""
        return await self.apart(self._tokenizer.convert_ids_to_tokens, tokens)

    async def apart(self, work: Callable[..., T], *given: Any) -> T:
        """What takes long is done on this thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def splitter(self, prompt: list[int]) -> Splitter:
        """For a chat's answer; some templates begin the thinking in the prompt."""
        if self.markers is None:
            return Splitter(enabled=False)
        return Splitter(opens_thinking(self._tokenizer, prompt, self.markers))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
