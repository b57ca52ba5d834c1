"""The official client's own calls for every option of how tokens are chosen, and for structured output."""

from __future__ import annotations

import json
import threading
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from semspec import Pair
from tests.serve.live import Live
from tests.serve.test_client import ASK, GREEDY, chat, itself, said

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "unit": {"enum": ["pens", "bags"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}
SHORT = {"max_tokens": 150, "extra_body": {"max_thinking_tokens": 4}}


PROMPT = "Mia has 4 bags with 6 pens each."


def complete(live: Live, prompt: Any = PROMPT, **more: Any) -> Any:
    return live.openai().completions.create(**{"model": "pocket", "prompt": prompt, "temperature": 0} | more)


@pytest.fixture(scope="module")
def token(pocket_pair: Pair) -> int:
    """The first token that the target writes after its opening marker."""
    return itself(pocket_pair).tokens[1]


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"frequency_penalty": 1.0}, {"frequency_penalty": 1.0}),
        ({"extra_body": {"repetition_penalty": 1.5}}, {"repetition_penalty": 1.5}),
        ({"extra_body": {"min_tokens": 25}, "stop": ["lga"]}, {"min_tokens": 25, "stop": ["lga"]}),
        ({}, {"bad_words": []}),  # two words of the text
        ({"stop": ["e"], "extra_body": {"include_stop_str_in_output": True}}, {"stop": ["e"], "include_stop": True}),
    ],
)
def test_an_option_means_what_it_means_to_the_pair(pocket: Live, pocket_pair: Pair, field: Any, option: Any):
    free = pocket_pair.generate(PROMPT, max_new_tokens=40)
    option = option if "bad_words" not in option else {"bad_words": free.text.split()[1:3]}
    field = field if "bad_words" not in option else {"extra_body": option}
    alone = pocket_pair.generate(PROMPT, max_new_tokens=40, verifier="none", **option)
    assert alone.text != free.text, "it changes something"
    answer = complete(pocket, max_tokens=40, **field).choices[0]
    assert answer.text == alone.text and answer.finish_reason == alone.finish_reason
    stop = option.get("stop", [""])[0]
    assert not option.get("include_stop") or answer.text.endswith(stop)
    assert not option.get("min_tokens") or len(alone.tokens) >= option["min_tokens"]


def test_a_bias_makes_a_token_certain_or_impossible(pocket: Live, pocket_pair: Pair, token: int):
    word = pocket_pair.tokenizer.encode("dozen", add_special_tokens=False)[-1]
    always = chat(pocket, logit_bias={str(word): 100}, max_tokens=5).choices[0].message
    assert pocket_pair.spelling(word) * 3 in said(always)
    never = chat(pocket, logit_bias={token: -100}, max_tokens=3).choices[0].message
    assert said(never)[:3] != said(chat(pocket, max_tokens=3).choices[0].message)[:3]


def test_only_allowed_tokens_are_written(pocket: Live, pocket_pair: Pair):
    digits = [pocket_pair.tokenizer.encode(d, add_special_tokens=False)[-1] for d in "0123456789"]
    text = said(chat(pocket, max_tokens=12, extra_body={"allowed_token_ids": digits}).choices[0].message)
    assert text.strip().isdigit()


def test_stop_tokens_end_an_answer(pocket: Live, pocket_pair: Pair):
    free = itself(pocket_pair).tokens
    choice = chat(pocket, extra_body={"stop_token_ids": [free[9]]})
    assert choice.usage.completion_tokens == free.index(free[9]) + 1 and choice.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"999999": 1}},
        {"logit_bias": {"1": 101}},
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        {"presence_penalty": 2.5},
        {"extra_body": {"repetition_penalty": 0}},
        {"extra_body": {"min_tokens": -1}},
        {"extra_body": {"bad_words": [" "]}},
        {"extra_body": {"bad_words": ["x"] * 257}},
        {"extra_body": {"allowed_token_ids": []}},
        {"extra_body": {"allowed_token_ids": [2**30]}},
        {"extra_body": {"prompt_logprobs": 21}},
        {"extra_body": {"prompt_logprobs": 1}, "stream": True},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}},
        {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}},
        {"extra_body": {"structured_outputs": {}}},
        {"extra_body": {"guided_choice": []}},
        {"extra_body": {"guided_regex": "("}},
        {"extra_body": {"guided_grammar": "start: nothing"}},
        {"extra_body": {"guided_json": {"type": "wrong"}}},
        {"extra_body": {"guided_json": {"$ref": "file:///etc/passwd"}}},
        {"extra_body": {"guided_json": "{"}},
    ],
)
def test_what_cannot_be_is_a_400_in_words(pocket: Live, wrong: dict[str, Any]):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(pocket, **wrong)
    message = caught.value.body["message"]  # type: ignore[index]
    assert len(message) > 20 and "Traceback" not in message and "object at" not in message and "/work" not in message
    assert pocket.idle()


