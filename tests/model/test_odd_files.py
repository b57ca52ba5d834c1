"""Files as people download them: what can be read is, and what cannot is said in words that help."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import semspec
from semspec.errors import ModelError
from semspec.model import ModelRunner, Source
from semspec.model.weights import locate
from semspec.text.tokenizer import load_tokenizer
from semspec.types import Score
from tests import gguf_files
from tests.checkpoints import LINEAR, YARN, make_model, make_tokenizer, save

CODE = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama3"), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def adapter_alone(folder: Path) -> None:
    adapter(folder)
    (folder / "config.json").unlink()


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")


def renamed(name: str) -> Callable[[Path], None]:
    def rename(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / name)

    return rename


def with_code(folder: Path) -> None:
    edit(folder / "config.json", model_type="of its own", auto_map=CODE)


def configured(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


def in_parts(folder: Path) -> None:
    make_model("llama3").save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()


def without_its_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_tokenizer_of_code(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    (folder / "tokenizer.json").unlink()


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (adapter, "has an adapter's weights .* merge_and_unload"),
    (adapter_alone, "has an adapter's weights .* merge_and_unload"),
    (pointer, "is a pointer of Git LFS, not the file itself; git lfs pull"),
    (renamed("merged.safetensors"), "no model.safetensors.index.json; if merged.safetensors is all of the model"),
    (renamed("consolidated.safetensors"), "take the files that are for transformers"),
    (with_code, "the checkpoint's own code, another way to load it, is never run"),
    (configured(model_type="llama9"), "transformers .* does not know this model's type; a newer release may"),
    (configured(hidden_size="64"), "config.json cannot be read: .*'hidden_size' expected int, got str"),
    (configured(rope_parameters={"rope_type": "default", "rope_theta": None}), "config.json makes no model: .*None"),
    (configured(rope_parameters={"rope_type": "new", "factor": 2}), "transformers cannot load it: KeyError: 'new'"),
    (in_parts, "no model.safetensors.index.json, which names its 17 parts; fetch that file"),
    (without_its_tokenizer, "has weights but no tokenizer; copy tokenizer.json"),
    (with_tokenizer_of_code, "is code in the checkpoint, which is never run; put its tokenizer.json there"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=[says[:30] for _, says in REFUSED])
def test_what_is_no_model_as_it_lies_there_says_what_to_do(
    change: Callable[[Path], None], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked whether code may be run"))
    change(folder)
    with pytest.raises(ModelError, match=says) as error:
        semspec.load(folder, slots=1, context=64)
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_code_is_read_from_its_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked whether code may be run"))
    edit(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("the sky") == make_tokenizer().encode("the sky") and tokenizer.chat_template


@pytest.mark.parametrize(("kind", "told"), [("mistral", True), ("llama", False)])
def test_words_that_mistral_cuts_otherwise_by_now_are_told(
    kind: str, told: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' own word on it is not among those that the command line shows."""
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text())
    made["model"]["vocab"] |= {f"more {i}": 400 + i for i in range(100_001)}
    file.write_text(json.dumps(made))
    edit(folder / "config.json", model_type=kind, transformers_version="4.57.0")
    load_tokenizer(folder)
    assert ("before Mistral corrected how words are cut" in caplog.text) == told


def test_a_chat_template_of_a_processor_is_the_models(folder: Path) -> None:
    for file in folder.glob("*.jinja"):
        file.unlink()
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert not load_tokenizer(folder).chat_template
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    assert load_tokenizer(folder).chat_template == "{{ messages[0].content }}"
    for wrong in ('{"chat_template": [1]}', "[]", "{"):
        (folder / "chat_template.json").write_text(wrong)
        with pytest.raises(ModelError, match=r"chat_template|tokenizer cannot be loaded"):
            load_tokenizer(folder)


