"""Checkpoints that load, and the sentences that greet those that cannot."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from semspec.errors import ModelError
from semspec.model import ModelRunner, Source, weights
from semspec.model.config import Shape
from semspec.model.weights import locate
from semspec.types import Score
from tests.checkpoints import FAMILIES, LLAMA3, edit_config, make_model, save

WEIGHTS = "model.safetensors"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3"), tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own to damage."""
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))


def logits(folder: Path) -> torch.Tensor:
    runner = ModelRunner.load(folder, device="cpu", slots=1, context=16)
    return runner.score([Score(runner, runner.acquire(), [3, 1, 4, 1, 5], 5)])[0].logits


def refusal(folder: Path | str) -> str:
    with pytest.raises(ModelError) as error:
        ModelRunner.load(folder, device="cpu", slots=1, context=16)
    return str(error.value)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a checkpoint by name (dots written as double underscores); None removes one."""
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        assert name in tensors
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_a_sharded_checkpoint_gives_the_same_logits(original: Path, tmp_path: Path) -> None:
    sharded = save(make_model("qwen3"), tmp_path / "sharded", shard="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2 and not (sharded / WEIGHTS).exists()
    assert torch.equal(logits(sharded), logits(original))


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    sharded = save(make_model("qwen3"), tmp_path / "sharded", shard="100KB")
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    assert f"{victim} is missing, damaged or cut short" in refusal(sharded)


def test_an_index_that_cannot_be_read_is_named(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    names = [5, None, "../a.safetensors", "/a.safetensors", "a/../../b"]
    wrongs = [json.dumps({"weight_map": {"a": name}}) for name in names]
    wrongs += ['{"weight_map":' + '{"a":' * 100_000 + "1" + "}" * 100_001]
    for wrong in ("{", json.dumps({"metadata": {}}), json.dumps([1]), json.dumps({"weight_map": ["a"]}), *wrongs):
        index.write_text(wrong)
        assert f"{index} cannot be read" in refusal(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, model__layers__1__mlp__up_proj__weight=None)
    assert refusal(folder) == f"{folder}: the checkpoint has no tensor model.layers.1.mlp.up_proj.weight"


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__k_proj__weight=torch.zeros(8, 64))
    assert refusal(folder) == (
        f"{folder}: model.layers.0.self_attn.k_proj.weight has shape (8, 64), but config.json asks for (64, 64)"
    )


def test_a_file_cut_short_is_named(folder: Path) -> None:
    weights = folder / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert f"{weights} is missing, damaged or cut short" in refusal(folder)


def test_a_file_that_is_no_safetensors_is_named(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"<html>the page of a login</html>")
    assert f"{folder / WEIGHTS} is missing, damaged or cut short" in refusal(folder)


@pytest.mark.parametrize("name", [WEIGHTS, "model.gguf"])
def test_a_file_that_was_not_fetched_is_told_from_a_damaged_one(folder: Path, name: str) -> None:
    file = folder / name
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 98362432\n")
    assert "is a pointer of Git LFS, not the file itself; git lfs pull" in refusal(file if name != WEIGHTS else folder)
    file.write_bytes(b"")
    assert refusal(file if name != WEIGHTS else folder) == (
        f"{file} is empty, as after a download that failed; fetch it again"
    )


def test_a_pickle_is_never_opened(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert refusal(folder).startswith(
        f"{folder} has no model.safetensors; pytorch_model.bin is a pickle, which semspec does not open: convert it"
    )


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert refusal(folder) == f"{folder} has no model.safetensors"


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder) == (
        f"{folder} is a folder without a config.json; give the folder of a Hugging Face checkpoint"
    )
    for name in ("b.Q4_0.gguf", "a.Q8_0.gguf"):
        (folder / name).touch()
    assert refusal(folder) == f"{folder} is a folder with 2 .gguf files; give one of them, such as {folder}/a.Q8_0.gguf"


def test_a_path_that_is_no_folder_is_refused(folder: Path) -> None:
    for name in ("config.json", WEIGHTS):
        told = f"{folder / name} is one file of a checkpoint; give the folder it is in: {folder}"
        assert refusal(folder / name) == told
    for path in (folder / "nowhere", "./nowhere", "../nowhere/at/all", "a/b/c", "my model"):
        assert refusal(path) == (
            f"{path} is no folder and no .gguf file; give one of these, or a hub id such as org/name or "
            "org/name/file.gguf"
        )


@pytest.mark.parametrize("name", ["", " "])
def test_a_model_needs_a_name(name: str) -> None:
    assert "name is empty" in refusal(name)


def test_a_hub_id_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(*_: Any, **__: Any) -> None:
        raise ValueError("404")

    monkeypatch.setattr(weights, "snapshot_download", not_there)
    assert "no-such/model is neither a folder nor a checkpoint the hub could give" in refusal("no-such/model")


def test_a_folder_may_be_given_as_text_or_path(folder: Path) -> None:
    assert locate(folder) == locate(str(folder)) == folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' is not supported; supported are: gemma3_text, llama, mistral, "),
        ({"model_type": "no-such-thing"}, "the config.json cannot be read"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: gelu_pytorch_tanh, silu"),
        ({"num_hidden_layers": 10**5, "layer_types": None}, "a model cannot have 100000 layers; its config is damaged"),
        ({"num_attention_heads": 3}, "3 query heads cannot share 2 key heads; its config is damaged"),
        ({"intermediate_size": 0}, "cannot be; its config is damaged"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not supported"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope scaling 'dynamic' is not supported; supported: linear, llama3, longrope, yarn",
        ),
        ({"vocab_size": "many"}, "the config.json cannot be read"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_with_the_reason(
    folder: Path, changes: dict[str, Any], says: str
) -> None:
    edit_config(folder, **changes)
    message = refusal(folder)
    assert message.startswith(f"{folder}: ") and says in message


QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "marlin-24",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
    },
    "mxfp4": {"quant_method": "mxfp4"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
    "gptq": {"quant_method": "gptq", "bits": 3, "group_size": 128},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
    "load_in_4bit": {"load_in_4bit": True},
}


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("where", ["config", "text_config", "of transformers"])
def test_a_quantised_checkpoint_is_refused_by_name_before_a_weight_is_read(
    name: str, where: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "safe_open", lambda *_, **__: pytest.fail("weights were opened"))
    changes: dict[str, Any] = {"quantization_config": QUANTISED[name]}
    if where == "text_config":
        changes = {"text_config": changes}
    if where == "of transformers":
        changes |= {"model_type": "gpt2"}
    edit_config(folder, **changes)
    for load in (lambda: ModelRunner.load(folder, device="cpu"), lambda: Source.find(folder)):
        with pytest.raises(ModelError, match=rf"config\.json says that the weights are quantised \(.*{name}"):
            load()


def test_a_checkpoint_quantised_by_modelopt_is_refused_by_name(folder: Path) -> None:
    quantised = folder / "hf_quant_config.json"
    quantised.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8"}}))
    assert "hf_quant_config.json says that the weights are quantised (W4A8), which is not supported" in refusal(folder)
    quantised.write_text("{")
    assert "the hf_quant_config.json cannot be read" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_weights_that_are_no_floats_are_refused_though_no_config_says_so(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, **{name.replace(".", "__"): load_file(folder / WEIGHTS)[name].to(dtype)})
    assert re.search(rf"{name} is stored as [FIU]8\w*, where BF16 or F16 or F32 or F64 belongs", refusal(folder))


def test_a_config_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{ not json")
    assert "the config.json cannot be read" in refusal(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_knows_how_many_weights_there_are(family: str) -> None:
    model = make_model(family)
    shape = Shape.of(model.config)
    vectors = ("bias", "q_norm", "k_norm")  # the small vectors that only some families have are not counted
    counted = sum(p.numel() for name, p in model.named_parameters() if not any(v in name for v in vectors))
    assert shape.parameters == counted


@pytest.mark.parametrize(("eos", "stop"), [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_end_of_text_tokens_are_read_from_the_config(folder: Path, eos: Any, stop: set[int]) -> None:
    edit_config(folder, eos_token_id=eos)
    assert Shape.read(folder).stop == stop


def test_an_older_config_with_rope_scaling_means_the_same(tmp_path: Path) -> None:
    """Checkpoints on the hub mostly say `rope_theta` and `rope_scaling`, as transformers 4 wrote them."""
    folder = save(make_model("llama3.1"), tmp_path / "old")
    expected = Shape.read(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 10000.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert Shape.read(folder).attention_specs == expected.attention_specs


def test_a_hub_id_is_fetched_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make_model("llama3"), tmp_path / "fetched")
    asked = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("semspec.model.weights.snapshot_download", fetch)
    assert locate("some-org/some-model") == folder
    ((name, patterns),) = asked
    assert name == "some-org/some-model" and "*.safetensors" in patterns
    assert not {"*", "*.bin", "*.pt", "*.pth"} & set(patterns), "pickles are not even fetched"


def test_a_model_with_longrope_ends_where_its_other_frequencies_begin() -> None:
    assert Shape.of(make_model("phi4-mini").config).context == 600


# -- headers that lie


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Whatever takes more memory than so many bytes fails in here, be it Python, torch or the reader of headers."""
    if sys.platform != "linux":  # elsewhere the limit is not on all that a process takes
        yield
        return
    import resource

    held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert held is not None
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(held[1]) * 1024 + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


