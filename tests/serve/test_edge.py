"""Small print of HTTP: what clients of OpenAI send and expect, what the log says, what is counted."""

from __future__ import annotations

import io
import json
import logging
import socket
import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessage

import semspec
from semspec import BadRequest, Pair
from semspec.serve.limits import Limits, Settings
from semspec.serve.logs import JsonFormatter, Stderr
from semspec.serve.schema.messages import Message
from tests.serve.live import WAIT, Live, serving, until

ASK = [{"role": "user", "content": "Mia has 4 bags with 6 pens each. How many pens does Mia have?"}]
CHAT: dict[str, Any] = {"model": "pocket", "messages": ASK, "temperature": 0, "max_tokens": 8}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 4, "ignore_eos": True, "temperature": 0}


# -- statuses


def test_what_never_fits_is_a_400_and_not_a_429(pair: semspec.Pair):
    limits = Limits(queue=2, choices=50)
    with serving(lambda: pair, Settings(name="tiny", limits=limits)) as live:
        room = live.engine.slots + limits.queue
        refusal = live.post("/v1/completions", TEXT | {"n": room + 1})
        assert refusal.status_code == 400 and f"more than {room}" in refusal.json()["error"]["message"]
        assert live.post("/v1/completions", TEXT | {"n": room}).status_code == 200


def test_a_deadline_is_not_tried_again(tiny: Live):
    failures = tiny.metric("semspec:request_failure_total")
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="x", max_retries=2)
    late = {"deadline": 0.01, "ignore_eos": True}
    with tiny.slowed(), pytest.raises(openai.InternalServerError) as error:
        client.completions.create(model="tiny", prompt="x", max_tokens=800, extra_body=late)
    assert error.value.status_code == 504 and error.value.response.headers["x-should-retry"] == "false"
    assert tiny.idle() and tiny.metric("semspec:request_failure_total") == failures + 1


def test_health_has_a_head(tiny: Live):
    for path in ("/health", "/"):
        found = httpx.head(tiny.url + path, timeout=WAIT)
        assert found.status_code == 200 and found.content == b""
    elsewhere = {"host": "evil.example"}
    assert httpx.head(tiny.url + "/health", headers=elsewhere, timeout=WAIT).status_code == 403


def test_every_file_of_the_page_has_its_headers(tiny: Live):
    for path in ("/", "/page/index.html", "/page/page.js", "/page/style.css", "/page/icon.svg"):
        headers = tiny.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"], path
        assert headers["referrer-policy"] == "no-referrer" and headers["x-content-type-options"] == "nosniff"
        again = tiny.get(path, headers={"if-none-match": headers["etag"]})
        assert "content-security-policy" in again.headers or again.status_code == 304


def test_the_module_of_the_commands_runs_them():
    done = subprocess.run(
        [sys.executable, "-m", "semspec.cli", "serve", "pocket", "--deadline", "nan"],
        capture_output=True, text=True, timeout=WAIT,
    )  # fmt: skip
    assert done.returncode == 2 and "deadline is nan" in done.stderr


def test_a_models_name_is_text(semspec):
    done = semspec("serve", "pocket", "--name", "caf\udce9")
    assert done.returncode == 2 and "the model's name is not valid UTF-8" in done.stderr


# -- fields


def test_a_dumped_message_is_taken_back(pocket: Live):
    answer = pocket.openai().chat.completions.create(**CHAT)
    messages = [*ASK, answer.choices[0].message.model_dump(), ASK[0]]
    assert pocket.openai().chat.completions.create(**CHAT | {"messages": messages}).usage
    empty = ChatCompletionMessage(role="assistant", content=None, annotations=[], tool_calls=[]).model_dump()
    assert Message.model_validate(empty).plain() == {"role": "assistant", "content": ""}


