"""The memory that is planned for layers with a window: by published shapes, and as a cache takes it."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3TextConfig

from semspec.model.config import Shape
from semspec.model.memory_plan import MemoryPlan, fitted
from semspec.model.page_pool import PASS
from semspec.model.paged_cache import PagedCache
from semspec.model.placement import Precision
from tests.checkpoints import FAMILIES

GEMMA_27B = Gemma3TextConfig(
    hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16,
    head_dim=128, sliding_window=1024, vocab_size=262208, query_pre_attn_scalar=168, max_position_embeddings=131072,
)  # fmt: skip
CARD = torch.device("cuda")


def test_gemma_3_27b_takes_3_gb_for_32k_tokens() -> None:
    """Published shapes: 52 layers with a window of 1,024, 10 that see all; each takes 8,192 bytes a token."""
    shape = Shape.of(GEMMA_27B)
    of = [MemoryPlan.of("gemma", shape, CARD, Precision(torch.bfloat16), slots, 32768) for slots in (1, 2, 9)]
    each = of[1].kv - of[0].kv
    assert [spec.window for spec in shape.attention_specs].count(1024) == 52
    assert 10 * 8192 * 32768 + 52 * 8192 * 1024 < each < 3.25e9 and of[2].kv - of[0].kv == 8 * each
    assert of[0].kv - each == 52 * 8192 * PASS * 64, "and once the tokens of a pass"
    assert of[0].per_token * 32768 > 16.6e9, "what it would be without windows"
    assert "(of the last 1024 in layers with a window)" in str(of[0])


@pytest.mark.parametrize("family", ["gemma3", "mistral", "qwen2-window", "llama2"])
def test_a_plan_is_what_a_paged_cache_takes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semspec.model.memory_plan.page_of", lambda context: 8)
    shape = Shape.of(FAMILIES[family][1])
    for slots, tokens in ((1, None), (3, None), (3, 500)):
        plan = MemoryPlan.of("m", shape, CARD, Precision(torch.float32), slots, 400)
        plan = fitted([plan], tokens)[0] if tokens else plan
        where = (torch.device("cpu"), torch.float32)
        assert PagedCache(shape, slots, 400, *where, tokens=tokens, page=8).nbytes == plan.kv


def test_the_largest_pool_that_fits_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = MemoryPlan.of("gemma", Shape.of(GEMMA_27B), CARD, Precision(torch.bfloat16), 64, 32768)
    for free in (60e9, 100e9, 139e9):
        monkeypatch.setattr("semspec.model.memory_plan.available", lambda device, free=free: int(free))
        (made,) = fitted([plan])
        fixed = plan.total - plan.kv
        assert made.tokens is None or made.kv <= 0.97 * (free - fixed) < made.kv + 3 * 64 * made.per_token, free
