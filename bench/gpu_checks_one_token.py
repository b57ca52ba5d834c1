"""What must hold on a GPU of the kernel that runs all layers of a single token in one launch. Knows all checks."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.gpu_checks_kernels import check, error
from bench.gpu_checks_packed import CHECKS as CHECKS
from semspec.bench.shapes import RandomWeights
from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import GraphCache
from semspec.model.kernels import DEFAULT_FLAGS, triton_kernels
from semspec.model.one_token import OneToken
from semspec.model.placement import Weights
from semspec.model.transformer import Transformer
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import FAMILIES

SIZES = {  # widths that are a multiple of nothing large, few and many heads, several sizes of heads
    "qwen2": {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960},
    "llama3": {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
               "head_dim": 64},
    "qwen3": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
              "head_dim": 128},
    "llama2": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
               "head_dim": 128},
}  # fmt: skip


def runners(family: str, weights: Weights, device: torch.device) -> tuple[ModelRunner, ModelRunner]:
    """With a launch for each operation, and with one; the same weights."""
    config = type(FAMILIES[family][1]).from_dict(
        FAMILIES[family][1].to_dict()
        | SIZES[family]
        | {"num_hidden_layers": 4, "layer_types": None, "vocab_size": 2048, "max_position_embeddings": 8192}
    )
    made = Transformer(Shape.of(config), RandomWeights(), device, torch.bfloat16, weights)
    both = []
    for one in (False, True):
        runner = ModelRunner(made, 2, 4096)
        flags = replace(DEFAULT_FLAGS, one_token=one)
        graph_runner = GraphRunner(made, runner.cache, triton_kernels(), GraphCache(device), flags)
        if one:  # by default only models with small layers
            graph_runner.fused.one_token = OneToken(made, runner.cache, graph_runner.kernels)
        runner.use(graph_runner)
        both.append(runner)
    return both[0], both[1]


def one_token_check(family: str, weights: Weights, device: torch.device) -> None:
    plain, whole = runners(family, weights, device)
    slots = [runner.acquire() for runner in (plain, whole)]
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for length in (1, 62, 63, 64, 900, 2500):
        prompt = torch.randint(2048, [length], generator=generator).tolist()
        for runner, slot in zip((plain, whole), slots, strict=True):
            runner.truncate(slot, 0)
            runner.score([Score(runner, slot, prompt, 1)])
        for token in torch.randint(2048, [6], generator=generator).tolist():
            theirs, ours = (
                r.score([Score(r, s, [token], 1)])[0].logits for r, s in zip((plain, whole), slots, strict=True)
            )
            worst = max(worst, error(ours, theirs.double()))
    assert worst < 0.03, f"logits are off by {worst:.3f} of their size"
    # What it wrote into the cache is read by passes of several tokens, and decodes are the same again and again.
    feed = torch.randint(2048, [9], generator=generator).tolist()
    theirs, ours = (r.score([Score(r, s, feed, 9)])[0].logits for r, s in zip((plain, whole), slots, strict=True))
    assert error(ours, theirs.double()) < 0.03
    rolls = set()
    for _ in range(20):
        whole.truncate(slots[1], 2000)
        rolls.add(tuple(whole.decode([Decode(whole, slots[1], [5], 40, Sampling(1.0, seed=3), 7)])[0].tokens))
    assert len(rolls) == 1, f"{len(rolls)} different texts of one seed"


for family in SIZES:
    for weights in ("plain", "fp8"):
        CHECKS[f"one token of {family}, {weights}"] = lambda device, one=family, other=weights: one_token_check(
            one, other, device
        )


@check
def one_token_changes_no_bit_from_run_to_run(device: torch.device) -> None:
    """Programs that meet too early would read what is not written yet, sometimes."""
    _, whole = runners("qwen2", "plain", device)
    slot = whole.acquire()
    whole.score([Score(whole, slot, list(range(1500)), 1)])
    found = []
    for _ in range(300):
        whole.truncate(slot, 1500)
        found.append(whole.score([Score(whole, slot, [5], 1)])[0].logits.clone())
    assert all(torch.equal(one, found[0]) for one in found)
