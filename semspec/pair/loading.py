"""From the names of models to a pair: find, plan, load."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest, ModelError
from semspec.model import ModelRunner, Source
from semspec.model.memory_plan import MemoryPlan, check, describe
from semspec.pair import Pair
from semspec.pocket.shipped import PROBES, SHIPPED
from semspec.sparse import SparsePlan, apply
from semspec.text.tokenizer import common_vocabulary, load_tokenizer
from semspec.types import Runner


def load(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    device: str = "auto",
    draft_device: str | None = None,
    dtype: str = "auto",
    slots: int = 8,
    context: int | None = None,
    sparse: str | Path | SparsePlan | None = None,
    allow_lossy: bool = True,
    report: Callable[[str], None] | None = None,
) -> Pair:
    """Load a target and, if given, its draft model: folders, .gguf files or hub ids, or "pocket" for the pair in the
    package. `slots` sequences are decoded at a time, each of at most `context` tokens; further ones wait.

    `sparse` is a plan, or its folder, that says what the target may leave out when it checks a draft (docs/sparse.md).

    With `allow_lossy` off the pair answers as the target alone would, whatever a request says: it refuses lossy
    verifiers, and here a plan.

    `report` is told in one line, before anything is loaded, what memory will be taken.
    """
    if slots < 1:
        raise BadRequest(f"slots is {slots}; give 1 or more, the number of sequences decoded at a time")
    if sparse is not None and not allow_lossy:
        raise BadRequest(
            "by a sparse plan no draft is checked without loss, and allow_lossy is off; load the target without the "
            "plan, or allow lossy answers"
        )
    if target == "pocket" and draft is None:
        draft = "pocket-draft"
    plan = SparsePlan.load(Path(sparse)) if isinstance(sparse, str | Path) else sparse
    source = Source.find(SHIPPED.get(str(target), target))
    tokenizer = load_tokenizer(source.path)
    eos = source.stop | _end_of_text(source.path, tokenizer)
    plans = [source.plan(device, dtype, slots, context)]
    if plan is not None and plan.attention is not None:  # what blocks are known by is kept beside them
        each, by = plans[0].per_token, plan.attention.vectors_per_block
        plans[0] = replace(plans[0], per_token=each + each * by // (2 * plan.attention.block))
    if draft is None:
        _announce(plans, report)
        alone = source.load(device, dtype, slots, context)
        if plan is not None:
            apply(plan, alone)
        return Pair(alone, tokenizer, eos=eos, allow_lossy=allow_lossy)
    partner = Source.find(SHIPPED.get(str(draft), draft))
    common = common_vocabulary(tokenizer, load_tokenizer(partner.path), source.vocab, partner.vocab)
    place, room = device if draft_device is None else draft_device, min(plans[0].context, partner.context)
    # The same weights serve both, but not of a model that transformers runs: that one is loaded twice.
    twins = partner.path == source.path and place == device and source.shape is not None
    second = partner.plan(place, dtype, slots, room)
    _announce([*plans, replace(second, weights=0) if twins else second], report)
    runner = source.load(device, dtype, slots, context)
    if plan is not None:
        apply(plan, runner)
    if twins and isinstance(runner, ModelRunner):
        drafter: Runner = ModelRunner(runner.transformer, slots, runner.capacity)
    else:
        drafter = partner.load(place, dtype, slots, room)
    runner.vocab = drafter.vocab = common
    shipped = PROBES if (target, draft) == ("pocket", "pocket-draft") and PROBES.is_dir() else None
    return Pair(runner, tokenizer, drafter, eos, probe_folder=shipped, allow_lossy=allow_lossy)


def _announce(plans: list[MemoryPlan], report: Callable[[str], None] | None) -> None:
    """Say what memory will be taken, and refuse what cannot be had."""
    if report is not None:
        report(describe(plans))
    check(plans)


def _end_of_text(path: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End-of-text tokens that the tokenizer and the generation settings name beside the model's own config."""
    ids = [tokenizer.eos_token_id]
    settings = path / "generation_config.json"
    if settings.is_file():
        try:
            named = json.loads(settings.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{settings} cannot be read: {error}") from error
        ids += named if isinstance(named, list) else [named]
    return frozenset(i for i in ids if i is not None)