def test_null_asks_for_nothing(pocket: Live):
    names = ("n", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "seed", "user")
    names += ("logprobs", "top_logprobs", "temperature", "top_p", "tools", "response_format", "deadline", "speculation")
    nulls = dict.fromkeys(names)
    assert pocket.post("/v1/chat/completions", CHAT | nulls).status_code == 200
    null_speculation = dict.fromkeys(("off", "verifier", "num_draft_tokens", "drafter", "trace", "detailed"))
    assert pocket.post("/v1/chat/completions", CHAT | {"speculation": null_speculation}).status_code == 200


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams"),
        ({"max_completion_tokens": 9}, "max_tokens and max_completion_tokens differ"),
        ({"messages": [ASK[0] | {"tool_calls": [{"id": "x"}]}]}, "tool_calls.0.function is required"),
        ({"messages": [ASK[0] | {"audio": {"id": "x"}}]}, "audio is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]}, "no field 'more'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role tool"),
        ({"stream": True, "stream_options": {"include_usage": True, "more": 1}}, "no field 'more'"),
    ],
)
def test_nothing_is_ignored_in_silence(pocket: Live, more: dict[str, Any], words: str):
    refusal = pocket.post("/v1/chat/completions", CHAT | more)
    assert refusal.status_code == 400 and words in refusal.json()["error"]["message"]


