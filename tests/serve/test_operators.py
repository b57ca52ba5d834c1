"""What operators need: fair shares, limits by client, keys that change, ids, metrics under vLLM's names."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as families

import semspec
from semspec.errors import BadRequest
from semspec.serve.admission import Admission, fairest, victims
from semspec.serve.auth import KeyStore, name_of
from semspec.serve.http_errors import HttpError
from semspec.serve.limits import Limits, Settings
from tests.serve.live import WAIT, Live, serving, until
from tests.serve.scripted import scripted_pair

HELLO: dict[str, Any] = {"model": "s", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
SETTINGS = Settings(name="s", limits=Limits(new_tokens=500))


def scripted(slots: int = 4) -> semspec.Pair:
    return scripted_pair({"hello": ["Good day."]}, slots=slots)


def gated(pair: Any) -> threading.Event:
    """No answer ends until it is set: requests pile up as long as a test likes."""
    gate, inner = threading.Event(), pair.target.logits

    def logits(context: list[int]) -> list[float]:
        if gate.is_set():
            return inner(context)
        time.sleep(0.005)
        return [0.0] * 100 + [100.0] + [0.0] * (pair.target.vocab_size - 101)

    pair.target.logits = logits
    return gate


@contextmanager
def opened_at_the_end() -> Iterator[threading.Event]:
    """A gate at which nobody is left standing."""
    gate = threading.Event()
    try:
        yield gate
    finally:
        gate.set()


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


# -- fair shares


def test_a_greedy_client_leaves_room_for_sixteen_fair_ones():
    pair: Any = scripted()
    fair = [f"fair-{i}" for i in range(16)]
    settings = replace(SETTINGS, limits=Limits(queue=28, choices=16), keys=("greedy", *fair))
    body = HELLO | {"max_tokens": 3000}
    greed = f"key {name_of('greedy')}"
    with serving(lambda: pair, settings) as live, ThreadPoolExecutor(40) as threads:
        gate = gated(pair)
        greedy = [
            threads.submit(live.post, "/v1/chat/completions", body | {"n": 4}, headers=key("greedy")) for _ in range(8)
        ]
        assert until(lambda: live.engine.live == 32), "every slot and every place in the queue"
        assert live.post("/v1/chat/completions", HELLO, headers=key("greedy")).status_code == 429
        asked = [
            threads.submit(live.post, "/v1/chat/completions", body | {"stream": i % 2 == 0}, headers=key(name))
            for i, name in enumerate(fair)
        ]
        assert until(lambda: sum(request.client != greed for request in list(live.engine.accepted)) == 16)
        gate.set()
        assert [answer.result().status_code for answer in asked] == [200] * 16, "each fair one is served"
        statuses = [answer.result().status_code for answer in greedy]
        assert statuses.count(200) >= 1 and set(statuses) == {200, 429}
        refusal = next(a.result() for a in greedy if a.result().status_code == 429)
        assert "retry-after" in refusal.headers and "fewer requests" in refusal.json()["error"]["message"]
        assert live.idle()


def test_who_is_not_ready_gives_way_too(monkeypatch: pytest.MonkeyPatch):
    """Else a client with many slow grammars would keep every place, and others would be refused for minutes."""
    pair: Any = scripted()
    settings = replace(SETTINGS, limits=Limits(queue=4, deadline=WAIT), keys=("greedy", "fair"))
    compiled = pair.resources.grammars.compiled
    slow = HELLO | {"guided_regex": "[a-z]+", "n": 2}
    with serving(lambda: pair, settings) as live, ThreadPoolExecutor(4) as threads, opened_at_the_end() as gate:
        monkeypatch.setattr(pair.resources.grammars, "compiled", lambda text: (gate.wait(), compiled(text))[1])
        greedy = [threads.submit(live.post, "/v1/chat/completions", slow, headers=key("greedy")) for _ in range(4)]
        assert until(lambda: live.engine.live == 8), "every slot and every place in the queue"
        assert live.post("/v1/chat/completions", HELLO, headers=key("fair")).status_code == 200
        assert until(lambda: sum(answer.done() for answer in greedy) == 1), "and is told so at once"
        assert live.engine.live == 6 and len(live.engine.accepted) == 3
        gate.set()
        statuses = sorted(answer.result().status_code for answer in greedy)
        assert statuses == [200, 200, 200, 429] and live.idle()
        refusal = next(a.result() for a in greedy if a.result().status_code == 429)
        assert refusal.headers["retry-after"] and "fewer requests" in refusal.json()["error"]["message"]


def test_a_client_may_want_several_answers_where_another_has_many_requests():
    pair: Any = scripted()
    settings = replace(SETTINGS, limits=Limits(queue=6), keys=("greedy", "fair"))
    with serving(lambda: pair, settings) as live, ThreadPoolExecutor(11) as threads:
        with live.held():
            greedy = [
                threads.submit(live.post, "/v1/chat/completions", HELLO, headers=key("greedy")) for _ in range(10)
            ]
            assert until(lambda: live.engine.live == 10 and all(r.submitted for r in list(live.engine.accepted)))
            fair = threads.submit(live.post, "/v1/chat/completions", HELLO | {"n": 3}, headers=key("fair"))
            assert until(lambda: fair.done() or any(r.count == 3 for r in list(live.engine.accepted)))
        assert len(fair.result().json()["choices"]) == 3
        statuses = sorted(answer.result().status_code for answer in greedy)
        assert statuses == [200] * 7 + [429] * 3 and live.idle()


def test_a_deadline_holds_while_others_grammars_are_compiled(monkeypatch: pytest.MonkeyPatch):
    pair: Any = scripted()
    with serving(lambda: pair, SETTINGS) as live, opened_at_the_end() as gate:
        monkeypatch.setattr(pair.resources.grammars, "compiled", lambda text: gate.wait())
        late = live.post("/v1/chat/completions", HELLO | {"guided_regex": "a+", "deadline": 0.1})
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline"
        assert live.engine.live == 0 and not live.engine.accepted


def request(client: str, count: int = 1, begun: bool = False, priority: int = 0, arrived: float = 0.0) -> Any:
    tasks = [SimpleNamespace(ticket=SimpleNamespace(task=object()), done=False) for _ in range(count)]
    return SimpleNamespace(
        client=client, count=count, begun=begun, priority=priority, arrived=arrived, sequences=tasks
    )  # fmt: skip


def test_who_gives_way_to_whom():
    many = [request("a", 4, arrived=i) for i in range(4)]
    assert victims("b", 1, 1, many) == [many[-1]], "the latest of the greediest"
    assert victims("b", 6, 6, many) == [many[-1], many[-2]], "as many as it takes"
    assert victims("b", 6, 2, many) == [many[-1]], "where there is some room, fewer"
    assert victims("a", 1, 1, many) == [], "nobody gives way to oneself"
    assert victims("b", 8, 9, many) == [], "nor to somebody as greedy"
    assert victims("b", 1, 1, [request("a", 4, begun=True)]) == [], "nor what has begun"
    assert victims("b", 1, 1, [request("a"), request("b")]) == [], "nor among equals"
    single = [request("a", arrived=i) for i in range(9)]
    assert victims("b", 3, 3, single) == single[:-4:-1], "also where all ask for one answer"


def test_slots_go_to_whoever_has_the_fewest_then_by_priority():
    a, b = request("a", 3), request("b", 2)
    late = request("b", 1, priority=-1)
    waiting = [s.ticket.task for s in (*a.sequences[1:], *b.sequences, *late.sequences)]
    assert fairest(waiting, [a, b, late]) is late.sequences[0].ticket.task, "b has none, and prefers the late one"
    assert fairest(waiting[:2], [a]) is waiting[0], "else in order of arrival"
    urgent = request("a", 1, priority=-9)
    mixed = [*(s.ticket.task for s in b.sequences), urgent.sequences[0].ticket.task]
    running = request("a", 1)
    assert fairest(mixed, [running, b, urgent]) is mixed[0], "no priority passes another client"
    assert fairest([waiting[0]], []) is waiting[0]
    hasty = request("c", 1, priority=-(2**31))
    equal = [s.ticket.task for s in (*b.sequences, *hasty.sequences)]
    assert fairest(equal, [b, hasty]) is equal[0], "nor that of one with as many: who came first is first"


def test_limits_of_a_client():
    admission = Admission(Limits(client_requests=2, client_rate=60))
    for _ in range(60):
        admission.check("a", 0.0, [])
    with pytest.raises(HttpError, match="60 requests a minute") as refusal:
        admission.check("a", 0.0, [])
    assert refusal.value.retry_after == 1
    admission.check("b", 0.0, [])
    admission.check("a", 1.0, [])
    with pytest.raises(HttpError, match="2 requests of yours"):
        admission.check("c", 0.0, [request("c"), request("c")])
    with pytest.raises(BadRequest):
        Limits(client_rate=0)


def test_limits_are_told_over_http():
    pair = scripted()
    with serving(lambda: pair, replace(SETTINGS, limits=Limits(client_rate=2))) as live:
        live.engine.clock = lambda: 1.0  # no time passes
        statuses = [live.post("/v1/chat/completions", HELLO).status_code for _ in range(3)]
        assert statuses == [200, 200, 429] and live.get("/v1/models").status_code == 200
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            refusal = live.post(path, body)
            assert refusal.status_code == 429 and "2 requests a minute" in refusal.json()["error"]["message"]


# -- keys


def test_keys_change_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "keys"
    file.write_text("one-secret # alice\nother-secret\n")
    pair = scripted()
    caplog.set_level("INFO", "semspec.serve")
    with serving(lambda: pair, replace(SETTINGS, key_file=file)) as live:

        def status(name: str) -> int:
            return live.post("/v1/chat/completions", HELLO, headers=key(name)).status_code

        assert (status("one-secret"), status("other-secret"), status("third")) == (200, 200, 401)
        file.write_text("third\n")
        live.server.config.app.state.keys.expire()  # as SIGHUP does
        assert (status("one-secret"), status("third")) == (401, 200)
        file.unlink()
        live.server.config.app.state.keys.reload()
        assert status("third") == 200, "a file that cannot be read changes nothing"
        page = live.get("/metrics", headers=key("third")).text
        file.write_text("# nobody any more\n")
        live.server.config.app.state.keys.expire()
        assert status("third") == status("one-secret") == 401, "a file without keys takes all of them away"
        assert "no key in it any more" in caplog.text
    assert 'client="alice"' in page and f'client="{name_of("other-secret")}"' in page
    logged = [record.fields.get("key") for record in caplog.records if record.getMessage() == "request"]
    assert "alice" in logged and "secret" not in page and "one-secret" not in caplog.text


def test_a_file_of_keys_is_looked_at_now_and_then(tmp_path: Path):
    now, file = [0.0], tmp_path / "keys"
    file.write_text("a\n")
    store = KeyStore(["b"], file, clock=lambda: now[0])
    file.write_text("c\n")
    os.utime(file, ns=(1, 1))
    store.refresh()
    assert store.owner(b"a") and not store.owner(b"c"), "not at every request"
    now[0] = 2.0
    store.refresh()
    assert store.owner(b"c") and not store.owner(b"a") and store.owner(b"b") == name_of("b")


# -- ids, metrics


def test_an_id_is_passed_through_if_it_is_one(tmp_path: Path):
    pair = scripted()
    with serving(lambda: pair, SETTINGS) as live:

        def answered(name: str) -> str:
            return live.get("/version", headers={"X-Request-Id": name}).headers["x-request-id"]

        assert answered("trace-01.a:b_c") == "trace-01.a:b_c"
        for wrong in ("", "a b", "x" * 129, "a;b", "<b>"):
            assert answered(wrong) != wrong
        body = live.post("/v1/chat/completions", HELLO, headers={"X-Request-Id": "mine"}).json()
        assert body["id"] == "chatcmpl-mine"


VLLM = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "time_per_output_token_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "prompt_tokens", "generation_tokens", "request_success", "prefix_cache_queries",
    "prefix_cache_hits", "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
]  # fmt: skip


def test_metrics_have_vllms_names_and_the_models():
    pair = scripted()
    with serving(lambda: pair, SETTINGS) as live:
        assert live.post("/v1/chat/completions", HELLO).status_code == 200
        plain = live.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain")
        found = {family.name: family for family in families(plain.text)}
        assert {f"vllm:{name}" for name in VLLM} <= set(found) and "process_resident_memory_bytes" in found
        for name, family in found.items():
            if name.startswith(("vllm:", "semspec:")):
                assert all(sample.labels["model_name"] == "s" for sample in family.samples), name
        count = {s.name: s.value for s in found["vllm:request_generation_tokens"].samples}
        assert count["vllm:request_generation_tokens_count"] == 1 and count["vllm:request_generation_tokens_sum"] > 3
        assert live.metric("vllm:generation_tokens_total") == live.metric("semspec:generation_tokens_total") > 3
        for version in ("abc", "1.0.0"):
            opened = live.get("/metrics", headers={"Accept": f"a/b, application/openmetrics-text; version={version}"})
            assert opened.status_code == 200
        assert opened.headers["content-type"].startswith("application/openmetrics-text")
        assert any(family.name == "vllm:prompt_tokens" for family in openmetrics(opened.text))


# -- drafts under load


def test_drafts_stop_under_load_and_no_text_changes(pair: semspec.Pair):
    body = {"model": "s", "prompt": "the quick", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    body["speculation"] = {"verifier": "exact", "num_draft_tokens": 4}

    def ask(live: Live) -> tuple[str, int]:
        answer = live.post("/v1/completions", body).json()
        return answer["choices"][0]["text"], answer["metrics"]["speculative_decoding"]["num_draft_tokens"]

    with serving(lambda: pair, SETTINGS) as live:
        text, drafted = ask(live)
    assert drafted > 0
    with serving(lambda: pair, replace(SETTINGS, allow_lossy=True, limits=Limits(speculating=0))) as live:
        assert ask(live) == (text, 0)
        body["speculation"] = {"verifier": "fly", "num_draft_tokens": 4}
        assert ask(live)[1] > 0, "a lossy rule was asked for, and is what the answer has to come from"
    with serving(lambda: pair, replace(SETTINGS, limits=Limits(speculating=1))) as live:
        body["speculation"] = {"verifier": "exact", "num_draft_tokens": 4}
        assert ask(live) == (text, drafted), "nobody else is there"
