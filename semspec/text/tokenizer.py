"""Tokenizers: loading them, prompts to tokens, markers of thinking, and whether two models have the same tokens."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from semspec.errors import BadRequest, ModelError, SemspecError, in_a_line
from semspec.model.gguf_tokenizer import read_tokenizer
from semspec.text.chat import PLAIN, ChatFormat, Messages, encode_chat, template_of, whole_characters

log = logging.getLogger(__name__)

Prompt = str | Messages
THINKING = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
CLOSING = re.compile(r"</\w*(?:think|thought|reason)\w*>|\[/\w*(?:think|thought|reason)\w*\]", re.IGNORECASE)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder, or the one in a GGUF file, with its chat template."""
    try:
        if path.suffix == ".gguf":
            return read_tokenizer(path)
        tokenizer = _with_template(_from_folder(path), path)
        _tell_of_cuts(tokenizer, path)
        tokenizer.deprecation_warnings[TOO_LONG] = True  # as if told already: we say it ourselves, with the real limit
        return tokenizer
    except SemspecError:
        raise
    except Exception as error:  # transformers raises many kinds here
        files = ("tokenizer.*", "vocab*", "*.model", "*.tiktoken")
        if path.is_dir() and not any(any(path.glob(pattern)) for pattern in files):
            raise ModelError(
                f"{path} has weights but no tokenizer; copy tokenizer.json and tokenizer_config.json from where the "
                "model came from"
            ) from error
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {in_a_line(error)}") from error


def _from_folder(path: Path) -> PreTrainedTokenizerBase:
    """A tokenizer with code of its own, which is never run, is what its file says."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        if not (path / "tokenizer.json").is_file():
            raise ModelError(
                f"{path}: the tokenizer is code in the checkpoint, which is never run; put its tokenizer.json there"
            ) from error
        return PreTrainedTokenizerFast.from_pretrained(path)


def _tell_of_cuts(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """transformers suspects a tokenizer.json from before Mistral corrected theirs, and leaves it as it is. It says so
    where it may speak, and suspects other models, too, whose config does not name its release."""
    suspected = getattr(getattr(tokenizer, "backend_tokenizer", None), "fix_mistral_regex", None) is False
    if suspected and re.search(
        r'"model_type":\s*"(\w*mistral\w*|ministral|pixtral)"', (path / "config.json").read_text()
    ):
        log.warning(
            "%s: its tokenizer.json may be from before Mistral corrected how words are cut; fetch it again if their "
            "repository has a newer one", path,
        )  # fmt: skip


def _with_template(tokenizer: PreTrainedTokenizerBase, path: Path) -> PreTrainedTokenizerBase:
    """Models that also read pictures may have their chat template in a file that only transformers' processors read."""
    file = path / "chat_template.json"
    if not tokenizer.chat_template and file.is_file():
        template = json.loads(file.read_text())["chat_template"]
        if not isinstance(template, str):
            raise ModelError(f"{file} has no text as its chat_template")
        tokenizer.chat_template = template
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt | list[int], form: ChatFormat = PLAIN) -> list[int]:
    """A prompt's tokens: text as it is, chat messages through the model's chat template, tokens as they are."""
    if isinstance(prompt, str):
        tokens = tokenizer.encode(whole_characters(prompt))
    elif prompt and all(isinstance(token, int) for token in prompt):
        tokens = prompt
    else:
        tokens = encode_chat(tokenizer, prompt, form)  # type: ignore[arg-type]
    if not tokens:
        raise BadRequest("the prompt is empty; give at least one token for the model to go on from")
    return tokens if isinstance(tokens, list) else list(tokens)  # a list may know more than its tokens


def thinking_markers(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int] | None:
    """The tokens between which a model thinks, if its tokenizer has such a pair: a common one, or one that
    the chat template names. Markers of several tokens are not found."""
    vocabulary = tokenizer.get_vocab()
    words = _marker_words(tokenizer, vocabulary)
    return None if words is None else (vocabulary[words[0]], vocabulary[words[1]])


def _marker_words(tokenizer: PreTrainedTokenizerBase, vocabulary: dict[str, int]) -> tuple[str, str] | None:
    closing = CLOSING.finditer(template_of(tokenizer))
    named = [(found[0].replace("/", "", 1), found[0]) for found in closing]
    return next(((b, e) for b, e in (*THINKING, *named) if b in vocabulary and e in vocabulary), None)


class CommonMarkers:
    """What a model wrote, with <think> and </think> in place of its own markers: whoever reads answers or steps knows
    these two."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, vocabulary = tokenizer, tokenizer.get_vocab()
        words = _marker_words(tokenizer, vocabulary)
        self._own = () if words is None else tuple(zip(words, map(vocabulary.get, words), THINKING[0], strict=True))

    def __call__(self, tokens: Sequence[int], text: str) -> str:
        """`tokens` as a text that may be cut at its end. It may be without special tokens: such markers are put in."""
        missing: list[tuple[int, str]] = []
        for word, marker, common in self._own:
            if word in text:
                text = text.replace(word, common)
            elif marker in tokens and not self._decode([marker]):
                missing += [(at, common) for at, token in enumerate(tokens) if token == marker]
        for at, common in sorted(missing, reverse=True):
            place = len(self._decode(tokens[:at]))
            text = text[:place] + common + text[place:] if place <= len(text) else text
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        # As texts are decoded (text/stream.py).
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def opens_thinking(tokenizer: PreTrainedTokenizerBase, prompt: list[int], markers: tuple[int, int]) -> bool:
    """Whether a prompt ends with the marker that opens the thinking, as some chat templates end it. A marker further
    up is somebody's text."""
    return last_token(tokenizer, prompt, markers) == markers[0]


def last_token(tokenizer: PreTrainedTokenizerBase, prompt: list[int], markers: tuple[int, int]) -> int | None:
    """A prompt's last token that is a marker or more than white space."""
    return next((t for t in reversed(prompt) if t in markers or str(tokenizer.decode([t])).strip()), None)


def difference(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_size: int, draft_size: int
) -> str:
    """Where two models' tokens first differ, in words; empty: they share the ids of the smaller vocabulary.

    Sizes alone say nothing: models of one family pad their vocabularies differently, and tokenizers of one size can
    disagree. So token strings are compared, id by id; ids that only padding uses do not matter.
    """
    size = min(target_size, draft_size)
    ours = {i: token for token, i in target.get_vocab().items()}
    theirs = {i: token for token, i in draft.get_vocab().items()}
    for i in sorted(ours.keys() & theirs.keys()):
        if ours[i] != theirs[i]:
            return f"id {i} is {ours[i]!r} to the target and {theirs[i]!r} to the draft"
    for name, vocabulary, own in (("target", ours, target_size), ("draft", theirs, draft_size)):
        lost = [i for i in vocabulary if size <= i < own]
        if lost:
            i = min(lost)
            return f"the {name} has a token {vocabulary[i]!r} with id {i}, but the models share only {size} ids"
    missing = sorted(ours.keys() ^ theirs.keys())
    if missing and missing[0] < min(max(ours), max(theirs)):
        i = missing[0]
        name, token = ("target", ours[i]) if i in ours else ("draft", theirs[i])
        return f"only the {name} has a token with id {i}, {token!r}"
    return ""
