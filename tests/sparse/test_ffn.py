"""Channels left out of feed-forward networks, against the rule written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.experts import FeedForward, Linear
from semspec.sparse import FfnPlan
from semspec.sparse.ffn import BY, sparse_ffn
from semspec.types import Score
from tests.checkpoints import make_model, save
from tests.sparse.runners import check, course, load, read, text, with_plan

DEPTH = 3


@pytest.fixture(scope="module", params=["llama-bias", "gemma3", "qwen3-moe"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model(request.param), tmp_path_factory.mktemp("model")))


def plan(threshold: float, by: str) -> FfnPlan:
    return FfnPlan(torch.full((DEPTH,), threshold), by)


def network(width: int = 6, channels: int = 10, biased: bool = True) -> FeedForward:
    random = torch.Generator().manual_seed(3)
    weight, down = torch.randn(2 * channels, width, generator=random), torch.randn(width, channels, generator=random)
    bias = (
        (torch.randn(2 * channels, generator=random), torch.randn(width, generator=random)) if biased else (None, None)
    )
    return FeedForward(Linear(weight, bias[0]), Linear(down, bias[1]), torch.nn.functional.silu)


def written_out(ffn: FeedForward, x: Tensor, threshold: float, sequences: list[int] | None) -> Tensor:
    """Token by token, channel by channel."""
    both = ffn.gate_up(x)
    gate, up = torch.nn.functional.silu(both[:, :10]), both[:, 10:]
    out = torch.zeros(len(x), 6) if ffn.down.bias is None else ffn.down.bias.repeat(len(x), 1)
    for t in range(len(x)):
        mates = [t] if sequences is None else [u for u in range(len(x)) if sequences[u] == sequences[t]]
        for c in range(10):
            if any(abs(float(gate[u, c])) >= threshold for u in mates):
                out[t] += gate[t, c] * up[t, c] * ffn.down.weight[:, c]
    return out


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.6, 1e9])
@pytest.mark.parametrize("sequences", [None, [7, 7, 7, 7, 7], [2, 2, 5, 5, 5]])
def test_channels_are_left_out_by_the_rule(threshold: float, sequences: list[int] | None, biased: bool) -> None:
    ffn, x = network(biased=biased), torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    ours = sparse_ffn(ffn, x, threshold, None if sequences is None else torch.tensor(sequences))
    torch.testing.assert_close(ours, written_out(ffn, x, threshold, sequences), atol=1e-5, rtol=1e-4)
    if threshold == 0.6:
        assert not torch.allclose(ours, ffn(x), atol=1e-2)


@pytest.mark.parametrize("by", BY)
def test_thresholds_of_zero_are_dense_to_the_last_bit(runner: ModelRunner, by: str) -> None:
    for ours, dense in zip(course(with_plan(runner, ffn=plan(0.0, by))), course(runner), strict=True):
        assert torch.equal(ours, dense)


@pytest.mark.parametrize("by", BY)
def test_a_threshold_that_nothing_is_below_is_dense(runner: ModelRunner, by: str) -> None:
    for ours, dense in zip(course(with_plan(runner, ffn=plan(1e-30, by))), course(runner), strict=True):
        torch.testing.assert_close(ours, dense, atol=1e-5, rtol=0)


@pytest.mark.parametrize("by", BY)
def test_only_checks_are_thin_and_neighbours_do_not_matter(runner: ModelRunner, by: str) -> None:
    """Two checks, a prompt and a token in one pass equal each by itself; prompt and token are dense."""
    feeds = [(text(10, 6), 6), (text(11, 4), 4), (text(12, 30), 1), (text(13, 1), 1)]

    def alone(one: ModelRunner, i: int) -> Tensor:
        slot = one.acquire()
        read(one, slot, text(i, 50))
        logits = one.score([Score(one, slot, *feeds[i])])[0].logits
        one.release(slot)
        return logits

    thinly = with_plan(runner, ffn=plan(0.3, by))
    single = [alone(thinly, i) for i in range(4)]
    dense = [alone(runner, i) for i in range(4)]
    assert [torch.equal(a, b) for a, b in zip(single, dense, strict=True)] == [False, False, True, True]
    slots = [thinly.acquire() for _ in feeds]
    for i, slot in enumerate(slots):
        read(thinly, slot, text(i, 50))
    for ours, one in zip(
        thinly.score([Score(thinly, s, *f) for s, f in zip(slots, feeds, strict=True)]), single, strict=True
    ):
        torch.testing.assert_close(ours.logits, one, atol=1e-3, rtol=1e-3)


def test_a_union_leaves_out_less_than_each_token_would(runner: ModelRunner) -> None:
    near, far = (
        sum(
            float((a - b).norm())
            for a, b in zip(course(with_plan(runner, ffn=plan(0.3, by))), course(runner), strict=True)
        )
        for by in ("union", "token")
    )
    assert 0 < near < far


def test_plans_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="by 'layer'"):
        FfnPlan(torch.zeros(3), "layer")
    with pytest.raises(BadRequest, match="0 or more"):
        FfnPlan(torch.tensor([-1.0]))
    model = load(save(make_model("qwen2"), tmp_path / "m"))
    with pytest.raises(BadRequest, match="2 thresholds for 3 layers"):
        with_plan(model, ffn=FfnPlan(torch.zeros(2)))
    check(model, model.acquire(), [1, 2])
