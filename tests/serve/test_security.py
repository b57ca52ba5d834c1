"""What a hostile client or page may try: paths, limits passed through nested options, other hosts, garbage."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

import semspec
from semspec import BadRequest, Options, draft
from semspec.cli.serve import keys
from semspec.draft import DrafterKind
from semspec.sampling.logit_options import LogitOptions
from semspec.serve.app import make_app
from semspec.serve.engine import Engine
from semspec.serve.hosts import HostCheck, host_names, parse_host
from semspec.serve.limits import Limits, Settings
from semspec.serve.menu import menu
from semspec.serve.metrics import Metrics
from semspec.serve.schema.requests import ChatRequest, CompletionRequest
from semspec.serve.schema.speculation import Speculation
from semspec.serve.speculation import apply
from semspec.serve.tokenization import Tokenization
from semspec.verify import REGISTRY
from semspec.verify.checked import option_fields
from tests.serve.live import JSON, WAIT, Live, serving

ASK: dict[str, Any] = {"model": "pocket", "prompt": "Mia has 4", "max_tokens": 4}
LOOSE = Settings(allow_lossy=True, limits=Limits(draft_tokens=8))


def asked(settings: Settings = LOOSE, **speculation: Any) -> Options:
    return apply(Speculation.model_validate(speculation), settings)


def test_what_rules_do_by_default_or_as_published_is_allowed():
    for name, rule in REGISTRY.items():
        if not getattr(rule, "refereed", False):
            asked(verifier=name)
        if "paper" in {f.name for f in option_fields(rule)}:
            assert asked(verifier=name, paper=True).verifier.paper  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "speculation",
    [
        {"verifier": "semantic+:probes={path}"},
        {"verifier": "semantic: probes ={path}"},
        {"verifier": "semantic+", "probes": "{path}"},
        {"verifier": "semantic+", "rewrite": "semantic:probes={path}"},
        {"verifier": "semantic+:rewrite=semantic:probes={path}"},
        {"verifier": "specreason", "rewrite": "semantic+:rewrite=semantic:probes={path}"},
        {"verifier": "semantic+", "rewrite": "semantic"},
        {"verifier": "semantic+", "rewrite": "{path}"},
    ],
)
def test_no_request_names_a_path_however_deep(
    pocket: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculation: dict[str, str]
):
    def load(*_: object) -> None:
        raise AssertionError("the disk was looked at")

    monkeypatch.setattr("semspec.probe.Probe.load", load)
    (tmp_path / "judge").mkdir()
    how = {key: value.format(path=tmp_path) for key, value in speculation.items()}
    refusal = pocket.post("/v1/completions", ASK | {"speculation": how})
    assert refusal.status_code == 400, refusal.text


def test_every_text_option_is_known_to_be_a_path_a_rule_or_words():
    """A new option that is text has to be thought about: a path needs its metadata, a rule its checks."""
    texts = {
        (n, f.name)
        for n, rule in REGISTRY.items()
        for f in option_fields(rule)
        if isinstance(f.default, str) and "choices" not in f.metadata
    }
    assert {name for _, name in texts} <= {"rewrite", "prompt", "question"}, texts


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"verifier": "semantic+", "rewrite_tokens": 200}, "rewrite_tokens"),
        ({"verifier": "semantic+:rewrite_tokens=200"}, "rewrite_tokens"),
        ({"verifier": "semantic+", "max_step_tokens": 100_000}, "max_step_tokens"),
        ({"verifier": "semantic+", "rewrite": "fly:window=2000000000"}, "min_draft_tokens"),
        ({"verifier": "semantic+", "rewrite": "fly:window=99999999999999999999"}, "31 bits"),
        ({"verifier": "semantic+", "rewrite": "typical:epsilon=nan"}, "epsilon is nan"),
        ({"verifier": "semantic+", "rewrite": "none"}, "token by token"),
        ({"verifier": "semantic+", "rewrite": "magic"}, "no verifier 'magic'"),
        ({"verifier": "semantic+", "rewrite": 3}, "a text"),
        ({"num_draft_tokens": 9}, "at most 8"),
        ({"drafter": "ngram:tree=9"}, "at most 8"),
        ({"off": True, "bogus": 1}, "no option 'bogus'"),
        ({"off": True, "num_draft_tokens": 9}, "at most 8"),
        ({"off": True, "verifier": "semantic:probes=/etc"}, "'probes'"),
    ],
)
def test_limits_hold_for_every_option(speculation: dict[str, Any], words: str):
    with pytest.raises(BadRequest, match=words):
        asked(**speculation)


def test_lengths_that_nobody_asked_for_give_way():
    rule = asked(verifier="semantic+").verifier
    assert dataclasses.asdict(rule)["rewrite_tokens"] == 8  # type: ignore[call-overload]
    ours = dataclasses.replace(LOOSE, defaults=Options(verifier="semantic+:rewrite_tokens=50"))
    for options in (apply(None, ours), asked(ours, trace=True)):
        assert dataclasses.asdict(options.verifier)["rewrite_tokens"] == 8  # type: ignore[call-overload]
    assert asked(Settings(), num_draft_tokens="auto").num_draft_tokens == "auto"
    for auto in ("auto", "auto-repeatable"):
        assert asked(num_draft_tokens=auto).max_draft_tokens == 8, "an automatic length stays within the limit"
        assert asked(num_draft_tokens=auto, max_draft_tokens=3).max_draft_tokens == 3, "or within what is asked for"
    with pytest.raises(BadRequest, match="max_draft_tokens is 9; this server allows at most 8"):
        asked(num_draft_tokens="auto", max_draft_tokens=9)
    with pytest.raises(BadRequest, match="at most 8"):
        make_app(Engine(lambda: None), Metrics(), dataclasses.replace(LOOSE, defaults=Options(num_draft_tokens=9)))  # type: ignore[arg-type,return-value]


def test_only_lossless_rules_however_deep():
    with pytest.raises(BadRequest, match="lossless ones"):
        asked(Settings(), verifier="semantic+", rewrite="fly")
    with pytest.raises(BadRequest, match="lossless ones"):
        asked(Settings(), off=True, verifier="fly")


# -- hosts and origins


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True), ("LocalHost:1234", True), ("localhost.", True), ("127.0.0.1:8000", True),
        ("127.9.9.9", True), ("[::1]:80", True), ("[0:0::1]", True), ("[::ffff:127.0.0.1]", True),
        ("evil.example:8000", False), ("localhost.evil.example", False), ("evil.localhost", False),
        ("localhost@evil.example", False), ("127.0.0.1.evil.example", False), ("", False), ("localhost:", False),
        ("localhost:x", False), ("10.0.0.1", False), ("[::2]", False), ("::1", False), ("x[::1]", False),
        ("127.1", False), ("0.0.0.0", False), ("local host", False), ("localhost..", False), ("a,localhost", False),
    ],
)  # fmt: skip
def test_a_loopback_server_takes_loopback_hosts_only(tiny: Live, host: str, allowed: bool):
    for path in ("/v1/models", "/", "/health", "/page/page.js"):
        found = tiny.get(path, headers={"host": host})
        assert found.status_code == (200 if allowed else 403), path
        assert allowed or found.json()["error"]["code"] == "bad_host"


def test_a_request_without_a_host_is_refused(tiny: Live):
    address, port = tiny.url.removeprefix("http://").split(":")
    with socket.create_connection((address, int(port)), timeout=WAIT) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b" 403 " in connection.recv(1000)


@pytest.fixture(scope="module")
def elsewhere(pair: semspec.Pair) -> Iterator[Live]:
    settings = Settings(
        hosts=host_names(["Models.Example.", "fe80::1", "10.1.2.3"]), cors=("https://page.example", "null")
    )
    with serving(lambda: pair, settings) as live:
        yield live


@pytest.mark.parametrize("host", ["models.example", "MODELS.example.:99", "[fe80::1]:3", "10.1.2.3:80", "localhost"])
def test_other_hosts_are_listed(elsewhere: Live, host: str):
    assert elsewhere.get("/v1/models", headers={"host": host}).status_code == 200
    assert elsewhere.get("/v1/models", headers={"host": "other.example"}).status_code == 403


@pytest.mark.parametrize(("host", "allowed"), [("10.0.0.5:80", True), ("localhost", True), ("10.0.0.6", False)])
def test_the_address_that_was_connected_to_is_a_host(host: str, allowed: bool):
    check = HostCheck(lambda *_: None, (), ())  # type: ignore[arg-type,return-value]
    scope = {"headers": [(b"host", host.encode())], "server": ("10.0.0.5", 8000)}
    assert (check.refusal(scope) is None) == allowed


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://{own}", True), ("https://{own}", True), ("HTTP://{own}", False), ("https://page.example", True),
        ("http://page.example", False), ("http://evil.example", False), ("http://localhost:1", False), ("", False),
        ("http://{own}.evil.example", False), ("http://evil@{own}", False), ("file://", False), ("null", True),
    ],
)  # fmt: skip
def test_pages_of_other_origins_are_refused(elsewhere: Live, origin: str, allowed: bool):
    given = origin.format(own=elsewhere.url.removeprefix("http://"))
    found = elsewhere.get("/v1/models", headers={"origin": given})
    assert found.status_code == (200 if allowed else 403), given


@pytest.mark.parametrize("given", ["a:80", "", "a b", "a/b", "http://a"])
def test_an_allowed_host_is_a_name(given: str):
    with pytest.raises(BadRequest, match="allowed host"):
        host_names([given])
    assert host_names(["0.0.0.0", "::", "[::1]"]) == ("::1",) and parse_host("[::1]:8") == ("::1", 8)


# -- garbage


def errors(kind: type[Any], **fields: Any) -> list[Any]:
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate({"model": "x"} | fields)
    return refusal.value.errors()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, {"prompt": [[]] * 300_000}),
        (CompletionRequest, {"prompt": [[1]] * 4000 + [[]] * 90}),
        (CompletionRequest, {"prompt": ["a"] * 250_000}),
        (CompletionRequest, {"prompt": [1, *["a"] * 200_000]}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["a"] * 200_000}),
        (CompletionRequest, {"prompt": "x", "allowed_token_ids": [1] * 500_000}),
        (CompletionRequest, {"prompt": "x"} | {f"f{i}": 1 for i in range(10_000)}),
        (CompletionRequest, {"prompt": "x", "speculation": {f"f{i}": 1 for i in range(10_000)}}),
        (ChatRequest, {"messages": [1] * 300_000}),
        (ChatRequest, {"messages": [1] * 4000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 300_000}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"} | {f"f{i}": 1 for i in range(10_000)}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "stop": [1] * 300_000}),
    ],
)
def test_garbage_is_given_up_at_its_first_fault(kind: type[Any], fields: dict[str, Any]):
    assert len(errors(kind, **fields)) <= 2, "a text, or a list of parts"


def test_options_are_checked_once_however_many_answers(tiny: Live, monkeypatch: pytest.MonkeyPatch):
    checks: list[Any] = []
    check = LogitOptions.__post_init__

    def counting(options: LogitOptions) -> None:
        if threading.current_thread().name != "semspec-engine":
            checks.append(options.allowed_token_ids)
        check(options)

    monkeypatch.setattr(LogitOptions, "__post_init__", counting)
    counts = []
    for more in ({"prompt": "x"}, {"prompt": ["x", "y"], "n": 2}):
        body = {"model": "tiny", "max_tokens": 2, "allowed_token_ids": [5, 7, 5] * 100} | more
        assert tiny.post("/v1/completions", body).status_code == 200
        counts.append(len(checks))
    assert counts[1] == 2 * counts[0], "as many for four answers as for one"
    assert all(len(ids) == 2 for ids in checks if ids), "and each token once"


def test_nothing_is_tokenized_for_what_is_refused(tiny: Live, monkeypatch: pytest.MonkeyPatch):
    async def encode(*_: object) -> list[int]:
        raise AssertionError("tokenized in vain")

    with monkeypatch.context() as patch:
        patch.setattr(Tokenization, "encode", encode)
        for huge in ({"prompt": "a " * 9000}, {"prompt": ["a", "a" * 19_000]}):
            refused = tiny.post("/v1/completions", {"model": "tiny", **huge})
            assert refused.status_code == 400 and "characters" in refused.json()["error"]["message"]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a" * 9000}] * 2}
        assert "characters" in tiny.post("/v1/chat/completions", chat).text
        many = tiny.post("/v1/completions", {"model": "tiny", "prompt": ["a"] * 4000})
        assert many.status_code == 400 and "at most 4" in many.json()["error"]["message"]
        patch.setattr(tiny.engine, "live", tiny.engine.slots + tiny.engine.queue)
        assert tiny.post("/v1/completions", {"model": "tiny", "prompt": "a"}).status_code == 429
        assert tiny.post("/v1/completions", {"model": "tiny", "prompt": []}).status_code == 429, "nor validated"
    assert tiny.idle()


def test_texts_to_tokenize_do_not_pile_up(tiny: Live, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("semspec.serve.completions.MAX_TOKENIZE", 0)
    assert tiny.post("/tokenize", {"prompt": "a"}).status_code == 429
    monkeypatch.undo()
    assert tiny.post("/tokenize", {"prompt": "a"}).status_code == 200


def test_room_is_taken_before_tokenizing_and_given_back(tiny: Live, monkeypatch: pytest.MonkeyPatch):
    seen = []

    async def encode(*_: object) -> list[int]:
        seen.append(tiny.engine.live)
        raise BadRequest("no")

    with monkeypatch.context() as patch:
        patch.setattr(Tokenization, "encode", encode)
        assert tiny.post("/v1/completions", {"model": "tiny", "prompt": "a", "n": 3}).status_code == 400
    assert seen == [3] and tiny.idle()


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model": "pocket", "messages": [{"role": "user", "content": "\ud800"}]}',
        rb'{"model": "pocket", "messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]}',
        rb'{"model": "pocket", "messages": [{"role": "user", "content": "x", "name": "\ud800"}]}',
        rb'{"model": "pocket", "messages": [{"role": "assistant", "reasoning_content": "\ud800", "content": "x"}]}',
        rb'{"model": "pocket", "messages": [{"role": "\ud800", "content": "x"}]}',
        rb'{"model": "pocket", "messages": [{"role": "user", "content": "x"}], "speculation": {"drafter": "\ud800"}}',
        rb'{"model": "pocket", "messages": [{"role": "user", "content": "x"}], "speculation": {"relax_span": "\ud8"}}',
        b'{"model": "pocket", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "pocket", "messages": [{"role": "user", "content": "x"}], "speculation": {"verifier": "\xe9"}}',
        b'\xff\xfe{\x00}\x00',
    ],
)  # fmt: skip
def test_what_is_no_text_is_a_400(pocket: Live, body: bytes, capfd: pytest.CaptureFixture[str]):
    refusal = httpx.post(pocket.url + "/v1/chat/completions", content=body, headers=JSON, timeout=WAIT)
    assert refusal.status_code == 400 and refusal.json()["error"]["message"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"prompt": {}}, "prompt has to be a text, a list of texts"),
        ({"prompt": [["x"]]}, "prompt.0.0 has to be a whole number"),
        ({"stop": 3}, "stop has to be a text"),
        ({"stop": ["x"] * 17}, "stop: there are 17 items; send at most 16"),
        ({"stop": ""}, "stop is empty"),
        ({"speculation": {"num_draft_tokens": 2.5}}, "speculation.num_draft_tokens has to be a whole number"),
        ({"stop": [3]}, "stop.0 has to be a text"),
        ({"model": None}, "model is required"),
        ({"speculation": 3}, "speculation has to be a JSON object"),
        ({"num_draft_tokens": 3}, "'num_draft_tokens' goes inside \"speculation\": {...}"),
        ({"stop": "\ud800"}, "stop: the text has half a character"),
        ({"x" * 9000: 1}, "there is no field 'xxx"),
        ({"speculation": {"drafter": "x" * 9000}}, "there is no drafter 'xxx"),
    ],
)
def test_errors_speak_of_fields_not_of_validators(tiny: Live, more: dict[str, Any], words: str):
    body = json.dumps({"model": "tiny", "prompt": "x"} | more).encode()
    refusal = httpx.post(tiny.url + "/v1/completions", content=body, headers=JSON, timeout=WAIT)
    message = refusal.json()["error"]["message"]
    assert words in message and len(message) <= 2000
    assert not any(inside in message for inside in ("function", "[", "_kind", "tag", "Annotated")), message


# -- keys


def test_a_key_in_the_environment_is_one_key(semspec, monkeypatch: pytest.MonkeyPatch):
    found: list[Settings] = []

    def make(engine: object, metrics: object, settings: Settings) -> None:
        found.append(settings)
        raise BadRequest("enough")

    monkeypatch.setattr("semspec.serve.app.make_app", make)
    monkeypatch.setattr("semspec.serve.logs.configure", lambda: None)
    monkeypatch.setenv("SEMSPEC_API_KEY", "correct horse battery staple")
    semspec("serve", "pocket")
    assert found[0].keys == ("correct horse battery staple",)
    monkeypatch.setenv("SEMSPEC_API_KEY", "caf\udce9")  # bytes that are not UTF-8
    semspec("serve", "pocket")
    assert found[1].keys == ("caf\udce9",)


def test_a_key_of_any_bytes_works(pair: semspec.Pair):
    with serving(lambda: pair, Settings(keys=("caf\udce9", "schlüssel"))) as live:
        for key in (b"caf\xe9", "schlüssel".encode()):
            assert live.get("/v1/models", headers=[(b"x-api-key", key)]).status_code == 200  # type: ignore[list-item]
        assert live.get("/v1/models", headers={"x-api-key": "caf"}).status_code == 401


def test_key_files_have_comments_and_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SEMSPEC_API_KEY", raising=False)
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbf# for the team\nfirst key\n\n  # old\nsecond#1\n")
    assert keys([], file) == ("first key", "second#1")
    for content in (b"# nothing but this\n", b"\x00\x01", b"\xff\xfe", b"a\x7fb\n", b""):
        file.write_bytes(content)
        with pytest.raises(BadRequest):
            keys(["given"], file)


def test_a_former_name_of_an_option_is_taken_over_http_too() -> None:
    settings = Settings(name="x", allow_lossy=True)
    with pytest.warns(DeprecationWarning, match="is now called 'threshold'"):
        options = apply(Speculation.model_validate({"verifier": "specreason", "least": 3}), settings)
    assert options.verifier.threshold == 3  # type: ignore[union-attr]


def test_no_request_gives_a_drafter_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter of another package may read a path from one."""

    @dataclasses.dataclass(frozen=True)
    class Heads(DrafterKind):
        name = "heads"
        weights: str = ""
        depth: int = 4

        def build(self, draft: Any, early_exit: Any) -> Any:
            raise AssertionError

    monkeypatch.setitem(draft.REGISTRY, "heads", Heads)
    asked, settings = "heads:weights=/etc/ssl", Settings(name="x")
    with pytest.raises(BadRequest, match="option 'weights' of that drafter is set where the server is started"):
        apply(Speculation.model_validate({"drafter": asked}), settings)
    assert apply(Speculation.model_validate({"drafter": "heads:depth=6"}), settings).drafter == "heads:depth=6"
    operator = Settings(name="x", defaults=Options(drafter=asked))
    assert apply(Speculation.model_validate({"drafter": asked}), operator).drafter == asked
    assert apply(Speculation.model_validate({"drafter": "heads"}), operator).drafter == asked, "the server's own"
    shown = menu(operator)
    assert shown["default"]["drafter"] == "heads" and "/etc" not in str(shown) and "eagle" not in shown["drafters"]
    with pytest.raises(BadRequest, match="option 'path' of that drafter is set where the server is started"):
        apply(Speculation.model_validate({"drafter": "eagle:/etc"}), settings)


def test_no_request_loads_a_head() -> None:
    """A target's own layer has no path, but weights and memory that nobody has planned."""
    with pytest.raises(BadRequest, match="loaded where the server is started: --drafter"):
        apply(Speculation.model_validate({"drafter": "mtp"}), Settings(name="x"))
    own = Settings(name="x", defaults=Options(drafter="mtp"))
    assert apply(Speculation.model_validate({"drafter": "mtp"}), own).drafter == "mtp"
    assert "mtp" in menu(own)["drafters"] and "mtp" not in menu(Settings(name="x"))["drafters"]
