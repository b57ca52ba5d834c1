"""The GPU benchmark's own reckoning: kernels into a table, choices into arms."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import gpu_grouped
from bench.gpu import Bench
from bench.gpu_arms import Arm, in_turns, kernels, parse, told
from bench.gpu_breakdown import Kernel, short, table
from semspec.loop import cost_profile as costs
from semspec.model.kernels import KernelFlags, reference_kernels


def test_time_is_kernels_and_gaps_and_nothing_twice() -> None:
    kernels = [Kernel("a<1>", 10, 14), Kernel("b", 16, 20), Kernel("a<2>", 19, 25), Kernel("b", 26, 27)]
    found = table(kernels[::-1])
    assert found["kernels"]["a"] == {"count": 2, "us": 4 + 5, "gap_us": 0}, "b ran during a's first microsecond"
    assert found["kernels"]["b"] == {"count": 2, "us": 4 + 1, "gap_us": 2 + 1}
    assert found["busy_us"] + found["gap_us"] == found["whole_us"] == 17
    assert list(found["kernels"]) == ["a", "b"]
    assert table(kernels, times=2)["whole_us"] == 8.5 and table([])["whole_us"] == 0


def test_names_without_what_changes() -> None:
    assert short("void cutlass::gemm<int, foo<3>>(Params)") == "cutlass::gemm"
    assert short("_attend") == "_attend"


def test_choices_are_read_and_told() -> None:
    assert parse("") == KernelFlags() and parse("fused_activation=0,skinny_gemm_bytes=16") == KernelFlags(
        fused_activation=False, skinny_gemm_bytes=16
    )
    assert told(parse("skinny_gemm_bytes=0,fused_activation=0")) == "cuBLAS+fused_rope+one_token+packed+int4_fragments"
    for wrong in ("fast=1", "gate", "small=-1"):
        with pytest.raises(ValueError, match="is no choice"):
            parse(wrong)


def test_an_arm_has_its_tiles_in_passes_of_its_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from semspec.model.kernels.tiles import Tiles

    def launch(q: Tensor, **options: Any) -> Any:
        return options

    made = replace(reference_kernels(), attend=launch, rope_cache_attend=launch)
    monkeypatch.setattr("bench.gpu_arms.triton_kernels", lambda: made)
    found = kernels(Arm(tiles=(64, 32, 16, 4, 2), queries=16))
    assert found.attend(torch.zeros(1, 16, 4, 8), chosen=None) == {"chosen": None, "tiles": Tiles(64, 32, 16, 4, 2)}
    assert found.attend(torch.zeros(1, 9, 4, 8)) == found.rope_cache_attend(torch.zeros(8, 16, 4, 8)) == {}


def test_an_arm_that_fails_is_left_out_and_the_first_round_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []

    def arm(name: str, first: float, later: float):  # type: ignore[no-untyped-def]
        def measure() -> float:
            calls.append(name)
            return first if calls.count(name) == 1 else later

        return measure

    def broken() -> float:
        raise RuntimeError("no such instruction")

    slow, fast = Arm(), Arm(KernelFlags(fused_activation=False))
    wrong = Arm(KernelFlags(fused_activation=False), (16, 128, 32, 4, 2))
    times = in_turns({slow: arm("slow", 9, 2), fast: arm("fast", 50, 1), wrong: broken})
    assert times == {slow: 2, fast: 1} and calls[:4] == ["slow", "fast", "slow", "fast"]
    name = "ours if small+fused_rope+one_token+packed+int4_fragments, 32 splits, 2 x 128 keys, 4 warps"
    assert f"{name}: RuntimeError: no such instruction" in capsys.readouterr().out


def test_experts_and_channels_are_measured_and_their_limits_count_what_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script's own logic on a CPU, with references in place of kernels; times mean nothing here."""
    monkeypatch.setattr(costs, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(gpu_grouped, "ROUNDS", 1)
    monkeypatch.setattr(gpu_grouped, "SIZES", (2,))
    asked = SimpleNamespace(
        device="cpu", shape="tiny", long_shape="tiny", mixture_shape="tiny-moe", context=64, repeats=1, plain=False,
        choices=KernelFlags(),
    )  # fmt: skip
    with torch.inference_mode():
        made = Bench(asked)  # type: ignore[arg-type]
        made.section("experts")
        made.section("ffn")
    rows = {row["what"]: row for row in made.rows}
    dense, thin = (rows[f"30B-A3B check of 16 tokens, {arm}"] for arm in ("dense", "3 of 8 skipped"))
    assert dense["distinct"] > thin["distinct"] > 0 and dense["limit_ms"] > thin["limit_ms"] > 0
    assert thin["byte_ratio"] == pytest.approx(thin["limit_ms"] / dense["limit_ms"]) and thin["bar_ratio"] == 0.83
    rule = rows["30B-A3B check of 16 tokens, calibrated rule"]
    assert thin["distinct"] <= rule["distinct"] <= dense["distinct"]
    planted = rows["32B feed-forward of 16 tokens, 64 % of the union inactive"]
    assert planted["union"] == pytest.approx(0.36, abs=0.01) and planted["bar_ratio"] == 0.75
    assert rows["32B feed-forward of 16 tokens, 0 % of the union inactive"]["byte_ratio"] == 1.0
    assert "MISSED" in capsys.readouterr().out, "references are no faster for leaving things out"


def test_the_best_cut_of_each_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[str, float]] = []
    bench = SimpleNamespace(add=lambda what, ms, **more: rows.append((what, ms)))
    times = {"a": 5.0, "b": 3.0, "c": float("inf"), "x": 2.0, "y": 1.0}
    monkeypatch.setattr(gpu_grouped, "graphed", lambda bench, launch, what: launch())
    best = gpu_grouped.best_cuts(
        bench, "pair", SimpleNamespace(CUTS=("a", "x")), lambda pair: sum(times[c] for c in pair), (["b", "c"], ["y"])
    )  # fmt: skip
    assert best == ("b", "y") and rows == [("pair, as it is cut", 7.0), ("pair, as cut best", 4.0)]


