"""`semspec info`: what a model is, the memory it needs, and the time of its passes on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from semspec.cli import arguments as args
from semspec.cli.progress import loading, warn_if_busy
from semspec.cli.spread import spread
from semspec.errors import ModelError

if TYPE_CHECKING:
    from semspec.model import Source
    from semspec.model.memory_plan import MemoryPlan

ROWS = (1, 2, 3, 5, 9, 17)  # tokens in a pass: one, or a draft and the token before it
MAX_NAMED = 8  # special tokens in a list
PROFILED = (1, 2, 5, 9, 17)  # of these, the ones compared with memory bandwidth


@spread
def info(
    model: args.LocalArguments,
    slots: Annotated[int, typer.Option(help="Sequences decoded at a time.")] = 1,
    measure: Annotated[bool, typer.Option(help="Load the models and time their passes.")] = True,
    profile: Annotated[
        bool, typer.Option("--profile", help="Compare passes with memory bandwidth; list the best draft lengths.")
    ] = False,
    as_json: args.Json = False,
) -> None:
    """Describe a model, with or without a draft: family, sizes, shared tokenizer, memory, and the time of a pass."""
    if measure or profile:
        warn_if_busy()
    found = gather(model, slots, measure or profile, profile)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
    else:
        show(found, Console(highlight=False, soft_wrap=True))


def gather(model: args.ModelArguments, slots: int, measure: bool, profile: bool = False) -> dict[str, Any]:
    from semspec.loop import cost_profile as costs
    from semspec.model.memory_plan import check, describe
    from semspec.model.threads import choose_threads
    from semspec.pair.loading import context_of_draft, exchange_of, find, kv_dtype_of_draft
    from semspec.pocket.shipped import shipped_pair

    sources = [find(name) for name in shipped_pair(model.target, model.draft) if name is not None]
    device, kinds = model.device, [model.dtype, model.draft_dtype or model.dtype]
    context = None if model.context is None else min(model.context, sources[0].context)
    plans = [sources[0].plan(device, kinds[0], slots, context, kv_dtype=model.kv_dtype, rules=True)]
    caches = [model.kv_dtype]
    tokenizers: dict[str, Any] = {}
    if len(sources) == 2:
        exchange = None
        try:
            exchange = exchange_of(*sources)
            same = {"agree": True, "shared_ids": min(source.vocab_size for source in sources)}
            tokenizers = same if exchange is None else {"agree": False, **exchange.facts()}
        except ModelError as error:
            tokenizers = {"agree": False, "refusal": str(error)}
        n = context_of_draft(plans[0].context, sources[1], exchange)
        caches.append(kv_dtype_of_draft(model.kv_dtype, sources[1], device))
        plans.append(sources[1].plan(device, kinds[1], slots, n, kv_dtype=caches[1]))
    found: dict[str, Any] = {
        "models": [facts(source, plan) for source, plan in zip(sources, plans, strict=True)],
        "memory": {"line": describe(plans), "bytes": sum(plan.total for plan in plans), "fits": True},
    }
    try:
        check(plans)
    except ModelError as error:
        found["memory"] |= {"fits": False, "refusal": str(error)}
    if tokenizers:
        found["tokenizers"] = tokenizers
    if measure and found["memory"]["fits"] and not any(model["refusal"] for model in found["models"]):
        each = zip(sources, kinds, plans, caches, strict=False)
        with loading():
            runners = [s.load(device, kind, slots, p.context, kv_dtype=kv) for s, kind, p, kv in each]
        choose_threads(runners[0])
        found["passes"] = [{str(rows): costs.pass_cost(runner, rows) for rows in ROWS} for runner in runners]
        found["drafts"] = break_even(*found["passes"])
        if profile:
            found["profile"] = costs.profile(runners, plans, found["passes"])
    return found


def facts(source: Source, plan: MemoryPlan) -> dict[str, Any]:
    config, shape = source.config, source.shape
    heads = getattr(config, "num_attention_heads", None)  # None: it has no attention
    return {
        "path": str(source.path),
        "model_type": config.model_type,
        "runner": "transformers" if shape is None else "native",
        "parameters": None if shape is None else shape.parameters,
        "stored": source.stored_as,
        "refusal": refusal(source),
        "mtp": shape is None and has_mtp(source),
        "bytes": plan.weights,
        "bytes_read_by_a_pass": plan.read,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "vocabulary": source.vocab_size,
        "context": source.context,
        "windows": sorted({s.window for s in shape.attention_specs if s.window}) if shape else [],
    }


def refusal(source: Source) -> str | None:
    """Why the weights cannot be read; a plan needs the config alone, and may be asked for before they are there."""
    from semspec.model.weights import open_checkpoint

    try:
        with open_checkpoint(source.path):
            return None
    except ModelError as error:
        return str(error)


def has_mtp(source: Source) -> bool:
    """Whether a model that transformers runs brings a layer that can draft."""
    from semspec.model.heads.mtp import Layout
    from semspec.model.weights import Checkpoint

    try:
        with Checkpoint(source.path) as checkpoint:
            return Layout.of(checkpoint, source.config.num_hidden_layers) is not None
    except ModelError:
        return False


def break_even(target: dict[str, float], draft: dict[str, float] | None = None) -> list[dict[str, float]]:
    """For each draft length the tau (tokens per round) at which speculation is as fast as the target alone. A round
    yields at most one token more than the draft has."""
    each = draft["1"] if draft else 0.0
    lengths = [rows - 1 for rows in ROWS if rows > 1]
    return [
        {"draft_tokens": k, "tau_to_break_even": (target[str(k + 1)] + k * each) / target["1"], "tau_at_most": k + 1}
        for k in lengths
    ]


def show(found: dict[str, Any], console: Console) -> None:
    for role, model in zip(("target", "draft"), found["models"], strict=False):
        size = "" if model["parameters"] is None else f", {model['parameters'] / 1e6:.0f}M parameters"
        size += "" if model["stored"] is None else f", stored as {model['stored']}"
        size += ", dequantised while loading" if model["stored"] and model["runner"] == "transformers" else ""
        heads = f", {model['heads']} query and {model['kv_heads']} KV heads" if model["heads"] else ""
        windows = f", windows of {', '.join(map(str, model['windows']))} tokens" if model["windows"] else ""
        console.print(
            f"[bold]{role}[/bold] {model['path']}: {model['model_type']} ({model['runner']} runner){size}, "
            f"{model['layers']} layers of {model['width']}{heads}, vocabulary {model['vocabulary']}, "
            f"context {model['context']}{windows}"
        )
        if model["mtp"] and role == "target":
            console.print("it brings a layer that drafts (multi-token prediction): --drafter mtp", markup=False)
        if model["refusal"]:
            console.print(f"cannot be loaded: {model['refusal']}", markup=False)
    if "tokenizers" in found:
        console.print(tokenizers_in_words(found["tokenizers"]), markup=False)
    memory = found["memory"]
    console.print(f"memory: {memory['line']}" if memory["fits"] else f"memory: {memory['refusal']}")
    if "passes" not in found:
        return
    roles = ["target", "draft"][: len(found["passes"])]
    table = Table("tokens in a pass", *(f"{role}, ms" for role in roles), "draft length", "break-even tau")
    drafts = {d["draft_tokens"] + 1: d for d in found["drafts"]}
    for rows in ROWS:
        costs = [f"{cost[str(rows)]:.1f}" for cost in found["passes"]]
        d = drafts.get(rows)
        table.add_row(
            str(rows), *costs, *((str(rows - 1), f"{d['tau_to_break_even']:.2f} (at most {rows})") if d else ())
        )
    console.print(table)
    console.print(
        "Speculation pays where tau (tokens per round) is above break-even; it is at most draft length + 1.",
        style="dim",
    )
    if "profile" in found:
        show_profile(found["profile"], found["passes"], console)


def tokenizers_in_words(found: dict[str, Any]) -> str:
    if found["agree"]:
        return f"tokenizers agree on {found['shared_ids']} ids"
    if "refusal" in found:
        return str(found["refusal"])
    what = "special tokens differ: ids are exchanged" if found["exchange"] == "ids" else "text is exchanged"
    lines = [
        f"tokenizers differ, {what}; {found['shared_tokens']} tokens are in both ({found['shared_share']:.0%} of the "
        "smaller vocabulary), which sampling and block draw from"
    ]
    if found["mapped"]:
        lines.append("mapped: " + ", ".join(f"{own} to {other}" for own, other in found["mapped"].items()))
    for title, key in (("not read by the draft", "not_read_by_draft"), ("never proposed", "never_proposed")):
        if found[key]:
            more = f" and {len(found[key]) - MAX_NAMED} more" if len(found[key]) > MAX_NAMED else ""
            lines.append(f"{title}: {', '.join(found[key][:MAX_NAMED])}{more}")
    return "\n".join(lines)


def show_profile(profile: dict[str, Any], passes: list[dict[str, float]], console: Console) -> None:
    console.print(f"{profile['device']}: memory bandwidth {profile['bandwidth_GBps']:.1f} GB/s")
    for role, limit, costs in zip(("target", "draft"), profile["limits_ms"], passes, strict=False):
        if limit is None:
            console.print(f"{role}: the bytes that a pass reads are not known in advance")
            continue
        ratios = ", ".join(f"{costs[str(rows)] / limit:.2f} ({rows})" for rows in PROFILED)
        line = f"{role}: reading the weights and {profile['context']} cached tokens takes {limit:.3g} ms; "
        console.print(f"{line}a pass takes this many times as long (tokens in the pass): {ratios}")
    if "best_drafts" not in profile:
        return
    limit = profile["limits_ms"][1]
    times = f", {profile['draft_token_ms'] / limit:.2f} times its limit" if limit else ""
    console.print(f"a draft token: {profile['draft_token_ms']:.3g} ms{times}")
    table = Table("acceptance", "best draft", "tau", "speedup")
    for best in profile["best_drafts"]:
        length = str(best["draft_tokens"]) if best["draft_tokens"] else "none"
        table.add_row(f"{best['acceptance']:.1f}", length, f"{best['tau']:.2f}", f"{best['speedup']:.2f}x")
    console.print(table)
