"""A drafter for a target with another tokenizer: it drafts in its own tokens and proposes the target's.

The text is the target's. Before each proposal, what the target has written since is read in the draft's own tokens,
and whatever the drafter inside has cached that differs is dropped. So a rejected token, a boundary inside a word or
inside a character needs no special case.

Rules that compare distributions get tokens that both models have, drawn from the draft's distribution restricted to
them; as any proposal with known probabilities, that keeps lossless rules lossless. All other rules get the draft's
text, which may use all of its tokens.
Source: token-level intersection and string-level matching, Timor et al. 2025 (arXiv 2502.05202).
"""

from __future__ import annotations

import math
from dataclasses import replace

from semspec.draft.model import ModelDrafter
from semspec.text.exchange import Exchange
from semspec.text.reader import Checkpoint, Reader
from semspec.types import Draft, Drafter, DraftRequest, ProposalGenerator

PRIOR = 16  # tokens after which the observed ratio of both models' tokens counts as much as the guess of 1
MOST = 4.0  # tokens of the draft for one of the target's


class TranslatingDrafter:
    def __init__(
        self, inner: Drafter, exchange: Exchange, prompt: list[int], read: int, shared: ModelDrafter | None = None
    ) -> None:
        """`prompt` is in the draft's tokens, `read` the number of the target's that it stands for. `shared` drafts in
        tokens that both models have, in the first slot of `inner`."""
        self.inner, self.exchange, self.shared = inner, exchange, shared
        self.runners = inner.runners
        self._reader = Reader(exchange, prompt, read)
        self._checkpoints: list[Checkpoint] = []  # one for each proposal since tokens were accepted, and one before
        self._cached: list[int] = []  # what the drafter inside may have cached after the reader's firm tokens
        self._firm = 0  # how many of those there were then
        self._own = self._targets = PRIOR

    def begin(self, slots: list[int]) -> None:
        self.inner.begin(slots)
        if self.shared is not None:
            self.shared.begin(slots[:1])
        self._checkpoints = [self._reader.checkpoint()]

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        reader = self._reader
        reader.extend(context[reader.read :])
        self._checkpoints.append(reader.checkpoint())
        self._drop_cached()
        stop = self.exchange.stops(request.stop) if request.stop else request.stop
        rate = 1.0 if request.comparable else min(self._own / self._targets, MOST)
        # Processors know the target's tokens; the loop cuts what they forbid.
        wanted = replace(request, max_tokens=math.ceil(request.max_tokens * rate), stop=stop, processors=None)
        if request.comparable:
            draft = yield from self._propose_shared(wanted)
        else:
            own: Draft = yield from self.inner.propose(reader.ids, wanted)
            self._cached += own.tokens
            draft = self._in_target_tokens(own, request)
        return draft

    def _in_target_tokens(self, own: Draft, request: DraftRequest) -> Draft:
        tokens, ends = self.exchange.translate(own.tokens, self._reader.pending)
        if not tokens:  # the target writes on, and perhaps the draft can after that
            return Draft([], early_exit=bool(own.tokens))
        self._own += ends[-1]
        self._targets += len(tokens)
        own = own.first(ends[-1])
        draft = Draft(tokens, own.logits, own.hidden, early_exit=own.early_exit)
        if own.hidden or own.logits is not None:
            draft.own, draft.own_ends = own.tokens, tuple(ends)
        return draft.first(request.max_tokens)

    def _propose_shared(self, request: DraftRequest) -> ProposalGenerator:
        """Tokens that both models have. What is proposed after a part of a character would be no guess but noise."""
        assert self.shared is not None, "the pair was not prepared for a rule that compares distributions"
        if self._reader.pending:
            return Draft([])
        own: Draft = yield from self.shared.propose(self._reader.ids, request)
        self._cached += own.tokens
        tokens = [self.exchange.shared_target[token] for token in own.tokens]
        logits = None if own.logits is None else self.exchange.rows_for_target(own.logits)
        return Draft(tokens, logits, own.hidden, early_exit=own.early_exit)

    def _drop_cached(self) -> None:
        """What is cached agrees with what was read now up to the first token that differs."""
        new = self._reader.ids[self._firm :]
        same = next((i for i, (a, b) in enumerate(zip(self._cached, new, strict=False)) if a != b), None)
        common = self._firm + (min(len(self._cached), len(new)) if same is None else same)
        self.inner.accept(min(common, len(self._reader.ids) - 1))  # a model goes on from a token that it is fed
        self._firm = self._reader.firm
        self._cached = self._reader.ids[self._firm :]

    def accept(self, length: int) -> None:
        """Return to the last state that has read accepted tokens only; the rest follows with the next proposal."""
        while len(self._checkpoints) > 1 and self._checkpoints[-1].read > length:
            self._checkpoints.pop()
        if self._reader.read > length:
            at = self._checkpoints[-1]
            if at.firm < self._firm:
                self._firm, self._cached = at.firm, self._reader.ids[at.firm : self._firm] + self._cached
            self._reader.rewind(at)
        self._checkpoints = self._checkpoints[-1:]

    def close(self) -> None:
        self.inner.close()
