"""Compiled grammars: shared, limited in memory, forgotten once their lexer is full, and nobody waits for another's."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from semspec import Options, Pair
from semspec.errors import BadRequest
from semspec.text import structured
from semspec.text.structured import CALLS, Grammars, grammar_of


def test_compiled_grammars_are_kept_and_forgotten(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("semspec.text.structured.CACHED", 2)
    grammars, compiled = Grammars(pair.tokenizer, pair.target.vocab_size, pair.eos), []
    plain = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda text: compiled.append(text) or plain(text))
    for pattern in ("a", "a", "b", "a", "c", "a", "b"):
        grammars.compiled(grammar_of({"regex": pattern}))
    assert len(compiled) == 4, "b was the oldest when c came"


WIDE = "start: (" + " | ".join(f"r{i}" for i in range(300)) + ")*\n"  # a few tokens make ten thousand states
WIDE += "\n".join(f"r{i}: /[a-z ]*{chr(97 + i % 26)}[a-z ]{{{i % 40 + 1}}}X[a-z ]*/" for i in range(300))
WEARS = "[ab]*a[ab]{40}c"  # where the a stand makes a state of its own


def failure(pair: Pair, wanted: dict[str, Any], answers: int) -> tuple[int, str]:
    """How many answers were written before one failed, and why it did."""
    for seed in range(answers):
        try:
            pair.generate("x", structured_outputs=wanted, seed=seed, temperature=1.5, max_new_tokens=60)
        except BadRequest as error:
            return seed, str(error)
    return answers, ""


def test_a_lexer_with_too_many_states_fails_before_it_takes_much_memory(pair: Pair):
    _, why = failure(pair, {"grammar": WIDE}, 60)
    assert "too complex" in why and "too many states" in why
    most = structured.CACHED * structured.LIMITS["max_lexer_states"] * 3_000
    assert most < 500e6, "bytes: each of these states takes almost 3 kB"


def test_a_lexer_that_many_answers_have_filled_is_forgotten(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    grammars, wanted = Grammars(pair.tokenizer, pair.target.vocab_size, pair.eos), {"regex": WEARS}
    monkeypatch.setattr(pair.resources, "grammars", grammars)
    monkeypatch.setitem(structured.LIMITS, "max_lexer_states", 500)
    full, grammar = grammars.compiled(grammar_of(wanted)), grammar_of(wanted)
    before, why = failure(pair, wanted, 60)
    assert 1 < before < 60 and "too many states" in why
    assert failure(pair, wanted, 1) == (1, ""), "the next one is answered again"
    again = grammars.compiled(grammar)
    assert again is not full
    grammars.forget(full)
    assert grammars.compiled(grammar) is again, "who fails late does not take the fresh one along"


def test_the_calls_that_a_server_requires_may_be_longer_than_a_grammar(pair: Pair):
    schema = json.dumps({"enum": ["Oslo"], "description": "x" * 60_000})
    assert pair.generate("x", structured_outputs={CALLS: f"start: a\na: %json {schema}"}).text == '"Oslo"'


def test_nobody_waits_for_another_grammar_to_be_compiled(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    grammars = Grammars(pair.tokenizer, pair.target.vocab_size, pair.eos)
    ready, slow = grammar_of({"regex": "a"}), grammar_of({"regex": "b"})
    known, plain, calls = grammars.compiled(ready), grammars._compile, []
    begun, may_end = threading.Event(), threading.Event()

    def compile_slowly(text: str) -> Any:
        calls.append(text)
        begun.set()
        assert may_end.wait(60)
        return plain(text)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(grammars.compiled(slow)), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    engine = threading.Thread(target=lambda: found.append(grammars.compiled(ready)), daemon=True)
    engine.start()
    engine.join(30)
    assert found == [known], "it has waited for a stranger's grammar"
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert calls == [slow] and len(found) == 4 and len(set(map(id, found))) == 2, "compiled once for all who asked"


def test_a_grammar_that_comes_with_its_request_is_not_compiled_again(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    wanted = {"regex": "[a-c]{4}"}
    compiled = pair.resources.grammars.compiled(grammar_of(wanted))
    monkeypatch.setattr(pair.resources.grammars, "compiled", None)  # as if others had driven it out
    (ticket,) = pair.submit([("x", Options(structured_outputs=wanted))], compiled)
    pair.executor.run()
    ticket.collect()
    assert re.fullmatch("[a-c]{4}", ticket.result().text)
