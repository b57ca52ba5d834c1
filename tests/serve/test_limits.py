"""Limits, keys and deadlines: what goes beyond them is refused with a status that says so."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import semspec
from semspec import BadRequest
from semspec.cli.serve import keys
from semspec.serve.limits import Limits, Settings
from semspec.serve.schema.speculation import Speculation
from semspec.serve.speculation import apply
from semspec.verify import make
from tests.serve.live import JSON, WAIT, Live, serving, until

LONG: dict[str, Any] = {"model": "tiny", "prompt": "the quick", "max_tokens": 800, "ignore_eos": True, "temperature": 0}


def test_who_finds_the_queue_full_is_told_when_to_come_back(tiny: Live):
    with ThreadPoolExecutor(8) as threads:  # two slots and a queue of six
        with tiny.held():
            running = [threads.submit(tiny.post, "/v1/completions", LONG | {"max_tokens": 80}) for _ in range(8)]
            assert until(lambda: tiny.engine.live == 8)
            refusal = tiny.post("/v1/completions", LONG)
            assert refusal.status_code == 429 and refusal.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(refusal.headers["retry-after"]) <= 60
            with pytest.raises(openai.RateLimitError):
                tiny.openai().completions.create(model="tiny", prompt="x", n=2)
        texts = {answer.result().json()["choices"][0]["text"] for answer in running}
    assert len(texts) == 1, "those who waited got the same answer as those who did not"
    assert tiny.idle() and tiny.post("/v1/completions", LONG | {"max_tokens": 2}).status_code == 200


def test_lossy_rules_need_to_be_allowed(tiny: Live):
    refusal = tiny.post("/v1/completions", LONG | {"speculation": {"verifier": "fly"}})
    assert refusal.status_code == 400
    assert "block, exact, none, sampling" in refusal.json()["error"]["message"]
    with pytest.raises(BadRequest, match="allow_lossy is off"):
        semspec.Options(verifier="fly", allow_lossy=False)


@pytest.mark.parametrize(("flags", "allowed"), [([], False), (["--allow-lossy"], True)])
def test_the_pair_that_a_server_loads_refuses_by_itself(semspec, monkeypatch, flags: list[str], allowed: bool):
    def load(*_: object, **given: object) -> None:
        raise BadRequest(f"asked for with allow_lossy={given['allow_lossy']}")

    monkeypatch.setattr("semspec.pair.loading.load", load)
    monkeypatch.setattr("semspec.serve.engine.Engine", lambda load, *_, **__: load())
    monkeypatch.setattr("semspec.serve.logs.configure", lambda: None)
    done = semspec("serve", "anything", *flags)
    assert done.returncode == 2 and f"asked for with allow_lossy={allowed}" in done.stderr


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"prompt": "x " * 300}, 400, "at most 200"),
        ({"prompt": [10**6]}, 400, "knows ids below"),
        ({"prompt": ""}, 400, "prompt is empty"),
        ({"prompt": "a" * 30_000}, 413, "longer than 20000 bytes"),
        ({"max_tokens": 901}, 400, "at most 900"),
        ({"prompt": ["x"] * 3, "n": 2}, 400, "at most 4"),
        ({"speculation": {"num_draft_tokens": 17}}, 400, "at most 16"),
        ({"speculation": {"loop_period": 2000}}, 400, "loop_period is 2000"),
        ({"speculation": {"loop_repeats": 1}}, 400, "loop_repeats is 1"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"top_p": 0}, 400, "top_p"),
        ({"seed": 2**64}, 400, "seed"),
        ({"speculation": {"relax_span": "thinking"}}, 400, "thinks between markers"),
    ],
)
def test_too_much_is_refused(tiny: Live, more: dict[str, Any], status: int, words: str):
    refusal = tiny.post("/v1/completions", LONG | more)
    assert refusal.status_code == status and words in refusal.json()["error"]["message"]
    assert tiny.idle()


def test_a_body_without_an_announced_length_is_cut_off_too(tiny: Live):
    pieces = iter([b'{"model": "tiny", "prompt": "', *[b"a" * 1000] * 40, b'"}'])
    assert httpx.post(tiny.url + "/v1/completions", content=pieces, headers=JSON, timeout=WAIT).status_code == 413


def test_a_deadline_ends_the_answer_with_an_error(tiny: Live):
    late = LONG | {"deadline": 0.3}
    with tiny.slowed():
        refusal = tiny.post("/v1/completions", late)
        assert refusal.status_code == 504 and refusal.json()["error"]["code"] == "deadline"
        with httpx.stream("POST", tiny.url + "/v1/completions", json=late | {"stream": True}, timeout=WAIT) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert "error" in json.loads(lines[-1].removeprefix("data: ")), "no [DONE]: a cut answer does not look whole"
        soon = {"deadline": 0.3, "ignore_eos": True}
        with pytest.raises(openai.APIError):
            list(tiny.openai().completions.create(
                model="tiny", prompt="x", stream=True, max_tokens=800, extra_body=soon
            ))  # fmt: skip
    assert tiny.idle()


@pytest.fixture(scope="module")
def locked(pair: semspec.Pair) -> Iterator[Live]:
    with serving(lambda: pair, Settings(name="tiny", keys=("first key", "second"))) as live:
        yield live


def basic(password: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()}


@pytest.mark.parametrize(
    "path", ["/", "/page/page.js", "/v1/models", "/metrics", "/version", "/v1/methods", "/nothing"]
)
def test_everything_but_health_needs_a_key(locked: Live, path: str):
    assert locked.get("/health").status_code == 200
    wrong = [{}, {"authorization": "Bearer second "[:-2]}, {"x-api-key": "First key"}, {"authorization": "Bearer"}]
    for headers in [*wrong, basic("third"), {"authorization": "Basic ???"}, {"authorization": "Bearer \xff"}]:
        raw = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
        refusal = locked.get(path, headers=raw)
        assert refusal.status_code == 401 and refusal.json()["error"]["type"] == "authentication_error"
    for headers in ({"authorization": "Bearer first key"}, {"x-api-key": "second"}, basic("second")):
        assert locked.get(path, headers=headers).status_code == (404 if path == "/nothing" else 200)


def test_the_client_sends_its_key(locked: Live):
    assert locked.openai("second").models.list().data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError, match="needs an API key"):
        locked.openai("third").completions.create(model="tiny", prompt="x")


def test_keys_come_from_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEMSPEC_API_KEY", "c")
    (tmp_path / "keys").write_text("d\n\ne\n")
    assert keys(["a", "b"], tmp_path / "keys") == ("a", "b", "c", "d", "e")
    monkeypatch.delenv("SEMSPEC_API_KEY")
    assert keys([], None) == ()
    (tmp_path / "empty").write_text("\n")
    for given, file in (([], tmp_path / "empty"), ([], tmp_path / "missing"), ([""], None)):
        with pytest.raises(BadRequest):
            keys(given, file)


def test_clients_may_not_point_at_the_servers_disk(pocket: Live):
    for how in ({"verifier": "semantic:probes=/etc"}, {"verifier": "semantic", "probes": "/etc"}):
        refusal = pocket.post("/v1/completions", {"model": "pocket", "prompt": "x", "speculation": how})
        assert refusal.status_code == 400 and "'probes'" in refusal.json()["error"]["message"]
    ours = Settings(allow_lossy=True, defaults=semspec.Options(verifier="semantic:probes=here,tau=0.5"))
    rule = apply(Speculation(verifier="semantic"), ours).verifier
    assert rule == make("semantic:probes=here"), "the place that whoever runs the server gave"
    assert apply(Speculation.model_validate({"tau": 0.7}), ours).verifier == make("semantic:probes=here,tau=0.7")


def test_other_sites_pages_may_not_use_it_unless_allowed(pair: semspec.Pair, tiny: Live):
    origin = {"origin": "https://example.org"}
    assert "access-control-allow-origin" not in tiny.get("/v1/models", headers=origin).headers
    with serving(lambda: pair, Settings(cors=("https://example.org",))) as live:
        assert live.get("/v1/models", headers=origin).headers["access-control-allow-origin"] == "https://example.org"


def test_a_body_that_never_comes_holds_nothing(pair: semspec.Pair):
    with serving(lambda: pair, Settings(limits=Limits(body_seconds=0.2))) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
            connection.sendall(b"content-length: 100\r\n\r\n{")
            assert b" 408 " in connection.recv(1000)


@pytest.mark.parametrize("wrong", [{"queue": -1}, {"new_tokens": 0}, {"deadline": 0}, {"body_bytes": 10}])
def test_limits_that_make_no_sense(wrong: dict[str, int]):
    with pytest.raises(BadRequest):
        Limits(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "most", "used"), [(None, 64, 15), (None, 10, 10), (4, 64, 4)])
def test_a_rule_brings_its_own_draft_length_up_to_the_limit(given: int | None, most: int, used: int):
    ours = Settings(
        allow_lossy=True, defaults=semspec.Options(num_draft_tokens=given), limits=Limits(draft_tokens=most)
    )
    assert apply(Speculation(verifier="fly"), ours).draft_length() == used
    alone = replace(ours, defaults=semspec.Options(verifier="fly", num_draft_tokens=given))
    assert apply(None, alone).draft_length() == used
