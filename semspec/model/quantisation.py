"""Quantised checkpoints that cannot be read are refused by name: read as plain weights they would give noise.

Models that transformers runs are refused too: its quantised layers need other packages and particular GPUs, and the
memory plan does not know them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from semspec.errors import ModelError

KEYS = ("quantization_config", "compression_config", "quantization")  # the last is MLX's and ModelOpt's
NAMES = ("quant_method", "quant_algo", "format", "kv_cache_quant_algo")
FILES = ("config.json", "hf_quant_config.json")


def refuse_quantised(folder: Path) -> None:
    for file in FILES:
        method = _method(_read(folder / file))
        if method is not None:
            raise ModelError(
                f"{folder}: {file} says that the weights are quantised ({method}), which is not supported; take the "
                "checkpoint in bfloat16 or a GGUF file of it"
            )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.parent}: the {path.name} cannot be read: {error}") from error


def _method(config: Any) -> str | None:
    """The name of the quantisation in a config or in one nested in it, such as `text_config`; None: there is none."""
    if not isinstance(config, dict):
        return None
    for key in KEYS:
        if settings := config.get(key):
            named = [str(settings[n]) for n in NAMES if settings.get(n)] if isinstance(settings, dict) else []
            return named[0] if named else f"{key}: {json.dumps(settings):.80}"
    return next((found for value in config.values() if (found := _method(value))), None)
