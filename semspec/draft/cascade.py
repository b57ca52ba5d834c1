"""Speculative decoding of the draft itself: a cheaper drafter proposes, the draft model verifies exactly.

Lossy rules accept long drafts, and then drafting token by token takes most of the time. So the draft model's own text
is drafted: by lookup as in FLy, or by a smaller model, which may be a cascade itself. The result is, token for token,
what the draft model generates greedily, or draws with the target's noise. Any other request for samples, and for logits
or hidden states, uses the draft model only.
Source: multi-level acceleration in FLy (arXiv 2511.22972); hierarchical speculative decoding (arXiv 2510.19705).
"""

from __future__ import annotations

from semspec.draft.early_exit import EarlyExit
from semspec.draft.model import NO_EARLY_EXIT, ModelDrafter
from semspec.sampling.noise import TARGET
from semspec.types import (
    DecodeOutput,
    Draft,
    Drafter,
    DraftRequest,
    ProposalGenerator,
    Runner,
    Score,
    ScoreOutput,
    Verdict,
    VerifyRequest,
)
from semspec.verify.exact import EXACT


class CascadeDrafter(ModelDrafter):
    def __init__(self, runner: Runner, inner: Drafter, ahead: int = 6, early_exit: EarlyExit = NO_EARLY_EXIT) -> None:
        super().__init__(runner, early_exit)
        self.inner, self.ahead = inner, ahead
        self.runners = [runner, *inner.runners]

    def begin(self, slots: list[int]) -> None:
        super().begin(slots[:1])
        self.inner.begin(slots[1:])

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        coupled = request.sampling.greedy or request.stream == TARGET  # then `exact` says what the model draws
        if request.keep_logits or request.layers or request.stop or not coupled:
            return (yield from super().propose(context, request))
        assert self.slot is not None
        n = min(request.max_tokens, self.runner.max_seq_len + 1 - len(context))
        text, end = list(context), len(context) + n
        confident = len(text)
        while confident == len(text) < end:
            # The model adds a token of its own to the accepted part of each guess.
            inner = DraftRequest(min(self.ahead, end - len(text) - 1))
            guess: Draft = yield from self.inner.propose(text, inner)
            feed = text[self.runner.length(self.slot) :] + guess.tokens
            rows: ScoreOutput = yield Score(
                self.runner, self.slot, feed, logits_to_keep=1 + len(guess.tokens), drafting=True
            )
            history = None if request.processors is None else request.processors.after(text)
            verdict: Verdict = yield VerifyRequest(
                EXACT, guess, rows, request.sampling, len(text), round=0, history=history
            )
            self.inner.accept(len(text) + verdict.accepted)
            new = [*guess.tokens[: verdict.accepted], verdict.next]
            text += new
            self.runner.truncate(self.slot, len(text) - 1)
            confident += self._num_confident(DecodeOutput(new, rows.logits[: len(new)]))
        return self._confident_part(Draft(text[len(context) :]), confident - len(context), n, request)

    def accept(self, length: int) -> None:
        super().accept(length)
        self.inner.accept(length)

    def close(self) -> None:
        super().close()
        self.inner.close()