def test_null_and_neutral_values_are_taken(pocket: Live):
    nothing: dict[str, Any] = dict.fromkeys(
        (
            "n",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "min_tokens",
        )
    ) | dict.fromkeys(("bad_words", "allowed_token_ids", "prompt_logprobs", "response_format", "structured_outputs"))
    neutral = {"logit_bias": {}, "bad_words": [], "min_tokens": 0, "repetition_penalty": 1.0, "top_k": -1, "n": 1}
    usual = said(chat(pocket).choices[0].message)
    for given in (nothing, neutral, {"response_format": {"type": "text"}}):
        response = pocket.post("/v1/chat/completions", GREEDY | {"messages": ASK} | given)
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        assert message.get("reasoning_content", "") + message["content"] == usual


# -- structured output


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"extra_body": {"guided_json": SCHEMA}},
        {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    ],
)
def test_an_answer_obeys_its_schema(pocket: Live, asked: dict[str, Any]):
    extra = SHORT["extra_body"] | asked.get("extra_body", {})
    for more in ({}, {"temperature": 1.0, "seed": 4, "n": 2}):
        answer = chat(pocket, **SHORT | asked | more | {"extra_body": extra})
        for choice in answer.choices:
            assert choice.finish_reason == "stop" and choice.message.reasoning_content
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_any_object_a_pattern_a_choice_and_a_grammar(pocket: Live):
    def content(**more: Any) -> str:
        extra = SHORT["extra_body"] | more.pop("extra_body", {})
        return chat(pocket, **SHORT | more | {"extra_body": extra}).choices[0].message.content

    for asked in (
        {"guided_regex": "[0-9]{2}-[a-z]{3}"},
        {"structured_outputs": {"regex": "[0-9]{2}-[a-z]{3}"}},
    ):
        text = content(extra_body=asked)
        assert len(text) == 6 and text[:2].isdigit() and text[2] == "-"
    choices = ["yes, it is", "no", 'maybe \\ "so" é']
    assert content(extra_body={"guided_choice": choices}) in choices
    assert content(extra_body={"structured_outputs": {"choice": choices[2:]}}) == choices[2]
    assert content(extra_body={"guided_grammar": 'start: "<" /[a-c]{3}/ ">"'})[::4] == "<>"
    text = content(response_format={"type": "json_object"}, max_tokens=250, extra_body={"guided_regex": None})
    assert text.startswith("{")


