"""The whole of SemanticSpec on synthetic models: here tiny ones, whose seconds mean nothing; counts must add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import synthetic_e2e
from bench.synthetic_e2e_text import FirstWord, make_tokenizer
from semspec.probe_fit.cluster import Source
from semspec.text.steps import StepDelimiters

LITTLE = [
    "--shape=tiny", "--device=cpu", "--problems=3", "--per-problem=2", "--samples=4", "--slots=4",
    "--max-step-tokens=8", "--meanings=3", "--prompt=6", "--tokens=40", "--epochs=3",
]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    synthetic_e2e.main([*LITTLE, *more])
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_from_sampling_to_decoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "--out", str(tmp_path / "new" / "synthetic_e2e.json"))
    assert json.loads((tmp_path / "new" / "synthetic_e2e.json").read_text()) == report
    stages, arms = report["stages"], {arm["arm"]: arm for arm in report["arms"]}
    assert not report["left_out"]
    assert list(stages) == ["models", "tokenizer", "collection", "labels", "probe target", "probe draft", "probe judge"]
    collection = stages["collection"]
    assert (collection["prefixes"], collection["samples"]) == (3 * 2, 3 * 2 * 4 * 2)
    assert len(collection["shard_seconds"]) == 2 == stages["labels"]["shards"], "six prefixes, four at a time"
    assert sum(stages["probe target"]["rows"].values()) == 48, "both models' steps"
    assert sum(stages["probe draft"]["rows"].values()) == 24, "its own steps"
    assert list(arms) == ["none", "semantic", "semantic+", "all steps accepted", "no step accepted"]
    assert all(arm["tokens"] == 40 and not arm["cut_off"] for arm in arms.values())
    assert arms["none"]["target_passes"] == 40 and not arms["none"]["steps"]
    assert arms["all steps accepted"]["target_passes"] < 40 and "rejected" not in arms["all steps accepted"]["steps"]
    assert arms["no step accepted"]["steps"]["rejected"] and "accepted" not in arms["no step accepted"]["steps"]
    for name in ("semantic", "semantic+"):
        assert arms[name]["steps"].keys() & {"accepted", "rejected"}, "the draft's steps were judged"


def test_when_time_is_over_the_rest_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "--seconds", "0", "--slots", "2")
    assert report["stages"]["collection"]["prefixes"] == 2, "one shard, so that there is something to tell"
    assert report["left_out"][0] == "some prefixes" and len(report["left_out"]) == 1 + 3 + 5
    assert not report["arms"] and "probe judge" not in report["stages"]


def test_every_id_has_a_word_and_some_end_a_step() -> None:
    vocab = 2000
    tokenizer = make_tokenizer(vocab)
    ids = [*range(vocab), 19, 0, 39]
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    steps = StepDelimiters.of(tokenizer)
    assert steps.delimiters == set(range(19, vocab, 20)) and steps.stops == steps.delimiters
    assert not tokenizer.all_special_ids and not tokenizer.get_added_vocab()


def test_steps_are_sorted_by_their_first_words() -> None:
    texts = [" b x", " b y", " c x", "", " b.\n\n", " c"]
    assert FirstWord(Source(), 10**9).cluster(texts) == [0, 0, 1, 2, 3, 1]
    assert set(FirstWord(Source(), 1).cluster(texts)) == {0}


@pytest.mark.parametrize("wrong", [["--problems", "2"], ["--shape", "huge"]])
def test_what_cannot_work_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        synthetic_e2e.main([*LITTLE, *wrong])
    assert wrong[0] in capsys.readouterr().err
