"""Does a head fit its target, and how does it count layers? Measured on a text of the target's own.

A layer's id means the state after that many layers to some programs and after one more to others, and configs do not
say which. A head with the wrong states drafts, and next to nothing is accepted. Some exporters also write an embedding
that was never trained. So the ways to read a head are compared, and the best is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model.heads.block import BlockHead
from semspec.model.heads.block_runner import BlockRunner
from semspec.model.heads.eagle import EagleHead
from semspec.model.heads.mtp import MtpHead
from semspec.model.heads.mtp_runner import MtpRunner
from semspec.model.heads.runner import HeadRunner, StateRunner
from semspec.model.hf_runner import TransformersRunner
from semspec.model.runner import ModelRunner
from semspec.model.wrapper import unwrap
from semspec.types import Decode, Runner, Sampling, Score

log = logging.getLogger(__name__)
DraftHead = EagleHead | BlockHead | MtpHead
TOKENS = 96  # that the target writes, or fewer if it ends before,
FEWEST = 24  # but not so few that nothing could be told from them
ROOM = 512  # tokens of the slot in which that is written
MARGIN = 0.05  # by which another reading has to be better than what the config says: less may be chance
OFFSETS = (0, 1)  # of an EAGLE-3 head's ids; where published heads agree on what an id means, 0 is right


@dataclass(frozen=True, slots=True)
class LayerFit:
    """One way to read a head, and the share of tokens at which its first guess is then the target's."""

    layers: tuple[int, ...]
    offset: int
    own_embedding: bool
    agreement: float
    tokens: int

    def __str__(self) -> str:
        embedding = "" if self.own_embedding else " with the target's embedding"
        ids = ", ".join(map(str, self.layers))
        return f"layers {ids} (ids {self.offset:+d}){embedding}: {self.agreement:.0%} of {self.tokens} tokens"


def runner_of(head: DraftHead, target: Runner, layers: tuple[int, ...]) -> StateRunner:
    if isinstance(head, BlockHead):
        return BlockRunner(head, target.vocab_size, target.max_seq_len, layers)
    if isinstance(head, MtpHead):
        return MtpRunner(head, target.vocab_size, target.max_seq_len, layers)
    return HeadRunner(head, target.vocab_size, target.max_seq_len, layers)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A head as it fits its target best."""

    runner: StateRunner
    name: str
    best: LayerFit
    others: str  # readings that were not taken

    def above(self, threshold: float) -> StateRunner:
        """Its runner; a head that agrees with less than `threshold` is refused."""
        if self.best.agreement < threshold:
            raise ModelError(
                f"{self.name}: the head does not fit this target. Its first guess is the target's at {self.best}"
                f"{self.others and '; '}{self.others}. At least {threshold:.0%} are wanted: take a head that was "
                "trained for this very model"
            )
        return self.runner


def fitted(
    head: DraftHead, target: Runner, prompt: Sequence[int], name: str, stop: frozenset[int] = frozenset()
) -> Fitted:
    readings = measure(head, target, prompt[: min(target.max_seq_len, ROOM) // 2], stop)
    best = max(readings, key=lambda reading: reading.agreement + MARGIN * (reading is readings[0]))
    others = "; ".join(str(reading) for reading in readings if reading is not best)
    log.warning("%s reads %s agree with the target%s", name, best, f" ({others})" if others else "")
    if not best.own_embedding:
        head.embedding = head.shared_embedding
    return Fitted(runner_of(head, target, best.layers), name, best, others)


def beside(target: Runner) -> Runner:
    """The target's model with a slot of its own: the target's may be taken by texts that wait for who reads them, and
    what its prefix cache remembers should not give way to a measurement."""
    inner, room = unwrap(target), min(target.max_seq_len, ROOM)
    if isinstance(inner, ModelRunner):
        return ModelRunner(inner.transformer, 1, room, target.vocab_size, graphs=False)
    return TransformersRunner(inner.model, 1, room, target.vocab_size)  # TargetParts knows no other


@torch.inference_mode()
def measure(
    head: DraftHead, target: Runner, prompt: Sequence[int], stop: frozenset[int] = frozenset()
) -> list[LayerFit]:
    """All ways to read this head."""
    ids = head.config.layers
    last = target.num_layers if head.config.fused else 0
    tried = head.config.offsets if isinstance(head, BlockHead) else OFFSETS
    offsets = [n for n in tried if not n or (min(ids) + n >= 0 and max(ids) + n <= last)]
    wanted = {n: tuple(i + n for i in ids) for n in offsets}
    needed = tuple(sorted({i for layers in wanted.values() for i in layers}))
    text, hidden = written(beside(target), prompt, needed, stop)
    own, shared = head.embedding, head.shared_embedding
    embeddings = [own]
    if own is not shared and own.shape == shared.shape and not torch.allclose(own, shared, atol=1e-2):
        embeddings.append(shared)
    readings = []
    for embedding in embeddings:
        head.embedding = embedding
        for n, layers in wanted.items():
            share, count = agreement(runner_of(head, target, layers), text, hidden, len(prompt))
            readings.append(LayerFit(layers, n, embedding is own, share, count))
    head.embedding = own
    return readings


def written(
    target: Runner, prompt: Sequence[int], layers: tuple[int, ...], stop: frozenset[int] = frozenset()
) -> tuple[list[int], dict[int, Tensor]]:
    """A prompt with what the target writes after it, and the target's states of all but the last token."""
    n = min(TOKENS, target.max_seq_len - len(prompt) - 1)
    slot = target.acquire(prompt)
    try:
        (out,) = target.decode([Decode(target, slot, list(prompt), n, Sampling(), 0, stop)])
        text = [*prompt, *out.tokens]
        if len(out.tokens) < FEWEST:
            more = n - len(out.tokens)
            text += target.decode([Decode(target, slot, text[-1:], more, Sampling(), 0)])[0].tokens if more else []
        target.truncate(slot, 0)
        (rows,) = target.score([Score(target, slot, text[:-1], 0, layers, states=len(text) - 1)])
    finally:
        target.release(slot)
    return text, rows.hidden


def agreement(runner: StateRunner, text: list[int], hidden: dict[int, Tensor], prompt: int) -> tuple[float, int]:
    """The share of the written tokens, and their number, that the head guesses from the target's states before."""
    guesses = runner.first_guesses(text, hidden, min(len(text) - prompt, len(text) - 2))
    return sum(text[i] == guess for i, guess in guesses.items()) / len(guesses), len(guesses)
