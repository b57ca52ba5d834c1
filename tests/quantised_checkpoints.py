"""Small quantised checkpoints in the formats of the hub, each with the plain weights that its reference reads from it.

compressed-tensors' own code compresses and decompresses its formats and reads AWQ; GPTQ, block FP8 and ModelOpt are
packed and read by formulas in plain Python.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import edit_config

Tensors = dict[str, Tensor]
Quantise = Callable[[Tensor], tuple[Tensors, Tensor]]
"""A weight -> (its stored tensors by their names within the module, the plain weight they stand for)"""
Format = tuple[Quantise, dict[str, Any]]  # with its config


def write(source: Path, folder: Path, quantise: Quantise, config: dict[str, Any], name: str = "config.json") -> Path:
    """A copy of a checkpoint with its matrices quantised, and beside it `plain`, the same with what they stand for."""
    tensors, plain, stored = load_file(source / "model.safetensors"), {}, {}
    for key, tensor in tensors.items():
        if key.endswith("_proj.weight"):
            parts, plain[key] = quantise(tensor)
            plain[key] = plain[key].contiguous()
            stored |= {f"{key.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
        else:
            plain[key] = stored[key] = tensor
    for where, content in ((folder / "quantised", stored), (folder / "plain", plain)):
        shutil.copytree(source, where)
        save_file(content, where / "model.safetensors", metadata={"format": "pt"})
    if name == "config.json":
        edit_config(folder / "quantised", quantization_config=config)
    else:
        (folder / "quantised" / name).write_text(json.dumps(config))
    return folder


def blocks_of(weight: Tensor, rows: int, columns: int) -> Tensor:
    """[row blocks, column blocks, rows * columns], padded with zeros."""
    out, width = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -width % columns, 0, -out % rows))
    cut = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    return cut.transpose(1, 2).flatten(2)


def spread(scales: Tensor, size: tuple[int, int], rows: int, columns: int) -> Tensor:
    return scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: size[0], : size[1]]


def compressed(form: str, scale: torch.dtype | None = torch.bfloat16, **weights: Any) -> Format:
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        out, width = weight.shape
        if args.block_structure:
            cut = blocks_of(weight, *args.block_structure)
        else:
            cut = blocks_of(weight, out if args.strategy == "tensor" else 1, args.group_size or width)
        state = {"weight": weight}
        overall = None
        if args.strategy == "tensor_group":
            overall = state["weight_global_scale"] = generate_gparam(*torch.aminmax(weight))
        scales, zeros = calculate_qparams(cut.amin(-1), cut.amax(-1), args, overall)
        if args.strategy == "tensor":
            scales, zeros = scales.flatten(), zeros.flatten()
        state |= {"weight_scale": scales if scale is None else scales.to(scale), "weight_zero_point": zeros}
        stored = compressor.compress(state, scheme)
        # A copy for the reference in float32: its own arithmetic would round to the type of the scales.
        exact = {k: v.float() if v.dtype in (torch.bfloat16, torch.float16) else v for k, v in stored.items()}
        if overall is None:
            return stored, compressor.decompress(exact, scheme)["weight"].float()
        values = unpack_fp4_from_uint8(stored["weight_packed"], out, width, dtype=torch.float32)
        each = stored["weight_scale"].float()
        return stored, dequantize(values, each, args=args, global_scale=overall, dtype=torch.float32)

    described = {key: value for key, value in args.model_dump(mode="json").items() if value is not None}
    group = {"targets": ["Linear"], "weights": described, "input_activations": None}
    config = {"config_groups": {"group_0": group}, "format": form, "quantization_status": "compressed"}
    return quantise, {"quant_method": "compressed-tensors", "ignore": ["lm_head"], **config}


def block_fp8(kind: torch.dtype, block: tuple[int, int]) -> Format:
    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        scales = blocks_of(weight, *block).abs().amax(-1) / 448
        if kind == torch.float8_e8m0fnu:
            scales = torch.exp2(scales.log2().ceil())
        scales = scales.to(kind)
        each = spread(scales, tuple(weight.shape), *block)
        codes = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scales}, codes.float() * each

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return quantise, config | {"modules_to_not_convert": ["lm_head", "model.embed_tokens"]}


def modelopt(algorithm: str) -> Format:
    nvfp4, _ = compressed("nvfp4-pack-quantized", None, **NVFP4)

    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        if algorithm == "NVFP4":
            stored, plain = nvfp4(weight)
            overall = stored["weight_global_scale"].float().reciprocal().reshape(())
            parts = {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"]}
            return parts | {"weight_scale_2": overall, "input_scale": torch.tensor(0.1)}, plain
        scale = weight.abs().amax() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}, codes.float() * scale

    return quantise, {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*gate"]}
        | ({"group_size": 16} if algorithm == "NVFP4" else {}),
    }


def pack(values: list[list[int]], bits: int, slots: tuple[int, ...] | None = None) -> Tensor:
    """Rows of codes -> rows of words; slot k of a word holds its value number slots[k], at bits * k."""
    each = 32 // bits
    slots = slots or tuple(range(each))
    words = [
        [sum(row[begin + slots[k]] << (bits * k) for k in range(each)) for begin in range(0, len(row), each)]
        for row in values
    ]
    return torch.tensor(words).to(torch.int32)  # the highest bit becomes the sign


def grouped(weight: Tensor, bits: int, group: int, order: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], zeros and scales [out, groups] of inputs in groups order [in], and what they stand for."""
    count, most = int(order.max()) + 1, (1 << bits) - 1
    low = torch.stack([weight[:, order == g].amin(1).clamp(max=0) for g in range(count)], 1)
    high = torch.stack([weight[:, order == g].amax(1).clamp(min=0) for g in range(count)], 1)
    scales = ((high - low) / most).clamp(min=1e-6).half().float()
    zeros = (-low / scales).round().clamp(1, most)
    codes = (weight / scales[:, order] + zeros[:, order]).round().clamp(0, most)
    return codes.int(), zeros.int(), scales, (codes - zeros[:, order]) * scales[:, order]


