"""The model `semspec` of lm-evaluation-harness: a pair, decoding by any verifier, scored by its target.

Prompts are decoded as batches of `batch_size`. Likelihoods are the target's own, whatever the verifier: they are what
a lossless verifier keeps, and a lossy one changes only what is generated.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from semspec.errors import BadRequest
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.options import Options
from semspec.pair import Pair
from semspec.pair.loading import load
from semspec.pair.remote import RemotePair
from semspec.remote.address import is_url
from semspec.types import Acquire, Event, Runner, Score, ScoreOutput

MAX_GEN_TOKS = 256  # as other models of the harness have it
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
IGNORED = ("do_sample", "until", "max_gen_toks", "max_tokens", "max_completion_tokens", "max_new_tokens")
LOADING = ("device", "draft_device", "dtype", "draft_dtype", "kv_dtype", "context", "sparse", "allow_lossy")


@register_model("semspec")
class SemspecLM(TemplateLM):
    def __init__(
        self,
        target: str = "",
        draft: str | None = None,
        verifier: str = "exact",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        num_draft_tokens: int | str | None = None,
        drafter: str = "auto",
        relax_span: str = "all",
        seed: int = 0,
        max_gen_toks: int = MAX_GEN_TOKS,
        pair: Pair | None = None,
        **loading: Any,
    ) -> None:
        """As `--model_args`: target, draft, verifier (its options parted by `;`), and what `semspec.load` takes."""
        super().__init__()
        odd = sorted(set(loading) - set(LOADING))
        if odd or not (target or pair):
            known = "target, draft, verifier, num_draft_tokens, drafter, relax_span, seed, max_gen_toks"
            what = f"has no argument {odd[0]!r}" if odd else "needs target=MODEL"
            raise BadRequest(f"the harness's model semspec {what}; its arguments are: {known}, {', '.join(LOADING)}")
        slots = 8 if str(batch_size).startswith("auto") else int(batch_size)
        self.options = Options(
            verifier=str(verifier).replace(";", ","),  # the harness parts its own arguments by commas
            num_draft_tokens=num_draft_tokens,
            drafter=drafter,
            relax_span=relax_span,
            seed=seed,
        )
        self.batch_size, self.max_gen_toks, self._name = slots, max_gen_toks, f"{target} {draft or ''}".strip()
        if is_url(target) or isinstance(pair, RemotePair):
            raise BadRequest(
                "the harness asks for tokens and likelihoods, and servers are sent text; `semspec bench --task "
                "lm_eval:NAME` takes servers, and so does the harness's own model local-completions"
            )
        self.pair = pair or load(target, draft, slots=slots, **loading)
        self.tokenizer = self.pair.tokenizer
        self.stats: list[Stats] = []  # of every text generated
        self._asked = 0  # prompts so far

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> SemspecLM:
        """From --model_args, which go before what the harness has of its own (--device, --batch_size)."""
        own = {key: value for key, value in (additional_config or {}).items() if value is not None}
        return cls(**own | arg_dict)

    @property
    def max_length(self) -> int:
        return self.pair.target.max_seq_len

    @property
    def eot_token_id(self) -> int:
        return min(self.pair.eos, default=0) if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        own = self.tokenizer.bos_token_id
        return self.eot_token_id if own is None else own

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__") or "semspec"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        more = {} if add_generation_prompt else {"continue_final_message": True}
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt, **more
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if not string:
            return []
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:  # a chat template may have put the beginning there already
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        given = [self._prepared(*request.args) for request in requests]
        texts = []
        for i in tqdm(range(0, len(given), self.batch_size), desc="semspec", disable=disable_tqdm):
            batch = given[i : i + self.batch_size]
            tickets = self.pair.submit(batch)
            try:
                while any(not ticket.task.done for ticket in tickets):
                    self.pair.executor.tick()
            finally:  # of one that was ended nobody takes the texts
                for ticket in tickets:
                    self.pair.executor.cancel(ticket.task)
            for ticket, request in zip(tickets, requests[i:], strict=False):
                ticket.collect()
                if ticket.task.error is not None:
                    raise ticket.task.error
                texts.append(ticket.result().text)
                self.stats.append(ticket.stats)
                self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _prepared(self, context: str, given: dict[str, Any]) -> tuple[list[int], Options]:
        """A prompt, its beginning left out if it is too long, and the options of its answer."""
        unknown = sorted(set(given) - {*SAMPLING, *IGNORED})
        if unknown:
            raise BadRequest(f"the task asks for {unknown[0]}={given[unknown[0]]!r}, which semspec does not have")
        until = given.get("until") or []
        named = [given[k] for k in IGNORED[2:] if given.get(k) is not None]
        wanted = int(named[0]) if named else self.max_gen_toks
        own = {key: given[key] for key in SAMPLING if given.get(key) is not None}
        if given.get("do_sample") is False or (own and "temperature" not in own and not given.get("do_sample")):
            own = {}
        elif given.get("do_sample") and "temperature" not in own:
            own["temperature"] = 1.0
        room = self.max_length - wanted
        if room < 1:
            raise BadRequest(f"an answer of {wanted} tokens does not fit into the context of {self.max_length}")
        tokens = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        # Repeated samples of one prompt differ, and so does the noise of different prompts.
        own["seed"], self._asked = ((self.options.seed or 0) + 7919 * self._asked) % 2**62, self._asked + 1
        return tokens, Options(**_values(self.options) | own, stop=tuple(stop), max_new_tokens=wanted)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **more: Any
    ) -> list[tuple[float, bool]]:
        found = []
        for i in tqdm(range(0, len(requests), self.batch_size), desc="semspec", disable=disable_tqdm):
            batch = requests[i : i + self.batch_size]
            scored = score(self.pair.executor, self.pair.target, [(c, k) for _, c, k in batch])
            for (names, *_), result in zip(batch, scored, strict=True):
                found.append(result)
                if names is not None:
                    self.cache_hook.add_partial("loglikelihood", names, result)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, owners = list[tuple[None, list[int], list[int]]](), list[int]()
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals


def _values(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("verifier", "num_draft_tokens", "drafter", "relax_span", "seed")}


@dataclass
class Scored:
    """A continuation's log-probability, and whether it is what the target itself writes."""

    logprob: float = 0.0
    greedy: bool = True


def score(executor: Executor, runner: Runner, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Contexts and continuations in tokens, in one batch. What does not fit is left out at the context's beginning."""
    results = [Scored() for _ in pairs]
    executor.run_all(
        _score(runner, context, continuation, result)
        for (context, continuation), result in zip(pairs, results, strict=True)
    )
    return [(result.logprob, result.greedy) for result in results]


def _score(
    runner: Runner, context: list[int], continuation: list[int], result: Scored
) -> Generator[Acquire | Score | Event, Any, None]:
    if not continuation:
        return
    tokens = [*context, *continuation][-runner.max_seq_len - 1 : -1]
    (slot,) = yield Acquire([runner], [tokens])
    try:
        rows: ScoreOutput = yield Score(
            runner, slot, tokens, logits_to_keep=min(len(continuation), len(tokens)), dense=True
        )
        logprobs = rows.logits.float().log_softmax(-1)
        wanted = logprobs.new_tensor(continuation[-len(logprobs) :]).long()
        result.logprob = float(logprobs.gather(1, wanted[:, None]).sum())
        result.greedy = bool((logprobs.argmax(-1) == wanted).all())
    finally:
        runner.release(slot)
