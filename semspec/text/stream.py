"""Between tokens and text: tokenizers that must agree, and text that streams without ever splitting a character."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from semspec.errors import BadRequest, ModelError, SemspecError
from semspec.model.gguf_tokenizer import read_tokenizer
from semspec.types import Origin

Messages = list[dict[str, Any]]
Prompt = str | Messages
THINKING = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))
CLOSING = re.compile(r"</\w*(?:think|thought|reason)\w*>|\[/\w*(?:think|thought|reason)\w*\]", re.IGNORECASE)
UNFINISHED = "\ufffd"  # how a decoder writes bytes that are not a whole character yet
GARBAGE = 64  # this many unfinished characters in a row are not the beginning of anything
CONTEXT = 8  # tokens decoded together, so that decoders which treat the start of a text specially do no harm


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder, or the one in a GGUF file, with its chat template."""
    try:
        if path.suffix == ".gguf":
            return read_tokenizer(path)
        return AutoTokenizer.from_pretrained(path)
    except SemspecError:
        raise
    except Exception as error:  # transformers raises many kinds here
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {error}") from error


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt | list[int]) -> list[int]:
    """A prompt's tokens: text as it is, chat messages through the model's chat template, tokens as they are."""
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt)
    elif prompt and all(isinstance(token, int) for token in prompt):
        tokens = prompt
    else:
        if not prompt:
            raise BadRequest("the chat has no messages; give at least one, with a role and a content")
        for message in prompt:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise BadRequest(f"a chat message needs a role and a content, this one is {message!r}")
        if not tokenizer.chat_template:
            raise BadRequest("this model has no chat template; give the prompt as text")
        try:
            tokens = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        except TemplateError as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}") from error
    if not tokens:
        raise BadRequest("the prompt is empty; give at least one token for the model to go on from")
    return list(tokens)


def thinking_markers(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int] | None:
    """The tokens between which a model thinks, if its tokenizer has such a pair: a usual one, or one of which the chat
    template speaks. Markers of several tokens are not found."""
    vocabulary = tokenizer.get_vocab()
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    told = [(found[0].replace("/", "", 1), found[0]) for found in CLOSING.finditer(template)]
    for begin, end in (*THINKING, *told):
        if begin in vocabulary and end in vocabulary:
            return vocabulary[begin], vocabulary[end]
    return None


def common_vocabulary(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_size: int, draft_size: int
) -> int:
    """The number of ids that both models share, or a refusal that shows where their tokenizers differ.

    Sizes alone say nothing: models of one family pad their vocabularies differently, and tokenizers of one size can
    disagree. So token strings are compared, id by id; ids that only padding uses do not matter.
    """
    size = min(target_size, draft_size)
    ours = {i: token for token, i in target.get_vocab().items()}
    theirs = {i: token for token, i in draft.get_vocab().items()}
    for i in sorted(ours.keys() & theirs.keys()):
        if ours[i] != theirs[i]:
            raise ModelError(
                f"the tokenizers differ: id {i} is {ours[i]!r} to the target and {theirs[i]!r} to the draft; "
                "take a draft model of the target's family"
            )
    for name, vocabulary, own in (("target", ours, target_size), ("draft", theirs, draft_size)):
        lost = [i for i in vocabulary if size <= i < own]
        if lost:
            i = min(lost)
            raise ModelError(
                f"the tokenizers differ: the {name} has a token {vocabulary[i]!r} with id {i}, but the models share "
                f"only {size} ids; take a draft model of the target's family"
            )
    missing = sorted(ours.keys() ^ theirs.keys())
    if missing and missing[0] < min(max(ours), max(theirs)):
        i = missing[0]
        name, token = ("target", ours[i]) if i in ours else ("draft", theirs[i])
        raise ModelError(f"the tokenizers differ: only the {name} has a token with id {i}, {token!r}")
    return size


class TextStream:
    """The text of one sequence as it grows, with the stop strings that may end it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int], stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._window = self._last_tokens(prompt)  # decoded together; begins where a character begins
        self._seen = self._decode()  # the part of the window's text that is in `text`
        self._whole: list[int] = []  # places in the window where characters end
        self.text = ""  # everything decoded so far, cut where a stop string begins
        self._ends: list[int] = []  # length of `text` after each token not yet handed out
        self._origins: list[Origin] = []
        self._given = 0
        self._spoken = 0  # tokens whose text has been handed out whole
        self.span_tokens: list[int] = []  # the token, counted from the first, that each span of the last `take` is of
        self._stopped = False

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
            self._grow()
            self._ends.append(len(self.text))
            if self._stopped:
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
        found = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stop]
        ends = [(at + len(stop), at) for at, stop in found if at >= 0]
        if ends:  # the first to be complete counts; of several that are so at once, the longest
            self.text, self._stopped = self.text[: min(ends)[1]], True

    def take(self, origins: list[Origin], final: bool = False) -> list[tuple[str, Origin]]:
        """The text that has become certain since the last call; `origins` are those of the tokens fed since then."""
        # _ends[i] is the end of the token whose origin is _origins[i]; text of tokens without an origin yet stays here.
        self._origins += origins
        if final and not self._stopped:  # what remains unfinished stays so
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