def awq(group: int, symmetric: bool = False) -> Format:
    slots = (0, 2, 4, 6, 1, 3, 5, 7)

    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, zeros, scales, plain = grouped(weight, 4, group, torch.arange(weight.shape[1]) // group)
        words = {"qweight": pack(codes.t().tolist(), 4, slots), "qzeros": pack(zeros.t().tolist(), 4, slots)}
        return words | {"scales": scales.t().half()}, plain

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return quantise, config | {"modules_to_not_convert": None}


def gptq(bits: int, group: int, version: str | None, shuffled: bool = False) -> Format:
    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        order = torch.arange(weight.shape[1]) // group
        if shuffled:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
        codes, zeros, scales, plain = grouped(weight, bits, group, order)
        kept = zeros if version == "gptq_v2" else zeros - 1
        words = {"qweight": pack(codes.tolist(), bits).t(), "qzeros": pack(kept.t().tolist(), bits)}
        return words | {"scales": scales.t().half(), "g_idx": order.int()}, plain

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": shuffled, "sym": False}
    return quantise, config | ({"checkpoint_format": version} if version else {})


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "float8_e4m3fn"}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8"}
FORMATS: dict[str, Format] = {
    "fp8 block, bf16": block_fp8(torch.bfloat16, (32, 32)),
    "fp8 block, f32": block_fp8(torch.float32, (48, 40)),
    "fp8 block, ue8m0": block_fp8(torch.float8_e8m0fnu, (32, 32)),
    "float-quantized, channel": compressed("float-quantized", **FP8, strategy="channel"),
    "float-quantized, tensor": compressed("float-quantized", **FP8, strategy="tensor"),
    "float-quantized, block": compressed("float-quantized", **FP8, strategy="block", block_structure=[32, 32]),
    "int-quantized": compressed("int-quantized", **INT8, strategy="channel"),
    "pack-quantized, int4": compressed("pack-quantized", **INT4),
    "pack-quantized, int4 with zeros": compressed("pack-quantized", **INT4, symmetric=False),
    "pack-quantized, int4 channel": compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
    "pack-quantized, int8": compressed("pack-quantized", **INT4 | {"num_bits": 8, "symmetric": False}),
    "nvfp4": compressed("nvfp4-pack-quantized", None, **NVFP4),
    "mxfp4": compressed("mxfp4-pack-quantized", None, num_bits=4, **MX),
    "mxfp8": compressed("mxfp8-quantized", None, num_bits=8, **MX),
    "modelopt fp8": modelopt("FP8"),
    "modelopt nvfp4": modelopt("NVFP4"),
    "awq": awq(32),
    "gptq": gptq(4, 32, None),
    "gptq v2": gptq(4, 32, "gptq_v2"),
    "gptq, int8": gptq(8, 32, "gptq"),
    "gptq with act-order": gptq(4, 16, "gptq", shuffled=True),
}


def make(source: Path, folder: Path, form: str) -> Path:
    quantise, config = FORMATS[form]
    return write(source, folder, quantise, config, "hf_quant_config.json" if "producer" in config else "config.json")


def rewritten(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def named(tensors: Tensors, *ends: str) -> Iterator[str]:
    """Tensors of the last layer whose name ends so."""
    last = max(name.split(".")[2] for name in tensors if name.startswith("model.layers."))
    yield from (n for n in tensors if n.startswith(f"model.layers.{last}.") and n.endswith(ends))
