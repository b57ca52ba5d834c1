"""Schemas, random and as people write them: every answer is valid by `jsonschema`; hostile ones are refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, Field

from semspec import Options, Pair
from semspec.errors import BadRequest, BatchFailed
from semspec.text import structured
from semspec.text.structured import CALLS, MAX_SCHEMA, grammar_of

NAMES = ["id", "name", "x y", "ünï", 'quo"te', "a/b", "items", "$ref_", "0"]


def scalar(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 20},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": rng.randint(0, 6)},
            {"type": "string", "minLength": 2, "maxLength": 4},
            {"type": "string", "pattern": "^[a-z]{1,4}(-[0-9]{2})?$"},
            {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])},
            {"enum": rng.sample([1, 2.5, "a", None, True, "é", [1], {"k": 0}], 3)},
            {"const": rng.choice([0, "x", None, [], {"a": [1]}])},
            {"type": ["boolean", "null"]},
        ]
    )


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Bounded everywhere, so that any text of it ends soon."""
    kind = rng.random() if depth else 0.0
    if kind < 0.3:
        return scalar(rng)
    if kind < 0.5:
        low = rng.randint(0, 2)
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind < 0.58:
        items = [schema(rng, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    if kind < 0.68:
        return {"anyOf": [schema(rng, depth - 1), scalar(rng)]}
    names = rng.sample(NAMES, rng.randint(0, 3))
    found = {"type": "object", "properties": {name: schema(rng, depth - 1) for name in names}}
    return found | {"required": [n for n in names if rng.random() < 0.6], "additionalProperties": False}


REAL: list[dict[str, Any]] = [
    {  # a tool call
        "type": "object",
        "properties": {
            "name": {"const": "get_weather"},
            "arguments": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 10},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    },
    {  # as pydantic writes models that refer to others
        "$defs": {
            "Line": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
                    "count": {"$ref": "#/$defs/N"},
                },
                "required": ["sku", "count"],
                "additionalProperties": False,
            },
            "N": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "title": "Order",
        "type": "object",
        "properties": {
            "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}, "minItems": 1, "maxItems": 3},
            "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}], "default": None},
        },
        "required": ["lines", "note"],
        "additionalProperties": False,
    },
    {  # a tree, bounded by its width
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "kids": {"type": "array", "maxItems": 0}},
                "required": ["v", "kids"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {"allOf": [{"type": "integer"}, {"minimum": 3, "maximum": 5}]},
    {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
]


def test_two_hundred_schemas_have_valid_answers(pair: Pair):
    rng = random.Random(5)
    schemas = REAL * 4 + [schema(rng) for _ in range(180)]
    rules = [{"verifier": "none"}, {"num_draft_tokens": 4}, {"verifier": "sampling"}, {"verifier": "accept-all"}]
    options, refused = [], 0
    for i, one in enumerate(schemas):
        try:
            pair.resources.grammars.compiled(grammar_of({"json": one}))
        except BadRequest:  # a combination that has no text, or that the library does not support
            refused += 1
            continue
        how = rules[i % len(rules)] | {"temperature": 0.0 if i % 3 == 0 else 1.5, "seed": i, "max_new_tokens": 600}
        options.append(Options(structured_outputs={"json": one}, **how))
    results = pair.generate(["{"] * len(options), options)
    assert refused <= 8 and len(results) >= 190
    for one, result in zip(options, results, strict=True):
        assert result.finish_reason == "stop", (one.structured_outputs, result.text[:200])
        jsonschema.validate(json.loads(result.text), one.structured_outputs["json"])  # type: ignore[index]


def test_an_answer_that_leaves_its_schema_would_be_caught(pair: Pair):
    free = pair.generate("{", max_new_tokens=20)
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        jsonschema.validate(json.loads(free.text), REAL[0])


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"(\+|-)?[1-9][0-9]{0,3}\.[0-9]{2} (EUR|USD)"}, r"[+-]?[1-9][0-9]{0,3}\.[0-9]{2} (EUR|USD)"),
        ({"regex": "[äöü]{3}ß?"}, "[äöü]{3}ß?"),
        ({"choice": ["one", "onerous", 'two\n"three"', "日本"]}, 'one|onerous|two\n"three"|日本'),
        ({"grammar": 'start: pair ("," pair){0,2}\npair: /[a-c]{1,3}/ "=" /[0-9]{1,2}/'}, "([a-c]{1,3}=[0-9]{1,2},?)+"),
    ],
)
def test_patterns_choices_and_grammars(pair: Pair, wanted: dict[str, Any], pattern: str):
    for i, verifier in enumerate(["none", "exact", "block", "topk"]):
        text = pair.generate("x", structured_outputs=wanted, verifier=verifier, temperature=1.2, seed=i).text
        assert re.fullmatch(pattern, text), text


