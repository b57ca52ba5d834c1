"""Two servers of our own with the pocket models, over real sockets: the same answers as in process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import semspec
from semspec import Pair, pocket
from semspec.model.prefix_cache import PrefixCache
from semspec.options import Options
from semspec.pair.remote import RemotePair, connect
from semspec.pocket.shipped import JUDGE_OF_EVIDENCE, SHIPPED
from semspec.serve.limits import Limits, Settings
from tests.serve.live import Live, serving

JUDGED = f"semantic+:probes={JUDGE_OF_EVIDENCE}"


@pytest.fixture(scope="module")
def here() -> Pair:
    return semspec.load("pocket", device="cpu", slots=4, context=512)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Live, Live]]:
    def settings(name: str) -> Settings:
        return Settings(name=name, defaults=Options(verifier="none"), limits=Limits(new_tokens=300))

    load = lambda name: semspec.load(SHIPPED[name], device="cpu", slots=4, context=512).cached()  # noqa: E731
    with (
        serving(lambda: load("pocket"), settings("pocket")) as target,
        serving(lambda: load("pocket-draft"), settings("pocket-draft")) as draft,
    ):
        yield target, draft


@pytest.fixture(scope="module")
def over_servers(servers: tuple[Live, Live]) -> RemotePair:
    return connect(*(f"{live.url}/v1" for live in servers), slots=4)


def test_both_have_what_a_pair_needs(over_servers: RemotePair) -> None:
    able = over_servers.servers.target.abilities
    assert (able.name, able.context, able.top, able.keeps_stop, able.tokenizes) == ("pocket", 512, 10, True, True)
    assert able.scores and able.scores_last


def test_a_step_is_scored_with_what_the_server_has_cached(
    over_servers: RemotePair, servers: tuple[Live, Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a text that grows step by step, each call reads the new step and what a guess of its length reaches back."""
    cache = servers[0].engine.pair.target  # type: ignore[union-attr]
    assert isinstance(cache, PrefixCache)
    chat = [{"role": "user", "content": pocket.problem(12, 8, "test").text}]
    read, score = list[int](), cache.inner.score
    counted = lambda asked: (read.append(sum(len(one.tokens) for one in asked)), score(asked))[1]  # noqa: E731
    monkeypatch.setattr(cache.inner, "score", counted)
    found, texts = dict[bool, int](), dict[bool, str]()
    for last in (True, False):  # the first finds nothing of it in the cache
        monkeypatch.setattr(over_servers.servers.target.abilities, "scores_last", last)
        read.clear()
        result = over_servers.generate(chat, verifier="accept-all-steps:lead=0", max_new_tokens=300)
        found[last], texts[last] = sum(read), result.text
        assert result.stats.step_outcomes["accepted"] > 5
    assert texts[True] == texts[False] and found[True] < found[False] / 2, found


def test_answers_are_those_of_the_same_rule_in_process(over_servers: RemotePair, here: Pair) -> None:
    chats = [[{"role": "user", "content": pocket.problem(i, 3, "test").text}] for i in range(4)]
    for verifier in (JUDGED, "semantic+", "none"):
        there = over_servers.generate(chats, verifier=verifier, max_new_tokens=200)
        own = here.generate(chats, verifier=JUDGED if verifier == "semantic+" else verifier, max_new_tokens=200)
        assert [r.text for r in there] == [r.text for r in own], verifier
        assert [r.finish_reason for r in there] == ["stop"] * 4
        if verifier != "none":
            stats = sum((r.stats for r in there), semspec.Stats())
            assert stats.step_outcomes["accepted"] > 6
            drafted = sum(stats.step_outcomes[o] for o in ("accepted", "rejected", "handed over"))
            assert stats.calls["draft"] <= drafted + 4, "a draft's own end is no step"
            assert stats.calls["target"] <= drafted + stats.step_outcomes["target"] + 4


def test_evidence_over_servers_is_the_evidence_of_the_rows(over_servers: RemotePair, here: Pair) -> None:
    """What the judge sees of a step, from log-probabilities as JSON, against the logits themselves."""
    chat = [{"role": "user", "content": pocket.problem(7, 4, "test").text}]
    why = {}
    for pair in (over_servers, here):
        result = pair.generate(chat, verifier=f"{JUDGED},threshold=0.0", max_new_tokens=200)
        why[pair] = [r.reason for event in result.events for r in event.relaxed.values()]
    assert why[over_servers] == why[here] and why[here]


def test_a_server_of_servers_counts_the_thinking_as_their_own_does(servers: tuple[Live, Live]) -> None:
    chat = [{"role": "user", "content": pocket.problem(2, 3, "test").text}]
    settings = Settings(name="pocket", defaults=Options(verifier="none"), limits=Limits(new_tokens=300))
    with serving(lambda: connect(f"{servers[0].url}/v1", None, slots=4), settings) as front:
        body = {"model": "pocket", "messages": chat, "max_tokens": 200, "temperature": 0}
        own, there = (live.post("/v1/chat/completions", body).json() for live in (servers[0], front))
        thought = own["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert there["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought > 20
        told, here = (one["choices"][0]["message"] for one in (own, there))
        assert here["reasoning_content"] == told["reasoning_content"] and here["content"] == told["content"]
        assert front.post("/api/show", {"model": "pocket"}).json()["capabilities"] == ["completion", "thinking"]
        assert servers[0].get("/v1/methods").json()["thinks"] is True
        assert front.get("/v1/methods").json()["thinks"] is False, "how long servers think cannot be limited"