def test_progress_of_transformers_is_for_people(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit(folder / "config.json", hidden_act="gelu")
    capfd.readouterr()
    assert Source.find(folder).load("cpu", "float32", 1, 64)
    assert capfd.readouterr() == ("", "")


def test_tensors_of_other_parts_do_not_disturb(folder: Path) -> None:
    """Frequencies that old files have, a layer that predicts further tokens, a vision tower."""
    tokens = [5, 6, 7, 8]
    expected = logits(folder, tokens)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8), "visual.x": torch.rand(2)}
    more["model.layers.3.mlp.up_proj.weight"] = torch.rand(4, 4)
    file = folder / "model.safetensors"
    save_file(load_file(file) | more, file, {"format": "pt"})
    torch.testing.assert_close(logits(folder, tokens), expected)


def logits(path: Path, tokens: list[int]) -> torch.Tensor:
    runner = Source.find(path).load("cpu", "float32", 1, 64)
    assert isinstance(runner, ModelRunner)
    return runner.score([Score(runner, runner.acquire(), tokens, len(tokens))])[0].logits


def test_biases_that_no_one_reads_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, one = folder / "model.safetensors", "model.layers.1.self_attn.q_proj.bias"
    for bias, told in ((torch.zeros(64), False), (torch.ones(64), True)):
        save_file(load_file(file) | {one: bias}, file, {"format": "pt"})
        logits(folder, [5, 6])
        assert (f"1 biases are not read, such as {one}" in caplog.text) == told
    caplog.clear()
    logits(save(make_model("llama-bias"), folder / "biased"), [5, 6])
    assert not caplog.text


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3-moe"])
def test_a_window_is_a_familys_that_has_one(family: str, folder: Path) -> None:
    """A model of Mistral's that was made a Llama may still speak of its window, which Llamas do not have."""
    model, tokens = make_model(family, sliding_window=20, use_sliding_window=True), list(range(3, 63))
    edit(save(model, folder) / "config.json", sliding_window=20)
    torch.testing.assert_close(logits(folder, tokens), expected(model, tokens), atol=1e-4, rtol=1e-4)


def test_a_folder_of_gguf_files_has_one_model_or_says_so(tmp_path: Path) -> None:
    for name in ("model-Q8_0.gguf", "mmproj-F16.gguf"):
        (tmp_path / name).touch()
    assert locate(tmp_path) == tmp_path / "model-Q8_0.gguf"
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in (1, 2):
        (parts / f"model-0000{number}-of-00002.gguf").touch()
    assert locate(parts) == parts / "model-00001-of-00002.gguf", "which says how parts are joined when it is read"
    (tmp_path / "model-Q4_0.gguf").touch()
    with pytest.raises(ModelError, match=r"with 2 .gguf files; give one of them, such as .*model-Q4_0.gguf"):
        locate(tmp_path)


