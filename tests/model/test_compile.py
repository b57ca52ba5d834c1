"""Every kernel compiles for the GPU it was written for, and takes no more shared memory than there is."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler is only known to come with x86-64")
def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.compile_kernels"],
        env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 100
    for name, taken in results.items():
        assert taken["cubin"] > 0 and taken["shared"] <= 227 * 1024, name
    for kind in ("", ", fp8"):
        found = results[f"rope_cache_attend{kind}"]
        assert found["waits_for_stores"], "what it puts into the cache is there before it is read"
    assert not results["add_norm"]["loads_after_reductions"], "its weights are on their way while it adds up"
    assert 2 * (results["rope_cache_attend"]["shared"] + 1024) <= 228 * 1024, "two of them share a processor"
    for queries in (1, 9, 17, 64):  # where rows lie costs no memory, and no copy of the pipeline
        flat, packed = (results[f"attend {queries}{kind}"] for kind in ("", ", packed"))
        assert (packed["shared"], packed["wide_copies"]) == (flat["shared"], flat["wide_copies"])
        narrow = results[f"attend {queries}, fp8"]
        assert queries == 64 or 2 * (narrow["shared"] + 1024) <= 228 * 1024, "two of them share a processor"
        assert not narrow["slow_conversions"], "codes become numbers two at a time"
        assert narrow["narrow_copies"] <= 48, "scales of neighbours are copied together, and none by itself"
    for kind in ("bf16", "fp8"):
        assert results[f"one token, {kind}"]["wide_copies"] >= 100, "its products and keys go through a pipeline"
    for name in ("gate_up", "down", "up of channels", "down of channels"):
        assert results[f"{name}, 16 rows"]["wide_copies"] >= 20, f"{name} has lost its pipeline"
