"""Layers for multi-token prediction: read from a target's own checkpoint, against the same layer without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import semspec
from semspec.cli.main import app
from semspec.errors import BadRequest, ModelError
from semspec.model import ModelRunner, Source
from semspec.model.heads.mtp import MtpHead, config_of_layer
from semspec.model.heads.mtp_runner import MtpRunner
from semspec.model.hf_runner import TransformersRunner
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import SMALL, VOCAB, edit_config, make_model, save
from tests.model.test_hf_runner import MODELS, RECURRENT, text

QWEN = RECURRENT["qwen3_5_text"]
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN | MIXTURE,
    "glm4_moe": SMALL | ROUTED | {"first_k_dense_replace": 1, "head_dim": 16},
    "deepseek_v3": SMALL | ROUTED | LATENT | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
}
EXPERTS = ("qwen3_5_moe_text", "glm4_moe", "deepseek_v3")  # which checkpoints may have one by one
QWEN_NAMES = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.layers.0", "mtp.norm")


class Layer:
    """The same layer made of a model's own modules; every pair is computed anew, without a cache."""

    def __init__(self, model: PreTrainedModel, seed: int = 1) -> None:
        torch.manual_seed(seed)
        decoder = model.get_decoder()
        self.model, config = model, config_of_layer(model.config)
        norms = [type(decoder.norm)(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
        joined = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.parts = nn.ModuleList([norms[0], norms[1], joined, type(decoder.layers[-1])(config, 0), norms[2]]).eval()
        for one in self.parts.parameters():
            one.data = torch.randn(one.shape) * 0.3 + (one.dim() == 1)

    def __call__(self, tokens: Tensor, states: Tensor, feeds_normed: bool) -> tuple[Tensor, Tensor]:
        embedding, state, joined, block, final = self.parts
        x = joined(torch.cat([embedding(self.model.get_input_embeddings()(tokens)), state(states)], -1))[None]
        n = len(tokens)
        mask = torch.full((n, n), torch.finfo(x.dtype).min).triu(1)[None, None]
        at = torch.arange(n)[None]
        rotary = self.model.get_decoder().rotary_emb(x, at)
        x = block(x, attention_mask=mask, position_ids=at, position_embeddings=rotary)
        x = (x[0] if isinstance(x, tuple) else x)[0]
        normed = final(x)
        return self.model.get_output_embeddings()(normed), normed if feeds_normed else x

    def write(self, folder: Path, single_experts: bool = False) -> None:
        """Into the checkpoint, under the names of its family."""
        stored = load_file(folder / "model.safetensors")
        qwen, depth = self.model.config.model_type.startswith("qwen"), self.model.config.num_hidden_layers
        at = f"model.layers.{depth}"
        names = QWEN_NAMES if qwen else (f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj", at, f"{at}.shared_head.norm")
        for name, part in zip(names, self.parts, strict=True):
            for key, value in part.state_dict().items():
                where, _, kind = key.rpartition(".")
                if single_experts and kind in ("gate_up_proj", "down_proj") and value.dim() == 3:
                    for i, matrix in enumerate(value):
                        halves = {"gate_proj": matrix[:32], "up_proj": matrix[32:]}
                        for one, weight in (halves if kind == "gate_up_proj" else {"down_proj": matrix}).items():
                            stored[f"{name}.{where}.{i}.{one}.weight"] = weight.clone()
                else:
                    stored[f"{name}.{key}"] = value.clone()
        save_file(stored, folder / "model.safetensors", {"format": "pt"})


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]), dtype=torch.float32).eval()


def target_of(folder: Path) -> TransformersRunner:
    runner = Source.find(folder).load("cpu", "auto", 2, 256)
    assert isinstance(runner, TransformersRunner)
    return runner


