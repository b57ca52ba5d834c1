"""Train one model of the pair from scratch, in resumable pieces measured in minutes.

The schedule runs over *time*, not steps, whatever the machine manages: the learning rate rises at once, stays, and
decays to zero over the last `--anneal` share of `--total-minutes`, or earlier: as soon as a probe shows a share of
right answers of `--anneal-when`. A probe (every `--probe-every` seconds) lets the model solve problems of the split
"probe" at T 0.6 and prints right answers and invalid steps; `--until-invalid` stops there once so few steps are
invalid. Every `--save-every` seconds a checkpoint and an export are written, so that a run that is cut loses no more;
`--resume` goes on from it, and `--minutes` ends a piece early. Compiling is not counted.

    PYTHONPATH=. python3 -m recipes.pocket.train --size target --data /tmp/pocket --out /tmp/run --total-minutes 8
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from recipes.pocket import export
from recipes.pocket.measure import TEMPERATURE, Bench
from recipes.pocket.model import SIZES, Decoder, document_mask
from recipes.pocket.muon import Muon
from recipes.pocket.stepper import WINDOW, ScoreOutput, Stepper, set_rate
from recipes.pocket.tokenizer import save_tokenizer, style_of
from semspec.pocket import problem
from semspec.pocket.chat import USER

_RATES = {"target": 2e-3, "draft": 3e-3, "moe": 2e-3}


@dataclass
class Schedule:
    """The learning rate over time, all in seconds. `annealing` is when the decay began."""

    total: float
    anneal: float
    annealing: float | None = None

    def share(self, now: float) -> float:
        """Share of the peak learning rate at this time."""
        if self.annealing is None and now >= self.total - self.anneal:
            self.annealing = now
        rise = min(1.0, 0.02 + now / (0.01 * self.total))
        return rise if self.annealing is None else rise * max(0.0, 1 - (now - self.annealing) / self.anneal)

    def over(self, now: float) -> bool:
        return self.annealing is not None and now >= self.annealing + self.anneal


def loss_of(
    model: Decoder, tokens: Tensor, labels: Tensor, dice: Tensor, light: float, starts_with: int, masked: bool
) -> tuple[Tensor, Tensor]:
    """What is minimized, and for the log the mean cross entropies [2]: of all learnt tokens, and of those not dice.

    Tokens where a choice of words shows weigh `light`: whether one shows depends only on the text before, never on
    the option, so the chances learnt stay true; but content is not drowned by noise that cannot be learnt."""
    mask = document_mask(tokens, starts_with) if masked else None
    logits = model(tokens, mask)
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none")
    learnt = (labels.flatten() != -100).float()
    content = learnt * (~dice.flatten()).float()
    weights = content + light * (learnt - content)
    loss = (each * weights).sum() / weights.sum()
    seen = torch.stack([each.sum() / learnt.sum(), (each * content).sum() / content.sum()]).detach()
    return loss + 0.01 * model.balance() if model.size.experts else loss, seen


def optimizers_for(model: Decoder, kind: str, cuda: bool) -> list[torch.optim.Optimizer]:
    """Matrices inside the layers decay, by Muon or AdamW; embedding and norms are AdamW's and do not. The learning
    rate is `set_rate`'s business."""
    inner = {name: weight.dim() >= 2 and "embed" not in name for name, weight in model.named_parameters()}
    matrices = [weight for name, weight in model.named_parameters() if inner[name]]
    rest = [weight for name, weight in model.named_parameters() if not inner[name]]

    def adamw(weights: list[torch.nn.Parameter], decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=rate(), betas=(0.9, 0.95), weight_decay=decay, fused=cuda, capturable=cuda)

    def rate() -> float | Tensor:
        return torch.zeros((), device="cuda") if cuda else 0.0

    return [Muon(matrices, lr=rate()) if kind == "muon" else adamw(matrices, 0.1), adamw(rest, 0.0)]


