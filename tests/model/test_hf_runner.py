"""Models that only transformers can run: the same contract, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import semspec
from semspec.errors import ModelError, SemspecError
from semspec.model import Source, hf_runner
from semspec.model.hf_runner import TransformersRunner
from semspec.sampling.noise import TARGET
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import SMALL, VOCAB, save

ENDS = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": None}
GPT = {"vocab_size": VOCAB, "n_layer": 3, "n_head": 4, "initializer_range": 0.3, "tie_word_embeddings": False} | ENDS
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT | {"n_embd": 64, "n_positions": 256},
    "gpt_neox": SMALL,
    "gemma2": SMALL | {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
    "bloom": GPT | {"hidden_size": 64},
}
MODELS["glm_moe_dsa"] = SMALL | {  # chooses what it reads by keys of its own; of few heads, many would be equal
    "num_key_value_heads": 4, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 16, "kv_lora_rank": 16,
    "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "initializer_range": 0.15,
}  # fmt: skip
STATES = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": VOCAB, "initializer_range": 0.3} | ENDS
RECURRENT: dict[str, dict[str, Any]] = {  # alone or beside attention, in the same layer too
    "qwen3_5_text": SMALL
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "lfm2": SMALL | {"layer_types": ["conv", "full_attention", "conv"]},
    "falcon_h1": SMALL
    | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16},
    "inkling_text": SMALL  # beside windows
    | {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], "head_dim": 16, "sliding_window_size": 16}
    | {"swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "n_routed_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "logits_mup_width_multiplier": 1.0},
    "mamba2": STATES | {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
}
MODELS |= RECURRENT


def test_a_config_that_lacks_what_caches_are_made_of_is_refused_by_name(tmp_path: Path) -> None:
    AutoConfig.for_model("blt").save_pretrained(tmp_path)  # reads bytes by three models, and has no number of layers
    with pytest.raises(ModelError, match=r"transformers makes no cache for 'blt': .*num_hidden_layers"):
        Source.find(tmp_path)


def test_a_config_without_an_end_of_text_is_read(tmp_path: Path) -> None:
    config = AutoConfig.for_model("roc_bert", num_hidden_layers=2)
    assert not hasattr(config, "eos_token_id")
    config.save_pretrained(tmp_path)
    assert Source.find(tmp_path).stop == frozenset()


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **MODELS[kind])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model = build(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


def load(folder: Path, slots: int = 2, context: int = 128) -> TransformersRunner:
    runner = Source.find(folder).load("cpu", "auto", slots, context)
    assert isinstance(runner, TransformersRunner)
    return runner


def text(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, [length], generator=torch.Generator().manual_seed(seed)).tolist()


def test_ragged_passes_with_truncation_between_say_what_transformers_says(case: tuple[PreTrainedModel, Path]) -> None:
    model, folder = case
    runner, tokens, others = load(folder), text(1, 60), text(2, 60)
    with torch.inference_mode():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    expected, states = out.logits[0], [h[0] for h in out.hidden_states]
    assert expected.std() > 0.3 and runner.num_layers + 1 == len(states)
    slot, beside = runner.acquire(), runner.acquire()
    layers = tuple(range(runner.num_layers + 1))
    for piece, back in [(1, 0), (20, 7), (9, 9), (30, 3), (60, 0)]:
        start = runner.length(slot)
        end = min(start + piece, 60)
        feed = Score(runner, slot, tokens[start:end], end - start, layers)
        rows, other = runner.score([feed, Score(runner, beside, others[:2], 0)])
        torch.testing.assert_close(rows.logits, expected[start:end], atol=1e-4, rtol=1e-4)
        for layer in layers:
            torch.testing.assert_close(rows.hidden[layer], states[layer][start:end], atol=1e-3, rtol=1e-4)
        assert other.logits.shape == (0, VOCAB)
        runner.truncate(slot, end - back)
    assert runner.length(slot) == 60 and runner.length(beside) == 10
    runner.release(slot)
    assert runner.acquire() == slot and runner.length(slot) == 0
    fresh = runner.score([Score(runner, slot, tokens[:4], 4)])[0].logits
    torch.testing.assert_close(fresh, expected[:4], atol=1e-4, rtol=1e-4)


def test_texts_of_different_lengths_share_a_pass(case: tuple[PreTrainedModel, Path]) -> None:
    """Each gets the logits and states that it gets alone; the weights are read once for all."""
    model, folder = case
    runner, texts = load(folder, slots=3), [text(seed, 60) for seed in (5, 6, 7)]
    with torch.inference_mode():
        outs = [model(torch.tensor([tokens]), output_hidden_states=True) for tokens in texts]
    slots = [runner.acquire() for _ in texts]
    for slot, tokens, n in zip(slots, texts, (3, 17, 40), strict=True):
        runner.score([Score(runner, slot, tokens[:n], 0)])
    passes = list[tuple[int, ...]]()
    runner.model.register_forward_pre_hook(lambda _, args: passes.append(tuple(args[0].shape)))
    layer = runner.num_layers
    for feed, back in ((4, 3), (1, 0), (5, 4), (1, 0), (2, 1)):
        starts = [runner.length(slot) for slot in slots]
        asked = [
            Score(runner, slot, tokens[at : at + feed], keep, (layer,) if keep else (), states=feed)
            for slot, tokens, at, keep in zip(slots, texts, starts, (feed, 1, 0), strict=True)
        ]
        for out, at, r, row in zip(outs, starts, asked, runner.score(asked), strict=True):
            end = at + feed
            torch.testing.assert_close(row.logits, out.logits[0, end - r.logits_to_keep : end], atol=1e-3, rtol=1e-3)
            for states in row.hidden.values():
                torch.testing.assert_close(states, out.hidden_states[layer][0, at:end], atol=1e-3, rtol=1e-3)
        for slot in slots:
            runner.truncate(slot, runner.length(slot) - back)
    shared = [size for size in passes if size[0] == 3]
    if any(hasattr(layer, "indexer_keys") for layer in runner._pasts[0].cache.layers):
        assert runner._joins is False and not shared, "what an index is of differs in length, and is not aligned"
        return
    assert len(shared) >= (3 if runner._pasts[0].recurrent else 5), passes


def test_a_short_text_is_not_padded_to_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding costs memory and attention; texts within a doubling share a pass."""
    monkeypatch.setattr(hf_runner, "PADDED", 15)
    runner, lengths = TransformersRunner(build("gpt_neox"), 4, 128), (3, 14, 40, 60)
    slots = [runner.acquire() for _ in lengths]
    for slot, n in zip(slots, lengths, strict=True):
        runner.score([Score(runner, slot, text(slot, n), 0)])
    passes = list[int]()
    runner._joins = True
    runner.model.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    runner.score([Score(runner, slot, [5], 1) for slot in slots])
    assert passes == [2, 2]
    monkeypatch.setattr(hf_runner, "MAX_KEYS", 64)  # two of the short ones, and one of those that take up to 64 each
    runner.score([Score(runner, slot, [6], 1) for slot in slots])
    assert passes == [2, 2, 2, 1, 1]


ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
BY_THE_LONGEST: dict[str, dict[str, Any]] = {
    "longrope": SMALL
    | {"rope_parameters": ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0, 8.0] * 4}},
    "dynamic": SMALL
    | {"max_position_embeddings": 32, "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}},
    "llama4_text": SMALL
    | {"intermediate_size_mlp": 128, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    | {"no_rope_layers": [1, 0, 1], "moe_layers": [1], "floor_scale": 16, "attn_scale": 0.5, "pad_token_id": 0},
}


@pytest.mark.parametrize("kind", BY_THE_LONGEST)
def test_a_text_is_not_read_as_a_longer_one_beside_it_has_to_be(kind: str) -> None:
    """Rotary frequencies for long texts, and a scale of attention that counts padding: short texts do not show it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind if kind == "llama4_text" else "llama", **BY_THE_LONGEST[kind])
    runner = TransformersRunner(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 3, 128)
    lengths, tokens = (60, 20, 20), text(4, 70)
    slots = [runner.acquire() for _ in lengths]
    for slot, n in zip(slots, lengths, strict=True):
        runner.score([Score(runner, slot, tokens[:n], 0)])
    (expected,) = runner.score([Score(runner, slots[2], tokens[20:24], 4)])
    pairs = zip(slots[:2], lengths, strict=False)
    _, row = runner.score([Score(runner, slot, tokens[n : n + 4], 4) for slot, n in pairs])
    torch.testing.assert_close(row.logits, expected.logits, atol=1e-4, rtol=1e-4)


def test_a_model_that_takes_no_mask_reads_each_text_by_itself(
    case: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: padding is attended to. It is found out before anything is answered."""
    model, folder = case
    runner, texts = load(folder), [text(seed, 30) for seed in (8, 9)]
    if not runner._takes_mask:
        assert runner._pasts[0].recurrent, "texts have no length in states, and no padding"
        return
    monkeypatch.setattr(runner, "_takes_mask", False)
    if model.config.model_type != "bloom":  # whose positions come from the mask
        monkeypatch.setattr(runner, "_takes_positions", False)
    slots = [runner.acquire() for _ in texts]
    for slot, tokens, n in zip(slots, texts, (4, 20), strict=True):
        runner.score([Score(runner, slot, tokens[:n], 0)])
    rows = runner.score([Score(runner, s, t[n : n + 3], 3) for s, t, n in zip(slots, texts, (4, 20), strict=True)])
    assert runner._joins is False
    for tokens, n, row in zip(texts, (4, 20), rows, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0, n : n + 3]
        torch.testing.assert_close(row.logits, expected, atol=1e-4, rtol=1e-4)


def test_a_decode_is_what_transformers_generates(case: tuple[PreTrainedModel, Path]) -> None:
    model, folder = case
    runner, prompt = load(folder), text(3, 12)
    ours = runner.decode([Decode(runner, runner.acquire(), prompt, 64, Sampling(), TARGET)])[0].tokens
    model.generation_config.eos_token_id = None
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, 12:].tolist()
    assert ours == theirs and len(set(ours)) > 5


