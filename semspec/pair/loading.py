"""Loading a pair of models: find them, plan memory, load."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from semspec.draft.kinds import HeadKind
from semspec.errors import BadRequest, ModelError, cause, did_you_mean
from semspec.model import ModelRunner, Source, memory_plan
from semspec.model.heads.plan import HeadPlan, head_plan
from semspec.model.memory_plan import MemoryPlan, check, describe, fitted
from semspec.model.placement import choose_device
from semspec.model.threads import choose_threads, row_cost, step_costs
from semspec.options import AUTO, Options
from semspec.pair import Pair
from semspec.pair.remote import connect
from semspec.pocket.shipped import HEADS as SHIPPED_HEADS
from semspec.pocket.shipped import PROBES, SHIPPED, shipped_pair
from semspec.remote.address import is_url
from semspec.sparse import SparsePlan, apply
from semspec.text.exchange import Exchange, Side
from semspec.text.frequent import head_ids
from semspec.text.tokenizer import load_tokenizer
from semspec.types import Runner

MORE_TOKENS = 1.25  # context of a draft model with another tokenizer, which may need more tokens for the same text


def load(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    device: str = "auto",
    draft_device: str | None = None,
    dtype: str = "auto",
    draft_dtype: str | None = None,
    draft_vocab: int | str | Path | None = None,
    kv_dtype: str = "auto",
    slots: int = 8,
    context: int | None = None,
    cache_tokens: int | None = None,
    drafter: str = AUTO,
    sparse: str | Path | SparsePlan | None = None,
    allow_lossy: bool = True,
    report: Callable[[str], None] | None = None,
) -> Pair:
    """Load a target and, if given, its draft model: folders, .gguf files or hub ids, or "pocket" for the pair in the
    package; or take the addresses of two OpenAI-compatible servers, as http://host:8001/v1 (docs/remote.md).
    `slots` sequences are decoded at a time, each of at most `context` tokens; others wait. On a GPU they share a cache
    of `cache_tokens`, by default as many as all slots can hold, or as there is memory for; where it is full, the
    youngest give way and go on later. On a CPU they do so if `cache_tokens` is given.

    `drafter` is what requests will name, if that is a draft head: its memory is planned, too.

    `dtype` is auto, float32, bfloat16 or float16, or fp8, int8 or int4, which quantise the weights while loading; the
    draft model's may be another. `draft_vocab` limits the draft model's head to so many tokens, or to those in a file
    of `semspec vocabulary`; answers stay lossless. `kv_dtype` is auto or, on a GPU, fp8, which stores keys and values
    in half the bytes, of the draft model too where it can.

    `sparse` is a plan, or its folder, of what the target may skip when it scores a draft (docs/sparse.md).

    With `allow_lossy` off every answer keeps the target's distribution: lossy verifiers and sparse plans are refused.

    `report` is called with one line on the memory needed, before anything is loaded.

    On a CPU torch is given one thread if that is faster here and now (docs/usage.md), unless OMP_NUM_THREADS is set.
    """
    if slots < 1:
        raise BadRequest(f"slots is {slots}; give 1 or more, the number of sequences decoded at a time")
    if sparse is not None and not allow_lossy:
        raise BadRequest(
            "a sparse plan is lossy, and allow_lossy is off; load the target without the plan, or allow lossy answers"
        )
    if is_url(target) or is_url(draft):
        local = {
            "device": device != "auto", "draft_device": draft_device, "dtype": dtype != "auto",
            "draft_dtype": draft_dtype, "draft_vocab": draft_vocab, "sparse": sparse, "cache_tokens": cache_tokens,
            "kv_dtype": kv_dtype != "auto",
        }  # fmt: skip
        if wrong := [name for name, given in local.items() if given]:
            raise BadRequest(f"{wrong[0]} is for models loaded here, and this pair is servers; leave it out")
        if not is_url(target):
            raise BadRequest(f"the draft is a server, and the target {target} is not; give the address of one")
        return connect(str(target), None if draft is None else str(draft), slots, context, allow_lossy)
    target, draft = shipped_pair(target, draft)
    plan = SparsePlan.load(Path(sparse)) if isinstance(sparse, str | Path) else sparse
    source = find(target)
    tokenizer = load_tokenizer(source.path)
    eos = _end_of_text(source, tokenizer)
    channels = plan.ffn if plan is not None and plan.ffn is not None and plan.ffn.by == "union" else None
    layers = int(channels.thresholds.count_nonzero()) if channels else 0
    given, dtype = dtype, _dtype(source, device, dtype, context, report, floats=plan is not None)
    draft_dtype = (given if plan is None else dtype) if draft_dtype is None else draft_dtype
    pool = cache_tokens is not None
    plans = [source.plan(device, dtype, slots, context, layers, kv_dtype, rules=True, pool=pool)]
    if plan is not None and plan.attention is not None:  # the index of the blocks takes memory too
        per_token, attention = plans[0].per_token, plan.attention
        wide = per_token if kv_dtype == "auto" else source.plan(device, dtype, slots, context).per_token
        extra = wide * attention.vectors_per_block // (2 * attention.block)
        plans[0] = replace(plans[0], per_token=per_token + extra, paged=False)  # and is made for full slots
    if draft is None:
        if draft_vocab is not None:
            raise BadRequest("draft_vocab is for a draft model, and there is none; give one or leave it out")
        head = _head(drafter, source, plans[0], device, dtype)
        plans = _announce(plans, cache_tokens, report, head)
        runner = source.load(device, dtype, slots, context, tokens=plans[0].tokens, kv_dtype=kv_dtype)
        choose_threads(runner)
        cost = row_cost(runner)
        if plan is not None:
            apply(plan, runner)
        return _shared(Pair(runner, tokenizer, eos=eos, allow_lossy=allow_lossy, row_cost=cost), plans, head)
    draft_source = find(draft)
    exchange = exchange_of(source, draft_source, tokenizer)
    # Models with the same tokens share the ids of the smaller vocabulary; others each have their own.
    common = min(source.vocab_size, draft_source.vocab_size) if exchange is None else None
    draft_device = device if draft_device is None else draft_device
    draft_dtype = "bfloat16" if (draft_dtype, dtype) == ("auto", "bfloat16") else draft_dtype  # no more fits
    draft_context = context_of_draft(plans[0].context, draft_source, exchange)
    # Both may be the same model on the same weights, but a model that transformers runs is loaded twice.
    here = choose_device(draft_device) == choose_device(device)  # whatever it was called
    shared = draft_source.path == source.path and here and draft_dtype == dtype and source.shape is not None
    ids = (
        None
        if draft_vocab is None
        else head_ids(draft_vocab, load_tokenizer(draft_source.path), draft_source.vocab_size)
    )
    draft_kv = kv_dtype_of_draft(kv_dtype, draft_source, draft_device)
    draft_plan = draft_source.plan(draft_device, draft_dtype, slots, draft_context, kv_dtype=draft_kv, pool=pool)
    plans = [*plans, replace(draft_plan, weights=0) if shared else draft_plan]
    head = _head(drafter, source, plans[0], device, dtype)
    plans = _announce(plans, cache_tokens, report, head)
    runner = source.load(device, dtype, slots, context, common, tokens=plans[0].tokens, kv_dtype=kv_dtype)
    choose_threads(runner)
    cost = row_cost(runner)
    if plan is not None:
        apply(plan, runner)
    if shared and isinstance(runner, ModelRunner):
        transformer = runner.transformer if ids is None else runner.transformer.with_head(ids)
        fp8 = draft_kv == "fp8"
        draft_runner: Runner = ModelRunner(
            transformer, slots, runner.max_seq_len, common, plans[1].tokens, fp8_cache=fp8
        )
    else:
        where = (draft_device, draft_dtype, slots, draft_context)
        draft_runner = draft_source.load(*where, common, ids, plans[1].tokens, draft_kv)
    shipped = PROBES if target == "pocket" and PROBES.is_dir() else None  # its judge probe reads the target only
    steps = step_costs(draft_runner, runner)
    return _shared(Pair(runner, tokenizer, draft_runner, eos, shipped, allow_lossy, exchange, cost, steps), plans, head)


def _head(drafter: str, source: Source, target: MemoryPlan, device: str, dtype: str) -> HeadPlan | None:
    kind = Options(drafter=drafter).drafter_kind
    if not isinstance(kind, HeadKind) or source.shape is None or not kind.path:
        return None
    path, precision = SHIPPED_HEADS.get(kind.path, kind.path), source.precision(device, dtype)
    return head_plan(path, target, source.shape, precision, Path(kind.path).name)


def _shared(pair: Pair, plans: list[MemoryPlan], head: HeadPlan | None) -> Pair:
    """Slots of a pool that may be empty, or of layers that keep their window only, may have to be recomputed: a
    prefix cache remembers what they held."""
    if head is not None and pair.caches is not None:
        pair.caches.target.states_limit = head.states * plans[0].held
    windowed = any(runner.windowed for runner in (pair.target, pair.draft) if runner is not None)
    return pair.cached() if windowed or any(plan.tokens is not None for plan in plans) else pair


def exchange_of(
    source: Source, draft_source: Source, tokenizer: PreTrainedTokenizerBase | None = None
) -> Exchange | None:
    """How two models read each other's tokens; None: they have the same."""
    sides = []
    for one, known in ((source, tokenizer), (draft_source, None)):
        own = known or load_tokenizer(one.path)
        sides.append(Side(own, one.vocab_size, _end_of_text(one, own)))
    return Exchange.of(*sides)


