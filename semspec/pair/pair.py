"""A target and its draft, ready to answer: `Pair.generate`, `Pair.stream`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from semspec import verify
from semspec.errors import BadRequest, BatchFailed
from semspec.loop.decoder import Decoder
from semspec.loop.draft_length import NO_STEPS
from semspec.loop.executor import Executor
from semspec.loop.learnt_lengths import DraftLengths
from semspec.loop.stats import Stats
from semspec.loop.step_decoder import StepDecoder
from semspec.model.heads.runner import StateRunner
from semspec.model.prefix_cache import has_cache
from semspec.options import Options
from semspec.pair.caches import PairCaches
from semspec.pair.prepare import Prepared, Preparer
from semspec.pair.resources import Resources
from semspec.pair.result import Stream, Ticket
from semspec.profile import Profile
from semspec.sparse import SparsePlan, plan_of
from semspec.text.exchange import Exchange
from semspec.text.structured import Compiled
from semspec.text.tokenizer import Prompt
from semspec.types import Runner


class Pair:
    """A target, perhaps a draft model, and one Executor that decodes whatever is submitted as one batch.

    Threads may share a pair: a pass is made by whoever asks first, for all sequences there are.
    """

    is_cached = False  # whether it remembers what it has read and written
    caches: PairCaches | None = None  # what it decodes with, where its models are not cached themselves

    def __init__(
        self,
        target: Runner,
        tokenizer: PreTrainedTokenizerBase,
        draft: Runner | None = None,
        eos: frozenset[int] = frozenset(),
        probe_folder: Path | None = None,
        allow_lossy: bool = True,
        exchange: Exchange | None = None,
        row_cost: float | None = None,
        step_costs: Mapping[int, float] = NO_STEPS,
    ) -> None:
        """`exchange`: how both models read each other's tokens; None: they have the same. For automatic draft lengths
        to begin with: `row_cost` of a further token in a target pass, in passes; `step_costs` of a draft token of so
        many sequences, in tokens of the target of as many."""
        if draft is not None and exchange is None and draft.vocab_size != target.vocab_size:
            raise BadRequest(
                f"the target has {target.vocab_size} tokens and the draft model {draft.vocab_size}; give an "
                "`exchange`, or load both with `semspec.load`, which finds out how they read each other's tokens"
            )
        self.tokenizer, self.eos = tokenizer, eos
        self.allow_lossy = allow_lossy  # False: no request may choose otherwise
        self.executor = Executor()
        self.resources = Resources(tokenizer, target, draft, eos, probe_folder, exchange)
        self._take(target, draft, DraftLengths(row_cost=row_cost, step_costs=step_costs))

    def _take(self, target: Runner, draft: Runner | None, lengths: DraftLengths) -> None:
        """Decode with these models, through prefix caches, which may be there already."""
        self.target, self.draft = target, draft
        self.is_cached, before = has_cache(target), self.caches
        self.caches = None if self.is_cached else PairCaches(target, draft)
        if self.caches is not None and before is not None:  # what was planned for its memory holds for this one, too
            self.caches.target.states_limit = before.target.states_limit
        through = (target, draft) if self.caches is None else (self.caches.target, self.caches.draft)
        self._preparer = Preparer(self.resources, *through, self.allow_lossy, lengths)

    def wrapped(
        self,
        wrap: Callable[[Runner], Runner],
        executor: Executor | None = None,
        wrap_head: Callable[[StateRunner], Any] | None = None,
    ) -> Pair:
        """The same pair with a wrapper around each model, the target first, and around draft heads if one is given, and
        the same executor if no other."""
        pair = copy.copy(self)
        if wrap_head is not None:
            pair.resources = copy.copy(self.resources)
            pair.resources.wrap_head = wrap_head
        pair.executor = executor or self.executor
        pair._take(wrap(self.target), None if self.draft is None else wrap(self.draft), self._preparer.lengths)
        return pair

    def fresh(self) -> Pair:
        """The same models on the same memory, with nothing learnt yet of draft lengths and costs."""
        pair = copy.copy(self)
        pair.executor = Executor()
        pair._take(self.target, self.draft, self._preparer.lengths.fresh())
        return pair

    def cached(self) -> Pair:
        """The same pair, but it remembers: what one request has read or written, no later one reads again, while there
        are slots for it. Texts may then depend on earlier ones, by rounding."""
        if self.caches is None:
            return self
        pair = copy.copy(self)
        pair.target, pair.draft, pair.is_cached = self.caches.target, self.caches.draft, True
        return pair

    def __repr__(self) -> str:
        draft = "no draft model" if self.draft is None else f"a draft model of {self.draft.num_layers} layers"
        lossy = "" if self.allow_lossy else ", lossless only"
        return (
            f"<Pair: target of {self.target.num_layers} layers on {self.target.device}, {draft}, "
            f"{self.target.vocab_size} tokens, context {self.target.max_seq_len}, {self.target.free} slots free{lossy}>"
        )

    def check(self, options: Options) -> None:
        """Refuse what no request with these options could get from this pair."""
        verify.make(options.verifier).bind(self.resources)
        self.check_profile(options.profile)

    @property
    def warm_up_verifiers(self) -> tuple[str, ...]:
        """Rules to answer something with before the first request; the last measures the target alone."""
        return ("exact", "none", "none")

    @property
    def exchange(self) -> Exchange | None:
        return self.resources.exchange

    def draft_alone(self) -> Pair:
        """The draft model as a target without a draft."""
        assert self.draft is not None, "this pair has no draft model"
        if self.exchange is None:
            return Pair(self.draft, self.tokenizer, eos=self.eos)
        return Pair(self.draft, self.exchange.draft.tokenizer, eos=self.exchange.draft.eos)

    @property
    def sparse(self) -> SparsePlan | None:
        """The plan by which the target checks drafts."""
        return plan_of(self.target)

    def check_profile(self, profile: Profile | None) -> None:
        """Refuse a profile of another pair."""
        if profile is not None:
            profile.check_pair(*self.resources.fingerprints, str(self.sparse or ""))

    def computed_otherwise(self, profile: Profile | None) -> tuple[str, ...]:
        """Options of loading that are not as they were when the profile was calibrated."""
        return () if profile is None else profile.computed_otherwise(self.resources.precisions)

    def generate(self, prompt: Any, options: Options | list[Options] | None = None, **overrides: Any) -> Any:
        """Answer one prompt (a Result) or a list of prompts decoded as one batch (a list of Results).

        A prompt is text or a list of chat messages. Options are given as keywords, as an `Options`, or as a list of
        `Options`, one for each prompt.
        """
        prompts, single = _prompts(prompt)
        given = options if isinstance(options, list) else [options or Options()] * len(prompts)
        if len(given) != len(prompts):
            raise BadRequest(
                f"there are {len(prompts)} prompts but {len(given)} options; give one for each, or one for all"
            )
        with ExitStack() as stack:
            with self.executor.lock:
                tickets = self.submit([(p, override(o, overrides)) for p, o in zip(prompts, given, strict=True)])
                if self.caches is not None and not self.is_cached:
                    stack.enter_context(self.caches.call([ticket.job for ticket in tickets], self.executor))
            self._run(tickets)
        results = [ticket.task.error or ticket.result() for ticket in tickets]
        if single:
            if isinstance(results[0], Exception):
                raise results[0]
            return results[0]
        if any(isinstance(r, Exception) for r in results):  # what the others wrote is not thrown away
            raise BatchFailed(results)
        return results

    def _run(self, tickets: Sequence[Ticket]) -> None:
        try:
            while any(not ticket.task.done for ticket in tickets):
                self.executor.tick()
                for ticket in tickets:
                    ticket.collect()
        finally:
            for ticket in tickets:
                self.executor.cancel(ticket.task)
                ticket.collect()

    def stream(self, prompt: Prompt, options: Options | None = None, **overrides: Any) -> Stream:
        """Answer one prompt, event by event. Closing the stream cancels the sequence and frees its memory.

        Several streams may be open at once; they are decoded as one batch. Bad input fails here, not later.
        """
        prompts, single = _prompts(prompt)
        if not single:
            raise BadRequest("a stream answers one prompt; open one stream for each, they are decoded together")
        (ticket,) = self.submit([(prompts[0], override(options or Options(), overrides))])
        return Stream(self.executor, ticket)

    def submit(
        self, requests: Sequence[tuple[Prompt | list[int], Options]], grammar: Compiled | None = None
    ) -> list[Ticket]:
        """Take prompts in, all or none, and run nothing: for those who tick the executor themselves, as a server does.

        A prompt may also be the list of its tokens. `grammar`: theirs, where it has been compiled already.
        """
        with self.executor.lock:
            for _, options in requests:
                self.check_profile(options.profile)
            prepared = [self._preparer.prepare(prompt, options, grammar) for prompt, options in requests]
            if self.caches is not None and not self.is_cached:
                self.caches.salt([each.job for each in prepared])
            return [self._submit(each) for each in prepared]

    def _submit(self, prepared: Prepared) -> Ticket:
        job, stats = prepared.job, Stats()
        job.num_draft_tokens = self.executor.lengths.within(job.num_draft_tokens)
        decoder = (Decoder if job.steps is None else StepDecoder)(job, self._preparer.target, prepared.drafter, stats)
        task = self.executor.submit(decoder.decode(), stats)
        sparse = str(self.sparse) if self.sparse and job.rule.speculates else ""
        otherwise = self.computed_otherwise(prepared.profile)
        return Ticket(self.executor, task, job, stats, prepared.text, sparse, prepared.profile, otherwise)

    def compile_grammar(self, grammar: str) -> Compiled:
        """For `submit`; may take a second, and may be called from any thread."""
        return self.resources.grammars.compiled(grammar)

    def load_drafter(self, options: Options) -> None:
        """Load what the drafter of these options needs, such as a head, before the first request comes."""
        with self.executor.lock:
            self._preparer.load_drafter(options)

    def spelling(self, token: int) -> str:
        """A single token as text, as it is inside a text."""
        return self.resources.bytes_of(token).decode(errors="replace")


def _prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """One prompt or several? Text and a list of messages are one; a list of either is several."""
    if isinstance(prompt, str):
        return [prompt], True
    if isinstance(prompt, list) and prompt:
        if all(isinstance(p, dict) for p in prompt):
            return [prompt], True
        if all(isinstance(p, str | list) for p in prompt):
            return prompt, False
    raise BadRequest(f"a prompt is text, a list of chat messages, or a list of such prompts; this is {prompt!r:.80}")


def override(options: Options, overrides: dict[str, Any]) -> Options:
    known = {f.name for f in fields(Options)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise BadRequest(f"there is no option {unknown[0]!r}; the options are: {', '.join(sorted(known))}")
    return replace(options, **overrides)
