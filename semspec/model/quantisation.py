"""Which matrices of a checkpoint are quantised and how, from its config.json or hf_quant_config.json.

What `quantised_formats.py` cannot read is refused by name before any weight is read: as plain weights it would give
noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from semspec.errors import ModelError, cause
from semspec.model.patterns import ERRORS, Patience, compiled

KEYS = ("quantization_config", "compression_config", "quantization")  # the last is MLX's and ModelOpt's
NAMES = ("quant_method", "quant_algo", "format", "kv_cache_quant_algo")
IGNORED = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
FILES = ("config.json", "hf_quant_config.json")
EVERY = ("Linear", "*")  # targets that mean every matrix
EXPERTS_ONLY = "gpt_oss"  # the family whose experts are mxfp4 by tensors of their own, and whose matrices are plain
GROUPS = (32, 64, 128, 256)  # inputs that share a scale, as a CPU's product takes them
Settings = dict[str, Any]


class NotSupported(Exception):
    """Something about a quantisation that is not handled, in words."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix is stored."""

    layout: str  # its reader, in quantised_formats.READERS
    bits: int = 8
    block: tuple[int, int] = (1, 0)  # (outputs, inputs) that share a scale; 0: all of them
    scale: str = "weight_scale"  # name of the scales
    symmetric: bool = True
    act_order: bool = False  # inputs are in groups of any order: such a matrix is dequantised while loading
    old_zeros: bool = False  # GPTQ before its second version: zeros are stored less one


@dataclass(frozen=True, slots=True)
class Quantisation:
    method: str
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]  # (targets, how they are stored); the first that fits
    ignored: tuple[str, ...]
    patience: Patience = field(default_factory=Patience, compare=False, repr=False)

    @staticmethod
    def read(folder: Path) -> Quantisation | None:
        """None: the weights are plain."""
        for file in FILES:
            config = _json(folder / file)
            settings = _settings(config)
            if settings is None or _of_the_cache(settings):
                continue
            method = _name(settings)
            try:
                if method == "mxfp4" and config.get("model_type") != EXPERTS_ONLY:
                    raise NotSupported(f"it is the format of {EXPERTS_ONLY!r}")
                return _quantisation(method, settings)
            except NotSupported as why:
                raise ModelError(
                    f"{folder}: {file} says that the weights are quantised ({method}), which is not supported: {why}; "
                    "take the checkpoint in bfloat16 or a GGUF file of it"
                ) from why
            except (TypeError, ValueError, AttributeError, KeyError, *ERRORS) as error:
                raise ModelError(
                    f"{folder}: the quantisation ({method}) in {file} cannot be read: {cause(error)}"
                ) from error
        return None

    def scheme_of(self, module: str) -> Scheme | None:
        """Of a matrix by its module's name; None: it is plain."""
        if any(self.patience.matches(pattern, module) for pattern in self.ignored):
            return None
        matches = self.patience.matches
        return next((s for targets, s in self.schemes if any(t in EVERY or matches(t, module) for t in targets)), None)

    @property
    def dequantises(self) -> bool:
        """Whether some matrices cannot be kept as they are stored."""
        return any(scheme.act_order for _, scheme in self.schemes)

    @property
    def int4(self) -> bool:
        """Whether all matrices but the head are integers of four bits in groups, which a CPU has a product for."""
        groups = all(
            s.layout in ("packed", "awq", "gptq") and s.bits == 4 and s.block[1] in GROUPS and not s.act_order
            for _, s in self.schemes
        )
        return bool(self.schemes) and groups and all("lm_head" in pattern for pattern in self.ignored)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.parent}: the {path.name} cannot be read: {error}") from error


def _settings(config: Any) -> Any:
    """The quantisation in a config or in one nested in it, such as `text_config`; None: there is none."""
    waiting = [config]
    for one in waiting:  # which grows meanwhile: a config may be nested deeper than calls can be
        if isinstance(one, dict):
            if found := next((one[key] for key in KEYS if one.get(key)), None):
                return found
            waiting += one.values()
    return None


def _of_the_cache(settings: Any) -> bool:
    """Whether keys and values alone are quantised, which we need not do: the weights are plain."""
    return (
        isinstance(settings, dict)
        and settings.get("quant_algo", "") in (None, "NO_QUANT", "NONE")
        and bool(settings.get("kv_cache_quant_algo"))
        and not settings.get("quantized_layers")
    )


def _name(settings: Any) -> str:
    named = [str(settings[n]) for n in NAMES if settings.get(n)] if isinstance(settings, dict) else []
    return named[0] if named else f"{json.dumps(settings):.80}"


def _quantisation(method: str, settings: Any) -> Quantisation:
    if not isinstance(settings, dict):
        raise NotSupported("its form is not known")
    kind = settings.get("quant_method") or settings.get("method") or ("modelopt" if "quant_algo" in settings else None)
    make = METHODS.get(str(kind))
    if make is None:
        raise NotSupported(f"supported are {', '.join(sorted(METHODS))}")
    ignored = [name for key in IGNORED for name in _names(settings.get(key))]
    schemes = tuple((tuple(targets), scheme) for targets, scheme in make(settings))
    for _, scheme in schemes:
        if type(scheme.bits) is not int:
            raise NotSupported(f"weights of {scheme.bits!r} bits")
    for pattern in (*ignored, *(target for targets, _ in schemes for target in targets)):
        if pattern.startswith("re:"):
            compiled(pattern[3:])  # one that is none is told now
    return Quantisation(method, schemes, tuple(ignored))