@pytest.mark.parametrize(("kind", "single"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in EXPERTS)])
def test_what_it_says_is_what_the_layer_says_without_a_cache(kind: str, single: bool, tmp_path: Path) -> None:
    """After a prompt, after accepted tokens, after a rejection; drafts go on from its own outputs."""
    model = build(kind)
    layer, folder = Layer(model), save(model, tmp_path)
    layer.write(folder, single)
    target, tokens = target_of(folder), text(1, 40)
    runner = MtpRunner(MtpHead.load("", target), VOCAB, 256)
    (last,) = runner.layers
    at = target.acquire()
    hidden = target.score([Score(target, at, tokens, 0, (last,), states=40)])[0].hidden[last]
    qwen = kind.startswith("qwen")
    slot, seen = runner.acquire(), 0
    for length in (12, 13, 17, 30):
        runner.observe(slot, {last: hidden[seen : length - 1]})
        seen = length - 1
        feed = tokens[runner.length(slot) : length]
        (drafted,) = runner.decode([Decode(runner, slot, feed, 4, Sampling(), 0, keep_logits=True)])
        assert drafted.logits is not None
        pairs, states = tokens[1:length], hidden[: length - 1]
        for token, row in zip(drafted.tokens, drafted.logits, strict=True):
            with torch.inference_mode():
                logits, output = layer(torch.tensor(pairs), states, qwen)
            torch.testing.assert_close(row, logits[-1], atol=1e-4, rtol=1e-4)
            pairs, states = [*pairs, token], torch.cat([states, output[-1:]])
        assert len(set(drafted.tokens)) > 1
        runner.truncate(slot, min(length + 2, runner.length(slot)))
        assert runner.length(slot) == length
    runner.release(slot)


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_the_first_guess_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    mtp = getattr(transformers.modeling_layers, "MtpModel", None)
    if mtp is None:
        pytest.skip(f"transformers {transformers.__version__} has no MTP")
    model = build(kind)
    layer, folder = Layer(model), save(model, tmp_path)
    layer.write(folder, single_experts=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target, tokens = target_of(folder), text(2, 20)
    with torch.inference_mode():
        states = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        cache = transformers.cache_utils.MtpCache(config=theirs.config.get_mtp_config())
        made = mtp(theirs, 1).eval()
        for name, part in zip(("enorm", "hnorm", "eh_proj", "mtp_block", "post_norm"), layer.parts, strict=True):
            made.layers[0].get_submodule(name).load_state_dict(part.state_dict())
        ids, positions = torch.tensor([tokens[1:]]), torch.arange(1, 20)[None]
        _, expected, _ = made(ids, states[None, :-1], None, positions, cache)
    runner = MtpRunner(MtpHead.load("", target), VOCAB, 256)
    slot = runner.acquire()
    runner.observe(slot, {3: states[:-1]})
    (rows,) = runner.score([Score(runner, slot, tokens, 1)])
    torch.testing.assert_close(rows.logits[0], expected[0, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_what_chooses_the_experts_is_as_precise_as_in_the_model(kind: str, tmp_path: Path) -> None:
    """These numbers are far from zero and near each other: in bfloat16 all would be the same."""
    model, bias = build(kind), torch.tensor([8.0, 8.01, 8.02, 8.03])
    layer, folder = Layer(model), save(model, tmp_path)
    layer.parts[3].get_submodule("mlp.gate").e_score_correction_bias.copy_(bias)
    layer.write(folder)
    target = Source.find(folder).load("cpu", "bfloat16", 1, 64)
    head = MtpHead.load("", target)
    assert head.joined.weight.dtype == torch.bfloat16
    torch.testing.assert_close(head.block.get_submodule("mlp.gate").e_score_correction_bias, bias)


def learnt(model: PreTrainedModel, layer: Layer, texts: list[list[int]]) -> None:
    """Train the layer to guess the token after the one that it reads."""
    with torch.no_grad():
        states = [model(torch.tensor([t]), output_hidden_states=True).hidden_states[-1][0] for t in texts]
    rate = torch.optim.Adam(layer.parts.parameters(), 0.01)
    for _ in range(60):
        losses = []
        for t, s in zip(texts, states, strict=True):
            guesses, _ = layer(torch.tensor(t[1:-1]), s[:-2], True)
            losses.append(F.cross_entropy(guesses, torch.tensor(t[2:])))
        rate.zero_grad()
        torch.stack(losses).mean().backward()
        rate.step()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layer has learnt its answers to the prompts of the tests."""
    model = build("qwen3_5_text")
    folder = save(model, tmp_path_factory.mktemp("trained"))
    pair = semspec.load(folder, device="cpu", slots=2, context=128)
    texts = []
    for prompt in PROMPTS:
        answer = pair.generate(prompt, verifier="none", max_new_tokens=40, ignore_eos=True).tokens
        texts.append([*pair.tokenizer(prompt)["input_ids"], *answer])
    layer = Layer(model)
    learnt(model, layer, texts)
    layer.write(folder)
    return folder


PROMPTS = ["the quick brown", "one two", "the sky is blue because light scatters"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "num_draft_tokens": 3}


def test_its_drafts_are_accepted_and_texts_stay_the_targets(trained: Path) -> None:
    pair = semspec.load(trained, device="cpu", slots=3, context=128)
    plain = [pair.generate(p, verifier="none", **OPTIONS) for p in PROMPTS]
    drafter = "mtp:threshold=0"  # of another text than these it knows nothing
    drafted = pair.generate(PROMPTS, drafter=drafter, **OPTIONS)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert min(r.stats.tau for r in drafted) > 1.7, "the first guess of each draft was learnt"
    for p, r in zip(PROMPTS, drafted, strict=True):
        assert pair.generate(p, drafter=drafter, **OPTIONS).tokens == r.tokens
    assert pair.target.free == 3
    cached = pair.cached()  # which remembers prompts, and the states that the layer has read
    for _ in range(2):
        for p, r in zip(PROMPTS, plain, strict=True):
            assert cached.generate(p, drafter=drafter, **OPTIONS).tokens == r.tokens


def test_info_says_that_a_checkpoint_brings_a_drafter(trained: Path, target_folder: Path) -> None:
    runner = CliRunner()
    told = runner.invoke(app, ["info", str(trained), "--device", "cpu"]).output
    assert "it brings a layer that drafts (multi-token prediction): --drafter mtp" in told
    assert "--drafter mtp" not in runner.invoke(app, ["info", str(target_folder), "--device", "cpu"]).output


def test_a_quantised_checkpoint_has_its_layer_in_codes(trained: Path, tmp_path: Path) -> None:
    """Block fp8, the layer as the rest."""
    stored = load_file(trained / "model.safetensors")
    for name in [n for n in stored if n.endswith("_proj.weight") or n == "mtp.fc.weight"]:
        weight = stored[name]
        scale = weight.abs().amax() / 448
        stored[name] = (weight / scale).to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in weight.shape]
        stored[name.replace(".weight", ".weight_scale_inv")] = scale.expand(*blocks).clone()
    for file in trained.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    pair = semspec.load(tmp_path, device="cpu", slots=1, context=128)
    plain = pair.generate(PROMPTS[0], verifier="none", **OPTIONS)
    assert pair.generate(PROMPTS[0], drafter="mtp:threshold=0", **OPTIONS).tokens == plain.tokens
    plain_head, coded = MtpHead.load("", target_of(trained)), MtpHead.load("", target_of(tmp_path))
    theirs, ours = plain_head.joined.weight.detach(), coded.joined.weight.detach()
    assert 0.001 < float((ours - theirs).norm() / theirs.norm()) < 0.06


def test_a_layer_is_found_whose_projection_is_in_codes(tmp_path: Path) -> None:
    """Which are not named as a weight is."""
    model = build("qwen3_5_text")
    folder = save(model, tmp_path)
    Layer(model).write(folder)
    stored = load_file(folder / "model.safetensors")
    weight = stored.pop("mtp.fc.weight")
    scale = weight.abs().amax(-1, keepdim=True) / 7
    codes = (weight / scale).round().clamp(-8, 7).int() + 8
    packed = (codes.view(64, -1, 8) << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    stored |= {
        "mtp.fc.weight_packed": packed,
        "mtp.fc.weight_scale": scale,
        "mtp.fc.weight_shape": torch.tensor([64, 128]),
    }
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 4, "strategy": "channel", "symmetric": True, "type": "int"}
    groups = {"group_0": {"targets": ["re:mtp.fc"], "weights": weights, "format": "pack-quantized"}}
    edit_config(folder, quantization_config={"quant_method": "compressed-tensors", "config_groups": groups})
    found = MtpHead.load("", target_of(folder)).joined.weight.detach()
    torch.testing.assert_close(found, (codes - 8) * scale)


def test_a_layer_that_guesses_the_wrong_token_is_refused(tmp_path: Path) -> None:
    model = build("qwen3_5_text")
    folder = save(model, tmp_path)
    layer = Layer(model)
    layer.write(folder)
    pair = semspec.load(folder, device="cpu", slots=1, context=128)
    with pytest.raises(ModelError, match="mtp: the head does not fit this target"):
        pair.generate("one two", drafter="mtp", **OPTIONS)


def test_what_cannot_work_is_refused(tmp_path: Path, target_folder: Path) -> None:
    model = build("glm4_moe")
    folder = save(model, tmp_path)
    with pytest.raises(ModelError, match=r"no layer for multi-token prediction \(mtp.fc or layers.3.eh_proj\)"):
        MtpHead.load("", target_of(folder))
    Layer(model).write(folder)
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.3.self_attn.k_proj.weight"]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.3\.self_attn\.k_proj"):
        MtpHead.load("", target_of(folder))
    indexed = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm_moe_dsa", **MODELS["glm_moe_dsa"]))
    Layer(indexed).write(save(indexed, tmp_path / "indexed"))
    with pytest.raises(ModelError, match="GlmMoeDsaDecoderLayer cannot be run by itself as its MTP layer"):
        MtpHead.load("", target_of(tmp_path / "indexed"))
    native = save(make_model("qwen3"), tmp_path / "native")
    with pytest.raises(ModelError, match="no model of this target's family"):
        MtpHead.load("", ModelRunner.load(native, device="cpu", slots=1, context=64))
    pair = semspec.load(target_folder, device="cpu", slots=1, context=64)
    with pytest.raises(ModelError, match="no model of this target's family"):
        pair.generate("one", drafter="mtp")
    with pytest.raises(BadRequest, match="eagle:PATH"):
        pair.generate("one", drafter="eagle")
