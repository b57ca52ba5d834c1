"""`probe fit` and then `semantic` over two tokenizers: each model's probe is of its own states of the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import semspec
from semspec import Options
from semspec.pocket import problem
from semspec.probe import Probe, fingerprint
from tests.probe_fit.test_chain import command, traces  # noqa: F401  # a fixture

DRAFT = "pocket-other-draft"


def test_probes_are_fitted_over_two_tokenizers_and_semantic_takes_them(
    traces: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "probes"
    what = ["--traces", traces, "--per-problem", 2, "--samples", 2, "--max-step-tokens", 40]
    where = ["--device", "cpu", "--context", 640]
    stages = (
        ["collect", "pocket", DRAFT, "--out", out, *what, *where],
        ["label", out],
        ["train", out, "--calibration", "temperature", "--epochs", 3, "--device", "cpu"],
    )
    for stage in stages:
        code, _, err = command(monkeypatch, capsys, "probe", *stage)
        assert code == 0, err
    pair = semspec.load("pocket", DRAFT, device="cpu", slots=3, context=640)
    assert pair.draft is not None and pair.exchange is not None and pair.exchange.kind == "text"
    for model, runner in (("target", pair.target), ("draft", pair.draft)):
        assert Probe.load(out / model, fingerprint(runner)).layers == (runner.num_layers,)
    with pytest.raises(semspec.ModelError):
        Probe.load(out / "draft", fingerprint(pair.target))
    chats = [[{"role": "user", "content": problem(i, split="test").text}] for i in range(3)]
    for rule, judged in (("semantic:tau=1e-9,min_prob=0", "accepted"), ("semantic:tau=1e9,top=0", "rejected")):
        options = Options(verifier=f"{rule},probes={out}", max_new_tokens=90)
        batch = pair.generate(chats, options)
        assert sum(r.stats.step_outcomes[judged] for r in batch) > 0, rule
        for chat, result in zip(chats, batch, strict=True):
            single = pair.generate(chat, options)
            assert single.tokens == result.tokens and single.stats.step_outcomes == result.stats.step_outcomes
    alone = pair.generate(chats, verifier="none", max_new_tokens=90)
    assert [r.tokens for r in batch] == [r.tokens for r in alone], "what is never accepted is the target's own text"
