"""Codes of four bits in the order of the matrix unit's left factor, and the kernel that reads them so."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from semspec.model.fragments import from_fragments, to_fragments
from semspec.model.kernels import QUANTISED_ROWS
from semspec.model.limited_head import LimitedHead
from semspec.model.quantised import QuantisedLinear, pack_nibbles, quantise

ROOT = Path(__file__).parents[2]


def test_the_order_is_that_of_the_instruction() -> None:
    """By the PTX manual: register i of the left factor has row thread // 4 + 8 (i % 2), columns 2 (thread % 4) + 8
    (i // 2) and the next; register i of the right factor rows 2 (thread % 4) + 8 i and the next."""
    outputs, inputs = 64, 128
    numbers = torch.arange(outputs * inputs).view(outputs, inputs)
    parts = [(numbers >> 4 * i & 15).to(torch.uint8) for i in range(4)]  # so many codes tell all weights apart
    ordered = [to_fragments(pack_nibbles(part)).view(torch.int32).flatten().tolist() for part in parts]
    for block in range(2):
        for chunk in range(2):
            for fragment in range(2):
                for thread in range(32):
                    for step in range(4):  # products of 16 inputs each
                        place = (((block * 2 + chunk) * 2 + fragment) * 32 + thread) * 4 + step
                        words = [part[place] for part in ordered]
                        for i in range(4):
                            for half in range(2):
                                found = sum((w >> 4 * (i + 4 * half) & 15) << 4 * n for n, w in enumerate(words))
                                row = thread // 4 + 8 * (i % 2)
                                output = block * 32 + row % 8 * 4 + fragment * 2 + row // 8
                                # x: 16 bytes of a thread are registers 0 and 1 of two products
                                register = step % 2 * 2 + i // 2
                                at = chunk * 64 + step // 2 * 32 + thread % 4 * 8 + register * 2 + half
                                assert found == output * inputs + at


@pytest.mark.parametrize("group", [32, 64, 128])
def test_there_and_back(group: int) -> None:
    linear = quantise(torch.randn(96, 256), "int4", group=group)
    before, sample = linear.dequantised(), linear.sample
    linear.set_fragments()
    assert torch.equal(linear.dequantised(), before) and torch.equal(linear.sample, sample)
    codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    assert torch.equal(pack_nibbles(from_fragments(to_fragments(codes))), codes)


def test_gates_and_ups_part_between_blocks() -> None:
    linear = quantise(torch.randn(128, 128), "int4", group=64)
    before = linear.dequantised()
    linear.set_fragments()
    gate, up = linear.halves
    assert torch.equal(torch.cat([gate.dequantised(), up.dequantised()]), before)


def test_dequantised_by_a_kernel() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from semspec.model.kernels.dequantise import dequantise
    from tests.interpreter import allow_new_numpy

    allow_new_numpy()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    linear = quantise(torch.randn(128, 256), "int4", group=64)
    linear.codes, linear.scales = linear.codes.to(device), linear.scales.to(device)
    linear.zeros = None if linear.zeros is None else linear.zeros.to(linear.scales.dtype).to(device)
    before = linear.dequantised()
    linear.set_fragments()
    torch.testing.assert_close(dequantise(linear, torch.float32), before, rtol=1e-6, atol=1e-7)


def test_a_head_for_some_tokens_is_picked_from_one_in_this_order() -> None:
    whole, ids = quantise(torch.randn(64, 128), "int4", group=64), [3, 40, 41]
    before = whole.dequantised()[ids]
    whole.set_fragments()
    some = LimitedHead.picked(whole, None, ids, 64).inner
    assert isinstance(some, QuantisedLinear) and torch.equal(some.dequantised(), before)


def test_what_does_not_fit_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from semspec.model.kernels import int4, quantised
    from semspec.model.kernels.tiles import Card

    linear = quantise(torch.randn(128, 256), "int4", group=64)
    quantised.prepare(linear, fragments=True)
    assert not linear.fragments and linear.run == 128, "there is no such kernel for a CPU"
    fragments = quantise(torch.randn(128, 256), "int4", group=64)
    fragments.set_fragments()
    assert quantised.quantised_product(torch.randn(3, 256), fragments) is None, "not of float32"
    if int4.kernel() is None:
        return
    monkeypatch.setattr(int4, "card_of", lambda device: Card(132, 227 * 1024, 90))
    monkeypatch.setattr(int4, "on_a_gpu", lambda codes: True)
    for size, group, expert in (((128, 256), 64, False), ((128, 256), 64, True), ((96, 256), 64, False)):
        one = quantise(torch.randn(size), "int4", group=group)
        quantised.prepare(one, expert, fragments=True)
        assert one.fragments == (size[0] == 128 and not expert)
        before = one.dequantised()
        quantised.prepare(one, expert, fragments=True)  # a draft on the target's own weights has a runner, too
        assert torch.equal(one.dequantised(), before)
    for other in (quantise(torch.randn(128, 192), "int4"), quantise(torch.randn(128, 256), "int4", group=16)):
        quantised.prepare(other, fragments=True)
        assert not other.fragments
    monkeypatch.setattr(int4, "kernel", lambda: None)
    assert not int4.fits(quantise(torch.randn(128, 256), "int4", group=64))


@pytest.mark.parametrize("gated", [False, True])
def test_every_matrix_has_a_cut(gated: bool) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from semspec.model.kernels.int4 import Int4Config
    from semspec.model.kernels.tiles import Card

    sizes = ((128, 128), (128, 256), (7168, 5120), (5120, 27648), (55296, 5120), (17920, 1536), (2048, 1536))
    for size in sizes:
        for rows in (1, 8, 9, 17, 64, QUANTISED_ROWS):
            cut = Int4Config.of(size, rows, Card(132, 227 * 1024, 90), not gated, gated)
            assert cut.warps <= 8 and (not gated or (cut.pairs, cut.splits) == (2, 1))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler is only known to come with x86-64")
def test_the_kernel_as_compiled_multiplies(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from semspec.model.kernels import int4

    if int4.kernel() is None:
        pytest.skip("the kernel is not known to compile with this version of Triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.int4_on_a_cpu"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    off = json.loads(done.stdout.splitlines()[-1])
    assert len(off) == 12
    for name, far in off.items():
        assert far < (1e-3 if name == "float16" else 8e-3), f"{name}: off by {far:.1e}"
    assert off["any zeros, in uneven parts"] < 1e-5, "its sums are not rounded"