def test_a_name_reaches_the_chat_template(pocket: Live, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    def encode(_: object, prompt: Any, form: Any) -> list[int]:
        seen.extend(prompt)
        return [1, 2, 3]

    monkeypatch.setattr("semspec.serve.tokenization.encode", encode)
    assert pocket.post("/v1/chat/completions", CHAT | {"messages": [ASK[0] | {"name": "Mia"}]}).status_code == 200
    assert seen == [ASK[0] | {"name": "Mia"}]


# -- the log


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.message == "request"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanished_is_a_499(tiny: Live, caplog: pytest.LogCaptureFixture, stream: bool):
    caplog.set_level(logging.INFO, "semspec.serve")
    address, port = tiny.url.removeprefix("http://").split(":")
    body = json.dumps(TEXT | {"max_tokens": 800, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with tiny.held(after=2):
        with socket.create_connection((address, int(port)), timeout=WAIT) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            assert until(lambda: tiny.engine.running == 1)
        assert until(lambda: not tiny.engine.accepted)
    assert until(lambda: any(line["status"] == 499 for line in logged(caplog))) and tiny.idle()
    assert 'semspec:http_responses_total{model_name="tiny",status="499"}' in tiny.get("/metrics").text


@pytest.mark.parametrize("path", ["/%C2%9B31m", "/%E2%80%A8x", "/%0Ax", "/%ED%A0%80", "/%1B[2J", "/%FF"])
def test_the_log_is_ascii(tiny: Live, caplog: pytest.LogCaptureFixture, path: str):
    caplog.set_level(logging.INFO, "semspec.serve")
    assert tiny.get(path).status_code == 404
    assert until(lambda: any(line["status"] == 404 for line in logged(caplog)))
    for record in caplog.records:
        line = JsonFormatter().format(record)
        assert line.isascii() and line.isprintable()


def test_the_log_follows_standard_error(monkeypatch: pytest.MonkeyPatch):
    """A program around the server may close the one that was there when logs were configured."""
    record = logging.LogRecord("semspec.serve", logging.INFO, __file__, 1, "it goes on", None, None)
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    handler = Stderr()
    handler.emit(record)
    monkeypatch.setattr(sys, "stderr", second)
    first_said = first.getvalue()
    first.close()
    handler.emit(record)
    assert first_said == second.getvalue() == "it goes on\n"


# -- counting


def test_a_prompt_is_counted_once(pocket: Live):
    def grown(**more: Any) -> tuple[float, int]:
        before = pocket.metric("semspec:prompt_tokens_total")
        usage = pocket.post("/v1/completions", {"model": "pocket", "max_tokens": 2} | more).json()["usage"]
        assert pocket.idle()
        return pocket.metric("semspec:prompt_tokens_total") - before, usage["prompt_tokens"]

    for more in ({"prompt": "Mia has", "n": 3}, {"prompt": ["Mia has", "Ana has 4"], "n": 2}, {"prompt": "Mia"}):
        counted, used = grown(**more)
        assert counted == used, more


def test_several_answers_read_their_prompt_once_and_say_what_was_cached(pocket: Live):
    prompt = "Mia has 4 bags with 6 pens each. Tom has 5 more pens than Mia. How many pens does Tom have? " * 3
    names = ("semspec:prefix_cache_queries_total", "semspec:prefix_cache_hits_total")
    body = {"model": "pocket", "prompt": prompt, "max_tokens": 4, "temperature": 1.0, "seed": 5}
    body["cache_salt"] = "nobody else's"  # other tests ask the same pair

    def ask(**more: Any) -> tuple[dict[str, Any], float]:
        before = [pocket.metric(name) for name in names]
        answer = pocket.post("/v1/completions", body | more).json()
        assert pocket.idle()
        queries, hits = (pocket.metric(name) - old for name, old in zip(names, before, strict=True))
        return answer, queries - hits

    several, read = ask(n=4)
    usage = several["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] < 16 and read < usage["prompt_tokens"] + 4 * 16
    alone, read = ask()
    assert alone["choices"][0]["text"] == several["choices"][0]["text"], "a seed's text is the same from a copy"
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1 and read < 16
    best, _ = ask(n=1, best_of=4)
    assert best["usage"]["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 16


@pytest.mark.parametrize("private", [False, True])
def test_nobody_learns_what_others_have_asked(pocket_pair: Pair, private: bool):
    """With --private-prompts what is cached of a prompt is for the same key only; it is always for the same salt."""
    settings = Settings(name="pocket", keys=("one-key", "another-key"), private_prompts=private)
    prompt = f"Mia has 4 bags with 6 pens each. Tom has 5 more pens than Mia. Is it private? {private}"
    with serving(lambda: pocket_pair, settings) as live:

        def cached(key: str, **more: Any) -> int:
            body = {"model": "pocket", "prompt": prompt, "max_tokens": 2} | more
            answer = live.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("one-key") < 40 and (all_of_it := cached("one-key")) > 20
        assert (cached("another-key") == all_of_it) != private
        assert cached("one-key", cache_salt="mine") == 0 and cached("one-key", cache_salt="mine") == all_of_it
        assert cached("another-key", cache_salt="yours") == 0
        long = {"model": "pocket", "prompt": "x", "cache_salt": "x" * 201}
        assert live.post("/v1/completions", long, headers={"authorization": "Bearer one-key"}).status_code == 400


def test_only_successes_are_counted_as_such(tiny: Live):
    names = ("semspec:request_success_total", "semspec:request_failure_total")
    before = [tiny.metric(name) for name in names]
    assert tiny.post("/v1/completions", TEXT).status_code == 200
    with tiny.slowed():
        assert tiny.post("/v1/completions", TEXT | {"max_tokens": 800, "deadline": 0.01}).status_code == 504
    assert tiny.idle() and [tiny.metric(name) for name in names] == [before[0] + 1, before[1] + 1]
    text = tiny.get("/metrics").text
    assert 'request_success_total{finished_reason="length",' in text
    assert 'request_success_total{finished_reason="deadline",' not in text
    assert "process_resident_memory_bytes" in text


def test_a_mean_acceptance_length_is_over_drafted_rounds(pocket: Live):
    """Lookup finds nothing to draft in many rounds; they are neither drafts nor in the mean."""
    how = {"drafter": "ngram", "detailed": True, "num_draft_tokens": 3}
    answer = pocket.post("/v1/chat/completions", CHAT | {"max_tokens": 120, "speculation": how}).json()
    report = answer["metrics"]["speculative_decoding"]
    drafted = [n for n in report["per_step_drafted"] if n]
    assert 0 < len(drafted) < len(report["per_step_drafted"])
    assert report["num_spec_steps"] == len(drafted) == sum(report["acceptance_histogram"])
    mean = 1 + report["num_accepted_draft_tokens"] / len(drafted)
    assert report["mean_acceptance_length"] == pytest.approx(mean, abs=1e-3)


def test_drafts_that_branch_give_the_targets_text(pocket: Live):
    ask = CHAT | {"max_tokens": 60, "temperature": 0.7, "seed": 5}
    alone = pocket.post("/v1/chat/completions", ask | {"speculation": {"off": True}}).json()
    for drafter in ("model:tree=20,top=5", "ngram:tree=9"):
        how = {"verifier": "exact", "drafter": drafter, "num_draft_tokens": 4, "detailed": True}
        answer = pocket.post("/v1/chat/completions", ask | {"speculation": how}).json()
        assert answer["choices"][0]["message"] == alone["choices"][0]["message"]
    refused = pocket.post("/v1/chat/completions", ask | {"speculation": {"drafter": "model:tree=64"}})
    assert refused.status_code == 400 and "tree is 64" in refused.text
    refused = pocket.post(
        "/v1/chat/completions", ask | {"speculation": {"drafter": "model:tree=8", "verifier": "block"}}
    )
    assert refused.status_code == 400 and "cannot verify tree drafts" in refused.text


def test_limits_of_time_are_numbers():
    with pytest.raises(BadRequest, match="deadline is nan"):
        Limits(deadline=float("nan"))
