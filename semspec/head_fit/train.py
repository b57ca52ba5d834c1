"""Training a head: batches of the target's texts with its states, the loss over several draft steps, and checkpoints.

A batch is a function of the seed and its number, so a run that was interrupted ends as one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.errors import BadRequest
from semspec.head_fit.module import HeadModule, HeadSize
from semspec.head_fit.texts import Text
from semspec.model.heads.eagle import TargetParts
from semspec.types import Runner, Score

DECAY = 0.8  # of a step's weight in the loss, per step
WARM_UP = 0.04  # share of the training in which the rate rises
LAST_RATE = 0.1  # of the peak, at the end
CLIP = 1.0
CHUNK = 512  # rows of the target's logits at a time: large vocabularies


@dataclass(frozen=True)
class Training:
    layers: tuple[int, ...]  # of the target
    steps: int = 2000
    batch: int = 8  # texts
    length: int = 512  # tokens of a text that are used at a time
    depth: int = 5  # draft steps
    rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "depth"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.length < self.depth + 3 or not self.rate > 0:
            raise BadRequest(
                f"length {self.length}, rate {self.rate}: give some tokens more than depth, a rate above 0"
            )


@dataclass(slots=True)
class Batch:
    embedded: Tensor  # [B, T, width] of the tokens after each state
    states: Tensor  # [B, T, layers * width]
    wanted: Tensor  # [B, T, head's vocab] the target's probabilities of the token after that
    counts: Tensor  # [B, T] whether it counts: it is there, and no prompt


class Trainer:
    def __init__(
        self, target: Runner, texts: Sequence[Text], ids: Tensor, size: HeadSize, how: Training, folder: Path
    ) -> None:
        """`ids`: the target's tokens that the head can draft. Every 20th text is held out."""
        self.target, self.how, self.folder, self.parts = target, how, folder, TargetParts.of(target)
        self.ids = ids.to(target.device)
        useful = [text for text in texts if len(text.tokens) >= how.depth + 3]
        self.held_out, self.texts = useful[::20], [text for i, text in enumerate(useful) if i % 20]
        if not self.texts:
            raise BadRequest(f"{len(useful)} texts of {how.depth + 3} tokens or more are too few to learn from")
        torch.manual_seed(how.seed)
        self.module = HeadModule(size).to(target.device)
        if size.width == size.target_width:  # what the target would say of its own state is a good beginning
            with torch.no_grad():
                unit = torch.eye(size.width, device=target.device, dtype=self.parts.dtype)
                self.module.lm_head.weight.copy_(self.parts.head(unit)[:, self.ids].T)
        self.optimiser = torch.optim.AdamW(self.module.parameters(), lr=how.rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.done, self.losses = 0, list[float]()

    def run(self, progress: Callable[[int, int], None], every: int = 50) -> None:
        """Train to the last step, from the last checkpoint on if there is one."""
        self._load()
        while self.done < self.how.steps:
            progress(self.done, self.how.steps)
            self.losses.append(self.step(self.done))
            self.done += 1
            if self.done % every == 0 or self.done == self.how.steps:
                self._save()
        progress(self.done, self.how.steps)

    def step(self, number: int) -> float:
        rng = Random(f"{self.how.seed} {number}")
        some = [self.texts[rng.randrange(len(self.texts))] for _ in range(self.how.batch)]
        batch = self.batch([_window(text, self.how.length, rng) for text in some])
        for group in self.optimiser.param_groups:
            group["lr"] = self.how.rate * _schedule(number, self.how.steps)
        loss = self.loss(batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        self.optimiser.step()
        return float(loss.detach())

    def loss(self, batch: Batch) -> Tensor:
        total = batch.wanted.new_zeros(())
        for j, logits in enumerate(self.module(batch.embedded, batch.states, self.how.depth)):
            counts = batch.counts.clone()
            counts[:, :j] = False
            rows = -(batch.wanted[counts] * logits[counts].float().log_softmax(-1)).sum(-1)
            total = total + DECAY**j * rows.mean()
        return total

    @torch.no_grad()
    def curve(self) -> list[float]:
        """On held-out texts: the share of places at which the first guess is the target's, of those the share at which
        the second is too, and so on."""
        there, right = [0] * self.how.depth, [0] * self.how.depth
        for i in range(0, len(self.held_out), self.how.batch):
            some = [_window(text, self.how.length, None) for text in self.held_out[i : i + self.how.batch]]
            batch = self.batch(some)
            so_far, best = batch.counts, batch.wanted.argmax(-1)
            for j, logits in enumerate(self.module(batch.embedded, batch.states, self.how.depth)):
                if j:  # a draft that began one position earlier
                    so_far = torch.cat([torch.zeros_like(so_far[:, :1]), so_far[:, :-1]], 1) & batch.counts
                there[j] += int(so_far.sum())
                so_far = so_far & (logits.argmax(-1) == best)
                right[j] += int(so_far.sum())
        return [r / max(t, 1) for r, t in zip(right, there, strict=True)]

    @torch.no_grad()
    def batch(self, texts: Sequence[Text]) -> Batch:
        """With the target's states and probabilities, padded to the longest text."""
        layers, depth = self.how.layers, self.parts.depth
        outputs = self._read(texts, tuple(sorted({*layers, depth})))
        longest = max(len(text.tokens) for text in texts) - 2
        embedded, states, wanted, counts = [], [], [], []
        for text, hidden in zip(texts, outputs, strict=True):
            n = len(text.tokens) - 2  # the last two tokens have no token two places later
            pad = (0, 0, 0, longest - n)
            after = torch.tensor(text.tokens[1:-1], device=self.target.device)
            embedded.append(F.pad(F.embedding(after, self.parts.embedding).float(), pad))
            states.append(F.pad(torch.cat([hidden[layer][:n] for layer in layers], -1).float(), pad))
            wanted.append(F.pad(self._probabilities(hidden[depth][1 : n + 1]), pad))
            places = torch.arange(longest, device=self.target.device)
            counts.append((places < n) & (places >= text.prompt - 2))
        return Batch(torch.stack(embedded), torch.stack(states), torch.stack(wanted), torch.stack(counts))

    def _read(self, texts: Sequence[Text], layers: tuple[int, ...]) -> list[dict[int, Tensor]]:
        read: list[dict[int, Tensor]] = []
        while len(read) < len(texts):
            some = texts[len(read) : len(read) + max(self.target.free, 1)]
            slots = [self.target.acquire() for _ in some]
            requests = [
                Score(self.target, slot, text.tokens, 0, layers, states=len(text.tokens))
                for slot, text in zip(slots, some, strict=True)
            ]
            read += [{i: h.clone() for i, h in rows.hidden.items()} for rows in self.target.score(requests)]
            for slot in slots:
                self.target.release(slot)
        return read

    def _probabilities(self, states: Tensor) -> Tensor:
        parts = [self.parts.head(rows).float().softmax(-1)[:, self.ids] for rows in states.split(CHUNK)]
        return torch.cat(parts)

    def _save(self) -> None:
        whole = {"how": asdict(self.how), "done": self.done, "losses": self.losses}
        whole |= {"module": self.module.state_dict(), "optimiser": self.optimiser.state_dict()}
        new = self.folder / "training.new"
        torch.save(whole, new)
        new.replace(self.folder / "training.pt")

    def _load(self) -> None:
        file = self.folder / "training.pt"
        if not file.exists():
            return
        try:
            whole = torch.load(file, map_location=self.target.device, weights_only=True)
            before = whole["how"]
        except Exception as error:  # torch raises many kinds here
            raise BadRequest(f"{file} cannot be read: {error}; delete it to begin again") from error
        now = asdict(self.how)
        other = [f"{k} {before.get(k)}" for k in now if before.get(k) != now[k]]
        if other:
            raise BadRequest(f"{file} is of a training with {', '.join(other)}; give the same, or another --out")
        self.module.load_state_dict(whole["module"])
        self.optimiser.load_state_dict(whole["optimiser"])
        self.done, self.losses = whole["done"], whole["losses"]


def _window(text: Text, length: int, rng: Random | None) -> Text:
    """A part of a text that is too long; mostly of what the target wrote."""
    if len(text.tokens) <= length:
        return text
    last = len(text.tokens) - length
    start = rng.randint(min(max(text.prompt - length // 2, 0), last), last) if rng else last
    return Text(text.tokens[start : start + length], max(text.prompt - start, 0))


def _schedule(step: int, steps: int) -> float:
    rise = max(1, int(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    share = (step - rise) / max(1, steps - rise)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2
