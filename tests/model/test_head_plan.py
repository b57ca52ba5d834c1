"""Draft heads in the memory plan, and the bytes that remembered states may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import semspec
from semspec.bench.shapes import SHAPES, planned
from semspec.errors import ModelError
from semspec.model import memory_plan
from semspec.model.config import Shape
from semspec.model.heads.plan import GROWS, head_plan
from semspec.model.hidden_states import CachedHiddenStates
from semspec.model.memory_plan import MemoryPlan, fitted
from semspec.model.prefix_cache import PrefixCache
from semspec.pocket.shipped import HEADS, SHIPPED
from semspec.types import Score
from tests.fakes import FakeRunner, chain

VOCAB = 12
TARGET = chain(VOCAB, seed=1)
CARD = torch.device("cuda")


def test_a_plan_is_what_the_head_takes() -> None:
    """Against the head itself, and the states of a prompt that it has read."""
    pair = semspec.load("pocket", device="cpu", slots=2, context=256)
    shape, here = Shape.read(Path(SHIPPED["pocket"])), MemoryPlan("target", torch.device("cpu"), 0, 1, 2, 256)
    found = head_plan(HEADS["pocket"], here, shape, torch.float32)
    assert found is not None
    remembering = pair.cached()
    for text in ("Mia has 4 pens.", "Tom has 7 books and Ana has 5."):
        remembering.generate(text, drafter="eagle:pocket", max_new_tokens=8)
    head = pair.resources.head("eagle", "pocket", 0.1, pair.target).head
    own = [head.fc, head.layers[0].qkv, head.layers[0].out, head.layers[0].ffn.gate_up, head.layers[0].ffn.down]  # type: ignore[union-attr]
    matrices = sum(linear.weight.numel() for linear in own)  # type: ignore[union-attr]
    assert 0.5 < 4 * matrices / found.memory.weights <= 1, "the rest is its vocabulary and norms"
    assert found.states == len(head.config.layers) * shape.width * 4
    caches = pair.caches
    assert caches is not None
    for slot, states in caches.target._states.items():
        tokens = len(caches.target._index.tokens[slot])
        assert states.nbytes == found.states * states.covers(head.config.layers) <= found.states * tokens
    assert caches.target._states
    s = head.shape
    assert found.memory.per_token == found.states + GROWS * 4 * (s.width + 2 * s.num_layers * s.kv_heads * s.head_dim)


def test_with_a_head_the_pool_of_a_card_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """32B and 1.5B on 139 GiB: what is left to a pool, when a head and its states have to fit as well."""
    card = 139 * 2**30
    monkeypatch.setattr(memory_plan, "available", lambda device: card)
    plans = [planned(name, shape, 64, 16384, CARD, torch.bfloat16)
             for name, shape in zip(("target", "draft"), SHAPES["32B/1.5B"], strict=True)]  # fmt: skip
    head = MemoryPlan("head", CARD, 1_530_000_000, 30_720 + GROWS * (10_240 + 4_096), 64, 16384, paged=True)
    without, with_head = fitted(plans), fitted([*plans, head])
    tokens = with_head[0].tokens
    assert tokens is not None and without[0].tokens is not None and 4096 * 40 < tokens < without[0].tokens
    assert sum(plan.total for plan in with_head) <= card and with_head[2].tokens == tokens
    forgotten = sum(plan.total for plan in without) + head.weights + head.per_token * without[0].held
    assert forgotten > card, "as it was: more than there is, under load"


def test_loading_plans_the_head_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said, how = list[str](), {"device": "cpu", "slots": 2, "context": 256}
    pair = semspec.load("pocket", **how, drafter="eagle:pocket", report=said.append)
    assert "head pocket on cpu: weights" in said[0] and pair.caches is not None
    shape, card = Shape.read(Path(SHIPPED["pocket"])), MemoryPlan("", CARD, 0, 1, 1, 1)
    found = head_plan(HEADS["pocket"], card, shape, torch.float32)
    assert found is not None and pair.caches.target.states_limit == found.states * 2 * 256
    for drafter in ("auto", "ngram", "model"):
        semspec.load("pocket", **how, drafter=drafter, report=said.append)
        assert "head" not in said[-1]
    taken = float(said[-1].rpartition("; ")[2].split()[0]) * 1e6  # MB
    monkeypatch.setattr(memory_plan, "available", lambda device: int(taken * 1.02))
    semspec.load("pocket", **how)
    with pytest.raises(ModelError, match=r"head pocket on cpu.* too much"):
        semspec.load("pocket", **how, drafter="eagle:pocket")


def test_a_head_that_cannot_be_read_is_refused_in_the_words_of_its_loader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    pair = semspec.load("pocket", device="cpu", slots=1, context=128, drafter=f"eagle:{tmp_path}")
    with pytest.raises(ModelError, match=str(tmp_path)):
        pair.generate("Mia has 4 pens.", drafter=f"eagle:{tmp_path}")


def test_states_of_the_least_recently_used_texts_give_way() -> None:
    inner = FakeRunner(TARGET, VOCAB, slots=2, max_seq_len=200, room=10**4)
    runner, texts = PrefixCache(inner), [[i] * 40 for i in range(4)]
    runner.states_limit = 2 * 40 * VOCAB * 4 + 100

    def read(text: list[int], states: bool) -> int:
        slot = runner.acquire(text)
        wanted = {"layers": (1,), "states": len(text)} if states else {}
        (row,) = runner.score([Score(runner, slot, text, 1, **wanted)])  # type: ignore[arg-type]
        said = torch.tensor([TARGET(text[: n + 1]) for n in range(len(text))])
        assert not states or torch.allclose(row.hidden[1], said + 1)
        runner.release(slot)
        return row.cached

    for text in texts:
        read(text, states=True)
    assert len(runner._states) == 2 and sum(s.nbytes for s in runner._states.values()) <= runner.states_limit
    assert read(texts[3], states=True) == 39 and read(texts[2], states=True) == 39
    assert read(texts[0], states=False) == 39, "the text itself is still there"
    assert read(texts[0], states=True) == 0, "and read again where its states are wanted"
    runner.states_limit = 0
    read(texts[0], states=True)
    assert not runner._states and read(texts[0], states=True) == 0


def test_bytes_are_those_of_the_tensors() -> None:
    """The count is kept as parts come and go; the tensors say what it should be."""
    states, wide = CachedHiddenStates(), torch.randn(50, 8)
    for start, end in ((0, 7), (7, 8), (8, 30)):
        states.append(start, {1: wide[start:end], 2: wide[start:end]})
    for made in (states, states.first(20), states.first(3), states.kept(10, [0, 2, 5]), CachedHiddenStates()):
        real = sum(t.untyped_storage().nbytes() for part in made._parts for t in part.values())
        assert made.nbytes == real
