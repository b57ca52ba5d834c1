"""Quantised checkpoints give the logits of the plain weights they stand for; damaged ones are refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model import ModelRunner, Source, int4, patterns
from semspec.model.config import Shape
from semspec.model.int4 import Int4Linear
from semspec.model.linear import DenseLinear
from semspec.model.placement import Weights
from semspec.model.quantisation import Quantisation, Scheme
from semspec.model.quantised import QuantisedLinear
from semspec.model.transformer import Transformer
from semspec.model.weights import Checkpoint, default_weights
from semspec.types import Score
from tests.checkpoints import edit_config, make_model, save
from tests.quantised_checkpoints import FORMATS, make, named, rewritten

CHANGES = {"llama3": {}, "qwen3": {}, "qwen3-moe": {"moe_intermediate_size": 64, "num_experts": 3}}
FOUR_BITS = ("pack-quantized, int4", "pack-quantized, int4 with zeros", "awq", "gptq", "gptq v2")
Made = Callable[..., Path]
TOKENS = [5, 9, 300, 41, 7, 7, 120, 64]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    made = {name: make_model(name, **more) for name, more in CHANGES.items()}
    return {name: save(model, folder / name) for name, model in made.items()}


@pytest.fixture(scope="module")
def made(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def one(form: str, family: str = "llama3") -> Path:
        return make(sources[family], tmp_path_factory.mktemp("made") / "m", form)

    return one


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Made:
    """Copies that a test may damage."""
    return lambda form: Path(shutil.copytree(made(form), tmp_path / form))


def logits(folder: Path, weights: Weights = "plain") -> tuple[Tensor, Transformer]:
    with Checkpoint(folder) as checkpoint:
        transformer = Transformer(Shape.read(folder), checkpoint, torch.device("cpu"), torch.float32, weights)
    runner = ModelRunner(transformer, 1, 32)
    return runner.score([Score(runner, runner.acquire(), TOKENS, len(TOKENS))])[0].logits, transformer


@pytest.mark.parametrize("family", CHANGES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_format_gives_the_logits_of_the_weights_it_stands_for(
    form: str, family: str, sources: dict[str, Path], made: Made
) -> None:
    folder = made(form, family)
    want, _ = logits(folder / "plain")
    for weights in ("plain", "stored"):
        found, transformer = logits(folder / "quantised", weights)  # type: ignore[arg-type]
        assert (found - want).abs().max() < 1e-3 * want.std(), weights
        kept = isinstance(transformer.layers[1].qkv, QuantisedLinear)
        assert kept == (weights == "stored" and "act-order" not in form)
    unlike, _ = logits(sources[family])
    assert (unlike - want).abs().max() > 1e-2 * want.std()  # what was stored is not simply the checkpoint it came from


@pytest.mark.skipif(not int4.fast(), reason="this processor has no fast product with four bits")
@pytest.mark.parametrize("form", FORMATS)
def test_on_a_cpu_four_bits_in_groups_stay_so_and_all_else_becomes_floats(form: str, made: Made) -> None:
    folder = made(form)
    runner = ModelRunner.load(folder / "quantised", device="cpu", slots=1, context=32)
    kept = form in FOUR_BITS
    assert isinstance(runner.transformer.layers[1].out, Int4Linear if kept else DenseLinear)
    found = runner.score([Score(runner, runner.acquire(), TOKENS, len(TOKENS))])[0].logits
    want, _ = logits(folder / "plain")
    error = (found - want).abs().mean() / want.std()
    assert error < (0.05 if kept else 1e-3)
    plan = Source.find(folder / "quantised").plan("cpu", "auto", 1, 32)
    assert (plan.weights < Source.find(folder / "quantised").plan("cpu", "float32", 1, 32).weights) == kept


def test_matrices_that_a_file_leaves_plain_are_not_rounded_on_a_cpu(copied: Made) -> None:
    folder = copied("awq") / "quantised"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "down_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    assert default_weights(folder, torch.device("cpu")) == "plain"


CODES = ("proj.weight", "weight_packed", "qweight")
SCALES = ("weight_scale", "weight_scale_inv", "scales", "weight_scale_2", "weight_global_scale")
ONE = "model.layers.2.self_attn.q_proj."


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("damage", ["no scale", "wrong shape of scales", "no number", "wrong codes", "no codes"])
def test_a_damaged_checkpoint_is_refused_by_name(form: str, damage: str, copied: Made) -> None:
    folder = copied(form) / "quantised"
    hit: list[str] = []

    def change(tensors: dict[str, Tensor]) -> None:
        ends = CODES if "codes" in damage else SCALES
        name = next(n for n in named(tensors, *ends) if n.startswith(ONE))
        hit.append(name)
        if damage in ("no scale", "no codes"):
            del tensors[name]
        elif damage == "wrong shape of scales":
            tensors[name] = torch.ones(7).to(tensors[name].dtype)
        elif damage == "no number":
            raw = tensors[name].reshape(-1).view(torch.uint8)
            tensors[name] = (
                torch.full_like(raw, 255).view(tensors[name].dtype).view_as(tensors[name])
            )  # NaN in every type of a scale
        else:
            tensors[name] = tensors[name].double()

    rewritten(folder, change)
    with pytest.raises(ModelError, match=re.escape(hit[0].rpartition(".")[0])) as error:
        logits(folder)
    assert str(error.value).startswith(f"{folder}: ")
    assert damage == "no number" or hit[0] in str(error.value)


@pytest.mark.parametrize(
    "form", [f for f in FORMATS if "tensor" not in f and "channel" not in f and f != "modelopt fp8"]
)
def test_another_group_than_the_config_says_is_refused_by_name(form: str, copied: Made) -> None:
    folder = copied(form) / "quantised"
    path = folder / ("hf_quant_config.json" if "modelopt" in form else "config.json")
    text = path.read_text()
    changed = re.sub(r'("group_size": )\d+', r"\g<1>8", text)
    changed = re.sub(r'("(?:weight_block_size|block_structure)": )\[\d+, \d+\]', r"\g<1>[16, 16]", changed)
    if "int-quantized" in form:
        changed = re.sub(r'"strategy": "channel"', '"strategy": "group", "group_size": 8', text)
    path.write_text(changed)
    assert changed != text
    with pytest.raises(ModelError, match=r"self_attn\.q_proj\.\w+ has shape"):
        logits(folder)


def test_modules_that_a_config_leaves_out_are_read_plain(copied: Made) -> None:
    """By name, by `re:`, by wildcard; in each of the lists that formats have."""
    folder = copied("float-quantized, channel")
    plain = {}

    def keep(tensors: dict[str, Tensor]) -> None:
        plain.update({n: t for n, t in tensors.items() if ".layers.0." in n and n.endswith("proj.weight")})

    def put(tensors: dict[str, Tensor]) -> None:
        for name, tensor in plain.items():
            tensors[name] = tensor
            del tensors[f"{name}_scale"]

    rewritten(folder / "plain", keep)
    rewritten(folder / "quantised", put)
    config = json.loads((folder / "quantised" / "config.json").read_text())["quantization_config"]
    want, _ = logits(folder / "plain")
    for ignored in (["re:model[.]layers[.]0[.].*"], ["model.layers.0"], ["*layers.0*"], ["*.self_attn.*", "*.mlp.*"]):
        edit_config(folder / "quantised", quantization_config=config | {"ignore": ["lm_head", *ignored]})
        quantisation = Quantisation.read(folder / "quantised")
        assert quantisation is not None and quantisation.scheme_of("model.layers.0.mlp.up_proj") is None
        if "layers" in ignored[0]:
            assert quantisation.scheme_of("model.layers.1.mlp.up_proj") is not None
            found, transformer = logits(folder / "quantised", "stored")
            assert (found - want).abs().max() < 1e-3 * want.std()
            kept = [isinstance(layer.qkv, QuantisedLinear) for layer in transformer.layers]
            assert kept == [False, True, True]


def test_a_name_in_a_list_means_whole_parts_of_a_name() -> None:
    some = Quantisation("x", ((("Linear",), Scheme("fp8")),), ("mlp.gate", "lm_head"))
    for name, out in (("model.layers.3.mlp.gate", True), ("model.layers.3.mlp.gate_proj", False), ("lm_head", True)):
        assert (some.scheme_of(name) is None) == out, name


def test_a_pattern_that_is_none_and_settings_of_another_form_are_refused(copied: Made) -> None:
    folder = copied("float-quantized, channel") / "quantised"
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    for change in (
        {"ignore": ["re:("]}, {"config_groups": 3}, {"config_groups": {"a": group | {"targets": ["re:("]}}},
        {"config_groups": {"group_0": {"targets": ["Linear"]}}}, {"ignore": 4},
    ):  # fmt: skip
        edit_config(folder, quantization_config=config | change)
        with pytest.raises(ModelError, match=r"the quantisation \(compressed-tensors\) in config.json cannot be read"):
            Source.find(folder)


def test_a_pattern_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes a checkpoint chooses its patterns; this one tries every way to split the name."""
    monkeypatch.setattr(patterns, "PATIENCE", 0.1)
    found = Quantisation("fp8", (), ("re:(a|aa)+$",))
    assert found.scheme_of("model.layers.0") is None
    with pytest.raises(ModelError, match="take over"):
        found.scheme_of("a" * 200 + ".b")


