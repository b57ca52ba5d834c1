"""Experts left out, against the rule in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.experts import Experts, left_out, ratios, skip
from semspec.sparse import ExpertsPlan
from semspec.types import Score
from tests.checkpoints import make_model, save
from tests.sparse.runners import course, load, read, text, with_plan

DEPTH, CHOSEN = 3, 4


@pytest.fixture(scope="module", params=["qwen3-moe", "mixtral"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model(request.param, num_experts_per_tok=CHOSEN), tmp_path_factory.mktemp("model")))


def plan(beta: float, most: int) -> ExpertsPlan:
    return ExpertsPlan(torch.full((DEPTH, CHOSEN - 1), beta), most)


weights = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(lambda w: sorted(w, reverse=True))


@given(st.lists(weights, min_size=1, max_size=4), st.lists(st.floats(0, 3), min_size=3, max_size=3), st.integers(0, 3))
def test_the_largest_number_below_its_beta_goes(rows: list[list[float]], betas: list[float], most: int) -> None:
    ours = left_out(torch.tensor(rows, dtype=torch.double), torch.tensor(betas, dtype=torch.double), most)
    for row, count in zip(rows, ours.tolist(), strict=True):
        allowed = [m for m in range(1, most + 1) if sum(row[4 - m :]) / sum(row[: 4 - m]) < betas[m - 1] - 1e-12]
        doubtful = [m for m in range(1, most + 1) if abs(sum(row[4 - m :]) / sum(row[: 4 - m]) - betas[m - 1]) <= 1e-12]
        assert count == max(allowed, default=0) or doubtful


def test_two_experts_are_the_earlier_papers_rule() -> None:
    """The second of two goes if it weighs less than beta times the first."""
    pairs = torch.tensor([[0.8, 0.2], [0.6, 0.4]])
    assert torch.allclose(ratios(pairs)[:, 0], torch.tensor([0.25, 2 / 3]))
    assert left_out(pairs, torch.tensor([0.5]), 1).tolist() == [1, 0]


def test_what_is_left_is_renormalised_only_where_the_router_does() -> None:
    given_, index = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), torch.tensor([[4, 1, 3], [0, 2, 5]])
    rows, betas = torch.tensor([True, False]), torch.tensor([1.0, 0.0])
    kept, experts = skip(given_, index, betas, 2, rows, renormalise=True)
    assert experts.tolist() == [[4, 1, -1], [0, 2, 5]]
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0], [0.5, 0.3, 0.2]]))
    kept, _ = skip(given_, index, betas, 2, rows, renormalise=False)
    torch.testing.assert_close(kept, torch.tensor([[0.5, 0.3, 0.0], [0.5, 0.3, 0.2]]))


@pytest.mark.parametrize("off", [plan(0.0, 3), plan(9.0, 0)])
def test_off_is_dense_to_the_last_bit(runner: ModelRunner, off: ExpertsPlan) -> None:
    for ours, dense in zip(course(with_plan(runner, experts=off)), course(runner), strict=True):
        assert torch.equal(ours, dense)


def test_checks_alone_leave_experts_out(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check, a prompt and a token in one pass: only the check's tokens have fewer experts, at most the cap."""
    sparse = with_plan(runner, experts=plan(1e9, 2))
    slots = [sparse.acquire() for _ in range(3)]
    for i, slot in enumerate(slots):
        read(sparse, slot, text(i, 20))
    seen: list[list[int]] = []
    mix = Experts.mix

    def watched(self: Experts, x: torch.Tensor, w: torch.Tensor, index: torch.Tensor, run: object) -> torch.Tensor:
        seen.append((index >= 0).sum(-1).tolist())
        return mix(self, x, w, index, run)  # type: ignore[arg-type]

    feeds = [(text(10, 4), 4), (text(11, 3), 1), (text(12, 1), 1)]
    with monkeypatch.context() as patch:
        patch.setattr(Experts, "mix", watched)
        rows = sparse.score([Score(sparse, s, *f) for s, f in zip(slots, feeds, strict=True)])
    assert seen and all(counts == [2, 2, 2, 2, 4, 4, 4, 4] for counts in seen)
    for i in (1, 2):
        slot = runner.acquire()
        read(runner, slot, text(i, 20))
        dense = runner.score([Score(runner, slot, *feeds[i])])[0].logits
        runner.release(slot)
        torch.testing.assert_close(rows[i].logits, dense, atol=1e-3, rtol=1e-3)


def test_plans_that_do_not_fit_are_refused(runner: ModelRunner, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(BadRequest, match="one must remain"):
        plan(1.0, 4)
    with pytest.raises(BadRequest, match="chooses 4 experts"):
        with_plan(runner, experts=ExpertsPlan(torch.zeros(DEPTH, 1), 1))
    dense = load(save(make_model("qwen2"), tmp_path_factory.mktemp("dense")))
    with pytest.raises(BadRequest, match="this model has none"):
        with_plan(dense, experts=plan(1.0, 1))
