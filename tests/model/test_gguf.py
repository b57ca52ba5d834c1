"""GGUF files: the same model as the checkpoint they were made from, and as transformers reads from them."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.integrations.gguf import dequant
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import semspec
from semspec.errors import BadRequest, ModelError
from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.gguf_header import SUPPORTED, Header
from semspec.model.weights import locate
from semspec.text.tokenizer import load_tokenizer
from semspec.types import Score
from tests.checkpoints import VOCAB, make_model, make_tokenizer
from tests.gguf_files import write

BY_TRANSFORMERS = ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16", "BF16", "F32")  # an independent reader
TOKENS = torch.randint(VOCAB, [90], generator=torch.Generator().manual_seed(3)).tolist()
WRITTEN = ["llama3", "llama3.1", "qwen2", "qwen3", "qwen3-moe", "mixtral", "smollm3", "gemma3", "phi3", "phi4-mini"]
AS_PUBLISHED: dict[str, dict[str, Any]] = {  # what a file does not say is as in the published models
    "qwen3-moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None},
    "gemma3": {
        "num_hidden_layers": 7,
        "layer_types": None,
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
        },
    },
}


def ours(path: Path, tokens: list[int] = TOKENS) -> Tensor:
    runner = ModelRunner.load(path, device="cpu", dtype="float32", slots=1, context=256)
    return runner.score([Score(runner, runner.acquire(), tokens, len(tokens))])[0].logits


def logits(model: PreTrainedModel, tokens: list[int] = TOKENS) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def as_transformers_loads(path: Path) -> PreTrainedModel:
    """What `from_pretrained(folder, gguf_file=...)` does, but for accelerate, which that insists on."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        ModelRunner.load(path, device="cpu", slots=1, context=64)
    return str(error.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama3", num_hidden_layers=1, tie_word_embeddings=True)
    return write(model, tmp_path_factory.mktemp("small") / "small.gguf", make_tokenizer())


@pytest.mark.parametrize("family", WRITTEN)
def test_a_file_gives_the_logits_of_the_checkpoint_it_was_made_from(family: str, tmp_path: Path) -> None:
    model = make_model(family, **AS_PUBLISHED.get(family, {}))
    expected = logits(model)
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(write(model, tmp_path / "m.gguf")), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16", "F32"])
def test_a_quantised_file_gives_the_logits_that_transformers_gives(kind: str, tmp_path: Path) -> None:
    path = write(make_model("llama3", tie_word_embeddings=True), tmp_path / "m.gguf", make_tokenizer(), Kind[kind])
    torch.testing.assert_close(ours(path), logits(as_transformers_loads(path)), atol=1e-4, rtol=1e-5)


def file_of(raw: np.ndarray, kind: Kind, path: Path) -> Path:
    """A file of one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda k: k.name)
def test_every_type_that_the_package_dequantises_is_read(kind: Kind, tmp_path: Path) -> None:
    block, width = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    try:
        raw = gguf.quants.quantize(rng.standard_normal((3, 512), dtype=np.float32), kind)
    except NotImplementedError:  # there is no quantiser, but any bytes are blocks
        raw = rng.integers(0, 256, (3, 512 // block * width), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales may be infinite
        expected = gguf.quants.dequantize(raw.view(np.uint8).reshape(3, -1), kind)
        header = Header.read(file_of(raw, kind, tmp_path / "t.gguf"))
        entry = header.tensors["t"]
        assert entry.shape == (3, 512) and entry.size == raw.nbytes
        np.testing.assert_array_equal(header.values(entry), expected)
        np.testing.assert_array_equal(header.values(entry, slice(1, 2)), expected[1:2])
    assert len(np.unique(expected)) > 2


def test_types_that_people_have_are_supported() -> None:
    names = {kind.name for kind in SUPPORTED}
    assert names >= {f"Q{n}_K" for n in (2, 3, 4, 5, 6)} | {f"Q{n}" for n in ("4_0", "4_1", "5_0", "5_1", "8_0")}
    assert names >= {"IQ1_S", "IQ2_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "F32", "F16", "BF16"}


@pytest.mark.parametrize("kind", [k for k in SUPPORTED if k.name in BY_TRANSFORMERS], ids=lambda k: k.name)
def test_types_are_read_as_transformers_reads_them(kind: Kind, tmp_path: Path) -> None:
    """Any bytes are a tensor of some kind, so random ones with sane scales are a test of all of them."""
    block, width = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    floats = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    if kind in floats:
        raw = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).to(floats[kind]).view(torch.uint8)
        expected = raw.view(floats[kind]).float()
        raw = raw.numpy()
    else:
        raw = rng.integers(0, 256, (3, 512 // block * width), dtype=np.uint8)
        for start in range(0, raw.shape[1], width):
            places = {Kind.Q6_K: [208], Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q4_1: [0, 2]}.get(kind, [0])
            for at in places:  # the scales of a block are half floats, and random ones might be infinite
                scale = np.float16(rng.uniform(0.01, 0.1, (3, 1)))
                raw[:, start + at : start + at + 2] = scale.view(np.uint8)
        expected = dequant.dequantize(torch.tensor(raw).flatten(), kind.value).view(3, 512)
    header = Header.read(file_of(raw, kind, tmp_path / "t.gguf"))
    assert header.tensors["t"].shape == (3, 512)
    assert expected.std() > 0.01
    assert torch.equal(torch.tensor(header.values(header.tensors["t"])), expected)
    assert torch.equal(torch.tensor(header.values(header.tensors["t"], slice(1, 2))), expected[1:2])


def test_tokenizer_and_chat_template_come_from_the_file(small: Path) -> None:
    found, original = load_tokenizer(small), make_tokenizer()
    theirs = AutoTokenizer.from_pretrained(small.parent, gguf_file=small.name)
    chat = [{"role": "user", "content": "the lazy fox"}]
    for text in ("the quick  brown fox<eos>", "light\n scatters 42 ö", ""):
        assert found.encode(text) == original.encode(text) == theirs.encode(text)
        assert found.decode(found.encode(text)) == text
    assert found.chat_template == original.chat_template == theirs.chat_template
    assert found.apply_chat_template(chat, tokenize=False) == original.apply_chat_template(chat, tokenize=False)
    assert found.eos_token_id == original.eos_token_id == 0


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_begins_with_a_token_if_the_file_says_so(begins: bool, tmp_path: Path) -> None:
    class Begins(gguf.GGUFWriter):
        def add_add_bos_token(self, value: bool) -> None:
            super().add_bos_token_id(5)
            super().add_add_bos_token(begins)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Begins)
        path = write(make_model("llama3"), tmp_path / "m.gguf", make_tokenizer())
    assert (load_tokenizer(path).encode("the fox")[0] == 5) == begins


def test_a_pair_is_loaded_from_files_and_drafts_are_lossless(small: Path) -> None:
    pair = semspec.load(small, small.parent, device="cpu", slots=1, context=256)
    prompt = [{"role": "user", "content": "the sky is"}]
    options = {"max_new_tokens": 40, "ignore_eos": True, "num_draft_tokens": 4}
    plain, drafted = (pair.generate(prompt, verifier=v, **options) for v in ("none", "exact"))
    assert plain.tokens == drafted.tokens and drafted.stats.accepted > 0


def test_a_file_is_found_by_its_name_by_its_folder_or_in_the_hub(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(small) == locate(str(small)) == locate(small.parent) == small
    monkeypatch.setattr("semspec.model.weights.hf_hub_download", lambda repo, file: f"/cache/{repo}/{file}")
    assert locate("org/name/model.gguf") == Path("/cache/org/name/model.gguf")


# -- files that cannot be used


def test_an_unsupported_quantisation_is_named_and_so_are_the_others(tmp_path: Path) -> None:
    message = refusal(file_of(np.zeros((4, 40), np.uint8), Kind.Q8_1, tmp_path / "m.gguf"))
    assert "t is stored as Q8_1, which is not supported; take a file of F32, F16, Q4_0" in message


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "GGUF architecture 'mamba' is not supported; supported are: gemma3, llama, mistral3" in refusal(
        tmp_path / "m.gguf"
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("blk.0.attn_k.weight", "blk.0.attn_z.weight", "the file has no tensor blk.0.attn_k.weight"),
        ("token_embd.weight", "token_embt.weight", "has no tensor token_embd.weight"),
        ("llama.context_length", "llama.context_lenght", "the metadata field context_length is missing"),
        ("llama.block_count", "llama.block_coint", "the metadata field block_count is missing"),
    ],
)
def test_a_renamed_field_or_tensor_is_named(small: Path, tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small.read_bytes().replace(old.encode(), new.encode()))
    assert says in refusal(path)


def test_a_file_with_tensors_that_would_be_ignored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gguf_files.factors", lambda model: {"blk.0.attn_gate.weight": np.zeros((64, 64), "f4")})
    message = refusal(write(make_model("llama3"), tmp_path / "m.gguf"))
    assert "has 1 tensors that its architecture does not use (blk.0.attn_gate.weight)" in message


def number(form: str, value: int) -> bytes:
    return struct.pack(form, value)


def text(value: str) -> bytes:
    return number("<Q", len(value)) + value.encode()


def head(tensors: int = 0, fields: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + number("<I", version) + number("<Q", tensors) + number("<Q", fields)


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = b"".join(number("<Q", n) for n in shape)
    return text("t") + number("<I", len(shape)) + dims + number("<I", kind) + number("<Q", offset)


FIELD = text("k")
HOSTILE = {
    "empty": (b"", "is empty, as after a download that failed"),
    "text": (b"not at all\n", "does not begin with GGUF"),
    "only the signature": (b"GGUF", "the version needs 4 bytes at 4, but the file ends at 4"),
    "version 1": (head(version=1), "its version is 1"),
    "big-endian": (b"GGUF" + number(">I", 3) + bytes(16), "its version is 50331648"),
    "endless tensors": (head(tensors=2**62), "the number of tensors is 4611686018427387904, more than"),
    "endless fields": (head(fields=2**62) + bytes(99), "the number of metadata fields is 4611686018427387904"),
    "endless name": (head(fields=1) + number("<Q", 2**63) + bytes(20), "a metadata name needs 9223372036854775808"),
    "endless text": (head(fields=1) + FIELD + number("<I", 8) + number("<Q", 2**40), "k needs 1099511627776 bytes"),
    "endless array": (head(fields=1) + FIELD + number("<I", 9) + number("<I", 4) + number("<Q", 2**60), "length of k"),
    "endless texts": (head(fields=1) + FIELD + number("<I", 9) + number("<I", 8) + number("<Q", 2**60), "length of k"),
    "array of arrays": (head(fields=1) + FIELD + number("<I", 9) * 2 + number("<Q", 1), "an array of arrays"),
    "unknown value": (head(fields=1) + FIELD + number("<I", 99) + bytes(20), "k has the unknown type 99"),
    "a field twice": (head(fields=2) + (FIELD + number("<I", 7) + b"\1") * 2, "the metadata field 'k' is there twice"),
    "not UTF-8": (head(fields=1) + number("<Q", 1) + b"\xff" + bytes(20), "a metadata name is not UTF-8"),
    "no dimensions": (head(tensors=1) + tensor(()), "t has 0 dimensions"),
    "a thousand dimensions": (head(tensors=1) + tensor((1,) * 1000), "t has 1000 dimensions"),
    "a product that overflows": (head(tensors=1) + tensor((2**40, 2**40)) + bytes(99), "t should take 48357032784"),
    "nothing": (head(tensors=1) + tensor((0, 5)) + bytes(99), "t has shape (5, 0), which F32 cannot have"),
    "part of a block": (head(tensors=1) + tensor((33,), kind=2) + bytes(99), "t has shape (33,), which Q4_0"),
    "beyond the end": (head(tensors=1) + tensor((4,), offset=2**60) + bytes(99), "t should take 16 bytes at"),
    "an unknown type": (head(tensors=1) + tensor((4,), kind=999) + bytes(99), "t is stored as type 999"),
    "a tensor twice": (head(tensors=2) + tensor((1,)) * 2 + bytes(99), "the tensor t is there twice"),
    "odd alignment": (
        head(fields=1) + text("general.alignment") + number("<I", 4) + number("<I", 3),
        "its alignment is 3, not a power of two",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    data, says = HOSTILE[case]
    path.write_bytes(data)
    tracemalloc.start()
    message = refusal(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert says in message and str(path) in message
    assert peak < 1_000_000, "nothing is allocated on the word of a header"


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.05, 0.3, 0.9, 0.9999])
def test_a_file_cut_short_is_refused(small: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "m.gguf"
    data = small.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert "is damaged or no GGUF file" in refusal(path)


@given(st.data())
@settings(max_examples=300)
def test_whatever_is_wrong_with_a_file_the_answer_is_a_model_or_a_clear_error(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(small.read_bytes())
    places = st.integers(0, 3000) | st.integers(0, len(content) - 9)
    values = st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7])
    for at, value in data.draw(st.lists(st.tuples(places, values), min_size=1, max_size=3)):
        content[at : at + len(value)] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(content)
    said = str(path)
    tracemalloc.start()
    try:
        Shape.read(path)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 40 * len(content)
        ModelRunner.load(path, device="cpu", slots=1, context=16)
    except BadRequest as error:  # a context too short for the one asked for
        said = f"{path}: {error}"
    except ModelError as error:
        said = str(error)
    tracemalloc.stop()
    assert str(path) in said


# -- a real file


def real_file() -> Path:
    path = Path(os.environ.get("SEMSPEC_SMOLLM2_GGUF", ".models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.is_file():
        pytest.skip(f"{path} is not there; `make smollm2` fetches it, or set SEMSPEC_SMOLLM2_GGUF to where it lies")
    return path


def test_smollm2_is_what_transformers_makes_of_the_same_file() -> None:
    path = real_file()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    found = load_tokenizer(path)
    chat = [{"role": "user", "content": "What's the capital of France?\n\n  Say 12345 or “naïve” 東京 🙂."}]
    rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert found.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == rendered
    assert "<|im_start|>assistant" in rendered and found.chat_template == theirs.chat_template
    tokens = theirs.encode(rendered)
    assert found.encode(rendered) == tokens and found.get_vocab() == theirs.get_vocab()
    assert found.special_tokens_map == theirs.special_tokens_map
    model = as_transformers_loads(path)
    torch.testing.assert_close(ours(path, tokens), logits(model, tokens), atol=1e-4, rtol=1e-5)
    answer = model.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False)[0, len(tokens) :].tolist()
    result = semspec.load(path, device="cpu", slots=1, context=256).generate(chat, verifier="none", max_new_tokens=24)
    assert result.tokens == answer[: len(result.tokens)] and "Paris" in result.text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_to_people_only(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr("sys.stderr", stream)
        ModelRunner.load(small, device="cpu", slots=1, context=16)
        assert (f"reading {small.name}" in stream.getvalue()) == shown
