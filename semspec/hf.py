"""transformers' own `generate`, decoding with semspec: `model.generate(ids, custom_generate=semspec.hf.generate, ...)`.

The models are those that the caller has loaded, behind the same runner as any other model of transformers, so an answer
is what `Pair.generate` gives. What `generate` was asked for is honoured or refused, never ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from semspec.errors import BadRequest
from semspec.model.config import context_of
from semspec.model.hf_loading import refuse_without_truncation
from semspec.model.hf_runner import TransformersRunner
from semspec.options import Options
from semspec.pair import Pair
from semspec.pair.result import Result, Ticket
from semspec.text.exchange import Exchange, Side
from semspec.types import Runner
from semspec.verify import Rule

# What `generate` always passes on. Anything else is an input that the loop would not feed to the model.
PREPARED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
# `Sampling` does what these do.
SAMPLERS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "LogitNormalization")
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
DRAFTED_BY_OTHERS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "penalty_alpha")


@dataclass
class Output(GenerateDecoderOnlyOutput):
    """What `return_dict_in_generate=True` gives: as usual, and semspec's result of each row."""

    results: Any = None  # list[Result]; ModelOutput takes no other list


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Callable[..., Any]] = (),
    *,
    draft: PreTrainedModel | None = None,
    verifier: str | Rule = "exact",
    processing_class: PreTrainedTokenizerBase | None = None,
    draft_processing_class: PreTrainedTokenizerBase | None = None,
    seed: int | None = None,
    drafter: str = "auto",
    num_draft_tokens: int | str | None = None,
    max_thinking_tokens: int | None = None,
    relax_span: str = "all",
    allow_lossy: bool = True,
    **inputs: Any,
) -> Tensor | Output:
    """For `custom_generate`. `draft` may also be given as `assistant_model`; without either, drafts are looked up.

    `processing_class` is the tokenizer, for tokens that are never relaxed and rules that read text; by default the one
    that was saved with the model. Without a `seed`, torch's generator gives one, so `torch.manual_seed` counts.
    """
    caller = _arguments_of_generate()
    draft = caller.get("assistant_model") if draft is None else draft
    streamer = caller.get("streamer")
    _refuse(model, input_ids, generation_config, logits_processor, inputs)
    if streamer is not None and len(input_ids) > 1:
        raise BadRequest("a streamer is for one prompt, and there are several; give one, or no streamer")
    prompts = _prompts(input_ids, inputs.get("attention_mask"))
    config, seed = generation_config, int(torch.randint(2**62, ())) if seed is None else seed
    options = [
        Options(
            verifier=verifier,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=config.max_length - input_ids.shape[1],
            max_thinking_tokens=max_thinking_tokens,
            temperature=(1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0,
            top_k=config.top_k or 0,
            top_p=1.0 if config.top_p is None else config.top_p,
            min_p=config.min_p or 0.0,
            seed=(seed + i) % 2**63,
            relax_span=relax_span,
            allow_lossy=allow_lossy,
        )
        for i in range(len(prompts))
    ]
    with _evaluating(model, draft):
        pair = _pair(model, draft, processing_class, draft_processing_class, config, len(prompts))
        tickets = pair.submit(list(zip(prompts, options, strict=True)))
        _watch(tickets, stopping_criteria, input_ids.device)
        results = _run(pair, tickets, streamer)
    sequences = _padded(input_ids, [result.tokens for result in results], config)
    return Output(sequences=sequences, results=results) if config.return_dict_in_generate else sequences


def _arguments_of_generate() -> dict[str, Any]:
    """`generate` does not hand its arguments `assistant_model` and `streamer` on to a function of the caller's, so they
    are read from where it called from. Nothing of it is changed."""
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame and frame.f_back else None
    if caller is None or caller.f_code.co_name != "generate" or "custom_generate" not in caller.f_locals:
        return {}
    return {name: caller.f_locals.get(name) for name in ("assistant_model", "streamer")}


def _refuse(
    model: PreTrainedModel, ids: Tensor, config: GenerationConfig, processors: Sequence[Any], inputs: dict[str, Any]
) -> None:
    if model.config.is_encoder_decoder:
        raise BadRequest("semspec decodes what goes on from a prompt; this model is an encoder-decoder")
    refuse_without_truncation(model.config, type(model).__name__)
    if (config.num_beams or 1) > 1:
        raise BadRequest(f"num_beams is {config.num_beams}; semspec writes one sequence per prompt, give 1")
    odd = [type(p).__name__ for p in processors if type(p).__name__ not in SAMPLERS]
    if odd:
        raise BadRequest(
            f"{odd[0]} looks at the tokens before each one, and a draft's tokens are scored all at once; leave out "
            "what asks for it (penalties, minimum lengths, forbidden or forced tokens, a logits_processor of your own)"
        )
    wanted = [name for name in (*OUTPUTS, *DRAFTED_BY_OTHERS) if getattr(config, name, None)]
    if wanted:
        raise BadRequest(f"{wanted[0]} is not supported with semspec; leave it out")
    more = sorted(name for name, value in inputs.items() if name not in PREPARED and value is not None)
    if more or not ids.numel():
        raise BadRequest(f"{more[0] if more else 'an empty prompt'} cannot be given; semspec reads input_ids only")
    past = inputs.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise BadRequest("past_key_values has tokens in it; semspec keeps caches of its own, leave it out")


def _prompts(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The prompts without the padding on their left."""
    if mask is None:
        return [list(map(int, row)) for row in ids.tolist()]
    kept = [(row, [bool(m) for m in marks]) for row, marks in zip(ids.tolist(), mask.tolist(), strict=True)]
    if any(marks != sorted(marks) or not marks[-1] for _, marks in kept):
        raise BadRequest("prompts of different lengths are padded on the left: set padding_side='left'")
    return [row[marks.index(True) :] for row, marks in kept]


@contextmanager
def _evaluating(*models: PreTrainedModel | None) -> Iterator[None]:
    """A model with dropout writes another text every time, so no draft could be verified."""
    before = [(module, module.training) for model in models if model is not None for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _pair(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    config: GenerationConfig,
    slots: int,
) -> Pair:
    eos = _ids(config.eos_token_id)
    target = Side(tokenizer or _tokenizer(model, "processing_class"), _vocab(model), eos)
    exchange, common = None, None
    runner: Runner | None = None
    if draft is not None:
        refuse_without_truncation(draft.config, type(draft).__name__)
        own = draft_tokenizer or (tokenizer if _vocab(draft) == _vocab(model) else None)
        side = Side(own or _tokenizer(draft, "draft_processing_class"), _vocab(draft), _ids(draft.config.eos_token_id))
        exchange = Exchange.of(target, side)
        common = min(target.vocab_size, side.vocab_size) if exchange is None else None
        runner = TransformersRunner(draft, slots, _capacity(draft, config), common)
    return Pair(
        TransformersRunner(model, slots, _capacity(model, config), common),
        target.tokenizer,
        runner,
        eos,
        exchange=exchange,
    )


def _tokenizer(model: PreTrainedModel, option: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(model.config._name_or_path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here
        raise BadRequest(
            f"{type(model).__name__} has no tokenizer beside it, which tells the tokens that are never relaxed; give "
            f"{option}=tokenizer"
        ) from error


def _vocab(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _capacity(model: PreTrainedModel, config: GenerationConfig) -> int:
    """Caches grow as they are filled, so a slot may be as long as the model reads."""
    own = model.config.get_text_config(decoder=True)
    named = getattr(own, "max_position_embeddings", None)
    return context_of(own) if named else max(config.max_length, context_of(own))


def _ids(named: int | list[int] | None) -> frozenset[int]:
    found = named if isinstance(named, list) else [named]
    return frozenset(i for i in found if i is not None and i >= 0)


def _watch(tickets: list[Ticket], criteria: Sequence[Callable[..., Any]], device: torch.device) -> None:
    """Let criteria other than the usual two end a text, after each of its tokens, as `generate` would."""
    own = [c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
    for ticket in tickets if own else ():
        ticket.job.halt = _halt(ticket, own, device)


def _halt(
    ticket: Ticket, criteria: list[Callable[..., Any]], device: torch.device
) -> Callable[[list[int]], int | None]:
    text, so_far = ticket.job.halt, list(ticket.job.prompt)

    def halt(new: list[int]) -> int | None:
        for count, token in enumerate(new, start=1):
            so_far.append(token)
            ids = torch.tensor([so_far], device=device)
            if any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in criteria):
                if text is not None:
                    text(new[:count])
                return count
        return text(new) if text is not None else None

    return halt


def _run(pair: Pair, tickets: list[Ticket], streamer: Any) -> list[Result]:
    try:
        while any(not ticket.task.done for ticket in tickets):
            pair.executor.tick()
            for event in [event for ticket in tickets for event in ticket.collect()]:
                if streamer is not None and event.tokens:
                    streamer.put(torch.tensor(event.tokens))
    finally:
        for ticket in tickets:
            pair.executor.cancel(ticket.task)
    for ticket in tickets:
        if ticket.task.error is not None:
            raise ticket.task.error
    if streamer is not None:
        streamer.end()
    return [ticket.result() for ticket in tickets]


def _padded(ids: Tensor, rows: list[list[int]], config: GenerationConfig) -> Tensor:
    """Prompts with their answers, padded on the right as `generate` does."""
    pad = config.pad_token_id if config.pad_token_id is not None else min(_ids(config.eos_token_id), default=0)
    longest = max(map(len, rows))
    return torch.cat([ids, ids.new_tensor([row + [pad] * (longest - len(row)) for row in rows])], 1)
