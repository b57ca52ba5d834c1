"""A model with a KV cache, and what a decoding generator may ask: loop/executor.py answers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from semspec.events import Event
from semspec.types.outputs import DecodeOutput, Draft, ScoreOutput
from semspec.types.sampling import Sampling

if TYPE_CHECKING:
    from semspec.sampling.processors import History
    from semspec.verify.base import Rule


class Runner(Protocol):
    """One model with a KV cache for several sequences (slots). Nothing else calls a model. `score` feeds tokens
    and returns what follows each; `decode` feeds tokens and continues autoregressively. After either, the slot holds
    all tokens fed; the last token that `decode` returns is not fed yet."""

    vocab: int
    capacity: int  # tokens a slot can hold
    depth: int  # number of layers; hidden states of layer `depth` are those after the final norm

    @property
    def trees(self) -> bool: ...  # whether it scores drafts that branch

    @property
    def windowed(self) -> bool: ...  # whether layers give back what their window has left

    @property
    def device(self) -> torch.device:
        """The device of its logits."""

    @property
    def free(self) -> int:
        """Slots that can be acquired."""

    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        """A slot for a sequence that starts with this prompt; it may hold a prefix of it, read for the same salt."""

    def release(self, slot: int) -> None: ...

    def park(self, slot: int) -> int | None:
        """Release a slot, but keep what it holds in a place: of that it can be copied, and it can be released, like a
        slot, but nothing is fed to it. None: there are none, and the slot is as it was."""

    def length(self, slot: int) -> int: ...
    def shortest(self, slot: int) -> int: ...  # shortest length but 0 that it can be truncated to now; see `windowed`
    def truncate(self, slot: int, length: int) -> None: ...
    def copy(self, source: int, target: int, length: int) -> None: ...  # the first `length` tokens of a cache
    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None: ...  # of the tokens from `start` on only these
    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]: ...
    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]: ...
    def admits(self, prompt: Sequence[int], salt: str = "") -> bool: ...  # whether there is room for one more now

    def lacks(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        """Whether there is no room for so many more tokens of these slots (None: of a new one), `without` others."""

    def preempt(self, slot: int) -> bool:
        """Give its room to others. Its user does not notice, if `lost` is fed before anything else; False: none won."""

    def lost(self, slot: int) -> list[int]:
        """What a preempted slot is to be fed again; ~token: of a tree that it ended with."""

    def expect(self, request: Score) -> None:
        """It is fed next: what its slot has of it already and it has no use for is given up."""


@dataclass(slots=True, eq=False)
class Acquire:
    """One slot on each of these runners; waits until all are free. Answer: list of slots."""

    runners: list[Runner]
    prompts: Sequence[Sequence[int]] = ()  # what each will be fed first, if it is known
    salt: str = ""  # prefixes are shared with sequences of the same salt only


@dataclass(slots=True, eq=False)
class Score:
    """Feed tokens into a slot and return the last `keep` rows. Answer: ScoreOutput."""

    runner: Runner
    slot: int
    tokens: list[int]
    keep: int
    layers: tuple[int, ...] = ()  # whose hidden states to return
    drafting: bool = False  # for a drafter; its seconds are counted as the draft's
    states: int = 0  # last tokens whose hidden states to return, if more than `keep`
    dense: bool = False  # no draft is checked, however many rows are kept: a sparse plan skips nothing
    parents: tuple[int, ...] = ()  # the slot then ends with a tree of so many tokens, some of them perhaps fed before

    @property
    def kept_states(self) -> int:
        return max(self.keep, self.states)


@dataclass(slots=True, eq=False)
class Decode:
    """Feed tokens into a slot, then generate n more or up to a stop token. Answer: DecodeOutput."""

    runner: Runner
    slot: int
    tokens: list[int]
    n: int
    sampling: Sampling
    stream: int  # which noise to draw from, see noise.py
    stop: frozenset[int] = frozenset()
    keep_logits: bool = False
    logprobs: int | None = None
    layers: tuple[int, ...] = ()
    drafting: bool = False  # for a drafter; its seconds are counted as the draft's
    history: History | None = None  # of a sequence whose logits are processed


@dataclass(slots=True, eq=False)
class VerifyRequest:
    """Verify a draft by a rule, given the target's rows for it. Answer: Verdict."""

    rule: Rule
    draft: Draft
    rows: ScoreOutput
    sampling: Sampling
    position: int  # index in the sequence of the first draft token
    round: int  # rounds of this sequence so far; makes noise fresh, see noise.py
    state: Tensor | None = None
    logprobs: int | None = None
    protected: Tensor | None = None  # [V] tokens that no rule may relax
    history: History | None = None  # of a sequence whose logits are processed


Request = Acquire | Score | Decode | VerifyRequest
SequenceGenerator = Generator[Request | tuple[Request, ...] | Event, Any, None]
ProposalGenerator = Generator[Request, Any, Draft]
