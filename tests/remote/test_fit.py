"""A judge of evidence alone, fitted from what two servers report, decides over the same servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from semspec import pocket, tasks
from semspec.errors import BadRequest
from semspec.pair.remote import connect
from semspec.probe import Probe
from semspec.probe_fit.data import Folder
from semspec.tasks.pocket import Pocket
from tests.remote.fake import Fake

PROBLEMS = 16


@pytest.fixture
def servers() -> Iterator[tuple[Fake, Fake]]:
    """A target that solves pocket problems, and a draft that gets some numbers wrong."""
    task = tasks.make("pocket").for_fitting()
    assert isinstance(task, Pocket)
    right, wrong = dict[str, list[str]](), dict[str, list[str]]()
    for number, problem in enumerate(task.problems(PROBLEMS, 0)):
        story = task.story(problem)
        steps = pocket.write_solution(story, pocket.TARGET_HABITS, Random(number)).split("\n\n")
        right[story.text] = steps
        wrong[story.text] = [
            re.sub(r"\d+(?=\D*$)", "999", step) if i == number % 2 else step for i, step in enumerate(steps)
        ]
    with Fake(right) as target, Fake(wrong) as draft:
        yield target, draft


def test_fit_over_servers(semspec, servers: tuple[Fake, Fake], tmp_path: Path) -> None:
    target, draft = servers
    out = tmp_path / "fitted"
    command = [
        "probe", "fit", target.url, draft.url, "--task", "pocket", "--problems", PROBLEMS, "--seed", 0, "--shard", 8,
        "--traces", "accept-all-steps:lead=0", "--judge-labels", "valid", "--epochs", 40, "--temperature", 0,
        "--batch", 16, "--out", out,
    ]  # fmt: skip
    done = semspec(*command, "--samples", 0)
    assert done.returncode == 0, done.stderr
    rows = [row for shard in Folder(out).shards for row in Folder(out).read_samples(shard)]
    labels = [label for shard in Folder(out).shards for label in Folder(out).read_labels(shard)]
    assert len(Folder(out).shards) == 2 and len(rows) > 2 * PROBLEMS
    assert all(label.valid is not None for label in labels)
    assert {label.valid for label in labels} == {True, False}
    for shard in Folder(out).shards:
        states, samples = Folder(out).read_states(shard), Folder(out).read_samples(shard)
        assert torch.allclose(states["target.evidence"][:, 2], torch.tensor([s.logprob["target"] for s in samples]))
        assert states["draft.confidence"].shape == (len(samples), 4)
    assert Probe.load(out / "judge", "fake").layers == ()
    asked = len(target.asked)
    assert semspec(*command, "--samples", 0).returncode == 0
    assert sum("echo" in body for body in target.asked[asked:]) <= 2, "what the folder has is not asked for again"
    pair = connect(target.url, draft.url)
    question, steps = next(iter(target.script.items()))
    chat = [{"role": "user", "content": question}]
    judged = pair.generate(chat, verifier=f"semantic+:probes={out}", max_new_tokens=300)
    assert judged.text == "\n\n".join(steps) and judged.stats.step_outcomes["accepted"]
    wrong = pair.generate(chat, verifier=f"semantic+:probes={out},threshold=0", max_new_tokens=300)
    assert wrong.text != judged.text, "without the judge the wrong number stays"


def test_samples_of_the_target_teach_what_it_writes(semspec, servers: tuple[Fake, Fake], tmp_path: Path) -> None:
    target, draft = servers
    done = semspec(
        "probe", "fit", target.url, draft.url, "--task", "pocket", "--problems", 6, "--traces", "likely-step",
        "--samples", 2, "--epochs", 5, "--out", tmp_path / "fitted",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = Folder(tmp_path / "fitted").read_samples(0)
    assert {row.model for row in rows} == {"target", "draft"}
    refused = semspec("probe", "collect", target.url, draft.url, "--out", tmp_path / "other")
    assert refused.returncode == 2 and "give --traces a rule of steps" in refused.stderr


def test_a_judge_with_states_is_refused(servers: tuple[Fake, Fake]) -> None:
    pair = connect(servers[0].url, servers[1].url)
    with pytest.raises(BadRequest, match="reads hidden states"):
        pair.generate("Q: ?\nA:\n", verifier=f"semantic+:probes={pocket.shipped.PROBES}")
