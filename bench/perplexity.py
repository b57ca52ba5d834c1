"""Perplexity of a real model with weights, or keys and values, rounded as we and as llama.cpp's formats round them.

    make smollm2 && .venv/bin/python bench/perplexity.py --out perplexity.json

In the first arms the layers' matrices are rounded and read back as float32, so only what rounding loses is measured. In
those "as loaded" the model is what `--dtype` loads on this machine, head included; the last has an fp8 KV cache. Text:
this repository's docs, in pieces of 512 tokens. The file of `make smollm2` is itself Q4_1, whose own grid Q4_1 and int4
in groups of 32 find again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import torch
from torch import Tensor

from semspec.bench.folder import surroundings
from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.quantised import quantise
from semspec.model.transformer import Transformer
from semspec.model.weights import open_checkpoint
from semspec.text.tokenizer import load_tokenizer
from semspec.types import Score

MODEL = Path(".models/SmolLM2-135M-Instruct.Q4_1.gguf")
DOCS = ("docs/architecture.md", "docs/methods.md", "docs/probes.md")
AS_LOADED = ("bfloat16", "fp8", "int8", "int4")  # values of --dtype
PIECE = 512  # tokens that are read one after the other; each piece begins anew
Round = Callable[[Tensor], Tensor]


def as_gguf(kind: str) -> Round:
    which = gguf.GGMLQuantizationType[kind]
    return lambda w: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), which), which))


ARMS: dict[str, Round] = {
    "as it is": lambda w: w,
    "fp8, a scale for each output": lambda w: quantise(w, "fp8").dequantised(),
    "int8, a scale for each output": lambda w: quantise(w, "int8").dequantised(),
    "Q8_0, groups of 32": as_gguf("Q8_0"),
    "int4, groups of 32 (CPU)": lambda w: quantise(w, "int4", group=32).dequantised(),
    "Q4_1, groups of 32": as_gguf("Q4_1"),
    "int4, groups of 128 (GPU)": lambda w: quantise(w, "int4", group=128).dequantised(),
    "Q4_0, groups of 32": as_gguf("Q4_0"),
}


class Rounded:
    def __init__(self, path: Path, rounded: Round) -> None:
        self.checkpoint, self.rounded = open_checkpoint(path), rounded

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        tensor = self.checkpoint.read(name, shape, device, dtype)
        return self.rounded(tensor) if name.endswith("_proj.weight") else tensor


def runners(path: Path) -> Iterator[tuple[str, ModelRunner]]:
    """One at a time, the plain model first."""
    device, shape = torch.device("cpu"), Shape.read(path)
    for name, rounded in ARMS.items():
        yield name, ModelRunner(Transformer(shape, Rounded(path, rounded), device, torch.float32), 1, PIECE)
    for dtype in AS_LOADED:
        yield f"{dtype}, as loaded", ModelRunner.load(path, device="cpu", dtype=dtype, slots=1, context=PIECE)
    plain = ModelRunner.load(path, device="cpu", dtype="float32", slots=1, context=PIECE)
    yield "fp8 keys and values", ModelRunner(plain.transformer, 1, PIECE, page=64, fp8_cache=True)


def logprobs(runner: ModelRunner, tokens: list[int]) -> Tensor:
    """[N, V] after each token, all in one pass"""
    slot = runner.acquire()
    (rows,) = runner.score([Score(runner, slot, tokens, len(tokens))])
    runner.release(slot)
    return rows.logits.float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a .gguf file or a folder")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="a JSON file with the figures")
    asked = parser.parse_args()
    text = "\n".join(Path(name).read_text() for name in DOCS)
    tokens = load_tokenizer(asked.model)(text)["input_ids"][: asked.tokens + 1]
    pieces = [tokens[begin : begin + PIECE + 1] for begin in range(0, len(tokens) - 1, PIECE)]
    report = {**surroundings(), "model": asked.model.name, "tokens": len(tokens) - 1, "arms": {}}
    plain: list[Tensor] = []
    for name, runner in runners(asked.model):
        loss, divergence, same = 0.0, 0.0, 0
        for i, piece in enumerate(pieces):
            q = logprobs(runner, piece[:-1])
            if len(plain) == i:
                plain.append(q)
            p = plain[i]
            loss -= float(q[torch.arange(len(q)), torch.tensor(piece[1:])].sum())
            divergence += float((p.exp() * (p - q)).sum())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
        n = report["tokens"]
        figures = {"perplexity": math.exp(loss / n), "kl_nats": divergence / n, "same_best_token": same / n}
        report["arms"][name] = figures
        print(f"{name:32} " + "  ".join(f"{key} {value:.5g}" for key, value in figures.items()), flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
