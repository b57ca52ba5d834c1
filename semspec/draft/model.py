"""Drafting with a small model. Its cache follows the sequence: rejected tokens are truncated, new ones are fed."""

from __future__ import annotations

from dataclasses import replace

from semspec.draft.early_exit import CHUNK, EarlyExit
from semspec.draft.tree import CHAIN, TreeOptions, grow
from semspec.types import Decode, DecodeOutput, Draft, DraftRequest, ProposalGenerator, Runner

NO_EARLY_EXIT = EarlyExit()


class ModelDrafter:
    def __init__(self, runner: Runner, early_exit: EarlyExit = NO_EARLY_EXIT, tree: TreeOptions = CHAIN) -> None:
        self.runner, self.early_exit, self.tree = runner, early_exit, tree
        self.runners = [runner]
        self.slot: int | None = None

    def begin(self, slots: list[int]) -> None:
        (self.slot,) = slots

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        assert self.slot is not None
        # The draft model's capacity may be smaller than the target's; the last token is never fed and need not fit.
        n = min(request.max_tokens, self.runner.max_seq_len - len(context) + 1)
        if n < 1:
            return Draft([])
        if self.tree.size:
            return (yield from grow(self.runner, self.slot, context, replace(request, max_tokens=n), self.tree))
        feed, parts = context[self.runner.length(self.slot) :], []
        history = None if request.processors is None else request.processors.after(context)
        drafted = confident = 0
        while confident == drafted < n:
            out: DecodeOutput = yield Decode(
                self.runner,
                self.slot,
                feed,
                min(CHUNK, n - drafted) if self.early_exit.enabled else n,
                request.sampling,
                request.stream,
                request.stop,
                keep_logits=request.keep_logits or self.early_exit.enabled,
                layers=request.layers,
                drafting=True,
                history=history,
                handover=None if self.early_exit.enabled else request.handover,
            )
            parts.append(out)
            drafted += len(out.tokens)
            confident += self._num_confident(out)
            feed = out.tokens[-1:]
            if feed[0] in request.stop:
                break
        whole = DecodeOutput.join(parts)
        draft = Draft(whole.tokens, whole.logits if request.keep_logits else None, whole.hidden)
        return self._confident_part(draft, confident, n, request)

    def _confident_part(self, draft: Draft, confident: int, n: int, request: DraftRequest) -> Draft:
        """The confident part of a draft of at most n tokens."""
        draft = draft.first(max(confident, request.min_tokens))
        stopped = bool(draft.tokens) and draft.tokens[-1] in request.stop
        draft.early_exit = self.early_exit.enabled and len(draft.tokens) < n and not stopped
        return draft

    def _num_confident(self, out: DecodeOutput) -> int:
        if not self.early_exit.enabled:
            return len(out.tokens)
        assert out.logits is not None
        return self.early_exit.confident_prefix(out.logits)

    def accept(self, length: int) -> None:
        # The cache may be shorter: the last draft token was never fed.
        assert self.slot is not None
        self.runner.truncate(self.slot, min(length, self.runner.length(self.slot)))

    def close(self) -> None:
        if self.slot is not None:
            self.runner.release(self.slot)
            self.slot = None