def test_a_pydantic_model_is_a_schema(pair: Pair):
    class Count(BaseModel):
        n: int = Field(ge=0, le=9)
        sure: bool

    text = pair.generate("x", structured_outputs={"json": Count}, temperature=1.0, seed=1).text
    assert Count.model_validate_json(text).n < 10


def test_options_can_still_be_keys():
    assert len({Options(), Options()}) == 1


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


@pytest.mark.parametrize(
    "hostile",
    [
        {"json": nested(400)},
        {"json": nested(900)},
        {"json": json.dumps(nested(5)).replace("string", "string" * 20_000)},
        {"json": "[" * 50_000},
        {"json": {"enum": ["x" * 1_000_000]}},
        {"json": " " * (MAX_SCHEMA + 1)},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"$ref": "http://localhost:1/x.json"}},
        {"json": {"$ref": "file:///etc/passwd"}},
        {"json": {"type": "string", "pattern": "("}},
        {"json": {"type": "no such type"}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 4}},
        {"json": False},
        {"json": 3},
        {"json": None},
        {"json": float("nan")},
        {"regex": "(" * 5_000},
        {"regex": "(?=a)b"},
        {"regex": r"(a)\1"},
        {"regex": "x" * 10_001},
        {"regex": ""},
        {"grammar": "start: " + " | ".join(f'"{i}"' for i in range(5_000))},
        {"grammar": "start: other"},
        {"grammar": "no grammar"},
        {"grammar": "x" * 30_001},
        {"choice": []},
        {"choice": [""]},
        {"choice": ["x"] * 1_001},
        {"choice": "yes"},
        {"json_object": False},
        {"xml": "x"},
        {},
        {"regex": "a", "json_object": True},
        "json",
    ],
)
def test_hostile_and_impossible_wishes_are_refused_in_words(pair: Pair, hostile: Any):
    with pytest.raises(BadRequest) as caught:
        pair.resources.grammars.compiled(grammar_of(hostile))
    assert 10 < len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "large",
    [
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9}},
        {"json": {"type": "string", "minLength": 10**7, "maxLength": 10**9}},
        {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}}},
        {"json": nested(100)},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "(a|b)*a(a|b){20}"},
        {"regex": "(?:(?:(?:a*)*)*)*b"},
    ],
)
def test_what_is_large_or_recursive_is_obeyed_as_far_as_the_answer_goes(pair: Pair, large: dict[str, Any]):
    result = pair.generate("x", structured_outputs=large, max_new_tokens=12, temperature=1.0, seed=2, min_tokens=3)
    assert result.finish_reason in ("length", "stop") and result.tokens


def test_a_grammar_that_grows_too_complex_fails_its_own_answer_only(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(structured.LIMITS, "max_items_in_row", 50)
    wide = {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}}
    wishes = [Options(structured_outputs=wide), Options(structured_outputs={"regex": "[a-c]{4}"})]
    with pytest.raises(BatchFailed) as caught:
        pair.generate(["x", "x"], wishes)
    failed, fine = caught.value.results
    assert isinstance(failed, BadRequest) and "too complex" in str(failed) and len(fine.text) == 4


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"json": 3}, "no object"),
        ({"json": "{"}, "not JSON"),
        ({"json": False}, "allows nothing"),
        ({"json": " " * (MAX_SCHEMA + 1)}, f"give at most {MAX_SCHEMA}"),
        ({"json": nested(400)}, "too deep"),
        ({CALLS: "x" * (MAX_SCHEMA + 1)}, "the schemas of the tools"),
        ({CALLS: 3}, "no text"),
    ],
)
def test_what_is_wrong_is_told_as_it_is(wrong: dict[str, Any], words: str):
    with pytest.raises(BadRequest, match=words):
        grammar_of(wrong)


@pytest.mark.parametrize("nothing", [{"regex": r"[^\s\S]"}, {"grammar": "start: start"}, {"json": {"$ref": "#"}}])
def test_what_no_text_fits_is_refused_in_words(pair: Pair, nothing: dict[str, Any]):
    with pytest.raises(BadRequest, match="no text fits it"):
        pair.generate("x", structured_outputs=nothing)
