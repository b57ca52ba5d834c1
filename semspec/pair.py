"""A target and its draft, ready to answer: `Pair.generate`, `Pair.stream`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from semspec import verify
from semspec.draft import CascadeDrafter, EarlyExit, ModelDrafter, NgramDrafter, NoDrafter
from semspec.errors import BadRequest, BatchFailed
from semspec.loop.decoder import Decoder, Job, Referee
from semspec.loop.draft_length import AdaptiveLength, DraftLengthPolicy
from semspec.loop.executor import Executor
from semspec.loop.kept import Kept
from semspec.loop.stats import Stats
from semspec.loop.step_decoder import StepDecoder
from semspec.options import Options
from semspec.probe import Probe, fingerprint
from semspec.probe.evidence import number_tokens
from semspec.result import Stream, Ticket
from semspec.sparse import SparsePlan, plan_of
from semspec.text.steps import Steps
from semspec.text.stream import Prompt, TextStream, encode, thinking_markers
from semspec.types import Drafter, Runner
from semspec.verify import Rule
from semspec.verify.step_rule import StepRule

DEFAULT_NEW_TOKENS = 256
PACES = 64  # combinations of rule and drafter whose draft lengths are remembered


class Pair:
    """A target, perhaps a draft model, and one Executor that decodes whatever is submitted as one batch."""

    def __init__(
        self,
        target: Runner,
        tokenizer: PreTrainedTokenizerBase,
        draft: Runner | None = None,
        eos: frozenset[int] = frozenset(),
        probe_folder: Path | None = None,
        allow_lossy: bool = True,
    ) -> None:
        self.target, self.draft, self.tokenizer, self.eos = target, draft, tokenizer, eos
        self.allow_lossy = allow_lossy  # False: no request may choose otherwise
        self.executor = Executor()
        self.protected = self._protected()
        self.probe_folder = probe_folder
        self._probes: dict[Path, tuple[Probe, Probe]] = {}
        self._judges: dict[Path, Probe] = {}
        self._numbers: Tensor | None = None
        self._steps: Steps | None = None
        self._paces: dict[tuple[Rule, str, EarlyExit], AdaptiveLength] = {}

    def _protected(self) -> Tensor:
        """[V] special, control and end-of-thinking tokens: whatever stands outside the tokenizer's plain vocabulary,
        and markers of thinking wherever they stand"""
        outside = {*self.tokenizer.get_added_vocab().values(), *self.tokenizer.all_special_ids, *self.eos}
        outside |= {*(thinking_markers(self.tokenizer) or ())}
        mask = torch.zeros(self.target.vocab, dtype=torch.bool)
        mask[[i for i in outside if i < self.target.vocab]] = True
        return mask.to(self.target.device)

    @property
    def sparse(self) -> SparsePlan | None:
        """The plan by which the target checks drafts."""
        return plan_of(self.target)

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
        jobs = [self._prepare(p, override(o, overrides)) for p, o in zip(prompts, given, strict=True)]
        tickets = [self._submit(*job) for job in jobs]  # all are checked before any is started
        try:
            while any(not ticket.task.done for ticket in tickets):
                self.executor.tick()
                for ticket in tickets:
                    ticket.collect()
        finally:
            for ticket in tickets:
                self.executor.cancel(ticket.task)
        results = [ticket.task.error or ticket.result() for ticket in tickets]
        if single:
            if isinstance(results[0], Exception):
                raise results[0]
            return results[0]
        if any(isinstance(r, Exception) for r in results):  # what the others wrote is not thrown away
            raise BatchFailed(results)
        return results

    def stream(
        self, prompt: Prompt, options: Options | None = None, *, kept: Kept | None = None, **overrides: Any
    ) -> Stream:
        """Answer one prompt, event by event. Closing the stream cancels the sequence and frees its memory, unless
        `kept` is there to take it for the next prompt of a conversation (see `Session`).

        Several streams may be open at once; they are decoded as one batch. Bad input fails here, not later.
        """
        prompts, single = _prompts(prompt)
        if not single:
            raise BadRequest("a stream answers one prompt; open one stream for each, they are decoded together")
        job = self._prepare(prompts[0], override(options or Options(), overrides))
        return Stream(self.executor, self._submit(*job, kept))

    def submit(self, requests: Sequence[tuple[Prompt | list[int], Options]]) -> list[Ticket]:
        """Take prompts in, all or none, and run nothing: for those who tick the executor themselves, as a server does.

        A prompt may also be the list of its tokens.
        """
        jobs = [self._prepare(prompt, options) for prompt, options in requests]
        return [self._submit(*job) for job in jobs]

    def _prepare(self, prompt: Prompt | list[int], options: Options) -> tuple[Job, Drafter, TextStream]:
        """Check a request and turn it into a job."""
        rule = verify.make(options.verifier)
        if not (rule.lossless or self.allow_lossy):
            raise BadRequest(
                f"verifier {rule.name!r} may change what the target would have written, and this pair was loaded with "
                "allow_lossy off; choose a lossless verifier (exact, sampling, block) or load it with allow_lossy on"
            )
        if self.sparse and rule.speculates and not (options.allow_lossy and self.allow_lossy):
            raise BadRequest(
                "this target checks drafts by a sparse plan, so no verifier is lossless, and allow_lossy is off; load "
                "it without the plan, or allow lossy answers"
            )
        rule = rule.bind(self)
        tokens = encode(self.tokenizer, prompt)
        if max(tokens) >= self.target.vocab:
            raise BadRequest(
                f"the prompt has a token with id {max(tokens)}, but the model knows ids below {self.target.vocab}; "
                "its tokenizer has tokens that it was not trained with"
            )
        seed = secrets.randbits(62) if options.seed is None else options.seed
        text = TextStream(self.tokenizer, tokens, options.stop_strings)
        job = Job(
            prompt=tokens,
            rule=rule,
            num_draft_tokens=self._pace(rule, options),
            max_new_tokens=self._room(len(tokens), options.max_new_tokens),
            sampling=options.sampling(seed),
            stop=frozenset(options.stop_ids) | (frozenset() if options.ignore_eos else self.eos),
            halt=text.feed,
            protected=self.protected,
            thinking=self._span(options.relax_span),
            logprobs=options.logprobs,
            steps=self.steps(rule),
            referee=self._referee(options.referee),
            rewriter=self._rewriter(rule),
            watch=options.repetition_guard(),
            spell=lambda tokens: str(self.tokenizer.decode(tokens)),
        )
        return job, self._drafter(rule, options.drafter, options.early_exit), text

    def _pace(self, rule: Rule, options: Options) -> int | DraftLengthPolicy:
        """A number, or what prompts before this one have taught about drafting for this rule."""
        length = options.draft_length()
        if isinstance(length, int):
            return length
        key = (rule, options.drafter, options.early_exit)
        pace = self._paces.pop(key, None) or AdaptiveLength(shortest=rule.min_draft_tokens())
        self._paces[key] = pace  # the latest comes last, and what has not been asked for in a long time goes
        if len(self._paces) > PACES:
            del self._paces[next(iter(self._paces))]
        return pace

    def spelling(self, token: int) -> str:
        """A single token as text."""
        return str(self.tokenizer.decode([token]))

    def tokens_of(self, text: str) -> list[int]:
        """A text in the target's tokens, for rules that put words before it."""
        return [t for t in self.tokenizer.encode(text, add_special_tokens=False) if t < self.target.vocab]

    def probes(self, folder: str = "") -> tuple[Probe, Probe]:
        """The target's and the draft's probe, from a folder with both; by default those that came with the pair."""
        place = Path(folder) if folder else self.probe_folder
        if place is None or self.draft is None:
            raise BadRequest(
                "this pair has no probes, which semantic verification needs; make them with `semspec probe fit`, "
                "and name their folder: semantic:probes=DIR"
            )
        if place not in self._probes:
            runners = {"target": self.target, "draft": self.draft}
            target, draft = (Probe.load(place / who, fingerprint(r), r.device) for who, r in runners.items())
            self._probes[place] = (target, draft)
        return self._probes[place]

    def judge_probe(self, folder: str = "") -> Probe:
        """The probe that judges whole steps, from a folder that has one; by default the one that came with the pair."""
        place = Path(folder) if folder else self.probe_folder
        if place is None:
            raise BadRequest(
                "this pair has no judge, which semantic+ needs; make one with `semspec probe fit`, and name its "
                "folder: semantic+:probes=DIR"
            )
        if place not in self._judges:
            self._judges[place] = Probe.load(place / "judge", fingerprint(self.target), self.target.device)
        return self._judges[place]

    def numbers(self) -> Tensor:
        """[V] tokens with a digit in them"""
        if self._numbers is None:
            self._numbers = number_tokens(self.tokenizer, self.target.vocab).to(self.target.device)
        return self._numbers

    def _rewriter(self, rule: Rule) -> Rule | None:
        if not isinstance(rule, StepRule) or not rule.rewrite:
            return None
        found = verify.make(rule.rewrite).bind(self)
        if found.unit != "token" or not found.speculates:
            raise BadRequest(f"rewrite is {rule.rewrite!r}; give a rule that judges drafts token by token, or nothing")
        return found

    def steps(self, rule: Rule) -> Steps | None:
        """Where steps end, for a rule whose unit is one."""
        if not isinstance(rule, StepRule):
            return None
        if self._steps is None:
            self._steps = Steps.of(self.tokenizer, self.eos)
        return replace(self._steps, max_tokens=rule.max_step_tokens)

    def _referee(self, asked: Callable[[str, str], bool] | None) -> Referee | None:
        """A referee over texts as one over tokens."""
        if asked is None:
            return None
        return lambda so_far, step: asked(str(self.tokenizer.decode(so_far)), str(self.tokenizer.decode(step)))

    def _span(self, relax_span: str) -> tuple[int, int] | None:
        if relax_span == "all":
            return None
        markers = thinking_markers(self.tokenizer)
        if markers is None:
            raise BadRequest(
                "relax_span 'thinking' needs a model that thinks between markers such as <think>; give all"
            )
        return markers

    def _submit(self, job: Job, drafter: Drafter, text: TextStream, kept: Kept | None = None) -> Ticket:
        stats = Stats()
        if isinstance(drafter, ModelDrafter) and job.steps is not None:
            decoder: Decoder = StepDecoder(job, self.target, drafter, stats, kept)
        else:
            decoder = Decoder(job, self.target, drafter, stats, kept)
        task = self.executor.submit(decoder.decode(), stats)
        return Ticket(task, job, stats, text, str(self.sparse) if self.sparse and job.rule.speculates else "")

    def _room(self, prompt: int, wanted: int | None) -> int:
        left = self.target.capacity - prompt
        if left < 1:
            raise BadRequest(
                f"the prompt has {prompt} tokens and the context is {self.target.capacity}; shorten the prompt or load "
                "the model with a larger context"
            )
        if wanted is None:
            return min(DEFAULT_NEW_TOKENS, left)
        if wanted > left:
            raise BadRequest(
                f"the prompt has {prompt} tokens and max_new_tokens is {wanted}, together more than the context of "
                f"{self.target.capacity}; ask for at most {left} new tokens or load the model with a larger context"
            )
        return wanted

    def _drafter(self, rule: Rule, kind: str, early_exit: EarlyExit) -> Drafter:
        if not rule.speculates:
            return NoDrafter()
        if self.draft is None and rule.unit == "step":
            raise BadRequest(f"verifier {rule.name!r} needs a draft model; load the pair with draft=...")
        if self.draft is None and early_exit.enabled:
            raise BadRequest("draft_min_p and draft_max_entropy need a draft model; load the pair with draft=...")
        if kind == "ngram" or (kind == "auto" and self.draft is None):
            return NgramDrafter()
        if self.draft is None:
            raise BadRequest(
                f"drafter {kind!r} needs a draft model; load the pair with draft=..., or use drafter 'ngram'"
            )
        if kind == "cascade":
            return CascadeDrafter(self.draft, NgramDrafter(), early_exit=early_exit)
        return ModelDrafter(self.draft, early_exit)


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
