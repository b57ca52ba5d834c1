"""Step rules and structured output, on the shipped pair: steps are drafted freely while it thinks, and inside the
grammar after it or where there is no thinking; none of them leaves it."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

import semspec
from semspec.verify import REGISTRY

ASK = [{"role": "user", "content": "Mia has 4 bags with 6 pens each. How many pens does Mia have?"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "unit": {"enum": ["pens", "bags"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}
LINES = "(So|Then|Well)( [a-z]{1,6}){2,5}\\.\n\n(The answer is [0-9]{1,3}\\.\n\n){2}"
STEP_RULES = sorted(name for name, rule in REGISTRY.items() if rule.unit == "step")


@pytest.fixture(scope="module")
def pair() -> semspec.Pair:
    return semspec.load("pocket", device="cpu", slots=4, context=512)


@pytest.mark.parametrize("rule", STEP_RULES)
def test_no_step_rule_leaves_the_grammar(pair: semspec.Pair, rule: str):
    how = {"verifier": rule, "seed": 2, "max_new_tokens": 120, "temperature": 0.7, "referee": lambda text, step: True}
    result = pair.generate(ASK, structured_outputs={"json": SCHEMA}, max_thinking_tokens=24, **how)
    thought, mark, answer = result.text.partition("</think>")
    assert thought.startswith("<think>") and mark, "its thinking is free"
    jsonschema.validate(json.loads(answer), SCHEMA)
    result = pair.generate("So ", structured_outputs={"regex": LINES}, bad_words=["the"], **how)
    assert re.fullmatch(LINES, result.text) and " the" not in result.text, "whole steps inside a grammar"


def test_a_rule_that_accepts_no_step_writes_what_none_writes(pair: semspec.Pair):
    given = {"structured_outputs": {"regex": LINES}, "presence_penalty": 0.5, "max_new_tokens": 80, "seed": 5}
    for temperature in (0.0, 0.9):
        alone = pair.generate("So ", verifier="none", temperature=temperature, **given)
        assert pair.generate("So ", verifier="accept-no-step", temperature=temperature, **given).text == alone.text
