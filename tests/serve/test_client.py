"""The official client drives every endpoint, and gets what the pair itself would have said."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

import semspec
from semspec import Pair
from tests.serve.live import Live

ASK = [{"role": "user", "content": "Mia has 4 bags with 6 pens each. How many pens does Mia have?"}]
GREEDY: dict[str, Any] = {"model": "pocket", "temperature": 0, "max_tokens": 60}


def chat(live: Live, **more: Any) -> Any:
    how = GREEDY | {"messages": ASK} | more
    return live.openai().chat.completions.create(**how)


def itself(pair: Pair, **more: Any) -> semspec.Result:
    how = {"max_new_tokens": 60, "verifier": "none"} | more
    return pair.generate(ASK, **how)


def said(message: Any) -> str:
    return (getattr(message, "reasoning_content", None) or "") + (message.content or "")


def plain(text: str) -> str:
    return text.replace("<think>", "", 1).replace("</think>", "", 1)


def test_a_chat_is_answered_as_the_pair_answers_it(pocket: Live, pocket_pair: Pair):
    alone = itself(pocket_pair)
    answer = chat(pocket)
    choice = answer.choices[0]
    assert said(choice.message) == plain(alone.text) and choice.message.role == "assistant"
    assert choice.finish_reason == alone.finish_reason
    assert answer.usage.completion_tokens == len(alone.tokens)
    assert answer.usage.prompt_tokens == alone.prompt_tokens
    assert answer.usage.total_tokens == len(alone.tokens) + alone.prompt_tokens
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "pocket"


def test_thinking_is_told_from_the_answer(pocket: Live, pocket_pair: Pair):
    thought, mark, rest = itself(pocket_pair, max_new_tokens=250).text.partition("</think>")
    message = chat(pocket, max_tokens=250).choices[0].message
    assert thought.startswith("<think>") and mark, "the pocket target thinks first"
    assert message.reasoning_content == thought.removeprefix("<think>")
    assert message.content == rest


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 0.8, "seed": 3}, {"stop": ["pens"]}])
def test_a_stream_adds_up_to_the_whole(pocket: Live, more: dict[str, Any]):
    whole = chat(pocket, **more)
    texts: dict[int, str] = {}
    finish: dict[int, str] = {}
    usage = None
    for chunk in chat(pocket, stream=True, stream_options={"include_usage": True}, **more):
        usage = chunk.usage or usage
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + said(choice.delta)
            finish |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert texts == {c.index: said(c.message) for c in whole.choices}
    assert finish == {c.index: c.finish_reason for c in whole.choices}
    assert usage == whole.usage


def test_several_answers_have_seeds_of_their_own(pocket: Live):
    sampled = {"temperature": 1.0, "max_tokens": 30}
    together = chat(pocket, n=3, seed=7, **sampled)
    apart = [said(chat(pocket, seed=7 + i, **sampled).choices[0].message) for i in range(3)]
    assert [said(c.message) for c in together.choices] == apart
    assert together.usage.prompt_tokens == chat(pocket).usage.prompt_tokens, "one prompt, however many answers"
    assert together.metrics["speculative_decoding"] is None


def test_a_stop_string_ends_the_answer_before_it(pocket: Live):
    free = said(chat(pocket).choices[0].message)
    word = free.split()[6]
    choice = chat(pocket, stop=word).choices[0]
    assert said(choice.message) == free[: free.index(word)] and choice.finish_reason == "stop"


def test_logprobs_are_the_targets_own(pocket: Live, pocket_pair: Pair):
    expected = itself(pocket_pair, logprobs=3).logprobs
    answer = chat(pocket, logprobs=True, top_logprobs=3)
    told = answer.choices[0].logprobs.content
    assert len(told) == answer.usage.completion_tokens == len(expected)
    assert [t.logprob for t in told] == pytest.approx([lp.logprob for lp in expected], abs=1e-4)
    for token in told:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token
        assert bytes(token.bytes).decode() == token.token
    streamed: list[str] = []
    for chunk in chat(pocket, logprobs=True, stream=True):
        streamed += [t.token for choice in chunk.choices if choice.logprobs for t in choice.logprobs.content]
    assert streamed == [t.token for t in told]


@pytest.mark.parametrize("off", [True, False])
def test_every_answer_says_what_it_took(pocket: Live, off: bool):
    answer = chat(pocket, extra_body={"speculation": {"off": off, "num_draft_tokens": 3, "detailed": True}})
    told = answer.metrics["speculative_decoding"]
    assert told["verifier"] == ("none" if off else "exact") and told["lossless"] and told["relaxed_tokens"] == 0
    assert sum(told["per_step_drafted"]) == told["num_draft_tokens"]
    assert sum(told["per_step_accepted"]) == told["num_accepted_draft_tokens"]
    histogram = told["acceptance_histogram"]
    assert sum(n * steps for n, steps in enumerate(histogram)) == told["num_accepted_draft_tokens"]
    assert sum(histogram) == told["num_spec_steps"], "rounds without a draft are not counted"
    mean = 1 + told["num_accepted_draft_tokens"] / max(told["num_spec_steps"], 1)
    assert told["mean_acceptance_length"] == pytest.approx(mean, abs=1e-3)
    assert told["num_spec_tokens"] == (0 if off else 3) and (told["num_spec_steps"] == 0) == off
    assert answer.metrics["tokens_per_second"] > 0
    assert answer.metrics["queue_time_ms"] <= answer.metrics["time_to_first_token_ms"]


def test_a_lossy_answer_says_which_tokens_were_relaxed_and_why(pocket: Live, pocket_pair: Pair):
    rule = {"verifier": "random", "rate": 0.9, "num_draft_tokens": 4}
    alone = itself(pocket_pair, verifier="random:rate=0.9", num_draft_tokens=4, seed=1)
    answer = chat(pocket, seed=1, extra_body={"speculation": rule | {"trace": True}})
    told = answer.metrics["speculative_decoding"]
    assert not told["lossless"] and told["relaxed_tokens"] == alone.stats.relaxed > 0
    trace = answer.choices[0].trace
    assert "".join(s["text"] for s in trace["spans"]) == said(answer.choices[0].message)
    assert {s["origin"] for s in trace["spans"]} == {"draft", "relaxed", "target"}
    assert len(trace["relaxed"]) == alone.stats.relaxed
    by_token = {s["token"]: s for s in trace["spans"]}
    for relaxed in trace["relaxed"]:
        span = by_token[relaxed["token"]]
        assert span["origin"] == "relaxed" and span["text"] in relaxed["text"]
        assert relaxed["why"] and relaxed["instead"] != relaxed["text"]


def test_requests_of_every_method_share_a_batch_and_change_nobodys_text(pocket: Live):
    alone = said(chat(pocket, extra_body={"speculation": {"off": True}}).choices[0].message)
    methods = ["none", "exact", "sampling", "block", "exact", "fly", "topk", "none", "block", "exact"]
    with ThreadPoolExecutor(len(methods)) as threads:
        ask = lambda m: chat(pocket, extra_body={"speculation": {"verifier": m}})  # noqa: E731
        answers = list(threads.map(ask, methods))
    for method, answer in zip(methods, answers, strict=True):
        if method not in ("fly", "topk"):
            assert said(answer.choices[0].message) == alone, method
        assert answer.metrics["speculative_decoding"]["verifier"] == method
    assert pocket.idle()


def test_texts_are_gone_on_with(pocket: Live, pocket_pair: Pair):
    client, text = pocket.openai(), "Mia has 4 bags with"
    expected = pocket_pair.generate(text, verifier="none", max_new_tokens=12)
    tokens = pocket_pair.tokenizer.encode(text)
    for prompt in (text, tokens):
        answer = client.completions.create(model="pocket", prompt=prompt, max_tokens=12, temperature=0, logprobs=2)
        assert answer.choices[0].text == expected.text
        told = answer.choices[0].logprobs
        assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(expected.tokens)
        assert told.text_offset == sorted(told.text_offset) and told.text_offset[0] == 0
        assert [max(top, key=top.get) for top in told.top_logprobs] == told.tokens
    many = client.completions.create(model="pocket", prompt=[text, "Ana has 3"], n=2, max_tokens=5, temperature=0)
    assert [c.index for c in many.choices] == [0, 1, 2, 3] and many.choices[0].text == many.choices[1].text
    assert expected.text.startswith(many.choices[0].text)
    ids = client.completions.create(model="pocket", prompt=[tokens, tokens], max_tokens=5, temperature=0)
    assert [c.text for c in ids.choices] == [many.choices[0].text] * 2
    pieces = client.completions.create(model="pocket", prompt=text, max_tokens=12, temperature=0, stream=True)
    assert "".join(c.text for p in pieces for c in p.choices) == expected.text


def test_the_rest_of_the_endpoints(pocket: Live, pocket_pair: Pair):
    client = pocket.openai()
    assert [m.id for m in client.models.list()] == ["pocket"] and client.models.retrieve("pocket").object == "model"
    assert pocket.get("/health").json() == {"status": "ready"}
    assert pocket.get("/version").json() == {"version": semspec.__version__}
    found = pocket.post("/tokenize", {"prompt": "Mia has 4 bags", "return_token_strs": True}).json()
    assert found["tokens"] == pocket_pair.tokenizer.encode("Mia has 4 bags")
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 512
    assert pocket.post("/tokenize", {"messages": ASK}).json()["count"] == chat(pocket).usage.prompt_tokens
    menu = pocket.get("/v1/methods").json()
    fly = next(m for m in menu["verifiers"] if m["name"] == "fly")
    theta = {
        "name": "theta",
        "type": "float",
        "default": 0.3,
        "label": "lowest entropy at which a mismatch may pass",
        "main": True,
    }
    assert theta in fly["options"] and not fly["lossless"] and fly["title"] == "Entropy gate and window"
    steps = next(m for m in menu["verifiers"] if m["name"] == "semantic+")["options"]
    lead = {"name": "lead", "type": "int", "default": 0, "label": "steps the target writes first", "main": False}
    assert lead in steps, "what a class overrides keeps its words"
    assert fly["num_draft_tokens"] == 15 and menu["default"]["num_draft_tokens"] is None
    assert menu["target_seconds_per_token"] > 0


def test_metrics_count_what_was_answered(pocket: Live):
    names = {
        "num_draft_tokens": "semspec:spec_decode_num_draft_tokens_total",
        "num_accepted_draft_tokens": "semspec:spec_decode_num_accepted_tokens_total",
        "num_spec_steps": "semspec:spec_decode_num_drafts_total",
        "relaxed_tokens": "semspec:spec_decode_num_relaxed_tokens_total",
    }
    before = {key: pocket.metric(name) for key, name in names.items()}
    tokens = pocket.metric("semspec:generation_tokens_total")
    per_position = pocket.metric("semspec:spec_decode_num_accepted_tokens_per_pos_total")
    answer = chat(pocket, extra_body={"speculation": {"verifier": "topk", "num_draft_tokens": 4}})
    told = answer.metrics["speculative_decoding"]
    assert {key: pocket.metric(name) - before[key] for key, name in names.items()} == {k: told[k] for k in names}
    assert pocket.metric("semspec:generation_tokens_total") - tokens == answer.usage.completion_tokens
    grown = pocket.metric("semspec:spec_decode_num_accepted_tokens_per_pos_total") - per_position
    assert grown == told["num_accepted_draft_tokens"]
    assert pocket.metric("semspec:num_requests_running") == 0 and pocket.metric("semspec:num_slots") == 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"extra_body": {"speculation": {"verifier": "magic"}}}, ["no verifier 'magic'", "exact", "fly"]),
        ({"extra_body": {"speculation": {"verifier": "fly", "tau": 1}}}, ["no option 'tau'", "theta", "window"]),
        ({"extra_body": {"speculation": {"verifier": "fly", "theta": "much"}}}, ["'theta'", "a number"]),
        ({"extra_body": {"speculation": {"verifier": "fly", "window": 10**30}}}, ["'window'", "31 bits"]),
        ({"extra_body": {"speculation": {"verifier": f"fly:window={10**30}"}}}, ["'window'", "31 bits"]),
        ({"extra_body": {"speculation": {"num_draft_tokens": 65}}}, ["at most 64"]),
        ({"extra_body": {"speculation": {"drafter": "oracle"}}}, ["no drafter 'oracle'", "ngram"]),
        ({"extra_body": {"surprise": 1}}, ["no field 'surprise'"]),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, ["does not take tools"]),
        ({"extra_body": {"suffix": "x"}}, ["suffix is not supported"]),
        ({"max_tokens": 301}, ["at most 300"]),
        ({"messages": []}, ["messages"]),
        ({"temperature": -1}, ["temperature"]),
        ({"stop": [""]}, ["stop"]),
        ({"n": 17}, ["at most 16"]),
    ],
)
def test_what_cannot_work_is_a_400_that_says_why(pocket: Live, more: dict[str, Any], words: list[str]):
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(pocket, **more)
    for word in words:
        assert word in refusal.value.message
    assert refusal.value.body["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        chat(pocket, stream=True, **more)


def test_a_model_that_is_not_here_is_a_404(pocket: Live):
    with pytest.raises(openai.NotFoundError, match="'pocket'"):
        chat(pocket, model="gpt-9")
    with pytest.raises(openai.NotFoundError):
        pocket.openai().models.retrieve("gpt-9")


def test_fields_that_ask_for_nothing_are_taken(pocket: Live):
    nothing = {"presence_penalty": 0, "logit_bias": {}, "user": "me", "response_format": {"type": "text"}}
    parts = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    answer = chat(pocket, messages=parts, **nothing)
    assert said(answer.choices[0].message) == said(chat(pocket).choices[0].message)


def test_earlier_turns_are_not_read_again(pocket: Live):
    chat(pocket)
    asked, spared = (pocket.metric(f"semspec:prefix_cache_{name}_total") for name in ("queries", "hits"))
    answer = chat(pocket, messages=[*ASK, {"role": "assistant", "content": "24."}, ASK[0]])
    grown = pocket.metric("semspec:prefix_cache_queries_total") - asked
    found = pocket.metric("semspec:prefix_cache_hits_total") - spared
    assert grown == answer.usage.prompt_tokens - 1
    first = chat(pocket).usage.prompt_tokens
    assert found >= first - 1, "all of the first turn was there"


def test_the_documents_example_works(pocket: Live, capsys: pytest.CaptureFixture[str]):
    text = (Path(__file__).parent.parent.parent / "docs/serve.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example.replace("http://localhost:8000", pocket.url), {})
    assert "'verifier': 'exact'" in capsys.readouterr().out
