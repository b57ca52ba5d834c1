"""The types that all other modules share, in the words of docs/architecture.md. Depends on torch, errors and events."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from semspec import tree
from semspec.errors import BadRequest
from semspec.events import DraftedStep as DraftedStep
from semspec.events import Event as Event
from semspec.events import FinishReason as FinishReason
from semspec.events import Origin as Origin
from semspec.events import Relaxed as Relaxed
from semspec.events import StepOutcome as StepOutcome
from semspec.events import TokenLogprob as TokenLogprob

if TYPE_CHECKING:
    from semspec.sampling.processors import History, Processors
    from semspec.verify.base import Rule

COLDEST = 1e-6  # in float32, lower temperatures divide by nothing and mean argmax


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a next token is drawn. Temperature 0 is greedy. The seed makes every draw reproducible (see `noise`)."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise BadRequest(f"temperature is {self.temperature}; give 0 (greedy) or a positive number up to 100")
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)
        if not 0 <= self.top_k < 2**31:
            raise BadRequest(f"top_k is {self.top_k}; give 0 (off) or a positive number of tokens, of at most 31 bits")
        if not 0.0 < self.top_p <= 1.0:
            raise BadRequest(f"top_p is {self.top_p}; give a number above 0 and at most 1 (1 is off)")
        if not 0.0 <= self.min_p <= 1.0:
            raise BadRequest(f"min_p is {self.min_p}; give a number from 0 (off) to 1")
        if not -(2**63) <= self.seed < 2**63:
            raise BadRequest(f"seed is {self.seed}; give a whole number of at most 64 bits")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether tokens have to be sorted first."""
        return self.top_k > 0 or self.top_p < 1.0


GREEDY = Sampling()


@dataclass(slots=True)
class ScoreOutput:
    """Rows for the last `keep` tokens fed: row i predicts the token after fed token i."""

    logits: Tensor  # [keep, V]
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer -> [Score.kept_states, d]
    cached: int = 0  # tokens of the feed that a prefix cache had already

    @staticmethod
    def join(parts: Sequence[ScoreOutput]) -> ScoreOutput:
        return parts[0] if len(parts) == 1 else ScoreOutput(torch.cat([p.logits for p in parts]), _join_hidden(parts))


@dataclass(slots=True)
class DecodeOutput:
    """Tokens generated autoregressively; row i of logits and hidden is what token i was drawn from."""

    tokens: list[int]
    logits: Tensor | None = None  # [n, V] temperature and filters applied; at temperature 0 unprocessed
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer -> [n, d]
    logprobs: list[TokenLogprob] | None = None

    @staticmethod
    def join(parts: Sequence[DecodeOutput]) -> DecodeOutput:
        if len(parts) == 1:
            return parts[0]
        logits = [p.logits for p in parts if p.logits is not None]
        tokens = [token for p in parts for token in p.tokens]
        logprobs = [lp for p in parts for lp in p.logprobs or []] if parts[0].logprobs is not None else None
        return DecodeOutput(tokens, torch.cat(logits) if logits else None, _join_hidden(parts), logprobs)


def _join_hidden(parts: Sequence[ScoreOutput | DecodeOutput]) -> dict[int, Tensor]:
    return {layer: torch.cat([p.hidden[layer] for p in parts]) for layer in parts[0].hidden}