def test_all_patterns_of_a_checkpoint_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these names takes too long by itself; a checkpoint has thousands of them. The clock is the test's."""
    clock = iter(range(1000))
    monkeypatch.setattr(patterns.time, "thread_time", lambda: float(next(clock)))
    found = Quantisation("fp8", (), ("re:b",))
    for _ in range(3):
        found.scheme_of("a")
    assert found.patience.left == pytest.approx(patterns.PATIENCE - 3 * (1 - patterns.USUAL))
    allowed = list[float]()

    class Slow:
        def match(self, name: str, timeout: float) -> None:
            allowed.append(timeout)
            if timeout < 1:
                raise TimeoutError

    monkeypatch.setattr(patterns, "compiled", lambda pattern: Slow())
    for i in range(2):
        found.scheme_of(f"layer.{i}")
    with pytest.raises(ModelError, match="take over 5 s"):
        found.scheme_of("layer.2")
    assert allowed == pytest.approx([2.0, 1.0, patterns.USUAL], abs=1e-3)
    assert Quantisation("fp8", (), ("re:b",)).patience.left is None, "another checkpoint has its own"


@pytest.mark.parametrize("pattern", [
    "a{i}", "a{d}x", "(?:ab){s}", "a{e<=1}", "model.{name}.b", "a{2}", "a{,2}b", "a{1,}", "a{}", "{a", r"a\{i}",
    "[{i}]+", "[[:alpha:]]", r"[\]\[a[]+", "[]a[]+", "[^]a]+", r"\N{DIGIT ONE}{2}", ".*b", "(?i)A{1,2}$",
])  # fmt: skip
def test_patterns_are_read_as_python_reads_them(pattern: str) -> None:
    names = ("a", "ab", "axxx", "a{i}", "a{d}x", "(ab){s}", "ab{s}", "ad", "a{e<=1}", "model.{name}.b", "model.x.b",
             "aa", "aab", "a{}", "{a", "{i}", "[:alpha:]", ":]", "]", "[", "a[", "11", "Aab", "x")  # fmt: skip
    ours = patterns.compiled(pattern)
    for name in names:
        theirs = re.match(pattern, name)
        found = ours.match(name)
        assert (found and found.span()) == (theirs and theirs.span()), name


