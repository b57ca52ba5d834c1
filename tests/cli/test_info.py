"""`semspec info`: true figures, and no failure where there is something to tell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import semspec
from semspec.cli import info
from semspec.cli.main import app
from semspec.loop import cost_profile as costs
from semspec.model import memory_plan as plan
from tests import quantised_checkpoints
from tests.checkpoints import make_model, make_tokenizer, save
from tests.model.test_hf_runner import build


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MEASURE_SECONDS", 0.01)
    monkeypatch.setattr(costs, "COPY_BYTES", {"cpu": 2**16})


def told(*arguments: object) -> dict:
    done = CliRunner().invoke(app, ["info", *map(str, arguments), "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_pair_is_described_and_its_passes_are_timed(target_folder: Path, draft_folder: Path) -> None:
    found = told(target_folder, "--draft", draft_folder)
    target, _ = found["models"]
    assert target["model_type"] == "llama" and target["runner"] == "native"
    assert target["layers"] == 3 and target["vocabulary"] == 320
    assert target["parameters"] == make_model("llama3.1").num_parameters()
    assert found["tokenizers"] == {"agree": True, "shared_ids": 320}
    assert found["memory"]["fits"] and found["memory"]["line"].count("weights") == 2
    assert len(found["passes"]) == 2 and all(ms > 0 for costs in found["passes"] for ms in costs.values())


def test_the_pocket_pair_is_told_whole_and_its_draft_is_called_pocket_too() -> None:
    for arguments in (["pocket"], ["pocket", "--draft", "pocket"]):
        paths = [model["path"] for model in told(*arguments, "--no-measure")["models"]]
        assert [Path(path).name for path in paths] == ["target", "draft"]


def test_break_even_counts_the_pass_and_the_draft() -> None:
    target = {str(rows): 10.0 + rows for rows in info.ROWS}
    assert info.break_even(target)[0] == {"draft_tokens": 1, "tau_to_break_even": 12 / 11, "tau_at_most": 2}
    costs = info.break_even(target, {"1": 2.0})
    assert [c["tau_to_break_even"] for c in costs] == [(11 + k + 2 * k) / 11 for k in (1, 2, 4, 8, 16)]


def test_tokenizers_that_differ_are_told_not_failed_on(target_folder: Path, tmp_path: Path) -> None:
    other = save(make_model("llama3"), tmp_path / "other", make_tokenizer(("<eos>", "<more>")))
    found = told(target_folder, "--draft", other, "--no-measure")
    assert not found["tokenizers"]["agree"] and found["tokenizers"]["exchange"] == "text"
    assert "passes" not in found


@pytest.mark.parametrize("draft", ["pocket-draft", "pocket-other-draft"])
@pytest.mark.parametrize("context", [[], ["--context", "1000"]])
def test_the_plan_is_that_of_loading(draft: str, context: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that fits is not refused later: what exchanges text has room for more tokens in the draft model."""
    monkeypatch.setattr(plan, "available", lambda device: 1_000_000_000)
    lines: list[str] = []
    length = int(context[1]) if context else None
    semspec.load("pocket", draft, device="cpu", slots=1, context=length, report=lines.append)
    assert told("pocket", "--draft", draft, "--no-measure", *context)["memory"]["line"] == lines[0]


def test_a_model_that_does_not_fit_is_told_and_not_loaded(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available", lambda device: 100_000)
    found = told(target_folder)
    assert not found["memory"]["fits"] and "too much" in found["memory"]["refusal"] and "passes" not in found


def test_windows_are_told_and_people_get_a_table(tmp_path: Path) -> None:
    folder = save(make_model("gemma3"), tmp_path / "gemma")
    assert told(folder, "--no-measure")["models"][0]["windows"] == [24]
    done = CliRunner().invoke(app, ["info", str(folder), "--device", "cpu"], env={"COLUMNS": "100"})
    assert done.exit_code == 0 and "windows of 24 tokens" in done.stdout and "break-even tau" in done.stdout


def test_a_profile_holds_passes_against_memory_and_names_the_best_drafts(
    target_folder: Path, draft_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "bandwidth", lambda device: 1e9)
    found = told(target_folder, "--draft", draft_folder, "--profile", "--dtype", "float32")
    profile, model = found["profile"], make_model("llama3.1")
    table = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    kv = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
    read = 4 * (model.num_parameters() - table + costs.CONTEXT * kv)
    assert profile["limits_ms"][0] == pytest.approx(read / 1e9 * 1000)
    assert profile["draft_token_ms"] >= 0 and profile["device"] == "CPU"
    assert [best["acceptance"] for best in profile["best_drafts"]] == [0.5, 0.6, 0.7, 0.8, 0.9]
    done = CliRunner().invoke(
        app, ["info", str(target_folder), "--draft", str(draft_folder), "--device", "cpu", "--profile"],
        env={"COLUMNS": "120"},
    )  # fmt: skip
    assert done.exit_code == 0 and "times its limit" in done.stdout and "speedup" in done.stdout
    alone = told(target_folder, "--profile", "--no-measure")  # a profile measures, whatever else is said
    assert alone["profile"]["bandwidth_GBps"] == 1.0 and "best_drafts" not in alone["profile"]


def test_weights_that_cannot_be_read_are_told_beside_the_plan(target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(target_folder, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    found = told(folder)
    assert "pytorch_model.bin is a pickle" in found["models"][0]["refusal"] and found["memory"]["fits"]
    assert "passes" not in found, "nothing to be timed"
    result = CliRunner().invoke(app, ["info", str(folder), "--device", "cpu"])
    assert result.exit_code == 0 and "cannot be loaded" in result.output


def test_models_that_only_transformers_runs_are_described(tmp_path: Path) -> None:
    """One without attention heads, and one whose stored weights need the memory of plain ones."""
    save(build("mamba2"), tmp_path / "states")
    done = CliRunner().invoke(app, ["info", str(tmp_path / "states"), "--device", "cpu", "--no-measure"])
    assert done.exit_code == 0, done.output
    assert "mamba2 (transformers runner), 3 layers of 64, vocabulary 320" in " ".join(done.output.split())
    assert "of states" in done.output
    made = quantised_checkpoints.make(save(build("lfm2"), tmp_path / "lfm2"), tmp_path / "it", "fp8 block, f32")
    done = CliRunner().invoke(app, ["info", str(made / "quantised"), "--device", "cpu", "--no-measure"])
    assert "stored as fp8, dequantised while loading, 3 layers" in " ".join(done.output.split())
