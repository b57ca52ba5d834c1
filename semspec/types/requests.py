"""A model with a KV cache, and what a decoding generator may ask: loop/executor.py answers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
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

    vocab_size: int
    max_seq_len: int  # tokens a slot can hold
    num_layers: int  # hidden states of layer `num_layers` are those after the final norm

    @property
    def trees(self) -> bool: ...  # whether it scores tree drafts

    @property
    def hands_over(self) -> bool: ...  # whether it can begin to score a draft before the host knows its tokens

    @property
    def windowed(self) -> bool: ...  # whether sliding-window layers free what has left their window

    @property
    def device(self) -> torch.device:
        """The device of its logits."""

    @property
    def free(self) -> int:
        """Slots that can be acquired."""

    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        """A slot for a sequence that starts with this prompt; it may hold a prefix, cached under the same salt."""

    def release(self, slot: int) -> None: ...

    def park(self, slot: int) -> int | None:
        """Release a slot but keep its cache entries under a new id, which can be copied from and released like a slot,
        but not fed. None: this runner cannot, and the slot stays as it was."""

    def length(self, slot: int) -> int: ...
    def min_length(self, slot: int) -> int: ...  # shortest length but 0 to truncate to now; see `windowed`
    def truncate(self, slot: int, length: int) -> None: ...
    def copy(self, source: int, target: int, length: int) -> None: ...  # the first `length` tokens of a cache
    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None: ...  # only these of the tokens from `start`
    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]: ...
    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]: ...
    def begin(self, handovers: Sequence[Handover], drafts: Tensor) -> None: ...  # drafts [n, B], on their device

    def grow(self, requests: Sequence[Grow]) -> list[np.ndarray[Any, Any]] | None:
        """All levels of these trees, chosen on the device by their beams: what `ScoreOutput.best` of each level would
        be, [levels, 2, width, top]. The slots stay as they were. None: it scores them level by level."""

    def can_admit(self, prompt: Sequence[int], salt: str = "") -> bool: ...  # whether there is room for one more now

    def lacks_room(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        """Whether so many more tokens of these slots (None: of a new one) do not fit, if those in `without` leave."""

    def preempt(self, slot: int) -> bool:
        """Drop a slot's cache entries, for others. Its user does not notice if `tokens_to_recompute` are fed before
        anything else. False: that frees nothing."""

    def tokens_to_recompute(self, slot: int) -> list[int]:
        """What a preempted slot has to be fed again; a token of the tree that it ended with is given as ~token."""

    def expect(self, request: Score) -> None:
        """This request is fed next: its slot drops what it holds beyond the part that need not be computed again."""


@dataclass(slots=True, eq=False)
class Acquire:
    """One slot on each of these runners; waits until all are free. Answer: list of slots."""

    runners: list[Runner]
    prompts: Sequence[Sequence[int]] = ()  # what each will be fed first, if it is known
    salt: str = ""  # prefixes are shared with sequences of the same salt only


@dataclass(slots=True, eq=False)
class Handover:
    """A score of a draft that begins where the draft's decode ends, on the device: the host learns the tokens while the
    target reads them. Slots hold no more than before until the score is asked for; then, if nothing else was done in
    between, its rows are those that were begun."""

    runner: Runner
    slot: int
    tokens: list[int]  # fed before the draft
    layers: tuple[int, ...] = ()  # whose hidden states are wanted
    draft: list[int] = field(default_factory=list)  # as soon as the host knows it
    start: int = 0  # where in the slot it was begun
    rows: ScoreOutput | None = None  # of all that was fed, if it was begun

    def rows_of(self, request: Score, start: int) -> ScoreOutput | None:
        """The rows of a request that is fed from `start` on; None: they were not begun, or for something else."""
        fed, n = [*self.tokens, *self.draft], len(request.tokens)
        same = request.layers == self.layers and request.tokens == fed[:n] and start == self.start
        if self.rows is None or request.parents or not same:
            return None
        hidden = {layer: states[n - request.kept_states : n] for layer, states in self.rows.hidden.items()}
        return ScoreOutput(self.rows.logits[n - request.logits_to_keep : n], hidden)


@dataclass(slots=True, eq=False)
class Score:
    """Feed tokens into a slot and return the last `logits_to_keep` rows. Answer: ScoreOutput."""

    runner: Runner
    slot: int
    tokens: list[int]
    logits_to_keep: int
    layers: tuple[int, ...] = ()  # whose hidden states to return
    drafting: bool = False  # for a drafter; its seconds are counted as the draft's
    states: int = 0  # last tokens whose hidden states to return, if more than `logits_to_keep`
    dense: bool = False  # nothing is verified, however many rows are kept: a sparse plan skips nothing
    parents: tuple[int, ...] = ()  # the slot then ends with a tree of so many tokens, some of them perhaps fed before
    best: int = 0  # of each row also so many of the likeliest tokens, on the host
    handover: Handover | None = None  # by which it may have begun already

    @property
    def kept_states(self) -> int:
        return max(self.logits_to_keep, self.states)


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
    handover: Handover | None = None  # what is to be done with the tokens, if all of them are written in one call


@dataclass(frozen=True, slots=True)
class Beam:
    """How a tree goes on where chances alone decide: the `top` likeliest successors of each token of a level, of all of
    these the `width` with the best joint log-probability, so many levels. Below `least`, or after a stop token, nothing
    follows."""

    chances: Sequence[float]  # joint log-probabilities of the tokens of the first level
    width: int
    top: int
    levels: int
    least: float
    stop: frozenset[int] = frozenset()


class Growth(Protocol):
    """A tree draft under way."""

    @property
    def beam(self) -> Beam | None:
        """How it goes on; None: in another way, which `add` alone knows."""

    @property
    def best(self) -> int:
        """How many of the likeliest tokens it wants of each row, see Score."""

    @property
    def most_fed(self) -> int:
        """Tokens of all its levels but the last, at most."""

    def add(self, rows: ScoreOutput) -> tuple[list[int], list[int]]:
        """Take the rows of a level. Returns the tokens to feed next, and the indices of their parents among all that
        were fed before; none: it is complete."""


@dataclass(slots=True, eq=False)
class Grow:
    """Feed a tree level by level, from these tokens on, which follow the context, until its growth wants no more.
    Answer: None."""

    runner: Runner
    slot: int
    growth: Growth
    tokens: list[int]
    drafting: ClassVar[bool] = True


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


Request = Acquire | Score | Decode | Grow | VerifyRequest
SequenceGenerator = Generator[Request | tuple[Request, ...] | Event, Any, None]
ProposalGenerator = Generator[Request, Any, Draft]
