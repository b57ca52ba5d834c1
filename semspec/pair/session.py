"""A conversation with a pair: turns that do not compute again what earlier ones have."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from semspec.errors import BadRequest
from semspec.options import Options
from semspec.pair.pair import Pair, override
from semspec.pair.result import Stream
from semspec.text.tokenizer import Messages, encode


class Session:
    """Messages. What was read and written stays in slots of the pair, as long as nobody else needs them, and other
    sessions that begin alike share it.

    Every turn's text is what `pair.stream(messages)` writes: the prompt is made from the messages anew, and of what
    the slots hold only its beginning is used.
    """

    def __init__(self, pair: Pair, system: str | None = None) -> None:
        self.pair = pair.cached()
        self._caches = None if pair.is_cached else pair.caches
        self._place = object()  # in the caches
        if self._caches is not None:
            self._caches.enter(self._place)
            weakref.finalize(self, self._caches.dropped, self._place, pair.executor).atexit = False
        self._messages: Messages = [] if system is None else [{"role": "system", "content": system}]
        self._turn: Stream | None = None
        self._last: Stream | None = None  # the same, but it stays

    @property
    def messages(self) -> Messages:
        """The conversation so far. A turn that was stopped counts with what it had written."""
        self._settle()
        return self._messages

    @property
    def reused(self) -> int:
        """Tokens of the last prompt that the target did not have to read."""
        return 0 if self._last is None else self._last.stats.cached_tokens

    def ask(self, text: str, options: Options | None = None, **overrides: Any) -> Stream:
        """The next turn. A turn that is still being written ends here."""
        messages = [*self.messages, {"role": "user", "content": text}]
        if self._caches is not None:
            self._caches.enter(self._place)  # once more, where it was closed
        stream = self.pair.stream(messages, self._fitted(messages, options, overrides))
        self._messages, self._turn, self._last = messages, stream, stream
        return stream

    def _fitted(self, messages: Messages, options: Options | None, overrides: dict[str, Any]) -> Options:
        """As a conversation grows, there is less and less room for an answer; it gets what there is."""
        options = override(options or Options(), overrides)
        if options.max_new_tokens is None:
            return options
        read = len(encode(self.pair.tokenizer, messages))
        left = self.pair.target.max_seq_len - read
        if left < 1:
            raise BadRequest(
                f"the conversation has {read} tokens and the context is {self.pair.target.max_seq_len}; begin a new "
                "one, or load the model with a larger context"
            )
        return replace(options, max_new_tokens=min(options.max_new_tokens, left))

    def _settle(self) -> None:
        """Take what the last turn has written into the conversation."""
        if self._turn is None:
            return
        turn, self._turn = self._turn, None
        turn.close()
        if turn.error is not None and self._caches is not None:  # a pass that failed may have left anything in slots
            with self.pair.executor.exclusive():
                self._caches.close()
        answer = turn.result().text
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:  # nothing was answered, so nothing was asked
            self._messages.pop()

    def close(self) -> None:
        """The pair's last session gives the slots back. The messages remain, and a further turn reads them again."""
        self._settle()
        if self._caches is not None:
            with self.pair.executor.exclusive():  # another thread may be making a pass on these models
                self._caches.leave(self._place)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
