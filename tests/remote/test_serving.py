"""`semspec serve` over two servers: what clients see, many at a time, and when a server behind it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from semspec.options import Options
from semspec.pair.remote import connect
from semspec.serve.limits import Limits, Settings
from tests.remote.conftest import CHAT, QUESTION, RIGHT
from tests.remote.fake import Fake
from tests.remote.test_faults import status
from tests.serve.live import Live, serving, until

TARGETS = "\n\n".join(RIGHT)
CLIENTS = 32


@pytest.fixture
def live(target: Fake, draft: Fake) -> Iterator[Live]:
    settings = Settings(
        name="pair", allow_lossy=True, defaults=Options(verifier="likely-step"), limits=Limits(new_tokens=100)
    )
    with serving(lambda: connect(target.url, draft.url, slots=16), settings) as live:
        yield live


def ask(live: Live, **more: Any) -> Any:
    return live.openai().chat.completions.create(model="pair", messages=CHAT, max_tokens=60, temperature=0, **more)


def streamed(live: Live) -> tuple[str, str]:
    """What a streaming client gets, and how it ends."""
    text = ""
    try:
        for chunk in ask(live, stream=True):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                if chunk.choices[0].finish_reason:
                    return text, chunk.choices[0].finish_reason
    except openai.APIError as error:
        return text, str(error)
    return text, "nothing"


def test_clients_at_a_time_each_get_their_answer(live: Live, target: Fake, draft: Fake) -> None:
    target.script |= {f"{QUESTION} {i}": [*RIGHT[:2], f"The sum is {i}."] for i in range(CLIENTS)}
    draft.script |= {f"{QUESTION} {i}": [*RIGHT[:2], f"The sum is {i}."] for i in range(CLIENTS)}

    def one(i: int) -> str:
        answer = live.openai().chat.completions.create(
            model="pair", messages=[{"role": "user", "content": f"{QUESTION} {i}"}], max_tokens=60, temperature=0
        )
        return str(answer.choices[0].message.content)

    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(one, range(CLIENTS)))
    assert found == ["\n\n".join([*RIGHT[:2], f"The sum is {i}."]) for i in range(CLIENTS)]
    assert live.idle()


def test_usage_metrics_and_trace_are_those_of_any_pair(live: Live) -> None:
    answer = ask(live, extra_body={"speculation": {"trace": True}}).model_dump()
    speculation = answer["metrics"]["speculative_decoding"]
    assert answer["usage"]["completion_tokens"] == 14 and answer["usage"]["prompt_tokens"] > 5
    assert speculation["verifier"] == "likely-step" and speculation["num_accepted_draft_tokens"] > 0
    assert speculation["calls"]["target"] and speculation["draft_lost"] is False
    assert "".join(span["text"] for span in answer["choices"][0]["trace"]["spans"]) == TARGETS
    assert live.get("/v1/models").json()["data"][0]["max_model_len"] == 4096


def test_a_model_without_markers_is_not_said_to_think(live: Live) -> None:
    assert live.post("/api/show", {"model": "pair"}).json()["capabilities"] == ["completion"]
    assert ask(live).usage.completion_tokens_details.reasoning_tokens == 0


def test_what_servers_cannot_do_is_the_requests_mistake(live: Live) -> None:
    for verifier, word in (("exact", "single tokens"), ("semantic", "no hidden states")):
        with pytest.raises(openai.BadRequestError, match=word):
            ask(live, extra_body={"speculation": {"verifier": verifier}})
    with pytest.raises(openai.BadRequestError, match="token ids"):
        live.openai().completions.create(model="pair", prompt=[1, 2, 3], temperature=0)


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "structured output cannot be had"),
        ("/v1/chat/completions", {"guided_regex": "a+"}, "structured output cannot be had"),
        ("/v1/chat/completions", {"continue_final_message": True}, "servers begin a new answer"),
        ("/v1/chat/completions", {"add_generation_prompt": False}, "servers begin a new answer"),
        ("/tokenize", {}, "tokens are not known here"),
        ("/detokenize", {"messages": None, "model": None, "tokens": [1, 2]}, "tokens are not known here"),
    ],
)
def test_what_servers_do_not_tell_is_refused_in_words(live: Live, path: str, more: dict[str, Any], words: str) -> None:
    given = {"model": "pair", "messages": CHAT} | more
    refusal = live.post(path, {k: v for k, v in given.items() if v is not None})
    assert refusal.status_code == 400 and words in refusal.json()["error"]["message"]
    assert live.idle()


def test_a_killed_draft_ends_no_answer(live: Live, target: Fake, draft: Fake) -> None:
    target.most = len(target.asked) + 20
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(streamed, live) for _ in range(16)]
        assert until(lambda: len(target.asked) > (target.most or 0))
        draft.kill()
        target.go.set()
        seen = Counter(answer.result() for answer in answers)
    assert seen == {(TARGETS, "stop"): 16}
    assert ask(live).model_dump()["metrics"]["speculative_decoding"]["draft_lost"] is True
    assert live.idle()


def test_a_killed_target_ends_every_stream_with_an_error(live: Live, target: Fake) -> None:
    target.most = len(target.asked) + 20
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(streamed, live) for _ in range(16)]
        assert until(lambda: len(target.asked) > (target.most or 0))
        target.kill()
        seen = [answer.result() for answer in answers]
    assert all(TARGETS.startswith(text) for text, _ in seen)
    assert all(end == "stop" or f"the target's server at {target.url} cannot be reached" in end for _, end in seen)
    assert sum(end != "stop" for _, end in seen) >= 8
    assert live.idle() and live.get("/health").status_code == 200


def test_a_target_that_fails_for_a_while_is_not_seen(live: Live, target: Fake) -> None:
    target.faults = [status(429), status(500), status(503)]
    assert ask(live).choices[0].message.content == TARGETS
    target.faults = [status(500, "out of memory")] * 4
    with pytest.raises(openai.InternalServerError, match="out of memory") as caught:
        ask(live)
    assert caught.value.status_code == 502
