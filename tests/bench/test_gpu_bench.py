"""The GPU benchmark's own reckoning: kernels into a table, choices into arms."""

from __future__ import annotations

import pytest

from bench.gpu_arms import in_turns, parse, told
from bench.gpu_breakdown import Kernel, short, table
from semspec.model.kernels import Choices


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
    assert parse("") == Choices() and parse("gate,early") == Choices(gate=True, early=True)
    assert told(parse("small=0,turn")) == "cuBLAS+turn"
    for wrong in ("fast", "gate=1", "small"):
        with pytest.raises(ValueError, match="is no choice"):
            parse(wrong)


def test_an_arm_that_fails_is_left_out_and_the_first_round_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []

    def arm(name: str, first: float, later: float):  # type: ignore[no-untyped-def]
        def measure() -> float:
            calls.append(name)
            return first if calls.count(name) == 1 else later

        return measure

    def broken() -> float:
        raise RuntimeError("no such instruction")

    slow, fast = Choices(), Choices(gate=True)
    times = in_turns({slow: arm("slow", 9, 2), fast: arm("fast", 50, 1), Choices(turn=True): broken})
    assert times == {slow: 2, fast: 1} and calls[:4] == ["slow", "fast", "slow", "fast"]
    assert "ours if small+turn: RuntimeError: no such instruction" in capsys.readouterr().out
