"""Text that streams without ever splitting a character, and the stop strings that end it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from semspec.types import Origin

UNFINISHED = "\ufffd"  # how a decoder writes bytes that are not a whole character yet
GARBAGE = 64  # this many unfinished characters in a row are not the beginning of anything
CONTEXT = 8  # tokens decoded together, so that decoders which treat the start of a text specially do no harm


class TextStream:
    """The text of one sequence as it grows, with the stop strings that may end it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`include_stop`: the stop string that ends the text belongs to it; nothing does before `min_tokens`."""
        self._tokenizer, self._stop = tokenizer, stop
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._fed = 0  # tokens
        self._window = self._last_tokens(prompt)  # decoded together; begins where a character begins
        # The part of the window's text that is in `text`, or before it. A character that the prompt begins and the
        # answer completes is the answer's.
        self._seen = self._decode().rstrip(UNFINISHED)
        self._whole: list[int] = []  # places in the window where characters end
        self.text = ""  # everything decoded so far, cut where a stop string begins
        self._ends: list[int] = []  # length of `text` after each token not yet handed out
        self._origins: list[Origin] = []
        self._given = 0
        self._spoken = 0  # tokens whose text has been handed out whole
        self.span_tokens: list[int] = []  # the token, counted from the first, that each span of the last `take` is of
        self.stopped_by: str | None = None  # the stop string that has ended it
        self.finished = False  # all text has been handed out

    def _last_tokens(self, prompt: list[int]) -> list[int]:
        for extra in range(4):  # a character has at most four bytes
            self._window = prompt[-CONTEXT - extra :]
            if not self._decode().startswith(UNFINISHED):
                break
        return self._window

    def _decode(self) -> str:
        text = self._tokenizer.decode(self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def feed(self, tokens: list[int]) -> int | None:
        """Add tokens. If the text ends within them, says how many of them belong to it."""
        for i, token in enumerate(tokens):
            self._window.append(token)
            self._fed += 1
            self._grow()
            self._ends.append(len(self.text))
            if self.stopped_by is not None:
                return i + 1
        return None

    def _grow(self) -> None:
        """Take over what the window's text has gained, but for a character at its end that is not whole yet."""
        decoded = self._decode()
        certain = decoded.rstrip(UNFINISHED)
        if len(decoded) - len(certain) > GARBAGE:  # no character is that long: these bytes will never be one
            certain = decoded
        before = len(self.text)
        self.text += certain[len(self._seen) :]
        self._seen = max(self._seen, certain, key=len)
        if certain == decoded:
            self._shorten()
        self._look_for_stops(before)

    def _shorten(self) -> None:
        """Drop old tokens from the window, up to a place where a character ended."""
        self._whole.append(len(self._window))
        cut = max((at for at in self._whole if len(self._window) - at >= CONTEXT), default=0)
        if cut:
            self._window = self._window[cut:]
            self._whole = [at - cut for at in self._whole if at > cut]
            self._seen = self._decode()

    def _look_for_stops(self, before: int) -> None:
        if self._fed < self._min_tokens:
            return
        found = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stop]
        ends = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if ends:  # the first to be complete counts; of several that are so at once, the longest
            end, at, self.stopped_by = min(ends)
            self.text = self.text[: end if self._include_stop else at]

    def take(self, origins: list[Origin], final: bool = False) -> list[tuple[str, Origin]]:
        """The text that has become certain since the last call; `origins` are those of the tokens fed since then."""
        # _ends[i] is the end of the token whose origin is _origins[i]; text of tokens without an origin yet stays here.
        self._origins += origins
        self.finished = self.finished or final
        if final and self.stopped_by is None:  # what remains unfinished stays so
            self.text += self._decode()[len(self._seen) :]
            if self._ends:
                self._ends[-1] = len(self.text)
        certain = len(self.text) if final else len(self.text) - self._possible_stop()
        spans: list[tuple[str, Origin]] = []
        self.span_tokens = []
        while self._origins and (self._given < certain or self._ends[0] <= certain):
            end = min(self._ends[0], certain)
            piece = self.text[self._given : end]
            if piece:
                spans.append((piece, self._origins[0]))
                self.span_tokens.append(self._spoken)
            self._given = max(self._given, end)
            if self._ends[0] > certain:
                break
            self._ends.pop(0)
            self._origins.pop(0)
            self._spoken += 1
        return spans

    def _possible_stop(self) -> int:
        """How many characters at the end may turn out to be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for n in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-n:]) for stop in self._stop):
                return n
        return 0
