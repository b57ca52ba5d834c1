"""GGUF files of four bits on a CPU: kept in their own blocks, which changes neither the model nor what is exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

import semspec
from semspec.cli.main import app
from semspec.errors import BadRequest
from semspec.model import ModelRunner, int4
from semspec.model import memory_plan as plans
from semspec.model.gguf_blocks import KEPT, read_blocks
from semspec.model.gguf_checkpoint import GgufCheckpoint
from semspec.model.int4 import Int4Linear
from semspec.model.int8 import Int8Linear
from semspec.model.linear import DenseLinear, evenly_spaced
from semspec.model.source import Source
from semspec.probe import fingerprint
from semspec.sparse import SparsePlan
from semspec.sparse.attention import AttentionPlan
from semspec.types import Score
from tests.checkpoints import VOCAB, make_model, make_tokenizer
from tests.gguf_files import q4_k, write

CPU = torch.device("cpu")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "initializer_range": 0.15}
MORE: dict[str, dict[str, object]] = {
    "qwen3-moe": {"mlp_only_layers": [], "norm_topk_prob": True, "moe_intermediate_size": 64},
    **{family: {"layer_types": None} for family in ("qwen2", "qwen3", "gemma3")},
}
PROMPTS = ["the quick brown fox", "the sky is blue because", "one two three", "light scatters light scatters light"]

pytestmark = pytest.mark.skipif(not int4.fast(), reason="this processor has no fast product with four bits")


def made(path: Path, kind: Kind | Callable[[str], Kind] = Kind.Q4_0, family: str = "llama3", **changed: object) -> Path:
    return write(make_model(family, **WIDE | MORE.get(family, {}) | changed), path / "m.gguf", make_tokenizer(), kind)


def logits(path: Path, dtype: str = "auto") -> Tensor:
    runner = ModelRunner.load(path, device="cpu", dtype=dtype, slots=1, context=128)
    tokens = torch.randint(VOCAB, [40], generator=torch.Generator().manual_seed(3)).tolist()
    return runner.score([Score(runner, runner.acquire(), tokens, len(tokens))])[0].logits


# -- blocks


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(sorted(KEPT)), seed=st.integers(0, 1 << 30), rows=st.integers(1, 5))
def test_blocks_are_to_the_last_bit_what_the_package_dequantises(kind: Kind, seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    block, width = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows * 512 // block, width), dtype=np.uint8)
    floats = 1 if kind == Kind.Q4_0 else 2
    scales = rng.choice([0.0, 1.0, -1.0, 6e-8], (len(raw), floats)) * rng.random((len(raw), floats))
    raw[:, : 2 * floats] = scales.astype(np.float16).view(np.uint8)
    raw = raw.reshape(rows, -1)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    found = read_blocks(raw, kind)
    assert torch.equal(found.dequantised().view(torch.int32), expected.view(torch.int32)), "the signs of zeros, too"
    assert torch.equal(found.sample.view(torch.int32), evenly_spaced(expected).view(torch.int32))


def test_the_tests_own_blocks_are_the_weights_up_to_four_bits() -> None:
    weights = np.random.default_rng(1).standard_normal((8, 512)).astype(np.float32)
    back = gguf.quants.dequantize(q4_k(weights), Kind.Q4_K)
    assert np.abs(back - weights).max() < 0.4 and np.abs(back - weights).mean() < 0.12


# -- models


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama3", Kind.Q4_0), ("llama3", Kind.Q4_1), ("llama3", Kind.Q4_K), ("qwen2", Kind.Q4_0), ("qwen3", Kind.Q4_1),
     ("phi3", Kind.Q4_K), ("gemma3", Kind.Q4_0), ("qwen3-moe", Kind.Q4_0), ("mixtral", Kind.Q4_1)],
)  # fmt: skip
def test_kept_blocks_are_the_same_model(family: str, kind: Kind, tmp_path: Path) -> None:
    path = made(tmp_path, kind, family)
    kept, floats = logits(path), logits(path, "float32")
    assert floats.std() > 0.5
    error = (kept - floats).abs().mean() / floats.std()
    assert 0 < error < 0.05, "inputs and scales are rounded to eight bits, and nothing else happens"
    runners = [ModelRunner.load(path, device="cpu", dtype=dtype, slots=1, context=64) for dtype in ("auto", "float32")]
    assert isinstance(runners[0].transformer.layers[0].out, Int4Linear)
    assert isinstance(runners[1].transformer.layers[0].out, DenseLinear)
    assert fingerprint(runners[0]) == fingerprint(runners[1]), "probes and profiles of one are for the other"


def test_rows_in_the_order_of_the_file_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's queries and keys lie in pairs."""
    path = made(tmp_path)
    floats = logits(path, "float32")
    monkeypatch.setattr(GgufCheckpoint, "_in_pairs", lambda self, stem: False)
    assert (logits(path) - floats).abs().mean() / floats.std() > 0.2


def test_own_codes_are_nearer_than_codes_made_again(tmp_path: Path) -> None:
    path = made(tmp_path, Kind.Q4_0)
    model = ModelRunner.load(path, device="cpu", dtype="float32", slots=1, context=64).transformer
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    weight = model.layers[0].qkv.weight  # type: ignore[attr-defined]
    kept = ModelRunner.load(path, device="cpu", slots=1, context=64).transformer.layers[0].qkv
    again = int4.cpu_int4(semspec.model.quantised.quantise(weight, "int4"))
    exact = x @ weight.T
    assert (kept(x) - exact).norm() < 0.9 * (again(x) - exact).norm()


