"""Which family a model belongs to, by its chat template and tokenizer, and how its answers are read."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.serve.tools import harmony
from semspec.serve.tools.harmony import Harmony
from semspec.serve.tools.parser import Family, JsonCalls, Parser
from semspec.text.chat import template_of

AUTO = "auto"
NAME = '{"name": "'
HERMES = Family(("<tool_call>",), ("<tool_call>", "</tool_call>"), f"<tool_call>\n{NAME}", '", "arguments": ')
LLAMA = Family(("<|python_tag|>",), ("<|python_tag|>", ";", ","), NAME, '", "parameters": ', bare=True)
MISTRAL = Family(
    ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[", ",", "]"), f"[TOOL_CALLS][{NAME}", '", "arguments": ', named=True
)
NEWER_MISTRAL = replace(MISTRAL, opening="[TOOL_CALLS]", after_name="[ARGS]")
JSON = Family((), ("```json", "```", "[", ",", "]"), NAME, '", "arguments": ', bare=True)


@dataclass(frozen=True)
class Style:
    """How one family writes calls."""

    parser: Callable[[frozenset[str]], Parser]  # for the functions that there are
    forced: Callable[[str | None], str]  # how an answer begins that has to be a call
    specials: frozenset[str] = frozenset()  # special tokens that the parser has to see
    always: bool = False  # answers are read by it even where there are no tools
    short_ids: bool = False  # the chat template takes ids of nine letters only

    def call_id(self) -> str:
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


def _json(family: Family, *specials: str, short_ids: bool = False) -> Style:
    return Style(partial(JsonCalls, family), family.forced, frozenset(specials), short_ids=short_ids)


STYLES = {
    "hermes": _json(HERMES, "<tool_call>", "</tool_call>"),
    "llama3": _json(LLAMA, "<|python_tag|>"),
    "mistral": _json(MISTRAL, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", short_ids=True),
    "harmony": Style(lambda names: Harmony(), harmony.forced, harmony.SPECIALS, always=True),
    "json": _json(JSON),
}


def check_name(name: str) -> None:
    if name not in (AUTO, *STYLES):
        raise BadRequest(f"there is no tool parser {name!r:.80}; give one of: {', '.join((AUTO, *STYLES))}")


def style_of(tokenizer: PreTrainedTokenizerBase, name: str = AUTO) -> Style:
    """By name, or by the markers that a model's vocabulary and chat template have."""
    check_name(name)
    if name != AUTO:
        return STYLES[name]
    vocabulary, template = tokenizer.get_vocab(), template_of(tokenizer)
    if "<|channel|>" in vocabulary and "<|message|>" in vocabulary:
        return STYLES["harmony"]
    for marker, family in (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3")):
        if marker in vocabulary or marker in template:
            newer = family == "mistral" and "[ARGS]" in vocabulary
            return replace(STYLES[family], forced=NEWER_MISTRAL.forced) if newer else STYLES[family]
    return STYLES["json"]