def test_cuts_over_fp8_are_checked_before_they_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from bench import gpu_fp8_tiles
    from semspec.model.kernels.tiles import Tiles
    from tests.interpreter import allow_new_numpy

    allow_new_numpy()
    first = Tiles(16, 64, 4, warps=4, stages=3)
    cuts = gpu_fp8_tiles.changed(first, fp8=True)
    assert cuts[0] == first and len(set(cuts)) == len(cuts) and first in gpu_fp8_tiles.changed(first, fp8=False)
    wrong, broken = replace(first, warps=8), replace(first, stages=9)

    def changed(chosen: Tiles, fp8: bool) -> list[Tiles]:
        return [first, wrong, broken, replace(first, keys=128)] if fp8 else [first]

    def attend(q: Tensor, *given: Any, tiles: Tiles, **more: Any) -> Tensor:
        if tiles == broken:
            raise RuntimeError("too much shared memory")
        return made(q, *given, tiles=tiles, **more) * (2 if tiles == wrong else 1)

    made = gpu_fp8_tiles.attend
    monkeypatch.setattr(costs, "bandwidth", lambda device: 1e10)
    for name, value in {"changed": changed, "attend": attend, "QUERIES": (2,), "LAYERS": 2, "SECONDS": 1e9}.items():
        monkeypatch.setattr(gpu_fp8_tiles, name, value)
    asked: Any = SimpleNamespace(device="cpu", shape="tiny", long=200, repeats=1)
    with torch.inference_mode():
        bench = Bench(asked)
        gpu_fp8_tiles.fp8_tiles(bench, shape=(2, 3, 16))
    assert [(row["page"], row["off"] < 1e-4) for row in bench.rows] == [(64, True), (64, True), (128, True)]
    said = capsys.readouterr().out
    assert "wrong, 1.0e+00 from the reference" in said and "too much shared memory" in said
    assert "best of 2, fp8: " in said and "best of 2, bfloat16: " in said
