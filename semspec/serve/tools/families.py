"""Which family a model belongs to, by its chat template and tokenizer, and how its answers are read."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.serve.tools import harmony
from semspec.serve.tools.harmony import Harmony
from semspec.serve.tools.parser import Family, JsonCalls, Parser
from semspec.text.chat import template_of
from semspec.text.structured import JSON_OPTIONS

AUTO = "auto"
NAME = '{"name": "'
HERMES = Family(("<tool_call>",), ("<tool_call>", "</tool_call>"), f"<tool_call>\n{NAME}", '", "arguments": ')
LLAMA = Family(("<|python_tag|>",), ("<|python_tag|>", ";", ","), NAME, '", "parameters": ', bare=True)
MISTRAL = Family(
    ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[", ",", "]"), f"[TOOL_CALLS][{NAME}", '", "arguments": ', "}]", named=True
)
NEWER_MISTRAL = replace(MISTRAL, opening="[TOOL_CALLS]", after_name="[ARGS]", closing="")
JSON = Family((), ("```json", "```", "[", ",", "]"), NAME, '", "arguments": ', bare=True)


@dataclass(frozen=True)
class Style:
    """How one family writes calls."""

    parser: Callable[[frozenset[str]], Parser]  # for the functions that there are
    forced: Callable[[str | None], str]  # how an answer begins that has to be a call
    between: str  # what is between a function's name and its arguments
    closing: str  # and after them
    specials: frozenset[str] = frozenset()  # special tokens that the parser has to see
    always: bool = False  # answers are read by it even where there are no tools
    short_ids: bool = False  # the chat template takes ids of nine letters only

    def grammar(self, functions: Mapping[str, dict[str, Any]], named: str | None) -> str | None:
        """What follows `forced`: a name, unless it is given, and arguments that fit its schema. In Lark's notation.

        None where special tokens stand between the two, which are no text."""
        if named is None and any(special in self.between for special in self.specials):
            return None
        lines, calls = [], []
        for i, (name, schema) in enumerate(functions.items()):
            if named in (None, name):
                before = [] if named is not None else [name + self.between]
                parts = [
                    *map(json.dumps, before),
                    f"arguments{i}",
                    *([json.dumps(self.closing)] if self.closing else []),
                ]
                calls.append(" ".join(parts))
                lines.append(f"arguments{i}: %json {json.dumps(schema | {'x-guidance': JSON_OPTIONS})}")
        return "\n".join([f"start: {' | '.join(calls)}", *lines])

    def call_id(self) -> str:
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


def _json(family: Family, *specials: str, short_ids: bool = False) -> Style:
    parser, markers = partial(JsonCalls, family), frozenset(specials)
    return Style(parser, family.forced, family.after_name, family.closing, markers, short_ids=short_ids)


STYLES = {
    "hermes": _json(HERMES, "<tool_call>", "</tool_call>"),
    "llama3": _json(LLAMA, "<|python_tag|>"),
    "mistral": _json(MISTRAL, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", short_ids=True),
    "harmony": Style(lambda names: Harmony(), harmony.forced, harmony.AFTER_NAME, "", harmony.SPECIALS, always=True),
    "json": _json(JSON),
}
NEWER = replace(STYLES["mistral"], forced=NEWER_MISTRAL.forced, between="[ARGS]", closing="")  # with names before calls


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
            return NEWER if family == "mistral" and "[ARGS]" in vocabulary else STYLES[family]
    return STYLES["json"]
