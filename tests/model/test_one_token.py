"""All layers of a single token in one launch, in Triton's interpreter: what the runner on a CPU says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from semspec.model import ModelRunner
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import NoGraphs
from semspec.model.kernels import DEFAULT_FLAGS, one_token, reference_kernels
from semspec.model.one_token import OneToken, suits, tried
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import make_model, save
from tests.interpreter import allow_new_numpy
from tests.model.test_graph_runner import close, text

allow_new_numpy()
CUT = one_token.OneTokenConfig(programs=1, splits=4, outputs=16, depth=64)


def in_one_launch(plain: ModelRunner, pages: int = 0) -> ModelRunner:
    """The runner of a GPU, with the kernel in the interpreter: programs run one after the other there, so one of them
    has to do all the work."""
    twin = ModelRunner(plain.transformer, 2, plain.max_seq_len, tokens=pages or None)
    kernels = replace(reference_kernels(), run_layers=one_token.run_layers)
    twin.use(GraphRunner(plain.transformer, twin.cache, kernels, NoGraphs(), DEFAULT_FLAGS))
    assert twin.graph_runner is not None and twin.graph_runner.fused.one_token is None  # not on a CPU by itself
    assert suits(plain.transformer, twin.cache)
    twin.graph_runner.fused.one_token = OneToken(plain.transformer, twin.cache, kernels, CUT)
    return twin


@pytest.mark.parametrize(
    ("family", "dtype", "pages"), [("llama2", "float32", 0), ("qwen2", "float32", 384), ("qwen3", "fp8", 384)]
)
def test_a_token_is_the_same_in_one_launch(family: str, dtype: str, pages: int, tmp_path: Path) -> None:
    plain = ModelRunner.load(save(make_model(family), tmp_path), device="cpu", dtype=dtype, slots=2, context=192)
    twin = in_one_launch(plain, pages=pages)
    (a, b), (c, d) = ([r.acquire(), r.acquire()] for r in (plain, twin))
    for length in (1, 62):  # the first tokens, and across two pages
        for runner, slots in ((plain, (a, b)), (twin, (c, d))):
            runner.truncate(slots[1], 0)
            runner.score([Score(runner, slots[1], text(2, length), 1)])
        for step in range(3):
            (theirs,), (ours,) = (
                runner.score([Score(runner, slot, [5 + step], 1)]) for runner, slot in ((plain, b), (twin, d))
            )
            close(ours.logits, theirs.logits)
    request = Decode(plain, b, [5], 4, Sampling(1.0, seed=3), 7, stop=frozenset({11}))
    (theirs,), (ours,) = plain.decode([request]), twin.decode([replace(request, runner=twin, slot=d)])
    assert ours.tokens == theirs.tokens
    (theirs,), (ours,) = (r.score([Score(r, s, [3], 1)]) for r, s in ((plain, b), (twin, d)))
    close(ours.logits, theirs.logits)  # what was written into the cache is the same, too


@pytest.mark.parametrize("family", ["gemma3", "qwen3-moe", "qwen2-window", "llama-bias"])
def test_other_models_are_left_to_other_kernels(family: str, tmp_path: Path) -> None:
    plain = ModelRunner.load(save(make_model(family), tmp_path), device="cpu", slots=2, context=96)
    assert not suits(plain.transformer, plain.cache)


def test_codes_with_scales_of_blocks_are_left_to_other_kernels(tmp_path: Path) -> None:
    plain = ModelRunner.load(save(make_model("qwen3"), tmp_path), device="cpu", dtype="int8", slots=2, context=96)
    assert not suits(plain.transformer, plain.cache)


def test_a_launch_that_is_refused_leaves_single_tokens_to_other_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = ModelRunner.load(save(make_model("qwen3"), tmp_path), device="cpu", slots=2, context=96)
    ends: list[int] = []

    def launched(x: Tensor, *rest: Any) -> None:
        ends.append(int(rest[6]))  # nothing is decoded, so nothing is written

    def refused(*_: Any) -> None:
        raise RuntimeError("too many blocks in cooperative launch")

    for launch, works in ((launched, True), (refused, False)):
        kernels = replace(reference_kernels(), run_layers=launch)
        made = OneToken(plain.transformer, plain.cache, kernels, CUT)
        assert (tried(made, None) is made) == works
    assert ends == [0] and "too many blocks" in caplog.text
