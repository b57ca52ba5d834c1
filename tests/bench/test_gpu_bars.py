"""The bars of a server under load: all in one run, each with what it is held against."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu_bars
from bench.gpu import Bench
from bench.gpu_bars import BARS, H200, LENGTH, held
from semspec.loop import cost_profile as costs
from semspec.model import memory_plan
from semspec.model.kernels import KernelFlags


def test_memory_holds_as_many_sequences_as_it_must() -> None:
    assert 55 <= held(H200) <= 62, "of 4,096 tokens, beside 32B and 1.5B in bfloat16 and what their graphs take"
    assert held(H200 - 10 * 2**30) < held(H200) - 5, "ten gigabytes are 9 sequences"
    assert memory_plan.available(torch.device("cpu")) != H200, "nothing is left of what was pretended"
    assert LENGTH == 4096


def test_all_bars_are_measured_in_one_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(costs, "bandwidth", lambda device: 1e10)
    asked: Any = SimpleNamespace(
        device="cpu",
        shape="tiny",
        context=32,
        steps=2,
        repeats=1,
        plain=True,
        choices=KernelFlags(),
        long_shape="tiny",
        mixture_shape="tiny-moe",
    )
    bench = Bench(asked)
    with torch.inference_mode():
        gpu_bars.bars(bench)
    rows = {row["bar"]: row for row in bench.rows if "bar" in row}
    assert rows.keys() == BARS.keys() and all(row["found"] > 0 for key, row in rows.items() if key != "stall")
    assert [rows[f"batch {n}"]["vllm"] for n in (1, 8, 32)] == [(111, 149), (101, 116), (110, 164)]
    assert all(row["verdict"] is None for row in rows.values()), "figures of a CPU reach no bar of a GPU"
    arms = {row["what"]: row["tokens_per_second"] for row in bench.rows if "tokens_per_second" in row}
    fixed, auto = arms["bars: batch 64, K=8, a token of each"], arms["bars: batch 64, auto, a token of each"]
    assert rows["auto"]["found"] == auto / fixed
    told = capsys.readouterr().out
    assert "vLLM 0.24" in told and "111-149" in told


def test_a_bar_is_missed_reached_or_more() -> None:
    assert [BARS["batch 8"].verdict(ms) for ms in (34.1, 34, 31)] == ["MISSED", "reached", "aim reached"]
    assert [BARS["prefill"].verdict(share) for share in (65, 66, 80)] == ["MISSED", "reached", "aim reached"]
    assert BARS["batch 1"].verdict(20) == "reached"
