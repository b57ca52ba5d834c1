"""Structured output: what an answer may have to be (JSON, a pattern, a choice, a grammar), checked and compiled.

Everything here may come from a stranger. Sizes are limited before anything is compiled; llguidance then counts what it
does and gives up, in words, beyond its own limits. It neither fetches nor opens what a schema refers to.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest

KINDS = ("json", "json_object", "regex", "choice", "grammar")
CALLS = "calls"  # a grammar that the server writes itself, out of the schemas of tools
MAX_SCHEMA = 100_000  # characters, as JSON
MAX_REGEX = 10_000
MAX_GRAMMAR = 30_000
MAX_CHOICES = 1_000
MAX_CHOICE = 30_000  # characters of all choices
MAX_MESSAGE = 300  # characters of the library's own words
NO_TEXT = "no text fits it"
NO_JSON = "the JSON schema is too deep, or has something that is not JSON: NaN, an infinity, half a character"
# What it says around an error of a schema that is part of a grammar of ours (`CALLS`).
IN_OURS = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: | \d+ \| start: .*$")
# A lexer's states are kept as long as its grammar is, and take up to 3 kB each: all grammars together below 500 MB.
CACHED = 8  # compiled grammars
LIMITS: dict[str, Any] = {"max_lexer_states": 20_000, "verbose_errors": False}  # the rest are the library's own
# One space, or a new line with its indent. Where any amount of white space is allowed, a model that is not sure what
# comes next may write it for ever.
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r" |\r?\n[ \t]{0,24}"}


def grammar_of(wanted: Any) -> str:
    """A request's `structured_outputs` as one of the library's grammars; whatever cannot be one is a BadRequest."""
    try:
        return _grammar_of(wanted)
    except BadRequest:
        raise
    except ValueError as error:  # the library's own, about JSON that it cannot read
        raise BadRequest(f"structured_outputs cannot be read: {str(error)[:MAX_MESSAGE]}") from None


def _grammar_of(wanted: Any) -> str:
    if not isinstance(wanted, dict) or len(wanted) != 1 or next(iter(wanted)) not in (*KINDS, CALLS):
        raise BadRequest(f"structured_outputs is no object with one of: {', '.join(KINDS)}")
    from llguidance import LLMatcher

    ((kind, value),) = wanted.items()
    if kind == "json_object":
        if value is not True:
            raise BadRequest("structured_outputs.json_object is either true or left out")
        return _of_schema('{"type": "object"}')
    if kind == "json":
        return _of_schema(_schema_text(value))
    if kind == "choice":
        if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
            raise BadRequest("structured_outputs.choice is no list of texts with something in them")
        if not 1 <= len(value) <= MAX_CHOICES or sum(map(len, value)) > MAX_CHOICE:
            raise BadRequest(
                f"structured_outputs.choice has {len(value)} texts; give 1 to {MAX_CHOICES}, of {MAX_CHOICE} "
                "characters together"
            )
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
    limit = {"regex": MAX_REGEX, "grammar": MAX_GRAMMAR, CALLS: MAX_SCHEMA}[kind]
    if kind == CALLS and isinstance(value, str) and len(value) > limit:
        raise BadRequest(
            f"the schemas of the tools have {len(value)} characters together; where a call is required, give at most "
            f"{limit}, or name one function in tool_choice"
        )
    if not isinstance(value, str) or not 1 <= len(value) <= limit:
        raise BadRequest(f"structured_outputs.{kind} is no text of 1 to {limit} characters")
    return LLMatcher.grammar_from_regex(value) if kind == "regex" else LLMatcher.grammar_from_lark(value)


def _schema_text(value: Any) -> str:
    if hasattr(value, "model_json_schema"):  # a pydantic model
        value = value.model_json_schema()
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise BadRequest(NO_JSON) from None
    if len(text) > MAX_SCHEMA:
        raise BadRequest(f"the JSON schema has {len(text)} characters; give at most {MAX_SCHEMA}")
    return text


@lru_cache(CACHED)
def _of_schema(text: str) -> str:
    """Options are checked several times on a request's way, and a long schema takes tens of milliseconds."""
    from llguidance import LLMatcher

    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRequest(f"the JSON schema is not JSON: {error}") from None
    except (ValueError, RecursionError):
        raise BadRequest(NO_JSON) from None
    if not isinstance(found, dict | bool):
        raise BadRequest("the JSON schema is no object")
    if found is False:
        raise BadRequest("the JSON schema false allows nothing")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps({} if found is True else found), overrides=JSON_OPTIONS)
    except ValueError:  # the library's own limit, and JSON that only Python takes
        raise BadRequest(NO_JSON) from None


@dataclass(frozen=True, eq=False)
class Compiled:
    """A grammar, ready for use. Its matchers share one lexer, whose states add up to the limit over many texts."""

    grammar: str
    start: Any

    def matcher(self) -> Any:
        """A matcher at the beginning of a text."""
        return self.start.deep_copy()


class Grammars:
    """Compiles grammars for one tokenizer and keeps the latest. Threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, eos: Iterable[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, sorted(eos)
        self._latest: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._lock = threading.Lock()  # never held for long
        self._compiling = threading.Lock()  # one at a time, or strangers' grammars would take every core

    @cached_property
    def _llguidance_tokenizer(self) -> Any:
        from llguidance import hf

        try:
            return hf.from_tokenizer(self._tokenizer, n_vocab=self._vocab, eos_token=self._eos or None)
        except Exception as error:  # a Rust library's own
            raise BadRequest(
                f"structured output is not possible with this model's tokenizer: {str(error)[:MAX_MESSAGE]}"
            ) from error

    @property
    def ends(self) -> list[int]:
        """The tokens with which the library ends a text."""
        return [token for token in self._llguidance_tokenizer.eos_tokens if token < self._vocab]

    def compiled(self, grammar: str) -> Compiled:
        """Waits for nobody where this grammar is ready; who asks for it meanwhile waits for the first."""
        with self._lock:
            found = self._latest.get(grammar)
            if is_new := found is None:
                found = self._latest[grammar] = Future()
            self._latest.move_to_end(grammar)
            while len(self._latest) > CACHED:
                self._latest.popitem(last=False)
        if is_new:
            try:
                with self._compiling:
                    found.set_result(Compiled(grammar, self._compile(grammar)))
            except BaseException as error:
                self._forget(grammar, found)
                found.set_exception(error)
        return found.result()

    def forget(self, worn: Compiled) -> None:
        """A matcher has failed, perhaps because the lexer is full: the next to ask gets a fresh one."""
        found = self._latest.get(worn.grammar)
        if found is not None and found.done() and found.result() is worn:
            self._forget(worn.grammar, found)

    def _forget(self, grammar: str, which: Future[Compiled]) -> None:
        with self._lock:
            if self._latest.get(grammar) is which:
                del self._latest[grammar]

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._llguidance_tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # some are found to be too complex only here
        if matcher.is_error():
            raise BadRequest(f"this grammar or schema cannot be obeyed: {reason(matcher)}")
        if matcher.is_stopped():
            raise BadRequest("this grammar or schema allows nothing but the empty text")
        return matcher


def reason(matcher: Any) -> str:
    """Why a matcher has failed, in the library's words."""
    text = " ".join(str(matcher.get_error()).replace("<non-verbose/>", "").split())
    text = IN_OURS.sub("", text).replace("Expected f64", "Expected number").replace("NoExtensionBias", NO_TEXT)
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."
