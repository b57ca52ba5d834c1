"""Packed passes against rectangles as bench/gpu.py measures and checks them: its own logic on a CPU, and that its
checks find faults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu_arms, gpu_packed
from bench.gpu import Bench
from bench.gpu_arms import parse, told
from bench.gpu_checks_packed import CHECKS, packed_check, packed_passes_over_fp8, tiles_check
from bench.gpu_packed import TICKS, rows_of
from semspec.loop import cost_profile as costs
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.kernels import KernelFlags
from semspec.model.packed_rows import PackedRows

CPU = torch.device("cpu")


def test_ticks_are_measured_both_ways(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(costs, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(gpu_arms, "ROUNDS", 1)
    few = {name: TICKS[name] for name in ("8 checks", "7 tokens and a tail of 60", "32 checks and a piece of 512")}
    monkeypatch.setattr(gpu_packed, "TICKS", few)
    asked: Any = SimpleNamespace(
        device="cpu", shape="tiny", long_shape="tiny", mixture_shape="tiny-moe", context=256, repeats=1, plain=False,
        choices=KernelFlags(),
    )  # fmt: skip
    with torch.inference_mode():
        made = Bench(asked)
        made.section("packed")
    rows = {row["what"]: row for row in made.rows}
    assert len(rows) == 6 and all(row["off"] < 1e-3 for row in rows.values())
    tail = [rows[f"packed: 7 tokens and a tail of 60, {arm}"] for arm in ("rectangles", "packed")]
    assert [(row["rows"], row["passes"], row["predicted_ms"]) for row in tail] == [(72, 2, 36.0), (72, 1, 20.0)]
    assert all("verdict" in row for name, row in rows.items() if name.endswith(", packed"))
    assert "of rectangles, at most 1.01" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lengths", "flat", "packed"),
    [
        ([9] * 33, (297, 2), (320, 1)),
        ([9] * 64, (576, 1), (576, 1)),
        ([9] * 32 + [512], (800, 2), (896, 1)),
        ([64] * 17, (1088, 2), (1088, 2)),
    ],
)
def test_what_a_tick_computes(lengths: list[int], flat: tuple[int, int], packed: tuple[int, int]) -> None:
    assert (rows_of(lengths, False), rows_of(lengths, True)) == (flat, packed)


def test_the_flag_can_be_asked_for() -> None:
    assert parse("packed=1") == KernelFlags(packed=True) and "+packed" in told(parse("packed=1"))


def test_the_checks_pass_and_are_among_those_of_a_gpu() -> None:
    assert len([name for name in CHECKS if name.startswith("packed logits of ")]) >= 15
    for name in ("packed logits of gemma3", "packed logits of qwen3-moe", "packed trees are the same everywhere"):
        CHECKS[name](CPU)
    CHECKS["packed attention over 140000 tokens"](CPU)
    chunks = [SequenceChunk(0, 65, 9, (-1, 0, 0, 1)), SequenceChunk(1, 0, 70), SequenceChunk(2, 300, 1)]
    tiles_check(CPU, torch.float32, chunks, 2, 5, 64, window=100)
    packed_passes_over_fp8(CPU)


def test_a_row_that_is_rotated_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedRows.numbers

    def wrong(self: PackedRows, *given: Any) -> list[int]:
        numbers = right(self, *given)
        numbers[2 * self.rows] += 1  # the first row's position
        return numbers

    monkeypatch.setattr(PackedRows, "numbers", wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        packed_check("llama3.1", CPU)
