"""Perplexity of a real model with its layers' matrices rounded as we and as llama.cpp's formats round them.

    make smollm2 && .venv/bin/python bench/perplexity.py

Weights are rounded and read back as float32, so only what rounding loses is measured. Text: this repository's docs. The
file of `make smollm2` is itself Q4_1, whose own grid Q4_1 and int4 in groups of 32 find again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from torch import Tensor

from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.quantised import quantise
from semspec.model.transformer import Transformer
from semspec.model.weights import open_checkpoint
from semspec.text.tokenizer import load_tokenizer
from semspec.types import Score

MODEL = Path(".models/SmolLM2-135M-Instruct.Q4_1.gguf")
DOCS = ("docs/architecture.md", "docs/methods.md", "docs/probes.md")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a .gguf file or a folder")
    parser.add_argument("--tokens", type=int, default=4096)
    asked = parser.parse_args()
    text = "\n".join(Path(name).read_text() for name in DOCS)
    tokens = load_tokenizer(asked.model)(text)["input_ids"][: asked.tokens]
    device, shape = torch.device("cpu"), Shape.read(asked.model)
    plain: list[Tensor] = []
    for name, rounded in ARMS.items():
        runner = ModelRunner(Transformer(shape, Rounded(asked.model, rounded), device, torch.float32), 1, 512)
        loss, divergence, same = 0.0, 0.0, 0
        for i, begin in enumerate(range(0, len(tokens) - 1, 512)):
            part = tokens[begin : begin + 513]
            slot = runner.acquire()
            q = runner.score([Score(runner, slot, part[:-1], len(part) - 1)])[0].logits.log_softmax(-1)
            runner.release(slot)
            if name == "as it is":
                plain.append(q)
            p = plain[i]
            loss -= float(q[torch.arange(len(q)), torch.tensor(part[1:])].sum())
            divergence += float((p.exp() * (p - q)).sum())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
        n = len(tokens) - 1
        print(
            f"{name:32} perplexity {math.exp(loss / n):8.3f}  KL {divergence / n:.5f}  same best token {same / n:.1%}"
        )


if __name__ == "__main__":
    main()
