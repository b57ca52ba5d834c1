"""What is looked at on the host, now and then: texts that repeat themselves, and the count of relaxed tokens.

Both are copied without waiting and read at the next look, so no step waits for the device, and every rank reads the
same at the same step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from prometheus_client import Counter
from torch import Tensor

if TYPE_CHECKING:
    from semspec.vllm.rounds import EngineStep, LossyRequest

log = logging.getLogger(__name__)
EVERY = 8  # steps between two looks

RELAXED = Counter("semspec:relaxed_tokens", "Draft tokens accepted although the target would have chosen another.")
LOOPS = Counter("semspec:loops_detected", "Requests that repeated themselves and were decoded losslessly after it.")


@dataclass
class Copied:
    """Of an earlier step, perhaps still on its way."""

    requests: list[LossyRequest]
    tokens: Tensor  # [B, T] the last ones of each text
    lengths: Tensor  # [B]
    relaxed: Tensor
    event: torch.cuda.Event | None


class Monitor:
    def __init__(self, relaxed: Tensor, reports: bool) -> None:
        self.relaxed, self.reports = relaxed, reports
        self.loops = 0
        self._steps = self._counted = 0
        self._copied: Copied | None = None

    def look(self, step: EngineStep, places: list[int], requests: dict[int, LossyRequest], draft_tokens: int) -> None:
        self._steps += 1
        if self._steps % EVERY:
            return
        if self._copied is not None:
            self._read(self._copied)
        watched = [p for p in places if requests[step.slots[p]].choice.guard.repeats]
        self._copied = self._copy(step, watched, [requests[step.slots[p]] for p in watched], draft_tokens)

    def _copy(self, step: EngineStep, places: list[int], requests: list[LossyRequest], draft_tokens: int) -> Copied:
        device = step.position.device
        at = torch.tensor(places, dtype=torch.long, device=device)
        longest = max([r.choice.guard.longest for r in requests], default=0) + EVERY * (draft_tokens + 1)
        lengths = step.position[at]
        back = lengths[:, None] - longest + torch.arange(longest, device=device)
        copied = [_host(part) for part in (step.tokens_at(at, back.clamp_min(0)), lengths, self.relaxed)]
        event = torch.cuda.Event() if device.type == "cuda" else None
        if event is not None:
            event.record()
        return Copied(requests, copied[0], copied[1], copied[2], event)

    def _read(self, copied: Copied) -> None:
        if copied.event is not None:
            copied.event.synchronize()  # some steps ago, so it is there
        new, self._counted = int(copied.relaxed) - self._counted, int(copied.relaxed)
        if self.reports:
            RELAXED.inc(new)
        for request, row, length in zip(copied.requests, copied.tokens.tolist(), copied.lengths.tolist(), strict=True):
            written = min(len(row), length - request.prompt)  # repetition in the prompt does not count
            loop = request.choice.guard.find(row[len(row) - written :], written) if written > 0 else None
            if loop is not None and not request.exact_only:
                request.exact_only = True
                self.loops += 1
                if self.reports:
                    LOOPS.inc()
                    log.warning(
                        "%s wrote %d tokens %d times in a row; going on without it",
                        request.rule.name, loop.period, loop.repeats,
                    )  # fmt: skip


def _host(tensor: Tensor) -> Tensor:
    """A copy, on its way to the host where it comes from a GPU."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
