"""Training steps as fast as the device allows: rows that wait on the device, and one CUDA graph for a whole step.

Small batches learn more from the same time than large ones, but then launching kernels takes longer than running
them. So forward, backward and update are recorded once and played back; the host only fills a window with the rows of
the next steps, now and then. Without CUDA the same step runs as plain code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.pocket.data import DICE, TOKEN
from recipes.pocket.model import Decoder

WINDOW = 32  # steps whose rows are fetched at once
WARM_UP = 3  # steps before recording, as CUDA graphs want it
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""tokens, labels and dice of a batch -> what is minimized, and two figures for the log"""


class ScoreOutput:
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

    def draw(self, steps: range) -> Tensor:
        """The rows of these steps, one batch after the other."""
        chosen = []
        for step in steps:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
            chosen.append(torch.randint(len(self.rows), (self.batch,), generator=generator))
        return self.rows[torch.cat(chosen).to(self.device)]


def unpack(stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of stored rows, [B, T] each: tokens, labels (-100 where nothing is learnt), and whether a label is dice."""
    stored = stored.long()
    tokens = stored & TOKEN
    labels = torch.where(stored < 0, tokens, -100)
    labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    return tokens, labels, (stored & DICE).bool().roll(-1, 1)


class Stepper:
    """Steps on one kind of rows. The log's figures add up in `seen`, the number of steps in `count`."""

    def __init__(
        self,
        loss: Loss,
        model: Decoder,
        optimizers: Sequence[torch.optim.Optimizer],
        rows: ScoreOutput,
        graphs: bool,
        bfloat16: bool = True,
    ) -> None:
        self.loss, self.model, self.optimizers, self.rows, self.bfloat16 = loss, model, optimizers, rows, bfloat16
        self.device = rows.device
        self.window = rows.draw(range(WINDOW))
        self.at = torch.zeros((), dtype=torch.long, device=self.device)
        self.lane = torch.arange(rows.batch, device=self.device)
        self.seen = torch.zeros(2, device=self.device)
        self.count = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        if graphs:
            self._record()
        else:
            self._step()
        self.seen.zero_()

    def run(self, first: int, steps: int) -> None:
        """Make steps `first`, `first` + 1, ... with the rows that belong to them."""
        for start in range(first, first + steps, WINDOW):
            amount = min(WINDOW, first + steps - start)
            self.window[: amount * self.rows.batch].copy_(self.rows.draw(range(start, start + amount)))
            self.at.zero_()
            for _ in range(amount):
                if self.graph is None:
                    self._step()
                else:
                    self.graph.replay()
        self.count += steps

    def figures(self) -> list[float]:
        """Means of the log's figures since the last call. Waits for the device, so the time stays honest."""
        found = (self.seen / max(1, self.count)).tolist()
        self.seen.zero_()
        self.count = 0
        return found

    def _step(self) -> None:
        stored = self.window.index_select(0, self.at * self.rows.batch + self.lane)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16, cache_enabled=False):
            loss, seen = self.loss(*unpack(stored))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.seen += seen
        self.at += 1

    def _record(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.at.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        torch.cuda.synchronize()


def set_rate(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate where a recorded step looks for it."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