@pytest.mark.parametrize("length", [3, 40])
def test_exact_is_the_target_token_for_token(tmp_path: Path, length: int) -> None:
    path = made(tmp_path, Kind.Q4_K)
    pair = semspec.load(path, path, device="cpu", slots=4, context=256)  # so that drafts are good
    alone = [pair.generate(p, verifier="none", max_new_tokens=48, ignore_eos=True).tokens for p in PROMPTS]
    options = {"verifier": "exact", "num_draft_tokens": length, "max_new_tokens": 48, "ignore_eos": True}
    drafted = pair.generate(PROMPTS, **options)  # type: ignore[arg-type]
    assert [r.tokens for r in drafted] == alone
    assert all(r.stats.tau > min(length, 20) for r in drafted)


# -- which files


def test_matrices_of_more_bits_beside_them_have_a_byte(tmp_path: Path) -> None:
    path = made(tmp_path, lambda name: Kind.Q8_0 if "attn_v" in name or "ffn_down" in name else Kind.Q4_0)
    layer = ModelRunner.load(path, device="cpu", slots=1, context=64).transformer.layers[0]
    kinds = [type(linear) for linear in (layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down)]  # type: ignore[union-attr]
    assert kinds == [Int8Linear, Int4Linear, Int4Linear, Int8Linear]
    kept, floats = logits(path), logits(path, "float32")
    assert (kept - floats).abs().mean() / floats.std() < 0.05


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q5_0, Kind.F16])
def test_files_of_more_bits_are_floats(kind: Kind, tmp_path: Path) -> None:
    runner = ModelRunner.load(made(tmp_path, kind), device="cpu", slots=1, context=64)
    assert isinstance(runner.transformer.layers[0].out, DenseLinear)


def test_a_processor_without_the_instructions_takes_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert isinstance(ModelRunner.load(path, device="cpu", slots=1, context=64).transformer.head, DenseLinear)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wide", ["ffn_down", "attn_v", "ffn_up", "attn_output"])
def test_the_plan_counts_what_is_taken(tmp_path: Path, tied: bool, wide: str) -> None:
    """A matrix of more bits widens those that are joined with it, and no others."""
    path = made(tmp_path, lambda name: Kind.Q8_0 if wide in name else Kind.Q4_0, tie_word_embeddings=tied)
    plan = Source.find(path).plan("cpu", "auto", 1, 64)
    model = ModelRunner.load(path, device="cpu", slots=1, context=64).transformer
    linears = [x for la in model.layers for x in (la.qkv, la.out, la.ffn.gate_up, la.ffn.down)]  # type: ignore[union-attr]
    samples = sum(x.sample.nbytes for x in [*linears, model.head])  # for fingerprints
    matrices = sum(x.nbytes for x in [*linears, model.head]) - samples
    norms = sum(la.attention_norm.nbytes + la.ffn_norm.nbytes for la in model.layers) + model.final_norm.nbytes
    assert plan.weights == pytest.approx(matrices + model.embedding.nbytes + norms, rel=0.01)
    assert plan.read == plan.weights - model.embedding.nbytes
    assert plan.weights < 0.5 * Source.find(path).plan("cpu", "float32", 1, 64).weights


def test_what_does_not_fit_does_not_become_wider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = made(tmp_path), list[str]()
    monkeypatch.setattr(plans, "available", lambda device: 1000)
    with pytest.raises(semspec.ModelError, match="too much"):
        semspec.load(path, device="cpu", slots=1, context=64, report=said.append)
    assert not any("bfloat16" in line for line in said)


def test_a_sparse_plan_gets_the_floats_it_reads(tmp_path: Path) -> None:
    path = made(tmp_path)
    plan = SparsePlan(attention=AttentionPlan())
    pair = semspec.load(path, device="cpu", slots=1, context=128, sparse=plan)
    assert isinstance(pair.target.transformer.layers[0].out, DenseLinear)
    with pytest.raises(BadRequest, match="float32"):
        semspec.load(path, device="cpu", dtype="int4", slots=1, context=128, sparse=plan)


def test_each_model_of_a_pair_is_as_its_own_file_is(tmp_path: Path) -> None:
    four = made(tmp_path)
    (tmp_path / "more").mkdir()
    eight = made(tmp_path / "more", Kind.Q8_0)
    for target, draft, kinds in ((four, eight, (Int4Linear, DenseLinear)), (eight, four, (DenseLinear, Int4Linear))):
        pair = semspec.load(target, draft, device="cpu", slots=1, context=64)
        assert pair.draft is not None
        found = [runner.transformer.layers[0].out for runner in (pair.target, pair.draft)]
        assert isinstance(found[0], kinds[0]) and isinstance(found[1], kinds[1])


def test_a_draft_may_have_a_smaller_head(tmp_path: Path) -> None:
    path = made(tmp_path, tie_word_embeddings=False)
    pair = semspec.load(path, path, device="cpu", slots=1, context=128, draft_vocab=200)
    assert pair.draft is not None
    head, whole = pair.draft.transformer.head, pair.target.transformer.head
    x = torch.randn(3, 256)
    torch.testing.assert_close(head(x)[:, :200], whole(x)[:, :200], atol=1e-4, rtol=1e-4)
    alone = pair.generate("the quick", verifier="none", max_new_tokens=24).tokens
    assert pair.generate("the quick", verifier="exact", max_new_tokens=24).tokens == alone


def test_info_says_how_a_file_is_stored(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["info", str(made(tmp_path, Kind.Q4_1)), "--device", "cpu", "--no-measure", "--json"]
    )
    (model,) = json.loads(done.stdout)["models"]
    assert model["stored"] == "Q4_1" and model["refusal"] is None