def _names(found: Any) -> list[str]:
    """A list of names; one by itself may stand without a list."""
    return [found] if isinstance(found, str) else list(map(str, found or []))


def _one_of(settings: Settings, key: str, known: Iterable[Any], default: Any = None) -> Any:
    value = settings.get(key, default)
    if value not in known:
        raise NotSupported(f"{key} is {value!r}; handled are {', '.join(repr(k) for k in known)}")
    return value


Schemes = Iterable[tuple[Iterable[str], Scheme]]


def _fp8(settings: Settings) -> Schemes:
    _one_of(settings, "fmt", ("e4m3",), "e4m3")
    block = settings.get("weight_block_size")
    scheme = Scheme("fp8", 8, (0, 0)) if block is None else Scheme("fp8", 8, _pair(block), "weight_scale_inv")
    return [(EVERY, scheme)]


def _compressed_tensors(settings: Settings) -> Schemes:
    if settings.get("quantization_status", "compressed") != "compressed":
        raise NotSupported(f"quantization_status is {settings['quantization_status']!r}; handled is 'compressed'")
    if settings.get("transform_config"):
        raise NotSupported("it has a transform_config")
    for group in settings["config_groups"].values():
        weights, form = group["weights"], group.get("format") or settings.get("format")
        if weights is None:
            continue
        bits, strategy, size = weights["num_bits"], weights.get("strategy"), weights.get("group_size")
        blocks = {
            "tensor": (0, 0), "channel": (1, 0), None: (0, 0),
            "group": (1, size), "tensor_group": (1, size), "block": weights.get("block_structure"),
        }  # fmt: skip
        if strategy not in blocks:
            raise NotSupported(f"strategy is {strategy!r}")
        scheme = Scheme("", bits, _pair(blocks[strategy]), symmetric=bool(weights.get("symmetric", True)))
        layout = {
            "float-quantized": "fp8", "naive-quantized": "int8" if weights.get("type") == "int" else "fp8",
            "int-quantized": "int8", "mxfp8-quantized": "fp8", "pack-quantized": "packed",
            "nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4",
        }.get(str(form))  # fmt: skip
        if layout is None or (layout == "packed" and bits not in (4, 8)) or (layout in ("fp8", "int8") and bits != 8):
            raise NotSupported(f"format {form!r} with {bits} bits")
        order = weights.get("actorder")
        act_order = order is True or str(order).lower() in ("group", "dynamic")
        yield _names(group["targets"]), replace(scheme, layout=layout, act_order=act_order)


def _modelopt(settings: Settings) -> Schemes:
    block = _pair((1, settings.get("group_size") or 16))
    known = {
        "FP8": Scheme("fp8", 8, (0, 0)),
        "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", 8, (1, 0)),
        "FP8_PB_WO": Scheme("fp8", 8, (128, 128)),
        "MXFP8": Scheme("fp8", 8, (1, 32)),
        "NVFP4": Scheme("modelopt-nvfp4", 4, block),
        "W4A16_NVFP4": Scheme("modelopt-nvfp4", 4, block),
    }
    return [(EVERY, known[_one_of(settings, "quant_algo", known)])]


def _awq(settings: Settings) -> Schemes:
    settings = {"bits": settings.get("w_bit"), "group_size": settings.get("q_group_size")} | settings
    _one_of(settings, "version", ("gemm", "GEMM"), "gemm")
    _one_of(settings, "bits", (4,))
    symmetric = not settings.get("zero_point", True)
    return [(EVERY, Scheme("awq", 4, _pair((1, settings["group_size"])), symmetric=symmetric))]


def _gptq(settings: Settings) -> Schemes:
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    _one_of({"checkpoint_format": form}, "checkpoint_format", ("gptq", "gptq_v2"))
    _one_of(settings, "pack_dtype", ("int32",), "int32")
    bits = _one_of(settings, "bits", (4, 8))
    if settings.get("dynamic"):
        raise NotSupported("it has settings for single matrices (dynamic)")
    scheme = Scheme("gptq", bits, _pair((1, settings["group_size"])), old_zeros=form == "gptq")
    return [(EVERY, replace(scheme, act_order=bool(settings.get("desc_act"))))]


def _pair(block: Any) -> tuple[int, int]:
    rows, columns = block
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < -1:
        raise ValueError(f"it has blocks of {json.dumps(rows)} x {json.dumps(columns)} weights")
    return max(rows, 0), max(columns, 0)


METHODS: dict[str, Callable[[Settings], Schemes]] = {
    "fp8": _fp8, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "awq": _awq, "gptq": _gptq,
    "mxfp4": lambda settings: (),
}  # fmt: skip
