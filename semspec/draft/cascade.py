"""A drafter that is itself sped up: a cheaper drafter guesses, the draft model checks, exactly.

Loose rules accept long drafts, and then writing them one token at a time is what takes the time. So the draft model's
own text is drafted, by lookup as in FLy, or by a yet smaller model, which may be a cascade in turn. The draft that
comes out is, token for token, what the draft model writes greedily. For rules that need the distribution a draft was
drawn from, the model writes by itself.
Source: multi-level acceleration in FLy (arXiv 2511.22972); hierarchical speculative decoding (arXiv 2510.19705).
"""

from __future__ import annotations

from semspec.draft.early_exit import EarlyExit
from semspec.draft.model import GREEDY, NEVER, ModelDrafter
from semspec.types import (
    DecodeOutput,
    Draft,
    Drafter,
    ProposalGenerator,
    Runner,
    Sampling,
    Score,
    ScoreOutput,
    Verdict,
    VerifyRequest,
)
from semspec.verify.base import Rule
from semspec.verify.exact import Exact

EXACT = Exact()


class CascadeDrafter(ModelDrafter):
    def __init__(self, runner: Runner, inner: Drafter, ahead: int = 6, early_exit: EarlyExit = NEVER) -> None:
        super().__init__(runner, early_exit)
        self.inner, self.ahead = inner, ahead
        self.runners = [runner, *inner.runners]

    def begin(self, slots: list[int]) -> None:
        super().begin(slots[:1])
        self.inner.begin(slots[1:])

    def propose(
        self,
        context: list[int],
        n: int,
        sampling: Sampling,
        round: int,
        rule: Rule,
        stop: frozenset[int] = frozenset(),
    ) -> ProposalGenerator:
        if rule.keeps_draft_logits or rule.draft_layers or rule.samples_drafts or stop:
            return (yield from super().propose(context, n, sampling, round, rule, stop))
        assert self.slot is not None
        text, end = list(context), min(len(context) + n, self.runner.capacity + 1)
        sure = len(text)
        while sure == len(text) < end:
            # The model adds a token of its own to what stands of the guess.
            guess: Draft = yield from self.inner.propose(
                text, min(self.ahead, end - len(text) - 1), GREEDY, round, EXACT
            )
            feed = text[self.runner.length(self.slot) :] + guess.tokens
            rows: ScoreOutput = yield Score(self.runner, self.slot, feed, keep=1 + len(guess.tokens), drafting=True)
            verdict: Verdict = yield VerifyRequest(EXACT, guess, rows, GREEDY, len(text), round)
            self.inner.accept(len(text) + verdict.accepted)
            new = [*guess.tokens[: verdict.accepted], verdict.next]
            text += new
            self.runner.truncate(self.slot, len(text) - 1)
            sure += self._sure(DecodeOutput(new, rows.logits[: len(new)]))
        return Draft(text[len(context) :]).first(max(sure - len(context), rule.min_draft_tokens()))

    def accept(self, length: int) -> None:
        super().accept(length)
        self.inner.accept(length)

    def close(self) -> None:
        super().close()
        self.inner.close()