def test_a_full_slot_refuses_more(case: tuple[PreTrainedModel, Path]) -> None:
    runner = load(case[1], context=16)
    with pytest.raises(SemspecError, match="is full: 0 tokens and 17 more exceed its capacity of 16"):
        runner.score([Score(runner, runner.acquire(), text(1, 17), 1)])


def test_drafts_are_lossless_and_may_come_from_a_native_model(
    case: tuple[PreTrainedModel, Path], draft_folder: Path
) -> None:
    pair = semspec.load(case[1], draft_folder, device="cpu", slots=2, context=100)
    options = {"max_new_tokens": 40, "ignore_eos": True, "num_draft_tokens": 4}
    plain = pair.generate("the quick brown", verifier="none", **options)
    for drafter in ("model", "ngram"):
        drafted = pair.generate("the quick brown", verifier="exact", drafter=drafter, **options)
        assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rwkv", "'rwkv' takes no cache of transformers, so that a rejected draft cannot be undone"),
        ("xlstm", "xlstm (xLSTMForCausalLM): a pass over a text alone, with the usual cache of transformers, fails: "),
        ("mamba", "mamba (MambaForCausalLM): in pieces, with a rejected draft between them, it gives other logits"),
    ],
)
def test_what_cannot_go_back_or_on_is_refused_by_name(kind: str, message: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **STATES, num_heads=4, attention_hidden_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as error:
        load(tmp_path)
    assert message in str(error.value)


def test_logits_are_cut_to_the_vocabulary_that_a_pair_shares(case: tuple[PreTrainedModel, Path]) -> None:
    runner = Source.find(case[1]).load("cpu", "auto", 1, 32, VOCAB - 5)
    assert runner.score([Score(runner, runner.acquire(), [1, 2], 2)])[0].logits.shape == (2, VOCAB - 5)


def test_a_model_that_does_not_forget_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gpt2")
    monkeypatch.setattr(TransformersRunner, "truncate", lambda self, slot, length: self._slots.truncate(slot, length))
    with pytest.raises(ModelError, match=r"gpt2 .* gives other logits than in one"):
        TransformersRunner(model, 1, 64)


def test_int8_is_refused(case: tuple[PreTrainedModel, Path]) -> None:
    with pytest.raises(ModelError, match="dtype int8 is for the model types semspec runs itself"):
        Source.find(case[1]).load("cpu", "int8", 1, 64)


def test_tensors_that_nobody_reads_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A config of another model may fit what it reads, and answers are noise. Layers behind the last only draft."""
    folder = save(build("gpt_neox"), tmp_path)
    file = folder / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {"gpt_neox.layers.3.mtp.weight": torch.zeros(2)}, file, {"format": "pt"})
    load(folder)
    assert not [record for record in caplog.records if record.name.startswith("semspec")]
    save_file(stored | {"gpt_neox.layers.2.attention.extra.weight": torch.zeros(2)}, file, {"format": "pt"})
    load(folder)
    assert "1 tensors are not read, such as gpt_neox.layers.2.attention.extra.weight" in caplog.text
