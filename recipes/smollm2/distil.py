"""A draft model for a target: a few of its own layers, taught to write what the target writes.

The draft has the target's embedding, head and norm and some of its layers, by default two at the bottom and two at the
top. It learns the target's distributions (Kullback-Leibler, temperature 1) on texts that the target has written itself,
which a head can be trained on, too. Prompts that are used to measure, such as Spec-Bench's, are no prompts to train on.

    M=.models/SmolLM2-135M-Instruct.Q4_1.gguf
    PYTHONPATH=. python3 -m recipes.smollm2.sample $M --problems 16000 --out runs/smollm2 --device cuda --slots 256
    PYTHONPATH=. python3 -m recipes.smollm2.distil $M --texts runs/smollm2 --minutes 6 --out runs/smollm2-draft
    semspec advise $M --draft runs/smollm2-draft --task spec-bench --data data
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from semspec.head_fit import texts
from semspec.model.source import Source
from semspec.model.weights import open_checkpoint
from semspec.text.tokenizer import load_tokenizer

HELD_OUT = 0.02  # share of the texts that is measured on, not learnt from
WARM_UP = 0.05  # share of the time in which the learning rate rises


def teacher_of(target: str, device: torch.device) -> PreTrainedModel:
    """The target as a transformers model, weights in full precision."""
    source = Source.find(target)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    with torch.no_grad(), open_checkpoint(source.path) as checkpoint:
        for name, weight in model.named_parameters():  # tied weights are named once
            weight.copy_(checkpoint.read(name, tuple(weight.shape), torch.device("cpu"), torch.float32))
    return model.to(device).eval().requires_grad_(False)  # type: ignore[return-value]


def student_of(teacher: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """The teacher with these of its layers only, ready to learn."""
    depth = teacher.config.num_hidden_layers
    if not layers or not all(0 <= i < depth for i in layers):
        raise SystemExit(f"layers are {list(layers)}; give some of 0 to {depth - 1}")
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    own = teacher.state_dict()
    kept = {}
    for name in model.state_dict():
        head, dot, rest = name.partition(".layers.")
        number, _, part = rest.partition(".")
        kept[name] = own[f"{head}.layers.{layers[int(number)]}.{part}" if dot else name]
    model.load_state_dict(kept)
    return model.to(teacher.device).train()  # type: ignore[return-value]


def read_texts(folder: Path, most: int) -> list[tuple[list[int], int]]:
    """(tokens, where the target's own part begins), cut to at most so many tokens."""
    cut = [(text.tokens[:most], text.prompt) for text in texts.read(folder / texts.FILE)]
    kept = [(tokens, begin) for tokens, begin in cut if len(tokens) > begin + 1]
    if not kept:
        raise SystemExit(f"{folder} has no text longer than its prompt within {most} tokens; give a larger --longest")
    return kept


def batches(rows: list[tuple[list[int], int]], size: int, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """[B, N] tokens, and [B, N - 1] which of their successors the target has written; without an end."""
    while True:
        order = list(range(len(rows)))
        rng.shuffle(order)
        for start in range(0, len(order), size):
            chosen = [rows[i] for i in order[start : start + size]]
            longest = max(len(tokens) for tokens, _ in chosen)
            ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in chosen])
            at = torch.arange(longest - 1)
            yield ids, torch.stack([(at >= begin - 1) & (at < len(tokens) - 1) for tokens, begin in chosen])


def said(model: PreTrainedModel, ids: Tensor, counts: Tensor) -> Tensor:
    """Logits of the places that count: those of all others would be most of the work."""
    states = model.base_model(ids, use_cache=False).last_hidden_state[:, :-1]
    return model.get_output_embeddings()(states[counts]).float()


def divergence(
    teacher: PreTrainedModel, student: PreTrainedModel, ids: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean KL(teacher, student) over the sampled tokens, in nats, and how often both like the same token best."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        with torch.no_grad():
            wanted = said(teacher, ids, counts)
        ours = said(student, ids, counts)
    loss = F.kl_div(ours.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")
    return loss, (ours.argmax(-1) == wanted.argmax(-1)).float().mean()


def train(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    rows: list[tuple[list[int], int]],
    minutes: float,
    batch: int,
    rate: float,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, float]]:
    """By the clock: the rate rises at once and falls to 0 at the end. Returns what was measured on held-out texts."""
    rng = random.Random(seed)
    shuffled = rng.sample(rows, len(rows))
    held = max(1, round(HELD_OUT * len(rows)))
    test, rest = shuffled[:held], shuffled[held:] or shuffled
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    began, log, step = clock(), [measure(teacher, student, test, batch)], 0
    print(f"before: KL {log[0]['kl']:.3f}, same favourite {log[0]['same']:.1%}", flush=True)
    for ids, counts in batches(rest, batch, rng):
        now = (clock() - began) / (60 * minutes)
        if now >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, now / WARM_UP + 0.01) * (1 - now)
        device = student.device
        loss, _ = divergence(teacher, student, ids.to(device), counts.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"step {step}, {now:.0%} of the time: KL {loss.item():.3f}", flush=True)
    log.append(measure(teacher, student, test, batch))
    print(f"after {step} steps: KL {log[-1]['kl']:.3f}, same favourite {log[-1]['same']:.1%}", flush=True)
    return log


@torch.no_grad()
def measure(teacher: PreTrainedModel, student: PreTrainedModel, rows: list[Any], batch: int) -> dict[str, float]:
    """On texts that nothing was learnt from, each once."""
    source, total = batches(rows, batch, random.Random(0)), [0.0, 0.0, 0.0]
    for _ in range(0, len(rows), batch):
        ids, counts = (part.to(student.device) for part in next(source))
        kl, same = divergence(teacher, student, ids, counts)
        n = int(counts.sum())
        total = [total[0] + kl.item() * n, total[1] + same.item() * n, total[2] + n]
    return {"kl": total[0] / total[2], "same": total[1] / total[2]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a checkpoint folder or a .gguf file")
    parser.add_argument(
        "--texts", type=Path, required=True, help="folder filled by recipes.smollm2.sample, or for a head"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the draft model")
    parser.add_argument("--layers", default="0,1,-2,-1", help="of the target, counted from 0, or from the end")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a text, prompt included")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    teacher = teacher_of(args.target, torch.device(args.device))
    depth = teacher.config.num_hidden_layers
    layers = [int(i) % depth if -depth <= int(i) < depth else int(i) for i in args.layers.split(",")]
    student = student_of(teacher, layers)
    log = train(teacher, student, read_texts(args.texts, args.longest), args.minutes, args.batch, args.rate)
    student.save_pretrained(args.out)
    load_tokenizer(Source.find(args.target).path).save_pretrained(args.out)
    card = {"target": args.target, "layers": layers, "before": log[0], "after": log[-1]}
    (args.out / "distilled.json").write_text(json.dumps(card, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
