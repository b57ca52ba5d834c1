"""Addresses of servers on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.remote.conftest import QUESTION, RIGHT, WRONG
from tests.remote.fake import Fake

TARGETS = "\n\n".join(RIGHT)


@pytest.fixture
def servers() -> Iterator[tuple[Fake, Fake]]:
    with Fake({QUESTION: RIGHT}) as target, Fake({QUESTION: WRONG}) as draft:
        yield target, draft


def test_generate_over_two_servers(semspec, servers: tuple[Fake, Fake]) -> None:
    target, draft = servers
    common = ["generate", target.url, "--draft", draft.url, QUESTION, "-n", 60]
    found = json.loads(semspec(*common, "--verifier", "likely-step", "--json").stdout)
    assert found["text"] == TARGETS and found["stats"]["calls"]["draft"] == 3
    assert TARGETS in semspec(*common, "--verifier", "likely-step", "--why").stdout
    refused = semspec(*common)
    assert (
        refused.returncode == 2
        and "'exact' compares single tokens" in refused.stderr
        and "Traceback" not in refused.stderr
    )
    draft.kill()
    lost = semspec(*common, "--verifier", "likely-step")
    assert lost.returncode == 4 and "draft's server" in lost.stderr and "Traceback" not in lost.stderr


def test_serve_refuses_at_the_start_what_its_servers_cannot_do(semspec, servers: tuple[Fake, Fake]) -> None:
    target, draft = servers
    for more, word in (
        (["--verifier", "exact"], "compares single tokens"),
        (["--verifier", "semantic+"], "no judge"),
        (["--verifier", "likely-step", "--no-allow-lossy"], "lossy"),
        (["--verifier", "likely-step", "--private-prompts"], "--private-prompts is for models loaded here"),
    ):
        told = semspec("serve", "--target", target.url, "--draft", draft.url, "--port", 0, *more)
        assert told.returncode == 2 and word in told.stderr and "Traceback" not in told.stderr
    target.dialect = frozenset({"tokenize"})
    told = semspec("serve", target.url, "--draft", draft.url, "--port", 0, "--verifier", "likely-step")
    assert "no log-probabilities of prompts" in told.stderr
    assert "there is no target" in semspec("serve", "--port", 0).stderr