class Run:
    """One training run: its model, its state, and its checkpoints."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: Any, device: str) -> None:
        self.arguments, self.tokenizer, self.out = arguments, tokenizer, Path(arguments.out)
        self.habit = arguments.habit or ("draft" if arguments.size.startswith("draft") else "target")
        self.model = Decoder(SIZES[arguments.size], -(-len(tokenizer) // 64) * 64).to(device)
        self.rate = arguments.rate or _RATES.get(arguments.size, 3e-3)
        self.optimizers = optimizers_for(self.model, arguments.optimizer, device == "cuda")
        total = arguments.total_minutes * 60
        self.schedule = Schedule(total, arguments.anneal * total)
        self.step, self.seconds = 0, 0.0
        self.log: list[dict[str, Any]] = []
        self.probes: list[dict[str, Any]] = []
        self.tasks = [problem(seed, split="probe") for seed in range(arguments.probe_problems)]
        self.out.mkdir(parents=True, exist_ok=True)
        if arguments.weights:
            self.model.load_state_dict(export.load(arguments.weights, device).state_dict())
        if arguments.resume and (self.out / "checkpoint.pt").exists():
            saved = torch.load(self.out / "checkpoint.pt", map_location=device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.seconds = saved["step"], saved["seconds"]
            self.log, self.probes, self.schedule.annealing = saved["log"], saved["probes"], saved["annealing"]

    def probe(self) -> dict[str, Any]:
        """Solve the probe problems now and say how well."""
        began = time.perf_counter()
        bench = Bench(self.model, self.model, self.tokenizer, seed=self.step)
        figures = bench.quality(self.tasks, bench.solve("target", self.tasks, TEMPERATURE))
        entry = {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "correct": round(figures["correct"].value, 4),
            "invalid": round(figures["invalid"].value, 4),
            "took": round(time.perf_counter() - began, 1),
        }
        self.probes.append(entry)
        print(json.dumps(entry), flush=True)
        return entry

    def save(self, card: dict[str, Any]) -> None:
        """A checkpoint to resume from and an export to use, each whole or not at all."""
        where = {"step": self.step, "seconds": self.seconds, "annealing": self.schedule.annealing}
        state = {"model": self.model.state_dict(), "optimizers": [one.state_dict() for one in self.optimizers]}
        torch.save({**state, **where, "log": self.log, "probes": self.probes}, self.out / "checkpoint.part")
        (self.out / "checkpoint.part").rename(self.out / "checkpoint.pt")
        folder, tokenizer = self.out / "export.part", self.tokenizer
        shutil.rmtree(folder, ignore_errors=True)
        export.save(self.model, folder, tokenizer.eos_token_id, tokenizer.pad_token_id, self.arguments.shard_mb)
        save_tokenizer(tokenizer, folder)
        card = {
            "size": self.arguments.size,
            "habit": self.habit,
            "seed": self.arguments.seed,
            "batch_rows": self.arguments.batch,
            "optimizer": self.arguments.optimizer,
            "peak_rate": self.rate,
            "dice_weight": self.arguments.dice,
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "seconds": round(self.seconds, 1),
            "annealing_from": self.schedule.annealing,
            **card,
            "log": self.log,
            "probes": self.probes,
        }
        (folder / "training_log.json").write_text(json.dumps(card, indent=1) + "\n")
        shutil.rmtree(self.out / "export", ignore_errors=True)
        folder.rename(self.out / "export")


def train(arguments: argparse.Namespace) -> Run:
    """Run one piece of training; it is left as a checkpoint and an export."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    while not (arguments.data / "tokenizer" / "tokenizer_config.json").exists():
        time.sleep(1)
    tokenizer = AutoTokenizer.from_pretrained(str(arguments.data / "tokenizer"))
    run = Run(arguments, tokenizer, device)
    model, schedule = run.model, run.schedule
    starts_with = tokenizer.convert_tokens_to_ids(style_of(tokenizer).spell(USER))
    compute = torch.compile(loss_of, dynamic=False) if device == "cuda" and not arguments.eager else loss_of

    def stepper(folder: Path, batch: int, masked: bool) -> Stepper:
        rows = ScoreOutput(folder, batch, device, arguments.seed)

        def loss(tokens: Tensor, labels: Tensor, dice: Tensor) -> tuple[Tensor, Tensor]:
            return compute(model, tokens, labels, dice, arguments.dice, starts_with, masked)

        graphs, bfloat16 = device == "cuda" and not arguments.no_graphs, device == "cuda" or arguments.bfloat16
        return Stepper(loss, model, run.optimizers, rows, graphs, bfloat16)

    began = time.perf_counter()
    set_rate(run.optimizers, 0.0)  # getting ready moves nothing but the moments
    short = stepper(arguments.data / run.habit, arguments.batch, masked=arguments.attention == "mask")
    long_folder, long_every = arguments.data / f"{run.habit}_long", arguments.long_every
    # A long row holds one document, so plain causal attention is enough there, and much faster.
    use_long = long_every and long_folder.exists()
    long = stepper(long_folder, arguments.long_batch, masked=False) if use_long else None

    def note() -> None:
        """Log the losses since the last note, take in new shards."""
        loss, content = short.figures()
        run.seconds = before + time.perf_counter() - began
        entry = {"step": run.step, "loss": round(loss, 5), "content": round(content, 5)}
        entry |= {"tokens": run.step * arguments.batch * short.rows.rows.shape[1], "seconds": round(run.seconds, 1)}
        run.log.append(entry)
        print(json.dumps(entry), flush=True)
        short.rows.refresh()

    def card(finished: bool) -> dict[str, Any]:
        counts = {"rows": len(short.rows.rows), "long_rows": len(long.rows.rows) if long else 0}
        return {"row_tokens": short.rows.rows.shape[1], **counts, "finished": finished}

    count = sum(weight.numel() for weight in model.parameters())
    print(f"{count / 1e6:.2f}M parameters, ready in {time.perf_counter() - began:.0f} s", flush=True)
    before, began = run.seconds, time.perf_counter()
    probed = saved = before
    while True:
        run.seconds = before + time.perf_counter() - began
        enough = schedule.over(run.seconds) or (arguments.max_steps and run.step >= arguments.max_steps)
        pause = arguments.minutes and run.seconds - before >= arguments.minutes * 60
        if short.count and (enough or pause or run.step % arguments.log_every == 0):
            note()
        if enough or pause or run.seconds - probed >= arguments.probe_every:
            found = run.probe()
            enough = enough or found["invalid"] <= arguments.until_invalid
            if arguments.anneal_when and found["correct"] >= arguments.anneal_when and schedule.annealing is None:
                schedule.annealing = run.seconds
            probed = run.seconds
        if enough or pause or run.seconds - saved >= arguments.save_every:
            run.save(card(bool(enough)))
            saved = run.seconds
        if enough or pause:
            return run
        set_rate(run.optimizers, run.rate * schedule.share(run.seconds))
        steps = min(WINDOW, arguments.log_every, arguments.max_steps - run.step if arguments.max_steps else WINDOW)
        if long and run.seconds > arguments.long_from * schedule.total:
            long.run(run.step // long_every, (run.step + steps) // long_every - run.step // long_every)
        short.run(run.step, steps)
        run.step += steps
        if device == "cuda":
            torch.cuda.synchronize()  # else the host runs far ahead, and the clock says nothing


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--habit", choices=["target", "draft"], help="whose wording to learn; by default from the size")
    parser.add_argument("--data", type=Path, required=True, help="folder written by recipes.pocket.data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--total-minutes", type=float, required=True, help="the whole planned training")
    parser.add_argument("--minutes", type=float, default=0, help="stop this piece after so long (0: no limit)")
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--weights", type=Path, help="begin with those of this exported folder, not from scratch")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--batch", type=int, default=16, help="rows a step")
    parser.add_argument("--long-batch", type=int, default=4, help="rows of a step on long documents, if there are any")
    parser.add_argument("--long-every", type=int, default=12, help="one long step in so many (0: none)")
    parser.add_argument("--long-from", type=float, default=0.5, help="share of the time from which long steps come")
    parser.add_argument("--dice", type=float, default=0.25, help="weight in the loss where a choice of words shows")
    parser.add_argument("--anneal", type=float, default=0.35, help="share of the time in which the rate decays")
    parser.add_argument("--anneal-when", type=float, default=0, help="begin the decay once this share is right")
    parser.add_argument("--until-invalid", type=float, default=-1, help="stop once no more steps are invalid")
    parser.add_argument("--probe-every", type=float, default=60, help="seconds")
    parser.add_argument("--probe-problems", type=int, default=128)
    parser.add_argument("--save-every", type=float, default=60, help="seconds")
    parser.add_argument("--optimizer", choices=["muon", "adamw"], default="muon", help="of the matrices in the layers")
    parser.add_argument("--rate", type=float, default=0, help="peak learning rate; by default from the size")
    parser.add_argument(
        "--attention",
        choices=["mask", "causal"],
        default="mask",
        help="mask: documents of a row do not see each other; causal: they do, but faster",
    )
    parser.add_argument(
        "--bfloat16", action="store_true", help="products in bfloat16 on a CPU, too, where it is faster"
    )
    parser.add_argument("--no-graphs", action="store_true", help="do not record steps as CUDA graphs")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--log-every", type=int, default=960, help="steps; best a multiple of the window of 32")
    parser.add_argument("--shard-mb", type=float, default=0, help="split the exported weights into files this big")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse())
