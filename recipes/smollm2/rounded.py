"""A draft model without training: the target with its layers rounded to a few bits.

It is no faster than its target here, where the rounded weights are stored as floats; it is for quality. Its mistakes
are those of a model that knows less, and it agrees with the target about as often as a good draft model does, so that
rules have something to accept and something to reject: with the defaults SmolLM2-135M likes the same token best as its
own rounded copy on two places of three.

    M=.models/SmolLM2-135M-Instruct.Q4_1.gguf
    PYTHONPATH=. python3 -m recipes.smollm2.rounded $M --out runs/smollm2-rounded
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipes.smollm2.distil import teacher_of
from semspec.model.source import Source
from semspec.text.tokenizer import load_tokenizer


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    """[N, K] with only 2**bits values in each group of a row, evenly spaced from its lowest to its highest."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(weight.dtype).tiny)
    return (((parts - low) / step).round() * step + low).flatten(1)


@torch.no_grad()
def round_layers(model: PreTrainedModel, bits: int, group: int) -> None:
    """The matrices of its layers; embedding, head and norms stay."""
    if not 1 <= bits <= 8:
        raise SystemExit(f"--bits is {bits}; give 1 to 8")
    for name, weight in model.named_parameters():
        if ".layers." in name and weight.ndim == 2:
            if group < 2 or weight.shape[1] % group:
                raise SystemExit(f"--group is {group}; {name} has rows of {weight.shape[1]}, which it must divide")
            weight.copy_(rounded(weight, bits, group))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a checkpoint folder or a .gguf file")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64, help="weights of a row that share a scale")
    parser.add_argument("--out", type=Path, required=True, help="folder of the draft model")
    args = parser.parse_args(arguments)
    model = teacher_of(args.target, torch.device("cpu"))
    round_layers(model, args.bits, args.group)
    model.to(torch.bfloat16).save_pretrained(args.out)
    load_tokenizer(Source.find(args.target).path).save_pretrained(args.out)


if __name__ == "__main__":
    main()
