"""Training a head: batches of the target's texts with its states, the loss over several draft steps, and checkpoints.

A batch is a function of the seed and its number, so a run that was interrupted ends as one that was not; on a GPU but
for rounding, since a pass reads all texts of a batch whose states are not at hand.
Where the target is in bfloat16, so is the training's arithmetic, and on a CPU with such instructions it is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from semspec.errors import BadRequest, ModelError
from semspec.head_fit.checkpoint import Checkpoint, Training, digests
from semspec.head_fit.module import HeadModule, HeadSize
from semspec.head_fit.texts import Text
from semspec.model.heads.eagle import TargetParts
from semspec.probe import fingerprint
from semspec.types import Runner, Score

DECAY = 0.8  # of a step's weight in the loss, per step
WARM_UP = 0.04  # share of the training in which the rate rises
LAST_RATE = 0.1  # of the peak, at the end
CLIP = 1.0
OTHER_STATES = 0.2  # of fc's first weights, beside the last state as it is
CACHE_BYTES = 2 << 30  # of the target's states, which are the same whenever a text comes again
CACHE_SHARE = 0.4  # of a GPU's free memory, if that is more
CHUNK = 512  # rows of the target's logits at a time: large vocabularies
LIKELY = 64  # of the target's best tokens at a place; the rest of its probability is not learnt


@dataclass(slots=True)
class Batch:
    embedded: Tensor  # [B, T, width] of the tokens after each state
    states: Tensor  # [B, T, layers * width]
    rows: Tensor  # [N] positions of B * T that count, and as many before them as a draft is long
    places: Tensor  # [N] where these are in their texts
    counts: Tensor  # [N] whether it counts: it is there, and no prompt
    likely: Tensor  # [N, L] the target's best tokens after that as numbers of the head's vocabulary, -1: not in it
    chances: Tensor  # [N, L] the target's probabilities of these, 0 of those not in it


@dataclass(slots=True)
class TargetOutputs:
    """What the target makes of a text."""

    states: dict[int, Tensor]  # [tokens, width], by layer
    likely: Tensor  # [own, L] as in a batch, from the first place on that a batch asks about
    chances: Tensor


class Trainer:
    def __init__(
        self, target: Runner, texts: Sequence[Text], ids: Tensor, size: HeadSize, how: Training, folder: Path
    ) -> None:
        """`ids`: the target's tokens that the head can draft, rising. Every 20th text is held out."""
        self.target, self.how, self.folder, self.parts = target, how, folder, TargetParts.of(target)
        self.ids, self.name, self.digests = ids.to(target.device), name_of(target), digests(texts)
        useful = [text for text in texts if len(text.tokens) >= how.depth + 3]
        self.held_out, self.texts = useful[::20], [text for i, text in enumerate(useful) if i % 20]
        if not self.texts:
            raise BadRequest(f"{len(useful)} texts of {how.depth + 3} tokens or more are too few to learn from")
        torch.manual_seed(how.seed)
        self.module = HeadModule(size).to(target.device)
        if size.width == size.target_width:
            self._begin_as_the_target()
        self.optimiser = torch.optim.AdamW(self.module.parameters(), lr=how.rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.done, self.losses = 0, list[float]()
        self.cached, self.room = dict[tuple[int, ...], TargetOutputs](), room_on(target.device)
        self.together = how.batch if target.device.type == "cuda" else 1  # texts in a pass of the target

    @torch.no_grad()
    def _begin_as_the_target(self) -> None:
        """What the target would say of its own last state is a good beginning."""
        width, own = self.module.size.width, self.module
        unit = torch.eye(width, device=self.target.device, dtype=self.parts.dtype)
        own.lm_head.weight.copy_(self.parts.head(unit)[:, self.ids].T)
        if self.parts.norm is not None:
            own.norm.weight.copy_(self.parts.norm)
        own.fc.weight.mul_(OTHER_STATES)
        own.fc.weight[:, -width:] += unit.to(own.fc.weight.dtype)

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

    def logits(self, batch: Batch, weights: dict[str, Tensor] | None = None) -> list[Tensor]:
        """Of each draft step, [N, vocab]; in bfloat16 where the target is. With other weights than its own if given."""
        half = self.parts.dtype == torch.bfloat16
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=half):
            given = (batch.embedded, batch.states, batch.rows, self.how.depth)
            return self.module(*given) if weights is None else functional_call(self.module, weights, given)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy to the target's best tokens."""
        total, at = batch.chances.new_zeros(()), batch.likely.clamp(min=0)
        for j, logits in enumerate(self.logits(batch)):
            counts = batch.counts & (batch.places >= j)
            rows = -(batch.chances * logits.float().log_softmax(-1).gather(-1, at)).sum(-1)
            total = total + DECAY**j * rows[counts].mean()
        return total

    @torch.no_grad()
    def curve(self, weights: dict[str, Tensor] | None = None) -> list[float]:
        """On held-out texts: the share of places at which the first guess is the target's, of those the share at which
        the second is too, and so on."""
        there, right = [0] * self.how.depth, [0] * self.how.depth
        weights = weights and {name: weight.float() for name, weight in weights.items()}
        for i in range(0, len(self.held_out), self.how.batch):
            batch = self.batch([_window(text, self.how.length, None) for text in self.held_out[i : i + self.how.batch]])
            best, length = batch.likely[:, 0], batch.embedded.shape[1]
            all_right = torch.zeros(batch.embedded.shape[0] * length, dtype=torch.bool, device=best.device)
            so_far = batch.counts
            for j, logits in enumerate(self.logits(batch, weights)):
                if j:  # a draft that began one position earlier
                    so_far = all_right[(batch.rows - 1).clamp(min=0)] & (batch.places > 0) & batch.counts
                there[j] += int(so_far.sum())
                so_far = so_far & (logits.argmax(-1) == best)
                right[j] += int(so_far.sum())
                all_right[batch.rows] = so_far
        return [r / max(t, 1) for r, t in zip(right, there, strict=True)]

    @torch.no_grad()
    def batch(self, texts: Sequence[Text]) -> Batch:
        """With the target's states and probabilities, padded to the longest text."""
        layers, readings = self.how.layers, self._read(texts)
        longest = max(len(text.tokens) for text in texts) - 2
        embedded, states, places, counts = [], [], [], []
        for text, reading in zip(texts, readings, strict=True):
            n = len(text.tokens) - 2  # the last two tokens have no token two places later
            pad = (0, 0, 0, longest - n)
            after = torch.tensor(text.tokens[1:-1], device=self.target.device)
            embedded.append(F.pad(F.embedding(after, self.parts.embedding).float(), pad))
            states.append(F.pad(torch.cat([reading.states[layer][:n] for layer in layers], -1).float(), pad))
            own = torch.arange(self._first(text), n)
            places.append(own)
            counts.append(own >= max(text.prompt - 2, 0))
        rows = torch.cat([own + i * longest for i, own in enumerate(places)])
        rows, where, count = (t.to(self.target.device) for t in (rows, torch.cat(places), torch.cat(counts)))
        likely, chances = torch.cat([r.likely for r in readings]), torch.cat([r.chances for r in readings])
        return Batch(torch.stack(embedded), torch.stack(states), rows, where, count, likely, chances)

    def _first(self, text: Text) -> int:
        """The first place of a text that matters: a draft that ends at its first own token may begin there."""
        return max(text.prompt - 2 - self.how.depth + 1, 0)

    def _read(self, texts: Sequence[Text]) -> list[TargetOutputs]:
        """Each text by itself, so that its states do not depend on those beside it, and once while there is room. On a
        GPU, whose states depend on the sizes of a pass anyway, all that are new in one pass: alone, each would leave it
        idle while the host prepares the next."""
        keys = [(text.prompt, *text.tokens) for text in texts]
        found = {key: self.cached[key] for key in keys if key in self.cached}
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
        left = list(new.items())
        while left:
            at_once = self._at_once([text for _, text in left])
            some, left = left[:at_once], left[at_once:]
            for (key, _), read in zip(some, self._pass([text for _, text in some]), strict=True):
                found[key] = read
                size = sum(t.numel() * t.element_size() for t in (*read.states.values(), read.likely, read.chances))
                if size <= self.room:
                    self.cached[key], self.room = read, self.room - size
        return [found[key] for key in keys]

    def _at_once(self, texts: Sequence[Text]) -> int:
        """How many of them, from the first on, one pass reads."""
        needs = [(None, len(text.tokens)) for text in texts[: max(1, min(self.together, self.target.free))]]
        while len(needs) > 1 and self.target.lacks_room(needs):  # a cache may have fewer pages than its slots fill
            needs.pop()
        return len(needs)

    def _pass(self, texts: Sequence[Text]) -> list[TargetOutputs]:
        depth = self.parts.num_layers
        layers, slots = tuple(sorted({*self.how.layers, depth})), [self.target.acquire() for _ in texts]
        try:
            rows = self.target.score(
                [Score(self.target, slot, text.tokens, 0, layers, states=len(text.tokens))
                 for slot, text in zip(slots, texts, strict=True)]
            )  # fmt: skip
        finally:
            for slot in slots:
                self.target.release(slot)
        made = []
        for text, row in zip(texts, rows, strict=True):
            likely, chances = self._likely(row.hidden[depth][self._first(text) + 1 : len(text.tokens) - 1])
            made.append(TargetOutputs({i: row.hidden[i].clone() for i in self.how.layers}, likely, chances))
        return made

    def _likely(self, states: Tensor) -> tuple[Tensor, Tensor]:
        best = []
        for rows in states.split(CHUNK):
            said = self.parts.head(rows).float()
            found = said.topk(min(LIKELY, said.shape[-1]))
            best.append((found.indices, (found.values - said.logsumexp(-1, keepdim=True)).exp()))
        tokens, chances = (torch.cat(parts) for parts in zip(*best, strict=True))
        numbers = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        other = self.ids[numbers] != tokens
        return numbers.masked_fill(other, -1), chances.masked_fill(other, 0.0)

    def _save(self) -> None:
        Checkpoint(
            self.how,
            self.module.size,
            self.ids,
            self.name,
            self.target.vocab_size,
            self.digests,
            self.done,
            self.losses,
            self.module.state_dict(),
            self.optimiser.state_dict(),
        ).save(self.folder)

    def _load(self) -> None:
        begun = Checkpoint.read(self.folder, self.target.device)
        if begun is None:
            return
        begun.refuse_target(self.name, self.folder)
        begun.refuse_options(self.how, len(self.ids), self.module.size.ffn, self.folder)
        begun.refuse_others(self.module.size, self.ids, self.digests, self.folder)
        self.module.load_state_dict(begun.module)
        self.optimiser.load_state_dict(begun.optimiser)
        self.done, self.losses = begun.done, begun.losses


def room_on(device: torch.device) -> int:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return max(CACHE_BYTES, int(CACHE_SHARE * free))


def name_of(target: Runner) -> str:
    """Which model it is; "" where nothing tells."""
    try:
        return fingerprint(target)
    except ModelError:
        return ""


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
