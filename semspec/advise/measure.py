"""A short run: every candidate answers the same prompts, interleaved, and the bare costs of passes are timed.

Acceptance by position, seconds by kind and the target's own opinion of each text are kept by prompt, so that all that
is predicted from them has an interval.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from semspec.bench.likelihood import likelihoods
from semspec.errors import BadRequest
from semspec.loop import cost_profile
from semspec.loop.draft_length import MAX_DRAFT_TOKENS
from semspec.loop.stats import SECONDS
from semspec.options import Options
from semspec.pair import Pair
from semspec.text.tokenizer import Prompt, encode
from semspec.verify import make

ROWS = (1, 2, 3, 5, 9, MAX_DRAFT_TOKENS + 1)  # tokens in a pass that is timed
LOSSLESS_TOKENS = 12  # draft length of the lossless candidates: all shorter ones are predicted from it
WARM_UP_TOKENS = 16
LOSSY = ("margin", "typical", "fly")
EVERYTHING = "accept-all"  # the other end of the scale of losses: the drafter's text

Clock = Callable[[], float]


@dataclass(frozen=True)
class Candidate:
    """A verifier and a drafter, tried with one draft length."""

    rule: str
    drafter: str  # "": none
    draft_tokens: int = 0

    @property
    def any_length(self) -> bool:
        """Whether its acceptance by position is the same with shorter drafts, as it is unless a rule looks ahead."""
        return make(self.rule).min_draft_tokens() == 1

    @property
    def lossless(self) -> bool:
        return make(self.rule).lossless

    @property
    def has_head(self) -> bool:
        kind = Options(drafter=self.drafter).drafter_kind if self.drafter else None
        return kind is not None and kind.reads_target


ALONE = Candidate("none", "")


@dataclass
class Answer:
    """One prompt, answered by one candidate. Rounds and their seconds are counted after the first event, which reads
    the prompt."""

    tokens: list[int]
    seconds: float
    first_seconds: float
    first_tokens: int
    drafted: Counter[int] = field(default_factory=Counter)  # draft length -> rounds
    accepted: Counter[int] = field(default_factory=Counter)  # accepted draft tokens -> rounds
    spent: dict[str, float] = field(default_factory=dict)  # seconds by kind
    relaxed: int = 0
    loops: int = 0
    likelihood: float = 0.0  # the target's mean log-probability of its tokens, at temperature 1

    @property
    def rounds(self) -> int:
        return self.accepted.total()

    @property
    def elsewhere(self) -> float:
        """Seconds that no round counts: of the text, the events and who asks for them."""
        return max(0.0, self.seconds - self.first_seconds - sum(self.spent.values()))


@dataclass
class Measured:
    """What a short run has found."""

    answers: dict[Candidate, list[Answer]]
    passes: dict[int, float]  # milliseconds of a target pass by its tokens
    draft_token: float | None  # milliseconds; None: no draft model


def candidates(
    pair: Pair, temperature: float, rules: Sequence[str] = LOSSY, others: Sequence[str] = ()
) -> list[Candidate]:
    """The target alone, lossless rules with every drafter, lossy ones with the first, and the end of their scale.
    `others`: drafters to try besides, such as heads; they come first."""
    drafters = [*others, *(["model", "ngram"] if pair.draft is not None else ["ngram"])]
    found = [ALONE]
    for drafter in drafters:
        # Where the target samples, a rule that compares distributions accepts more of a model's draft.
        sees = drafter == "model" or Candidate("exact", drafter).has_head
        found.append(Candidate("block" if temperature and sees else "exact", drafter, LOSSLESS_TOKENS))
    for name in (*rules, EVERYTHING):
        rule_ = make(name)
        if rule_.unit == "step":
            raise BadRequest(f"advise predicts token rules; try {name!r} with semspec bench")
        found.append(Candidate(name, drafters[0], max(LOSSLESS_TOKENS, rule_.default_draft_tokens())))
    return list(dict.fromkeys(found))


def measure(
    pair: Pair,
    prompts: Sequence[Prompt],
    tried: Sequence[Candidate],
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Clock = time.perf_counter,
    **options: Any,
) -> Measured:
    """Answer every prompt with every candidate; who is first rotates, so that a machine's noise affects all alike."""
    answers: dict[Candidate, list[Answer]] = {candidate: [] for candidate in tried}
    for candidate in tried:
        answer(pair, prompts[0], candidate, clock, **options | {"max_new_tokens": WARM_UP_TOKENS})
    for number, prompt in enumerate(prompts):
        for i in range(len(tried)):
            progress(number * len(tried) + i, len(prompts) * len(tried))
            candidate = tried[(number + i) % len(tried)]
            found = answer(pair, prompt, candidate, clock, **options | {"seed": number})
            (rows,) = likelihoods(pair.target, [(encode(pair.tokenizer, prompt), found.tokens)], temperature=1.0)
            found.likelihood = fmean(own for own, _ in rows)
            answers[candidate].append(found)
    progress(len(prompts) * len(tried), len(prompts) * len(tried))
    # Attention grows with the text: bare passes are timed after as much of it as the run had.
    lengths = [len(encode(pair.tokenizer, prompt)) for prompt in prompts]
    context = round(fmean(lengths) + fmean(len(a.tokens) for a in answers[tried[0]]) / 2)
    passes = {rows: cost_profile.pass_cost(pair.target, rows, clock, context) for rows in ROWS}
    token = None if pair.draft is None else cost_profile.token_cost(pair.draft, clock, context)
    return Measured(answers, passes, token)


def answer(pair: Pair, prompt: Prompt, candidate: Candidate, clock: Clock, **options: Any) -> Answer:
    drafts: dict[str, Any] = {}
    if candidate.drafter:
        drafts = {"drafter": candidate.drafter, "num_draft_tokens": candidate.draft_tokens}
    began, first, before = clock(), 0.0, None
    with pair.stream(prompt, Options(verifier=candidate.rule, **drafts, **options)) as stream:
        for _ in stream:
            if before is None:
                first, before = clock() - began, copy.deepcopy(stream.stats)
        stats = stream.stats
    seconds = clock() - began
    assert before is not None, "an answer has at least one event"
    return Answer(
        tokens=stream.result().tokens,
        seconds=seconds,
        first_seconds=first,
        first_tokens=before.tokens,
        drafted=stats.drafts - before.drafts,
        accepted=stats.histogram - before.histogram,
        spent={kind: stats.seconds[kind] - before.seconds[kind] for kind in SECONDS},
        relaxed=stats.relaxed,
        loops=stats.loops,
    )