ROOM = 48 * 2**20  # for a model of less than a megabyte, its copy, and what allocators take in large pieces


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits all that a process takes")
def test_the_limit_of_these_tests_is_one() -> None:
    with at_most(ROOM), pytest.raises((RuntimeError, MemoryError)):
        torch.empty(64 * ROOM, dtype=torch.uint8)  # more than what earlier tests have left to allocators


TERABYTE = 2**40
NAME = "model.embed_tokens.weight"


def entry(shape: list[int], end: int, start: int = 0) -> dict[str, Any]:
    return {NAME: {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}}


LYING = {
    "a tensor longer than the file": (entry([2**20, 2**18], TERABYTE), 64, "cut short"),
    "a tensor behind the end": (entry([16], TERABYTE + 64, TERABYTE), 64, "cut short"),
    "a shape that its bytes do not hold": (entry([2**20, 2**18], 64), 64, "cut short"),
    "a product that overflows": (entry([2**40, 2**40], 64), 64, "cut short"),
    "a file of holes, as long as it says": (entry([2**20, 2**18], TERABYTE), TERABYTE, "cannot be mapped|has shape"),
    "a file of holes that can be mapped": (
        entry([2**14, 2**14], 2**30), 2**30, r"has shape \(16384, 16384\), but config.json asks for \(\d+, 64\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LYING)
def test_terabytes_in_a_header_are_refused_before_a_tensor_is_made(
    folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, size, says = LYING[case]
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(folder / WEIGHTS, 8 + len(text) + size)  # takes no space: there are holes

    class Headers:
        """A file of which nothing but the header may be read."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = open_file(*args, **options)

        def __enter__(self) -> Headers:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def keys(self) -> list[str]:
            return list(self.file.keys())

        def get_slice(self, name: str) -> Any:
            return self.file.get_slice(name)

        def get_tensor(self, name: str) -> torch.Tensor:
            pytest.fail(f"{name} was made on the word of a header")

    open_file = weights.safe_open
    monkeypatch.setattr(weights, "safe_open", Headers)
    with at_most(ROOM + min(size, 2**30)):  # a mapping counts, though nothing of it is read
        assert re.search(says, refusal(folder))


@pytest.mark.parametrize("length", [2**62, 2**40, 10**8 + 1])
def test_an_endless_header_is_refused(folder: Path, length: int) -> None:
    (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + b"{}")
    with at_most(ROOM):
        assert f"{folder / WEIGHTS} is missing, damaged or cut short" in refusal(folder)


@given(st.data())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_wrong_with_a_header_the_answer_is_a_model_or_a_clear_error(
    folder: Path, original: Path, data: st.DataObject
) -> None:
    content = bytearray((original / WEIGHTS).read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    values = st.binary(min_size=1, max_size=4) | st.sampled_from([b"\xff" * 8, b"9" * 8, b"BF16", b"-1,0"])
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, header), values), min_size=1, max_size=3)):
        content[at : at + len(value)] = value
    (folder / WEIGHTS).write_bytes(content)
    said = str(folder)
    try:
        with at_most(ROOM):
            ModelRunner.load(folder, device="cpu", slots=1, context=16)
    except ModelError as error:
        said = str(error)
    assert str(folder) in said


@pytest.mark.parametrize(
    ("field", "value"), [("head_dim", 1 << 30), ("vocab_size", 1 << 40), ("max_position_embeddings", 1 << 50)]
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_made_of_them(folder: Path, field: str, value: int):
    edit_config(folder, **{field: value})
    with pytest.raises(ModelError, match="cannot be; its config is damaged"):
        Shape.read(folder)
