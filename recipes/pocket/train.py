"""Train one model of the pair from scratch, in resumable pieces measured in minutes.

The schedule runs over *time*, not steps: the learning rate rises over the first percent, stays, and falls to nothing
over the last third of `--total-minutes`, whatever the machine manages in between. `--minutes` ends a piece early with
a checkpoint, from which `--resume` goes on. Compiling is not counted.

    PYTHONPATH=. python3 -m recipes.pocket.train --size target --data /tmp/pocket --out /tmp/run --total-minutes 8
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from recipes.pocket import export
from recipes.pocket.data import LEARN
from recipes.pocket.model import SIZES, Decoder, document_mask
from recipes.pocket.tokenizer import save_tokenizer
from semspec.pocket.chat import USER

LONG_FROM, LONG_EVERY = 0.4, 5  # long documents come late, when the short ones are known, and once in so many steps
_RATES = {"target": 2e-3, "draft": 3e-3, "moe": 2e-3}


def schedule(progress: float) -> float:
    """Share of the peak learning rate at this share of the planned time."""
    return max(0.0, min(1.0, 0.02 + progress / 0.01, (1 - progress) / 0.35))


class Rows:
    """Packed rows on the device, drawn at random from all shards there are so far."""

    def __init__(self, folder: Path, batch: int, device: str, seed: int) -> None:
        self.folder, self.batch, self.seed, self.device = folder, batch, seed, device
        self.seen: set[Path] = set()
        self.rows = torch.empty(0, 0, dtype=torch.int16, device=device)
        while len(self.rows) < batch:  # the first shards may still be in the making
            self.refresh()
            if len(self.rows) < batch:
                if (folder.parent / "data.json").exists():
                    raise ValueError(f"{folder} holds {len(self.rows)} rows, fewer than a batch of {batch}; make more")
                time.sleep(1)

    def refresh(self) -> None:
        """Take in shards that have appeared since the last look."""
        new = sorted(p for p in self.folder.glob("*.npy") if p not in self.seen and ".part" not in p.name)
        if new:
            found = [torch.from_numpy(np.load(path).view(np.int16)).to(self.device) for path in new]
            self.rows = torch.cat([self.rows, *found]) if len(self.rows) else torch.cat(found)
            self.seen.update(new)

    def get(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of a step, [B, T] each; label -100 where nothing is learnt."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = torch.randint(len(self.rows), (self.batch,), generator=generator).to(self.device)
        stored = self.rows[chosen].long()
        tokens = stored & (LEARN - 1)
        labels = torch.where(stored < 0, tokens, -100)
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
        return tokens, labels


def loss_of(model: Decoder, tokens: Tensor, labels: Tensor, starts_with: int, masked: bool) -> Tensor:
    """Cross entropy on the learnt tokens, plus a little for experts used unevenly."""
    mask = document_mask(tokens, starts_with) if masked else None
    logits = model(tokens, mask)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
    return loss + 0.01 * model.balance() if model.size.experts else loss


def optimizer_for(model: Decoder, rate: float, fused: bool) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def train(arguments: argparse.Namespace) -> dict[str, object]:
    """Run one piece of training; the log, which is also written beside the checkpoint."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    while not (arguments.data / "tokenizer" / "tokenizer_config.json").exists():
        time.sleep(1)
    tokenizer = AutoTokenizer.from_pretrained(str(arguments.data / "tokenizer"))
    entries = -(-len(tokenizer) // 64) * 64
    size = SIZES[arguments.size]
    habit = arguments.habit or ("draft" if arguments.size == "draft" else "target")
    rows = Rows(arguments.data / habit, arguments.batch, device, arguments.seed)
    model = Decoder(size, entries).to(device)
    rate = arguments.rate or _RATES.get(arguments.size, 3e-3)
    optimizer = optimizer_for(model, rate, fused=device == "cuda")
    step, before, log = 0, 0.0, []
    if arguments.resume:
        saved = torch.load(out / "checkpoint.pt", map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, before, log = saved["step"], saved["seconds"], saved["log"]
    starts_with = tokenizer.convert_tokens_to_ids(USER)
    compute = torch.compile(loss_of, dynamic=False) if device == "cuda" and not arguments.eager else loss_of
    masked = arguments.attention == "mask"
    long_folder = arguments.data / f"{habit}_long"
    long_rows = Rows(long_folder, arguments.long_batch, device, arguments.seed) if long_folder.exists() else None

    def one_step(number: int, share: float, long: bool = False) -> Tensor:
        # A long row holds one document, so plain causal attention is enough there, and much faster.
        tokens, labels = long_rows.get(number // LONG_EVERY) if long and long_rows else rows.get(number)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = compute(model, tokens, labels, starts_with, masked and not long)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    began = time.perf_counter()
    one_step(step, 0.0)  # compiles; moves nothing but the decay-free moments
    if long_rows:
        one_step(step, 0.0, long=True)
    if device == "cuda":
        torch.cuda.synchronize()
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, ready in "
        f"{time.perf_counter() - began:.0f} s",
        flush=True,
    )
    total = arguments.total_minutes * 60
    began = time.perf_counter()
    losses: list[Tensor] = []
    while True:
        elapsed = time.perf_counter() - began
        done = before + elapsed >= total or (arguments.max_steps and step >= arguments.max_steps)
        pause = arguments.minutes and elapsed >= arguments.minutes * 60
        if losses and (done or pause or step % arguments.log_every == 0):
            entry = {
                "step": step,
                "loss": round(torch.stack(losses).mean().item(), 5),  # waits for the device, so elapsed stays honest
                "tokens": step * arguments.batch * rows.rows.shape[1],
                "seconds": round(before + time.perf_counter() - began, 1),
            }
            log.append(entry)
            print(json.dumps(entry), flush=True)
            losses = []
            rows.refresh()
        if done or pause:
            break
        progress = (before + elapsed) / total
        if long_rows and progress > LONG_FROM and step % LONG_EVERY == 0:
            one_step(step, schedule(progress), long=True)
        losses.append(one_step(step, schedule(progress)))
        step += 1
    seconds = before + time.perf_counter() - began
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "step": step, "seconds": seconds, "log": log}, out / "checkpoint.pt")
    folder = out / "export"
    export.save(model, folder, tokenizer.eos_token_id, tokenizer.pad_token_id, arguments.shard_mb)
    save_tokenizer(tokenizer, folder)
    card = {
        "size": arguments.size,
        "habit": habit,
        "seed": arguments.seed,
        "batch_rows": arguments.batch,
        "row_tokens": rows.rows.shape[1],
        "rows": len(rows.rows),
        "long_rows": len(long_rows.rows) if long_rows else 0,
        "peak_rate": rate,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "seconds": round(seconds, 1),
        "finished": bool(done),
        "log": log,
    }
    (folder / "training_log.json").write_text(json.dumps(card, indent=1) + "\n")
    return card


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--habit", choices=["target", "draft"], help="whose wording to learn; by default from the size")
    parser.add_argument("--data", type=Path, required=True, help="folder written by recipes.pocket.data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--total-minutes", type=float, required=True, help="the whole planned training")
    parser.add_argument("--minutes", type=float, default=0, help="stop this piece after so long (0: no limit)")
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--batch", type=int, default=128, help="rows a step")
    parser.add_argument("--long-batch", type=int, default=32, help="rows of a step on long documents, if there are any")
    parser.add_argument("--rate", type=float, default=0, help="peak learning rate; by default from the size")
    parser.add_argument(
        "--attention",
        choices=["mask", "causal"],
        default="mask",
        help="mask: documents of a row do not see each other; causal: they do, but faster",
    )
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--shard-mb", type=float, default=0, help="split the exported weights into files this big")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse())
