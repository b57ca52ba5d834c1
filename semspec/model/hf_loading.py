"""Models that transformers makes and fills: which of its classes, from which files, and what it left out."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as progress

from semspec.errors import ModelError, in_a_line
from semspec.model.config import read_config
from semspec.model.dequantised import dequantised
from semspec.model.past import cache_name, odd_layers
from semspec.model.quantisation import Quantisation
from semspec.model.weights import Checkpoint

log = logging.getLogger(__name__)


def loader_of(config: PreTrainedConfig, name: str) -> Any:
    """Which of transformers' loaders makes a model that writes text: models that also read pictures do without any."""
    for loader in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in loader._model_mapping:
            return loader
    raise ModelError(f"{name}: {config.model_type!r} is no causal language model that transformers knows")


def class_of(config: PreTrainedConfig, name: str) -> type[PreTrainedModel]:
    return loader_of(config, name)._model_mapping[type(config)]


def refuse_without_truncation(config: PreTrainedConfig, name: str) -> None:
    """Refuse models that transformers does not know or whose past cannot be undone, from their config alone."""
    kept = cache_name(class_of(config, name))
    try:
        odd = odd_layers(config)
    except Exception as error:  # transformers raises many kinds here
        raise ModelError(
            f"{name}: transformers makes no cache for {config.model_type!r}: {in_a_line(error)}"
        ) from error
    if why := "takes no cache of transformers" if kept is None else f"keeps its past in a {odd[0]}" if odd else None:
        raise ModelError(
            f"{name}: {config.model_type!r} {why}, so that a rejected draft cannot be undone; take a model whose "
            "layers keep keys and values, or a recurrent state, in a cache of transformers"
        )


def read_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with _bars_for_people():
            if Quantisation.read(path) is None:
                made = loader_of(read_config(path), str(path)).from_pretrained(
                    path, dtype=dtype, use_safetensors=True, output_loading_info=True
                )
            else:
                made = _dequantised(path, dtype)
        model, found = made
    except ModelError:
        raise
    except Exception as error:  # transformers raises many kinds here
        raise ModelError(f"{path}: transformers cannot load it: {in_a_line(error)}") from error
    if found["missing_keys"]:  # transformers initialises at random what is missing
        missing = sorted(found["missing_keys"])
        raise ModelError(f"{path}: the checkpoint lacks {len(missing)} tensors of its config, such as {missing[0]}")
    _tell_unread(path, model, found["unexpected_keys"])
    model.config.name_or_path = str(path)  # where further parts may be
    return model


@contextmanager
def _bars_for_people() -> Iterator[None]:
    """transformers shows its progress on a terminal only, as we do ours."""
    if sys.stderr.isatty() or not progress.is_progress_bar_enabled():
        yield
        return
    progress.disable_progress_bar()
    try:
        yield
    finally:
        progress.enable_progress_bar()


def _dequantised(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = read_config(path)
    model, own = class_of(config, str(path)), config.get_text_config(decoder=True)
    config = own if model.config_class is type(own) else config
    for one in (config, own):
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    with Checkpoint(path) as checkpoint:
        tensors = dequantised(checkpoint, dtype)
        return model.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True)


def _tell_unread(path: Path, model: PreTrainedModel, names: Iterable[str]) -> None:
    """Nothing says that a checkpoint is its config's but that all of it is read. Layers behind the last are another
    matter: they draft, see heads/mtp.py."""
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    behind = re.compile(r"\blayers\.(\d+)\.")
    unread = sorted(n for n in names if (at := behind.search(n)) is None or int(at[1]) < depth)
    if unread:
        log.warning(
            "%s: %d tensors are not read, such as %s; if answers make no sense, the config is another model's",
            path, len(unread), unread[0],
        )  # fmt: skip