@dataclass(slots=True)
class Draft:
    """A proposal. Without `logits` each token had probability 1. Rows of logits and states belong to `own` tokens."""

    tokens: list[int]
    logits: Tensor | None = None  # [K, V] temperature and filters applied; at temperature 0 unprocessed
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer -> [K, d]
    step_ends: tuple[int, ...] = ()  # token counts at which whole reasoning steps end, for step rules
    valid: tuple[bool, ...] = ()  # a referee's decision on each of these steps, if the rule needs one
    marks: tuple[float, ...] = ()  # the draft model's own opinion of each of them, if the rule asks for it
    early_exit: bool = False  # the draft model stopped because it was not confident enough
    own: list[int] | None = None  # the draft model's own tokens, if it has another tokenizer; None: the same
    own_ends: tuple[int, ...] = ()  # how many of them are needed up to each of `tokens`
    parents: tuple[int, ...] = ()  # of a draft that branches: each token's parent, see tree.py; none: a chain

    @property
    def longest(self) -> int:
        """Tokens on its longest path."""
        return max(tree.depths(self.parents), default=-1) + 1 if self.parents else len(self.tokens)

    def only(self, some: Iterable[int]) -> Draft:
        """A draft that branches without all tokens but some, and what follows the others."""
        left, parents = tree.kept(self.parents, some)
        rows = torch.tensor(left, dtype=torch.long)
        logits = None if self.logits is None else self.logits[rows.to(self.logits.device)]
        return Draft([self.tokens[i] for i in left], logits, parents=parents)

    @property
    def own_tokens(self) -> list[int]:
        return self.tokens if self.own is None else self.own

    def own_count(self, n: int) -> int:
        """How many own tokens the first n stand for."""
        return n if self.own is None else self.own_ends[n - 1] if n else 0

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Ranges that are verified separately: every whole step, then what follows the last one, if anything."""
        if not self.step_ends:
            return [(0, len(self.tokens))]
        rest = self.step_ends[-1] < len(self.tokens)
        return list(pairwise([0, *self.step_ends, *([len(self.tokens)] if rest else [])]))

    def first(self, n: int) -> Draft:
        """Its first n tokens."""
        if n >= len(self.tokens):
            return self
        if self.parents:
            return self.only(range(n))
        rows, steps = self.own_count(n), tuple(end for end in self.step_ends if end <= n)
        logits = None if self.logits is None else self.logits[:rows]
        hidden = {layer: states[:rows] for layer, states in self.hidden.items()}
        own, ends = None if self.own is None else self.own[:rows], self.own_ends[:n]
        valid, marks = self.valid[: len(steps)], self.marks[: len(steps)]
        return Draft(self.tokens[:n], logits, hidden, steps, valid, marks, self.early_exit, own, ends)

    @staticmethod
    def join(parts: Sequence[Draft]) -> Draft:
        """Consecutive parts as one draft, without step ends."""
        if not parts:
            return Draft([])
        whole = DecodeOutput.join([DecodeOutput(part.tokens, part.logits, part.hidden) for part in parts])
        draft = Draft(whole.tokens, whole.logits, whole.hidden)
        for part in parts:
            if part.own is not None:
                draft.own_ends += tuple(len(draft.own or []) + end for end in part.own_ends)
                draft.own = (draft.own or []) + part.own
        return draft


@dataclass(slots=True)
class Verdict:
    """A rule's decision about one draft."""

    accepted: int
    next: int
    relaxed: tuple[int, ...] = ()  # draft positions that were accepted against the target's own choice
    target_tokens: tuple[int, ...] = ()  # the target's own choice at each of them
    evidence: tuple[tuple[float, ...], ...] = ()  # the numbers that decided each, for Rule.reason
    logprobs: list[TokenLogprob] | None = None  # of the accepted tokens and of `next`
    state: Tensor | None = None  # given to the rule with this sequence's next draft
    last: int = -1  # of a draft that branches: the last accepted token,
    path: tuple[int, ...] = ()  # and all of them

    @property
    def taken(self) -> Sequence[int]:
        """The accepted tokens of the draft."""
        return self.path or range(self.accepted)

    @staticmethod
    def join(parts: Sequence[Verdict], lengths: Sequence[int]) -> Verdict:
        """Verdicts on the segments of one draft, of these lengths, as one: nothing after a rejection is accepted."""
        if len(parts) == 1:
            return parts[0]
        whole = Verdict(0, parts[0].next)
        for part, length in zip(parts, lengths, strict=True):
            whole.relaxed += tuple(whole.accepted + i for i in part.relaxed)
            whole.target_tokens += part.target_tokens
            whole.evidence += part.evidence
            whole.accepted, whole.next, whole.state = whole.accepted + part.accepted, part.next, part.state
            if part.accepted != length:
                break
        return whole


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
    def length(self, slot: int) -> int: ...
    def shortest(self, slot: int) -> int: ...  # but 0, that it can be cut to now, where a runner is `windowed`
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


@dataclass(slots=True, eq=False)  # these are what a decoding generator may yield, and loop/executor.py answers
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


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one draft should be: all that a drafter knows about the rule that will verify it (`Rule.request`)."""

    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)  # of the draft; mostly greedy
    stream: int = 0  # which noise to draw from, see noise.py
    keep_logits: bool = False  # return what each token was drawn from
    comparable: bool = False  # with the target's distributions: every token is drawn by itself, from tokens both have
    layers: tuple[int, ...] = ()  # whose hidden states to return
    min_tokens: int = 1  # an early exit does not make the draft shorter than this
    stop: frozenset[int] = frozenset()  # the draft ends with the first of these
    processors: Processors | None = None  # that change the logits of the sequence, in the target's tokens
    least: float = 0.0  # of drafts that branch: tokens with a smaller chance of being accepted are not worth a place


class Drafter(Protocol):
    """Proposes for one sequence. `propose` is a generator, so that draft models are batched. See draft/reading.py."""

    runners: list[Runner]  # each needs one slot, given to `begin` in this order

    def begin(self, slots: list[int]) -> None: ...

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        """Tokens that may follow `context`."""

    def accept(self, length: int) -> None:
        """The first `length` tokens of the last context + draft are accepted; the rest of the draft is rejected."""

    def close(self) -> None: ...