def test_what_is_no_pattern_of_python_is_refused() -> None:
    for wrong in ("(", "a{2}{3}", r"\p{L}", "(?R)", "(?V1)a", "a{99999999999999999999}"):
        with pytest.raises(patterns.ERRORS):
            patterns.compiled(wrong)


def test_numbers_of_another_type_and_deep_nesting_are_refused(tmp_path: Path) -> None:
    file, gptq = tmp_path / "config.json", {"quant_method": "gptq", "bits": 4, "group_size": 128}
    for change in ({"bits": 4.0}, {"bits": 8.0}, {"group_size": True}, {"group_size": "128"}, {"group_size": -2}):
        file.write_text(json.dumps({"quantization_config": gptq | change}))
        with pytest.raises(ModelError, match=r"\(gptq\)"):
            Quantisation.read(tmp_path)
    awq = {"quant_method": "awq", "bits": 4}
    for settings, why in (
        (awq | {"group_size": None}, "it has blocks of 1 x null weights"),
        ({"quant_method": "gptq", "bits": 4}, "it has no 'group_size'"),
    ):
        file.write_text(json.dumps({"quantization_config": settings}))
        with pytest.raises(ModelError, match="the quantisation") as error:
            Quantisation.read(tmp_path)
        assert str(error.value).endswith(f"cannot be read: {why}")
    file.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        Quantisation.read(tmp_path)
    for depth in range(100, 1000, 100):  # what can be parsed can be searched
        file.write_text('{"a":' * depth + '{"quantization_config": {"quant_method": "odd"}}' + "}" * depth)
        with pytest.raises(ModelError, match=r"quantised \(odd\)|cannot be read"):
            Quantisation.read(tmp_path)