def context_of_draft(target_context: int, draft_source: Source, exchange: Exchange | None) -> int:
    """Tokens that a slot of the draft model has room for."""
    longer = 1 if exchange is None else MORE_TOKENS
    return min(int(longer * target_context), draft_source.context)


def kv_dtype_of_draft(kv_dtype: str, draft_source: Source, device: str) -> str:
    """The target's where it can be: a CPU and transformers' models have plain caches."""
    return kv_dtype if draft_source.shape is not None and choose_device(device).type != "cpu" else "auto"


def find(model: str | Path) -> Source:
    """A model that is shipped, on the disk or in the hub. Nobody means the hub by a shipped name with a typo."""
    near = did_you_mean(str(model), SHIPPED)
    if near and str(model) not in SHIPPED and not Path(model).exists():
        raise ModelError(f"there is no model {model}; {near}")
    return Source.find(SHIPPED.get(str(model), model))


def readable(dtype: str, device: str) -> str:
    """Of a target that verifies by sparse plans, which read its weights: on a CPU these are floats."""
    return "float32" if dtype == "auto" and choose_device(device).type == "cpu" else dtype


def _dtype(
    source: Source, device: str, dtype: str, context: int | None, report: Callable[[str], None] | None, floats: bool
) -> str:
    """By default float32 on a CPU, in which `exact` is exact, or the blocks of four bits that a GGUF file has, in which
    it is, too, unless these have to be `floats`; bfloat16 where only that fits."""
    if dtype != "auto" or choose_device(device).type != "cpu":
        return dtype
    dtype = readable(dtype, device) if floats else dtype
    plan = source.plan(device, dtype, 1, context)
    free, narrow = memory_plan.available(plan.device), source.plan(device, "bfloat16", 1, context)
    if free is None or plan.total <= free or plan.total <= narrow.total:
        return dtype
    if report is not None:
        report(f"{plan.name}: float32 would take {memory_plan.size(plan.total)}, so it is bfloat16 (--dtype)")
    return "bfloat16"


