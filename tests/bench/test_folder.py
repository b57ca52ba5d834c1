"""A run's folder that is not as it was left: other prompts, other models, damaged files, measures of other texts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import semspec
from semspec.bench import outside
from semspec.bench.folder import load_run
from semspec.bench.run import Bench, Config
from semspec.errors import BadRequest
from tests.bench.conftest import CONFIG, samples
from tests.bench.test_measures import made_up, same

PROMPTS = [f"Mia has {i} bags with 6 pens each. How many pens does Mia have?" for i in range(2, 8)]


def of_prompts(pair: semspec.Pair, path: Path) -> Bench:
    return Bench(Config(f"jsonl:path={path}", ["exact:k=3"], max_new_tokens=8, device="cpu", controls=False), pair)


def test_a_run_does_not_go_on_with_other_prompts_or_models(pocket: semspec.Pair, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "run"
    prompts.write_text("\n".join(PROMPTS))
    of_prompts(pocket, prompts).run(out)
    kept = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    (out / "samples.jsonl").write_text("".join(kept[:7]))
    prompts.write_text("\n".join(PROMPTS).replace("pens", "beads"))
    with pytest.raises(BadRequest, match=r"holds another run \(the content of problems was \w+ and is"):
        of_prompts(pocket, prompts).run(out)
    prompts.write_text("\n".join(PROMPTS))
    run = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(run | {"inputs": run["inputs"] | {"draft": "another"}}))
    with pytest.raises(BadRequest, match="the content of draft was another and is"):
        of_prompts(pocket, prompts).run(out)
    del run["inputs"]  # as in runs of earlier versions
    (out / "run.json").write_text(json.dumps(run))
    of_prompts(pocket, prompts).run(out)
    assert len(samples(out)) == len(kept)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "", "cannot be read as a run"),
        ("run.json", "[1]", "lists no arms"),
        ("run.json", '{"arms": ["none"]}', "lists no arms"),
        ("samples.jsonl", "no JSON\n{}\n", "line 1 of .* is damaged"),
        ("samples.jsonl", '{"arm": "none", "problem": "x"}\n{}\n', "line 1 of .* is damaged"),
    ],
)
def test_a_damaged_folder_is_refused_in_words(
    pocket: semspec.Pair, finished: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(BadRequest, match=message):
        load_run(tmp_path)
    with pytest.raises(BadRequest, match=message):
        Bench(CONFIG, pocket).run(tmp_path)


def test_a_folder_that_is_none_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as refused:
        load_run(tmp_path)
    assert str(refused.value) == f"{tmp_path} is not a run: it has no run.json; make one with `semspec bench --out`"


def test_a_last_line_that_is_no_sample_is_taken_out_before_the_run_goes_on(
    pocket: semspec.Pair, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(whole[:-1]) + b'{"arm": "exact:k=3"}\n')
    Bench(CONFIG, pocket).run(tmp_path)
    assert len(samples(tmp_path)) == len(whole) and len(load_run(tmp_path)[1]) == len(whole)


def test_meanings_that_were_measured_of_other_texts_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Letters:
        def __init__(self, name: str, user: str) -> None:
            pass

        def embed_long(self, texts: list[str]) -> Any:
            return [np.array([text.count("a"), 1.0]) for text in texts]

    monkeypatch.setattr("semspec.text.encoder.Encoder", Letters)
    run, made = made_up(fly=same)
    first, _ = outside.outside_measures(tmp_path, run, made, "letters")
    for sample in made:
        sample["text"] = sample["text"].replace("a", "b")
    second, _ = outside.outside_measures(tmp_path, run, made, "letters")
    assert first["meaning"] != second["meaning"]
    monkeypatch.delattr("semspec.text.encoder.Encoder")
    assert outside.outside_measures(tmp_path, run, made, "letters")[0] == second, "of the same texts they are kept"


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 7.0}, {"min_p": 2.0}, {"max_new_tokens": 0}, {"max_new_tokens": -3}]
)
def test_settings_that_no_request_could_have_are_refused_before_there_is_a_folder(wrong: dict[str, Any]) -> None:
    """Else the folder would hold a run that cannot be made, and refuse the right one."""
    with pytest.raises(BadRequest, match=f"{next(iter(wrong))} is"):
        Config("pocket", ["exact"], n=2, **wrong)


def test_a_date_may_be_the_seed(pocket: semspec.Pair, tmp_path: Path) -> None:
    config = replace(CONFIG, seed=20261118, n=2, methods=["exact:k=3"], max_new_tokens=2, repeats=2, controls=True)
    Bench(config, pocket).run(tmp_path)
    seeds = {
        (s["problem"], s["repeat"], s["arm"].startswith("resampled") and s["arm"]): s["seed"] for s in samples(tmp_path)
    }
    assert len(set(seeds.values())) == len(seeds) == 2 * 2 * 4, "each problem, repeat and resample has its own"
