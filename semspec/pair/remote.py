"""A pair of two servers: `semspec.load("http://host:8001/v1", draft="http://host:8002/v1")`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from semspec import verify
from semspec.errors import BadRequest
from semspec.loop.decoder import Job
from semspec.loop.stats import Stats
from semspec.loop.thinking import Thinking
from semspec.options import AUTO, Options
from semspec.pair.pair import Pair
from semspec.pair.prepare import DEFAULT_NEW_TOKENS
from semspec.pair.result import Ticket
from semspec.pocket.shipped import JUDGE_OF_EVIDENCE
from semspec.remote.address import is_url
from semspec.remote.connection import Connection
from semspec.remote.decoder import Servers, TextDecoder
from semspec.remote.executor import CallExecutor
from semspec.remote.model import BACKGROUND, UNKNOWN_CONTEXT, RemoteModel
from semspec.remote.pieces import RemoteTokenizer, TextPrompt
from semspec.remote.verification import NO_STATES, JudgeProbes
from semspec.sampling.logit_options import LogitOptions
from semspec.text.stream import TextStream
from semspec.text.structured import Compiled
from semspec.text.tokenizer import CommonMarkers, Prompt, encode, opens_thinking, thinking_markers
from semspec.verify import Rule
from semspec.verify.step_rule import StepRule

KEYS = {"target": "SEMSPEC_TARGET_API_KEY", "draft": "SEMSPEC_DRAFT_API_KEY"}
DRAFT_TRIES = 2  # the target can go on without it
STEP_RULES = "semantic+, specreason, likely-step, the controls random-step and accept-all-steps, or none"


def connect(
    target: str,
    draft: str | None = None,
    slots: int = 8,
    context: int | None = None,
    allow_lossy: bool = True,
    seconds: float = 120.0,
    keys: dict[str, str] | None = None,
) -> RemotePair:
    """The pair of two servers, after trying what each can do. Keys are by who they are for, target or draft; by
    default those of the environment."""
    if draft is not None and not is_url(draft):
        raise BadRequest(
            f"the target is a server, and the draft {draft!r} is not; give the address of one, or no draft"
        )
    if draft is not None and not allow_lossy:
        raise BadRequest("two servers exchange text, so every rule for them is lossy, and allow_lossy is off")
    held = {who: (keys or {}).get(who) or os.environ.get(name) for who, name in KEYS.items()}

    async def one(url: str, who: str, tries: int) -> RemoteModel:
        address, _, name = url.partition("#")
        return await RemoteModel.connect(Connection(address, who, held[who], seconds, tries), name or None)

    async def both() -> tuple[RemoteModel, RemoteModel | None]:
        if draft is None:
            return await one(target, "target", 4), None
        return await asyncio.gather(one(target, "target", 4), one(draft, "draft", DRAFT_TRIES))

    models = BACKGROUND.wait(both())
    if models[1] is not None and models[0].abilities.scores is None:
        raise BadRequest(
            f"{models[0].connection!r} reports no log-probabilities of prompts (neither with echo nor with "
            "prompt_logprobs), so it cannot score a draft; serve the target with vLLM, SGLang or semspec, or leave the "
            "draft out"
        )
    return RemotePair(*models, slots, context, allow_lossy)


def _changes_logits(options: Options) -> bool:
    given = options.logit_options()
    return replace(given, bad_words=tuple(given.bad_words)) != LogitOptions() or options.structured_outputs is not None


class RemoteSide:
    """What is asked of a runner wherever its logits are not."""

    vocab_size, num_layers, device = 1, 0, torch.device("cpu")

    def __init__(self, model: RemoteModel, executor: CallExecutor, context: int | None) -> None:
        self.model, self._executor = model, executor
        known = model.abilities.context
        self.max_seq_len = min(context or known or UNKNOWN_CONTEXT, known or context or UNKNOWN_CONTEXT)

    @property
    def free(self) -> int:
        return self._executor.free


class RemoteResources:
    """Of `pair.Resources`, what there is."""

    exchange = None
    probe_folder: Path | None = None
    eos: frozenset[int] = frozenset()

    def __init__(self, servers: Servers, tokenizer: RemoteTokenizer) -> None:
        self._empty, self.tokenizer = servers.vocabulary(), tokenizer
        self.thinking, self.common_markers = thinking_markers(tokenizer), CommonMarkers(tokenizer)

    def bytes_of(self, token: int) -> bytes:
        return self.tokenizer.pieces.text(token).encode()

    @property
    def grammars(self) -> NoReturn:
        raise BadRequest("structured output cannot be had from servers that exchange text; leave it out")

    def __getattr__(self, name: str) -> Any:
        """A rule is bound to the vocabulary of a step; here to an empty one, for what does not depend on it."""
        return getattr(self._empty, name)


class RemotePair(Pair):
    """As `Pair`, but whatever needs a model's tensors is refused before anything is asked."""

    def __init__(
        self, target: RemoteModel, draft: RemoteModel | None, slots: int, context: int | None, allow_lossy: bool
    ) -> None:
        executor = CallExecutor(slots)
        tokenizer = RemoteTokenizer(target, draft)
        judge = str(JUDGE_OF_EVIDENCE) if target.abilities.name == "pocket" and JUDGE_OF_EVIDENCE.is_dir() else ""
        turn = None if draft is None else BACKGROUND.wait(target.next_turn())
        self.servers = Servers(target, draft, tokenizer.pieces, JudgeProbes(judge), turn)
        self.target: Any = RemoteSide(target, executor, context)
        self.draft: Any = None if draft is None else RemoteSide(draft, executor, context)
        self.tokenizer: Any = tokenizer
        self.executor: Any = executor
        self.resources: Any = RemoteResources(self.servers, tokenizer)
        self.allow_lossy, self.eos, self._slots, self._context = allow_lossy, frozenset(), slots, context

    def __repr__(self) -> str:
        return f"<Pair: target {self.servers.target!r}, draft {self.servers.draft!r}>"

    @property
    def sparse(self) -> None:
        return None

    def wrapped(self, wrap: Callable[[Any], Any], executor: Any = None, wrap_head: Any = None) -> Pair:
        """Servers have their own caches."""
        return self

    def draft_alone(self) -> Pair:
        assert self.servers.draft is not None, "this pair has no draft model"
        return RemotePair(self.servers.draft, None, self._slots, self._context, self.allow_lossy)

    @property
    def warm_up_verifiers(self) -> tuple[str, ...]:
        return ()

    def submit(
        self, requests: Sequence[tuple[Prompt | list[int], Options]], grammar: Compiled | None = None
    ) -> list[Ticket]:
        prepared = [self._prepare(prompt, options) for prompt, options in requests]
        return [self._begin(*each) for each in prepared]

    def _begin(self, job: Job, text: TextStream, options: Options) -> Ticket:
        stats = Stats()
        decoder = TextDecoder(job, self.servers, stats, options.referee)
        return Ticket(self.executor, self.executor.submit(decoder.decode(), stats), job, stats, text)

    def _prepare(self, prompt: Prompt | list[int], options: Options) -> tuple[Job, TextStream, Options]:
        rule = self._rule(options)
        tokens = encode(self.tokenizer, prompt)
        if not isinstance(tokens, TextPrompt):
            raise BadRequest("servers are sent text, and this prompt is a list of token ids; give it as text")
        left = self.target.max_seq_len - len(tokens)
        if left < 1 or (options.max_new_tokens or 1) > left:
            raise BadRequest(
                f"the prompt has {len(tokens)} tokens and {options.max_new_tokens or 1} new ones are asked for, more "
                f"than the server's context of {self.target.max_seq_len}; shorten the prompt or ask for less"
            )
        text = TextStream(self.tokenizer, [], options.stop_strings, include_stop=options.include_stop)
        job = Job(
            prompt=tokens,
            rule=rule,
            num_draft_tokens=rule.max_step_tokens if isinstance(rule, StepRule) else 0,
            max_new_tokens=options.max_new_tokens or min(DEFAULT_NEW_TOKENS, left),
            sampling=options.sampling(),
            halt=text.feed,
            repetition_guard=options.repetition_guard(),
            thinking=self._thinking(tokens),
        )
        return job, text, options

    def _thinking(self, prompt: TextPrompt) -> Thinking | None:
        """Which is only counted."""
        markers: tuple[int, int] | None = self.resources.thinking
        return None if markers is None else Thinking(*markers, opens_thinking(self.tokenizer, prompt, markers))

    def load_drafter(self, options: Options) -> None:
        """The draft's server has what it needs."""

    def check(self, options: Options) -> None:
        self._rule(options)

    def _rule(self, options: Options) -> Rule:
        """What servers cannot do is refused here."""
        rule = verify.make(options.verifier)
        if not (rule.lossless or self.allow_lossy):
            raise BadRequest(f"verifier {rule.name!r} is lossy, and this pair was loaded with allow_lossy off")
        if rule.unit != "step" and rule.speculates:
            raise BadRequest(
                f"verifier {rule.name!r} compares single tokens, and servers exchange text; over servers choose "
                f"{STEP_RULES}"
            )
        refused = {
            "logprobs": options.logprobs is not None or options.prompt_logprobs is not None,
            "max_thinking_tokens": options.max_thinking_tokens is not None,
            "relax_span": options.relax_span != "all",
            "stop_ids": bool(options.stop_ids),
            "cache_salt": bool(options.cache_salt),  # their caches are shared by all who ask them
            "ignore_eos": options.ignore_eos,
            "a change of logits (penalties, biases, structured_outputs, ...)": _changes_logits(options),
            "draft_min_p and draft_max_entropy": options.early_exit.enabled,
            "a profile": options.profile is not None or options.count_entropy,
            "drafter": options.drafter not in (AUTO, "model"),
        }
        if isinstance(rule, StepRule):
            if self.draft is None:
                raise BadRequest(f"verifier {rule.name!r} needs a draft; give the address of its server as the draft")
            refused |= {
                "steps": rule.steps > 1, "delimiters": rule.delimiters != "all", "end_tokens": rule.end_tokens > 0,
                "candidates": rule.candidates > 1,
                f"what {rule.name} asks inside a step": rule.takeover_tokens() > 0 or rule.glimpses or rule.asks_draft,
            }  # fmt: skip
            bound = rule.bind(self.servers.vocabulary())
            if bound.layers or bound.draft_layers:
                raise BadRequest(NO_STATES)
        if wrong := [name for name, is_set in refused.items() if is_set]:
            raise BadRequest(f"{wrong[0]} cannot be had from servers that exchange text; leave it out")
        return rule

    def spelling(self, token: int) -> str:
        return self.servers.pieces.text(token)