def _announce(
    plans: list[MemoryPlan],
    cache_tokens: int | None,
    report: Callable[[str], None] | None,
    head: HeadPlan | None = None,
) -> list[MemoryPlan]:
    """Share the memory there is, report what is needed, and refuse if there is not enough."""
    if cache_tokens is not None and (cache_tokens < 1 or not plans[0].paged):
        raise BadRequest(
            f"cache_tokens is {cache_tokens}; give the tokens that all slots hold together, or leave it out: "
            "under transformers, with a sparse plan of attention and with integer weights on a CPU each slot of the "
            "target has room for its whole context"
        )
    plans = fitted(plans if head is None else [*plans, head.memory], cache_tokens)
    if report is not None:
        report(describe(plans))
    check(plans)
    return plans


def _end_of_text(source: Source, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End-of-text tokens that the model's config, the tokenizer and generation_config.json name."""
    ids = [*source.stop, tokenizer.eos_token_id]
    settings = source.path / "generation_config.json"
    if settings.is_file():
        try:
            named = json.loads(settings.read_text()).get("eos_token_id")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ModelError(f"{settings} cannot be read: {cause(error)}") from error
        named = named if isinstance(named, list) else [named]
        if not all(i is None or type(i) is int for i in named):
            raise ModelError(f"{settings} names an eos_token_id that is no token id; give a whole number or a list")
        ids += named
    return frozenset(i for i in ids if i is not None and i >= 0)  # some write -1 for none
