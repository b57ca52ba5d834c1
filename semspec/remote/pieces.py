"""Tokens of servers, known by their text alone: numbers for them, and a tokenizer made of servers."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from semspec.errors import BadRequest, RemoteError
from semspec.remote.model import BACKGROUND, RemoteModel
from semspec.text.tokenizer import THINKING, Messages

MOST = 1 << 20  # different texts; no model has so many tokens
KEPT = 64  # first numbers, which are never forgotten
NOTHING = 0  # the number of the empty text
WIDEST = " " * 32  # as long as the longest tokens of most models
MARKERS = frozenset(text for pair in THINKING for text in pair)
MARKED = re.compile(f"({'|'.join(map(re.escape, MARKERS))})")
WORDS = re.compile(r"\s*\S+|\s+")


class Pieces:
    """Every text that a token has had lately, numbered. Where servers report no tokens, pieces are words, and there is
    no end of those: of too many, the least recently used are forgotten, and no number means two texts."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._texts = OrderedDict({NOTHING: ""})
        self._numbers = {"": NOTHING}
        self._next = NOTHING + 1
        self._lock = Lock()

    def number(self, text: str) -> int:
        with self._lock:
            number = self._numbers.get(text)
            if number is None:
                number, self._next = self._next, self._next + 1
                self._numbers[text], self._texts[number] = number, text
                while len(self._texts) > self.most:
                    self._forget()
            elif number >= KEPT:
                self._texts.move_to_end(number)
            return number

    def _forget(self) -> None:
        number, text = self._texts.popitem(last=False)
        if number < KEPT:  # markers, which are numbered first
            self._texts[number] = text
        else:
            del self._numbers[text]

    def text(self, number: int) -> str:
        return self._texts.get(number, "")


class TextPrompt(list[int]):
    """A prompt as text, for each server its own. As tokens only their number is known: they are all nothing, but for
    the marker that opens the thinking, if it ends with one."""

    def __init__(self, target: str, draft: str, count: int, last: int = NOTHING) -> None:
        super().__init__([*[NOTHING] * (max(1, count) - 1), last])
        self.target, self.draft = target, draft


def words(text: str) -> list[str]:
    """A text in pieces about the size of tokens, where a server does not report tokens. A marker of thinking is one."""
    return [piece for part in MARKED.split(text) for piece in ([part] if part in MARKERS else WORDS.findall(part))]


class RemoteTokenizer:
    """What the package asks of a tokenizer, answered by servers. Threads may share it."""

    eos_token_id = None
    all_special_ids: Sequence[int] = ()

    def __init__(self, target: RemoteModel, draft: RemoteModel | None) -> None:
        self._target, self._draft = target, draft
        self.pieces = Pieces()
        self._markers = {text: self.pieces.number(text) for pair in THINKING for text in pair}
        self.pieces.number(WIDEST)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTokenizer:
        return self

    @property
    def chat_template(self) -> str | None:
        able = self._target.abilities
        return "the server's" if able.tokenizes or able.templates else None

    @property
    def thinks(self) -> bool:
        """Whether the target is known to: it has tokens for the markers."""
        return self._target.abilities.thinking is not None

    def get_vocab(self) -> dict[str, int]:
        """The markers that the target has tokens for; of a server that does not tell, all."""
        able = self._target.abilities
        known = (able.thinking or ()) if able.tokenizes else self._markers
        return {text: self._markers[text] for text in known} | {WIDEST: self.pieces.number(WIDEST)}

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def encode(self, text: str, **_: Any) -> TextPrompt:
        if not text:
            raise BadRequest("the prompt is empty; give at least one token for the model to go on from")
        return self._prompt(text, text, BACKGROUND.wait(self._target.count(text)))

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, continue_final_message: bool = False, **_: Any
    ) -> TextPrompt:
        if continue_final_message or not add_generation_prompt:
            raise BadRequest(
                "servers begin a new answer where a chat ends; leave continue_final_message and add_generation_prompt "
                "out, or give the prompt as text"
            )
        text, count, draft = BACKGROUND.wait(self._rendered(messages))
        return self._prompt(text, draft, len(text) // 4 if count is None else count)

    async def _rendered(self, messages: Messages) -> tuple[str, int | None, str]:
        """A chat is read by each model through its own template; a draft whose server has none reads the target's."""

        async def by_draft() -> str | None:
            try:
                return None if self._draft is None else (await self._draft.render(messages))[0]
            except (RemoteError, BadRequest):
                return None

        (text, count), draft = await asyncio.gather(self._target.render(messages), by_draft())
        return text, count, text if draft is None else draft

    def _prompt(self, text: str, draft: str, count: int) -> TextPrompt:
        end = text.rstrip()
        last = next((self._markers[begin] for begin, _ in THINKING if end.endswith(begin)), NOTHING)
        return TextPrompt(text, draft, count, last)

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(self.pieces.text(token) for token in tokens)

    def batch_decode(self, lists: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [self.decode(tokens) for tokens in lists]

    def convert_ids_to_tokens(self, tokens: Sequence[int]) -> list[str]:
        return self.batch_decode([[token] for token in tokens])
