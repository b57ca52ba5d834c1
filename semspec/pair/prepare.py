"""From a prompt and its options to a job for the loop: everything that can be refused is refused here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from semspec import verify
from semspec.draft import REGISTRY as DRAFTERS
from semspec.draft import DrafterKind, EarlyExit, ModelDrafter, NoDrafter, TranslatingDrafter, WithinContext
from semspec.errors import BadRequest
from semspec.loop.decoder import Job, Referee
from semspec.loop.draft_length import DraftLengthPolicy, RepeatableLength
from semspec.loop.learnt_lengths import DraftLengths
from semspec.loop.thinking import Thinking
from semspec.model.restricted import RestrictedRunner
from semspec.model.wrapper import unwrap
from semspec.options import REPEATABLE, Options, lossy_refused
from semspec.pair.resources import Resources
from semspec.profile import Profile
from semspec.sampling.processors import Processors
from semspec.sparse import plan_of
from semspec.text.grammar import GrammarProcessor
from semspec.text.prompts import draft_prompt
from semspec.text.stream import TextStream
from semspec.text.structured import Compiled
from semspec.text.tokenizer import Prompt, encode, last_token, opens_thinking
from semspec.types import Drafter, Runner
from semspec.verify import Rule
from semspec.verify.step_rule import StepRule

DEFAULT_NEW_TOKENS = 256
ROW_COST = {"cpu": 0.05, "cuda": 0.005}  # of one more token in a pass, in passes of one token: about what was measured
UNKNOWN_DRAFT_COST = 0.1  # of a draft token, where the models' sizes are not known
MIN_SHARED = 0.1  # of the smaller vocabulary, for rules that compare distributions


@dataclass(slots=True)
class Prepared:
    job: Job
    drafter: Drafter
    text: TextStream
    profile: Profile | None = None


class Preparer:
    """Knows what a pair can do; remembers the draft lengths that paid for each rule and drafter."""

    def __init__(
        self,
        resources: Resources,
        target: Runner,
        draft: Runner | None,
        allow_lossy: bool,
        lengths: DraftLengths,
    ) -> None:
        self.resources, self.target, self.draft, self.allow_lossy = resources, target, draft, allow_lossy
        self.lengths = lengths

    def prepare(self, prompt: Prompt | list[int], options: Options, grammar: Compiled | None = None) -> Prepared:
        rule = verify.make(options.verifier)
        self._check_lossy(rule, options)
        rule = rule.bind(self.resources)
        if isinstance(length := options.draft_length(), int):
            rule = rule.for_draft_length(length)
        tokens = self._encode(prompt)
        rewriter = self._rewriter(rule)
        drafter = self._drafter(rule, options)
        own = None
        if self.resources.exchange is not None and drafter.runners and self._kind(options).needs_model:
            own = draft_prompt(self.resources.exchange, prompt, tokens)
            comparing = [r for r in (rule, rewriter) if r is not None and r.needs_draft_logits]
            drafter = self._translating(drafter, own, len(tokens), comparing, options.early_exit)
        text = TextStream(
            self.resources.tokenizer, tokens, options.stop_strings, options.include_stop, options.min_tokens
        )
        stop = frozenset(options.stop_ids) | (frozenset() if options.ignore_eos else self.resources.eos)
        job = Job(
            prompt=tokens,
            rule=rule,
            num_draft_tokens=self._draft_length(rule, options, drafter),
            max_new_tokens=self._max_new_tokens(len(tokens), options.max_new_tokens),
            sampling=options.sampling(),
            stop=stop,
            halt=text.feed,
            protected=self.resources.protected,
            thinking=self._thinking(tokens, options),
            count_entropy=options.count_entropy or options.profile is not None,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            prompt_logprobs_last=options.prompt_logprobs_last,
            processors=self._processors(tokens, stop, options, grammar),
            steps=self.resources.steps(rule.max_step_tokens, rule.delimiters) if isinstance(rule, StepRule) else None,
            referee=self._referee(options.referee),
            rewriter=rewriter,
            draft_prompt=own,
            salt=options.cache_salt,
            repetition_guard=options.repetition_guard(),
            text_of=self.resources.text_of,
        )
        return Prepared(job, drafter, text, options.profile)

    def _check_lossy(self, rule: Rule, options: Options) -> None:
        if not (rule.lossless or self.allow_lossy):
            why = "this pair was loaded with allow_lossy off"
            raise lossy_refused(rule, why, "load it with allow_lossy on")
        if plan_of(self.target) and rule.speculates and not (options.allow_lossy and self.allow_lossy):
            raise BadRequest(
                "this target checks drafts by a sparse plan, so no verifier is lossless, and allow_lossy is off; load "
                "it without the plan, or allow lossy answers"
            )

    def _draft_length(self, rule: Rule, options: Options, drafter: Drafter) -> int | DraftLengthPolicy:
        length = options.draft_length()
        if options.num_draft_tokens is None and not isinstance(length, int) and plan_of(self.target):
            # A sparse plan sees drafts as wholes, so the text depends on where they end: not on a clock, unless asked.
            length = min(rule.default_draft_tokens(), options.max_draft_tokens)
        if isinstance(length, int):
            return length
        lengths = options.max_draft_tokens, rule.min_draft_tokens()
        if length == REPEATABLE:
            row_cost = ROW_COST.get(self.target.device.type, ROW_COST["cuda"])
            return RepeatableLength(self._draft_cost(drafter), row_cost, *lengths)
        key = (rule, options.drafter, options.early_exit, options.max_draft_tokens)
        return self.lengths.of(key, *lengths, self._kind(options).looks_up, self._draft_cost(drafter))

    def _draft_cost(self, drafter: Drafter) -> float:
        """What a draft token takes, in target passes, by the models' sizes: no clock, so the same in every run."""
        if not drafter.runners:
            return 0.0
        draft, target = (getattr(unwrap(runner), "shape", None) for runner in (drafter.runners[0], self.target))
        return draft.parameters / target.parameters if draft and target else UNKNOWN_DRAFT_COST

    def _encode(self, prompt: Prompt | list[int]) -> list[int]:
        tokens = encode(self.resources.tokenizer, prompt)
        if max(tokens) >= self.target.vocab_size:
            raise BadRequest(
                f"the prompt has a token with id {max(tokens)}, but the model knows ids below "
                f"{self.target.vocab_size}; its tokenizer has tokens that it was not trained with"
            )
        return tokens

    def _processors(
        self, prompt: list[int], stop: frozenset[int], options: Options, ready: Compiled | None
    ) -> Processors | None:
        vocab, tokens_of = self.target.vocab_size, self.resources.tokens_of
        each = options.logit_options().processors(prompt, vocab, stop, tokens_of)
        if ready is None and (grammar := options.grammar()) is not None:
            ready = self.resources.grammars.compiled(grammar)
        if ready is not None:
            each.append(self._grammar(ready, prompt, stop))
        return Processors(len(prompt), each) if each else None

    def _grammar(self, grammar: Compiled, prompt: list[int], stop: frozenset[int]) -> GrammarProcessor:
        grammars, markers = self.resources.grammars, self.resources.thinking
        last = None if markers is None else last_token(self.resources.tokenizer, prompt, markers)
        is_open = markers is not None and last == markers[0]
        if markers is not None and last == markers[1]:  # the prompt has ended the thinking
            markers = None
        failed = partial(grammars.forget, grammar)
        return GrammarProcessor(
            grammar.matcher(), self.target.vocab_size, grammars.ends, stop, markers, is_open, failed
        )

    def _max_new_tokens(self, prompt: int, wanted: int | None) -> int:
        left = self.target.max_seq_len - prompt
        if left < (wanted != 0):
            raise BadRequest(
                f"the prompt has {prompt} tokens and the context is {self.target.max_seq_len}; shorten the prompt or "
                "load the model with a larger context"
            )
        if wanted is None:
            return min(DEFAULT_NEW_TOKENS, left)
        if wanted > left:
            raise BadRequest(
                f"the prompt has {prompt} tokens and max_new_tokens is {wanted}, together more than the context of "
                f"{self.target.max_seq_len}; ask for at most {left} new tokens or load the model with a larger context"
            )
        return wanted

    def _rewriter(self, rule: Rule) -> Rule | None:
        if not isinstance(rule, StepRule) or not rule.rewrite:
            return None
        found = verify.make(rule.rewrite)
        if found.unit != "token" or not found.speculates:
            raise BadRequest(f"rewrite is {rule.rewrite!r}; give a token rule, or nothing")
        return found.bind(self.resources)

    def _referee(self, referee: Callable[[str, str], bool] | None) -> Referee | None:
        """A referee over texts as one over tokens."""
        if referee is None:
            return None
        text_of, marked = self.resources.text_of, self.resources.common_markers
        return lambda so_far, step: referee(marked(so_far, text_of(so_far)), marked(step, text_of(step)))

    def _thinking(self, prompt: list[int], options: Options) -> Thinking | None:
        relax_only, limit = options.relax_span == "thinking", options.max_thinking_tokens
        markers = self.resources.thinking
        if markers is None:
            if relax_only or limit is not None:
                what = "relax_span 'thinking'" if relax_only else "max_thinking_tokens"
                raise BadRequest(f"{what} needs a model that thinks between markers such as <think>; leave it out")
            return None
        is_open = opens_thinking(self.resources.tokenizer, prompt, markers)
        return Thinking(*markers, is_open, limit, relax_only)

    def _kind(self, options: Options) -> DrafterKind:
        return options.drafter_kind or DRAFTERS["ngram" if self.draft is None else "model"]()

    def load_drafter(self, options: Options) -> None:
        """Whatever the drafter needs, now instead of with the first request."""
        self._kind(options).bind(self.resources, self.target)

    def _drafter(self, rule: Rule, options: Options) -> Drafter:
        if not rule.speculates:
            return NoDrafter()
        if self.draft is None and rule.unit == "step":
            raise BadRequest(f"verifier {rule.name!r} needs a draft model; load the pair with draft=...")
        kind = self._kind(options)
        if kind.looks_up and options.early_exit.enabled:
            raise BadRequest("draft_min_p and draft_max_entropy need a draft model; load the pair with draft=...")
        if self.draft is None and kind.needs_model:
            raise BadRequest(
                f"drafter {kind.name!r} needs a draft model; load the pair with draft=..., or use drafter 'ngram'"
            )
        if kind.tree_options.size:
            self._check_trees(kind, rule, options)
        if isinstance(rule, StepRule) and rule.candidates > 1:
            self._check_candidates(rule, options)
        drafter = kind.bind(self.resources, self.target).build(self.draft, options.early_exit)
        # A rule that mixes both models' distributions has no use for drafts without one.
        looks_up = rule.unit == "token" and (rule.lossless or not rule.needs_draft_logits) and not rule.draft_layers
        if self.draft is None or not kind.needs_model or not looks_up:
            return drafter
        # A draft model with another tokenizer may need more tokens for the same text.
        shorter = self.draft.max_seq_len < self.target.max_seq_len or self.resources.exchange is not None
        return WithinContext(drafter, self.draft) if shorter else drafter

    def _check_trees(self, kind: DrafterKind, rule: Rule, options: Options) -> None:
        """Refuse trees where they cannot be drafted or verified."""
        leave_out = "leave out the drafter's tree=..."
        if not rule.supports_trees:
            raise BadRequest(
                f"verifier {rule.name!r} cannot verify tree drafts; take exact, sampling, traversal or a rule "
                f"that needs the draft's tokens only, or {leave_out}"
            )
        if not self.target.trees or (kind.needs_model and self.draft is not None and not self.draft.trees):
            what = "target" if not self.target.trees else "draft model"
            raise BadRequest(f"this {what} runs through transformers and cannot read tree drafts; {leave_out}")
        if kind.needs_model and self.resources.exchange is not None:
            raise BadRequest(f"a draft model with another tokenizer drafts no trees; {leave_out}")
        if options.early_exit.enabled:
            raise BadRequest(f"draft_min_p and draft_max_entropy are for chains, not for tree drafts; {leave_out}")

    def _check_candidates(self, rule: StepRule, options: Options) -> None:
        """Whether the draft can write several candidates for a step, and the target read them together."""
        leave_out = "leave out candidates=..."
        if not self.target.trees:
            raise BadRequest(f"this target runs through transformers and cannot read several candidates; {leave_out}")
        if self.resources.exchange is not None and (options.sampling().greedy or not rule.samples_drafts):
            raise BadRequest(
                "a greedy draft model with another tokenizer has one candidate for a step; give a temperature and "
                f"{rule.name}'s sample=true, or {leave_out}"
            )

    def _translating(
        self, inner: Drafter, prompt: list[int], read: int, comparing: list[Rule], early_exit: EarlyExit
    ) -> Drafter:
        """The drafter for a target with other tokens, and for rules that compare both models' distributions."""
        exchange = self.resources.exchange
        assert exchange is not None
        if not comparing:
            return TranslatingDrafter(inner, exchange, prompt, read)
        if exchange.shared_share < MIN_SHARED:
            raise BadRequest(
                f"verifier {comparing[0].name!r} compares probabilities of tokens that both models have, and these "
                f"tokenizers share only {len(exchange.shared[0])} ({exchange.shared_share:.0%} of the smaller "
                "vocabulary); choose a verifier that needs the draft's tokens only, such as exact"
            )
        return TranslatingDrafter(inner, exchange, prompt, read, ModelDrafter(self._restricted, early_exit))

    @cached_property
    def _restricted(self) -> RestrictedRunner:
        """One for all sequences, so that they are batched."""
        assert self.draft is not None and self.resources.exchange is not None
        return RestrictedRunner(self.draft, self.resources.exchange.shared[1])
