"""Drafting with a small model. Its cache follows the sequence: the rejected is truncated, what it missed is fed."""

from __future__ import annotations

from semspec.draft.early_exit import CHUNK, EarlyExit
from semspec.sampling.noise import DRAFT, stream
from semspec.types import Decode, DecodeOutput, Draft, ProposalGenerator, Runner, Sampling
from semspec.verify.base import Rule

GREEDY = Sampling()
NEVER = EarlyExit()


class ModelDrafter:
    def __init__(self, runner: Runner, early_exit: EarlyExit = NEVER) -> None:
        self.runner, self.early_exit = runner, early_exit
        self.runners = [runner]
        self.slot: int | None = None

    def begin(self, slots: list[int]) -> None:
        (self.slot,) = slots

    def propose(
        self,
        context: list[int],
        n: int,
        sampling: Sampling,
        round: int,
        rule: Rule,
        stop: frozenset[int] = frozenset(),
    ) -> ProposalGenerator:
        """At most n tokens, up to and including one of those to stop at."""
        assert self.slot is not None
        # The draft model's context may be the shorter one; the last token it writes need not fit, being never fed.
        n = min(n, self.runner.capacity - len(context) + 1)
        if n < 1:
            return Draft([])
        feed, parts = context[self.runner.length(self.slot) :], []
        written = sure = 0
        while sure == written < n:
            # A rule that compares distributions needs tokens drawn from the one it is told; others get the best guess.
            rolled: DecodeOutput = yield Decode(
                self.runner,
                self.slot,
                feed,
                min(CHUNK, n - written) if self.early_exit.enabled else n,
                sampling if rule.needs_draft_logits or rule.samples_drafts else GREEDY,
                stream(DRAFT, round),
                stop,
                keep_logits=rule.keeps_draft_logits or self.early_exit.enabled,
                layers=rule.draft_layers,
                drafting=True,
            )
            parts.append(rolled)
            written += len(rolled.tokens)
            sure += self._sure(rolled)
            feed = rolled.tokens[-1:]
            if feed[0] in stop:
                break
        whole = DecodeOutput.join(parts)
        draft = Draft(whole.tokens, whole.logits if rule.keeps_draft_logits else None, whole.hidden)
        return draft.first(max(sure, rule.min_draft_tokens()))

    def _sure(self, rolled: DecodeOutput) -> int:
        if not self.early_exit.enabled:
            return len(rolled.tokens)
        assert rolled.logits is not None
        return self.early_exit.confident_prefix(rolled.logits)

    def accept(self, length: int) -> None:
        # The last draft token was never fed, and the token after the accepted ones is not the draft's.
        assert self.slot is not None
        self.runner.truncate(self.slot, min(length, self.runner.length(self.slot)))

    def close(self) -> None:
        if self.slot is not None:
            self.runner.release(self.slot)
            self.slot = None