def test_a_name_without_a_list_is_one_name(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_to_not_convert": "lm_head"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = Quantisation.read(tmp_path)
    assert found is not None and found.ignored == ("lm_head",)


def test_a_scale_beside_plain_weights_is_refused(copied: Made) -> None:
    folder = copied("float-quantized, channel") / "quantised"
    rewritten(folder, lambda tensors: tensors.update({f"{ONE}weight": tensors[f"{ONE}weight"].float()}))
    with pytest.raises(ModelError, match=r"q_proj\.weight is stored as F32, where F8_E4M3 belongs"):
        logits(folder)


def test_the_memory_plan_of_a_checkpoint_that_is_kept_counts_its_bytes(copied: Made) -> None:
    for form in ("fp8 block, bf16", "awq", "mxfp4"):
        folder = copied(form) / "quantised"
        with Checkpoint(folder) as checkpoint:
            kept = checkpoint.kept_bytes
        _, model = logits(folder, "stored")
        matrices = [m for layer in model.layers for m in (layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down)]
        taken = sum(m.nbytes for m in [*matrices, model.head]) + model.embedding.nbytes
        assert kept == pytest.approx(taken, rel=0.02), form


@pytest.mark.parametrize(
    ("form", "end", "harmless", "value"),
    [
        ("pack-quantized, int4", "weight_zero_point", 0, 3),
        ("modelopt nvfp4", "pre_quant_scale", 1, 1.5),
        ("awq", "smoothing", 1, 2),
    ],
)
def test_what_would_be_ignored_beside_a_matrix_is_refused(
    form: str, end: str, harmless: float, value: float, copied: Made
) -> None:
    folder = copied(form) / "quantised"
    want, _ = logits(folder)

    def put(what: float) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            module = next(named(tensors, "qweight", "weight_packed", "weight_scale_2")).rsplit(".", 1)[0]
            tensors[f"{module}.{end}"] = torch.full((4, 2), what)

        rewritten(folder, change)

    put(harmless)
    torch.testing.assert_close(logits(folder)[0], want)
    put(value)
    with pytest.raises(ModelError, match=rf"{end} is stored with a quantised matrix and would be ignored"):
        logits(folder)


def test_scales_of_activations_and_of_the_cache_are_no_variant(copied: Made) -> None:
    folder = copied("modelopt fp8") / "quantised"

    def change(tensors: dict[str, Tensor]) -> None:
        for module in {name.rsplit(".", 1)[0] for name in list(tensors) if name.endswith("_proj.weight_scale")}:
            tensors |= {f"{module}.{end}": torch.tensor(0.02) for end in ("input_scale", "k_scale", "v_scale")}

    want, _ = logits(folder)
    rewritten(folder, change)
    torch.testing.assert_close(logits(folder)[0], want)


def test_one_scale_for_a_matrix_has_either_name(copied: Made) -> None:
    """transformers' own fp8 without blocks says weight_scale_inv."""
    folder = copied("float-quantized, tensor") / "quantised"
    want, _ = logits(folder)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[f"{name}_inv"] = tensors.pop(name)

    rewritten(folder, change)
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": None, "modules_to_not_convert": ["lm_head"]}
    edit_config(folder, quantization_config=quantised)
    torch.testing.assert_close(logits(folder)[0], want)


def test_a_cache_that_is_quantised_leaves_the_weights_plain(tmp_path: Path) -> None:
    folder = save(make_model("llama3"), tmp_path / "m")
    settings = {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": settings})
    )
    assert Quantisation.read(folder) is None
    assert isinstance(logits(folder, "stored")[1].layers[0].out, DenseLinear)
    settings["quant_algo"] = "NEW"  # an algorithm that is not known is no cache
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": settings})
    )
    with pytest.raises(ModelError, match="NEW"):
        Quantisation.read(folder)


@pytest.mark.parametrize("dtype", ["fp8", "int4"])
def test_heads_have_a_byte_of_int8_whatever_the_layers_have(dtype: str, sources: dict[str, Path]) -> None:
    with Checkpoint(sources["llama3"]) as checkpoint:
        made = Transformer(Shape.read(sources["llama3"]), checkpoint, torch.device("meta"), torch.bfloat16, dtype)  # type: ignore[arg-type]
    assert isinstance(made.head, QuantisedLinear) and made.head.kind == "int8"
    assert isinstance(made.layers[0].out, QuantisedLinear) and made.layers[0].out.kind == dtype