def expected(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def written(
    model: PreTrainedModel, path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, **more: float
) -> Path:
    """A file of another architecture's name, and with more metadata."""
    monkeypatch.setitem(gguf_files.ARCHITECTURES, model.config.model_type, architecture)
    begin = gguf.GGUFWriter.add_block_count

    def add(writer: gguf.GGUFWriter, count: int) -> None:
        begin(writer, count)
        for name, value in more.items():
            key = f"{architecture}.{name.replace('__', '.')}"
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", add)
    return gguf_files.write(model, path)


@pytest.mark.parametrize(
    ("family", "architecture"), [("llama3", "mistral3"), ("qwen2", "qwen2vl"), ("qwen3", "qwen3vl")]
)
def test_architectures_that_are_others_with_pictures(
    family: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = make_model(family), list(range(3, 43))
    path = written(model, tmp_path / "m.gguf", monkeypatch, architecture)
    assert gguf.GGUFReader(path).fields["general.architecture"].contents() == architecture
    torch.testing.assert_close(logits(path, tokens), expected(model, tokens), atol=1e-4, rtol=1e-4)


def test_the_ends_of_yarn_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2.5-yarn", rope_parameters=YARN | {"beta_fast": 8.0, "beta_slow": 2.0})
    yarn = {"rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 256}
    yarn |= {"rope__scaling__yarn_beta_fast": 8.0, "rope__scaling__yarn_beta_slow": 2.0}
    add = gguf.GGUFWriter.add_rope_freq_base
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_rope_freq_base",
        lambda writer, base: (add(writer, base), writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)),
    )
    path, tokens = written(model, tmp_path / "m.gguf", monkeypatch, "qwen2", **yarn), list(range(3, 43))
    torch.testing.assert_close(logits(path, tokens), expected(model, tokens), atol=1e-4, rtol=1e-4)
    wrong = written(model, tmp_path / "n.gguf", monkeypatch, "qwen2", rope__scaling__yarn_log_multiplier=0.1)
    with pytest.raises(ModelError, match=r"yarn_log_multiplier is 0\.1.*not supported"):
        Source.find(wrong)


LOCAL, GLOBAL = ({"rope_type": "default", "rope_theta": base} for base in (500.0, 50000.0))


@pytest.mark.parametrize(
    ("family", "changes", "fields"),
    [
        ("llama3", {"rope_parameters": LINEAR}, {"rope__scale_linear": 4.0}),  # as files of 2023 have it
        ("gemma3", {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": GLOBAL}}, {}),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 2}, {"pattern": 2}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 4}, {"pattern": 0}),
    ],
)
def test_rotations_and_windows_of_layers_are_the_files(
    family: str, changes: dict[str, object], fields: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "gemma3":
        ropes = {"sliding_attention": LOCAL, "full_attention": GLOBAL}
        changes = {
            "num_hidden_layers": 7,
            "layer_types": None,
            "query_pre_attn_scalar": 32,
            "rope_parameters": ropes,
        } | changes
        changes |= {"num_hidden_layers": len(changes["layer_types"] or range(7))}  # type: ignore[arg-type]
        fields = {"rope__freq_base_swa": 500.0} | fields
    else:
        monkeypatch.setattr(gguf.GGUFWriter, "add_rope_scaling_type", lambda *_: None)
        monkeypatch.setattr(gguf.GGUFWriter, "add_rope_scaling_factor", lambda *_: None)
    fields = {k.replace("pattern", "attention__sliding_window_pattern"): v for k, v in fields.items()}
    model, tokens = make_model(family, **changes), list(range(3, 63))
    path = written(model, tmp_path / "m.gguf", monkeypatch, {"llama3": "llama"}.get(family, family), **fields)
    torch.testing.assert_close(logits(path, tokens), expected(model, tokens), atol=1e-4, rtol=1e-4)


def test_scalings_beside_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = {"rope__scale_linear": 4.0}
    both = written(make_model("llama3.1"), tmp_path / "m.gguf", monkeypatch, "llama", **factor)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight beside rope\.scaling\.type 'linear' is not supported"):
        Source.find(both)
    monkeypatch.undo()
    gained = written(
        make_model("llama3"), tmp_path / "n.gguf", monkeypatch, "llama", **factor, rope__scaling__attn_factor=1.5
    )
    with pytest.raises(ModelError, match=r"rope\.scaling\.attn_factor is 1\.5, which is not supported"):
        Source.find(gained)


def test_what_a_gguf_file_alone_does_not_have_or_we_do_not_do_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama3")
    warm = written(model, tmp_path / "m.gguf", monkeypatch, "mistral3", attention__temperature_scale=0.1)
    with pytest.raises(ModelError, match=r"attention\.temperature_scale"):
        Source.find(warm)
    monkeypatch.undo()
    begin = gguf.GGUFWriter.add_block_count
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_block_count", lambda w, n: (begin(w, n), w.add_uint16("split.count", 3))[0]
    )
    part = gguf_files.write(model, tmp_path / "m-00001-of-00003.gguf")
    with pytest.raises(
        ModelError, match="is one of 3 parts of a model; join them with llama-gguf-split --merge, and give"
    ):
        Source.find(part)