def test_the_engine_compiles_nothing_even_where_others_have_driven_a_grammar_out(
    pocket: Live, pocket_pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("semspec.text.structured.CACHED", 0)
    grammars, asked = pocket_pair.resources.grammars, []
    plain = grammars.compiled
    monkeypatch.setattr(grammars, "compiled", lambda text: asked.append(threading.current_thread()) or plain(text))
    for extra in ({"guided_regex": "[0-9]{2}"}, {"structured_outputs": {"json": SCHEMA}}):
        answer = chat(pocket, n=2, **SHORT | {"extra_body": SHORT["extra_body"] | extra})
        assert all(choice.finish_reason == "stop" for choice in answer.choices)
    assert len(asked) == 2 and all("asyncio" in thread.name for thread in asked), asked


def test_the_clients_own_parse(pocket: Live):
    class Count(BaseModel):
        answer: int
        sure: bool

    parsed = pocket.openai().chat.completions.parse(
        model="pocket",
        messages=ASK,
        temperature=0,
        max_tokens=150,
        response_format=Count,
        **{"extra_body": SHORT["extra_body"]},
    )
    assert isinstance(parsed.choices[0].message.parsed, Count)


# -- the prompt again, its logprobs, the best of several


def test_a_prompt_comes_back_with_its_logprobs(pocket: Live, pocket_pair: Pair):
    scored = pocket_pair.generate(PROMPT, max_new_tokens=5, logprobs=2, prompt_logprobs=2)
    told = [lp for event in scored.events for lp in event.prompt_logprobs or []]
    tokens = pocket_pair.tokenizer.encode(PROMPT)
    assert told[0] is None and [lp.token for lp in told[1:]] == tokens[1:]
    # The same rows, token by token, from the target itself.
    for i in (1, len(tokens) - 1):
        again = pocket_pair.generate([tokens[:i]], max_new_tokens=1, logprobs=20)[0].logprobs[0]
        assert dict(again.top).get(told[i].token, -99) == pytest.approx(told[i].logprob, abs=1e-3) or told[i].rank > 20
    whole = complete(pocket, max_tokens=5, echo=True, logprobs=2).choices[0]
    assert whole.text == PROMPT + scored.text
    assert whole.logprobs.token_logprobs[0] is None and whole.logprobs.top_logprobs[0] is None
    expected = [lp.logprob for lp in [*told[1:], *scored.logprobs]]
    assert whole.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    assert "".join(whole.logprobs.tokens) == whole.text
    assert [
        whole.text[at:].startswith(t) for at, t in zip(whole.logprobs.text_offset, whole.logprobs.tokens, strict=True)
    ]
    for token, top in list(zip(whole.logprobs.tokens, whole.logprobs.top_logprobs, strict=True))[1:]:
        assert token in top and 2 <= len(top) <= 3
    alone = complete(pocket, max_tokens=0, echo=True, logprobs=0)
    assert alone.choices[0].text == PROMPT and alone.usage.completion_tokens == 0
    assert alone.choices[0].logprobs.token_logprobs == whole.logprobs.token_logprobs[: len(tokens)]
    again = complete(pocket, prompt=[tokens, tokens[:4]], max_tokens=2, echo=True)
    assert [c.text.startswith("Mia has") for c in again.choices] == [True, True] and again.choices[0].logprobs is None
    streamed = "".join(c.choices[0].text for c in complete(pocket, max_tokens=5, echo=True, stream=True))
    assert streamed == whole.text


def test_prompt_logprobs_as_vllm_tells_them(pocket: Live, pocket_pair: Pair):
    tokens = pocket_pair.tokenizer.encode(PROMPT)
    told = complete(pocket, max_tokens=1, extra_body={"prompt_logprobs": 3}).choices[0].prompt_logprobs
    assert told[0] is None and len(told) == len(tokens)
    for token, entry in zip(tokens[1:], told[1:], strict=True):
        own = entry[str(token)]
        assert own["decoded_token"] == pocket_pair.spelling(token) and own["rank"] >= 1
        better = [e for e in entry.values() if e["logprob"] > own["logprob"]]
        assert len(better) == min(own["rank"] - 1, 3)
    answer = chat(pocket, max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    cached = chat(pocket, max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert cached.prompt_logprobs == answer.prompt_logprobs, "a prefix cache takes nothing away"


def test_the_best_of_several_answers_is_the_likeliest(pocket: Live):
    sampled = {"temperature": 1.2, "seed": 11, "max_tokens": 8}
    every = complete(pocket, n=4, logprobs=0, **sampled)
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in every.choices]
    order = sorted(range(4), key=lambda i: -means[i])
    best = complete(pocket, n=2, best_of=4, **sampled)
    assert [c.text for c in best.choices] == [every.choices[i].text for i in order[:2]]
    assert best.choices[0].logprobs is None and best.usage.completion_tokens == every.usage.completion_tokens
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 99}, {"max_tokens": 0}):
        with pytest.raises(openai.BadRequestError):
            complete(pocket, **sampled | wrong)
