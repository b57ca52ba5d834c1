"""`semspec sparse`: calibrate, measure and show sparse plans. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from semspec.cli import arguments as args
from semspec.cli.progress import bar, loading
from semspec.cli.sparse_options import K, MoreTexts, TargetArguments, Texts
from semspec.cli.spread import spread
from semspec.errors import BadRequest, cause

app = typer.Typer(
    help="Sparse verification: verify drafts with parts of the KV cache, FFN channels or experts skipped.",
    no_args_is_help=True,
)


@app.command()
@spread
def calibrate(
    model: TargetArguments,
    out: Annotated[Path, typer.Option(help="Folder of the plan.")],
    texts: Texts,
    preset: Annotated[
        str, typer.Option(help="default: ours; paper: the paper's rules. Options below change single parts.")
    ] = "default",
    rho: Annotated[
        float | None, typer.Option(help="Share of the KV cache to read beyond L0; 1: all. Default: 0.1.")
    ] = None,
    dense_below: Annotated[
        int | None, typer.Option(help="L0, the context length up to which all is read. Default: 1024; paper: 4096.")
    ] = None,
    block: Annotated[
        int | None, typer.Option(help="Tokens in a block of the KV cache. Default: 16; paper: 64.")
    ] = None,
    sinks: Annotated[int | None, typer.Option(help="First blocks that are always read. Default: 1.")] = None,
    recent: Annotated[int | None, typer.Option(help="Latest blocks that are always read. Default: 2.")] = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="How blocks are scored: q.k of the first token and the mean key (first, the paper's), largest "
            "attention share of any token (share), or the same with the keys' variance added (reach). "
            "Default: reach; paper: first."
        ),
    ] = None,
    spread: Annotated[
        str | None,
        typer.Option(
            help="Take the best blocks over all heads (pairs), or equally many of each head (heads). Default: pairs."
        ),
    ] = None,
    rest: Annotated[
        str | None,
        typer.Option(
            help="What stands in for blocks that are not read: nothing, or their mean key and value (mean). "
            "Default: mean; paper: nothing."
        ),
    ] = None,
    reuse: Annotated[
        float | None,
        typer.Option(
            help="Layers whose blocks overlap this much (Jaccard) with the last anchor's reuse them. Default: 0.7."
        ),
    ] = None,
    shallow: Annotated[
        int | None, typer.Option(help="First layers that always select for themselves. Default: 4.")
    ] = None,
    ffn: Annotated[float | None, typer.Option(help="Share of a token's FFN channels to skip. Default: 0, off.")] = None,
    ffn_threshold: Annotated[
        float | None,
        typer.Option(
            help="Skip FFN channels with an activation below this, in every layer. Default: 0, off; paper: 0.05."
        ),
    ] = None,
    ffn_by: Annotated[
        str | None,
        typer.Option(help="Skip channels by token, or by the union of a draft's tokens. Default: union; paper: token."),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(help="Maximum experts of a token to skip. Default: 0, off; paper: 3, where there are experts."),
    ] = None,
    quantile: Annotated[
        float | None,
        typer.Option(help="Quantile that sets the experts' thresholds. Default: 0.5, the paper's medians."),
    ] = None,
    refresh: Annotated[
        int | None,
        typer.Option(help="Recompute keys and values densely after this many sparse passes. Default: 0, never."),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Time it on this device, and turn off what is not faster.")
    ] = False,
) -> None:
    """Make a plan for a model from texts that it generates itself."""
    from semspec.sparse_fit import presets
    from semspec.sparse_fit.break_even import keep_what_pays
    from semspec.sparse_fit.calibrate import calibrate as run

    config = presets.config(
        preset, rho=rho, dense_below=dense_below, block=block, sinks=sinks, recent=recent, score=score, spread=spread,
        rest=rest, reuse=reuse, shallow=shallow, ffn=ffn, ffn_threshold=ffn_threshold, ffn_by=ffn_by, experts=experts,
        quantile=quantile, refresh=refresh,
    )  # fmt: skip
    problems, pair = texts.problems(), model.load()
    with bar("calibrate") as progress:
        plan = run(pair, problems, texts.n, config, texts.seed, texts.k, texts.max_new_tokens, progress)
    plan.made.update(task=texts.task, preset=preset)
    if auto:
        plan = keep_what_pays(pair, problems, plan, texts.seed, texts.k)
    plan.save(out)
    Console(stderr=True, highlight=False).print(f"{out}: {plan}", markup=False)
    summary: dict[str, Any] = {"plan": str(out), "model": plan.model, "made": plan.made}
    if plan.attention:
        summary["anchors"] = plan.attention.anchors
        summary["token_overlap"] = [round(float(row.nanmean()), 3) for row in plan.seen["token_overlap"]]
    if plan.ffn:
        summary["token_share"] = [round(s, 3) for s in plan.seen["token_share"].nan_to_num(-1).tolist()]
        summary["thresholds"] = [round(t, 5) for t in plan.ffn.thresholds.tolist()]
        summary["union_share"] = [round(s, 3) for s in plan.seen["union_share"].nan_to_num(-1).tolist()]
    if plan.experts:
        summary["betas"] = [[round(b, 4) for b in row] for row in plan.experts.betas.tolist()]
    typer.echo(json.dumps(summary))


@app.command()
@spread
def quality(
    model: args.LocalArguments,
    sparse: Annotated[Path, typer.Option(help="Folder of the plan.")],
    texts: MoreTexts,
    verifier: args.Verifier = "exact",
    drafter: args.Drafter = "auto",
    rho: Annotated[
        list[float] | None, typer.Option(help="Share of the KV cache to read beyond L0; may be repeated.")
    ] = None,
    dense_below: Annotated[
        list[int] | None, typer.Option(help="L0, the context length up to which all is read; may be repeated.")
    ] = None,
    ffn_threshold: Annotated[
        list[float] | None, typer.Option(help="Skip channels with an activation below this; may be repeated.")
    ] = None,
    experts: Annotated[
        list[int] | None, typer.Option(help="Maximum experts of a token to skip; may be repeated.")
    ] = None,
    experts_always: Annotated[
        list[int] | None, typer.Option(help="Skip this many experts of every token; may be repeated.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only variants with this in their name, e.g. attention; may be repeated.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Problems solved as one batch.")] = 8,
    label: Annotated[str, typer.Option(help="Prefix that `table` puts before the names of these variants.")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    quiet: args.NoMemoryLine = False,
) -> None:
    """Measure what a plan costs: each part by itself and all together, against dense verification."""
    from semspec.sparse.plan import SparsePlan
    from semspec.sparse_fit.quality import measure, select, variants
    from semspec.sparse_fit.table import on_screen

    plan, problems = SparsePlan.load(sparse), texts.problems()
    with loading(quiet) as report:
        pair = model.load(min(slots, texts.n), report=report)
    skipped = experts or (), experts_always or ()
    found = variants(plan, pair.target.num_layers, rho or (), *skipped, dense_below or (), ffn_threshold or ())
    plans = select(found, only or [])
    document = {name: getattr(texts, name) for name in ("task", "seed", "k")}
    document |= {"verifier": verifier, "drafter": drafter, "target": model.target}
    document |= {"label": label, "plan": str(plan), "dtype": model.dtype, "device": str(pair.target.device)}
    ids = [problem.id for problem in problems.problems(texts.n, texts.seed)]
    how = texts.seed, texts.k, verifier, texts.max_new_tokens, drafter
    with bar(f"quality on {texts.task}") as progress:
        for rows in measure(pair, problems, texts.n, plans, *how, progress):
            done = rows[0]["same_text"]["total"]
            document |= {"problems": done, "ids": ids[:done], "rows": rows}
            if out is not None:  # an interrupted run keeps what has been measured
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(document, indent=1) + "\n")
    Console(stderr=True).print(on_screen(rows))
    shown = [{name: value for name, value in row.items() if name != "each"} for row in rows]
    typer.echo(json.dumps(document | {"rows": shown}))


@app.command()
@spread
def search(
    model: TargetArguments,
    out: Annotated[Path, typer.Option(help="Folder of the plan.")],
    max_kl: Annotated[float, typer.Option(help="Limit of the KL divergence from dense verification, nats per token.")],
    texts: Texts,
    preset: Annotated[str, typer.Option(help="Rules of the parts: default or paper, as of `calibrate`.")] = "default",
    dense_below: Annotated[
        int | None, typer.Option(help="L0, the context length up to which all is read. Default: 1024; paper: 4096.")
    ] = None,
    block: Annotated[int | None, typer.Option(help="Tokens in a block. Default: 16; paper: 64.")] = None,
    rho: Annotated[
        list[float] | None,
        typer.Option(help="Values of rho to try, falling; may be repeated. Default: 0.5, 0.25, 0.1."),
    ] = None,
    ffn: Annotated[
        list[float] | None,
        typer.Option(help="Shares of channels to try, rising; may be repeated. Default: 0.2, 0.4, 0.6."),
    ] = None,
    experts: Annotated[
        list[int] | None, typer.Option(help="Numbers of experts to try, rising; may be repeated. Default: 1, 2, 3.")
    ] = None,
    by: Annotated[str, typer.Option(help="What to minimise: bytes or flops.")] = "bytes",
) -> None:
    """Find what to skip of blocks, channels and experts together within a limit on the KL divergence."""
    from semspec.sparse_fit import presets
    from semspec.sparse_fit.search import Grid, in_words
    from semspec.sparse_fit.search import search as run

    if by not in ("bytes", "flops") or max_kl <= 0:
        raise BadRequest(f"--max-kl is {max_kl} and --by {by!r}; give a limit above 0, and bytes or flops")
    given = {"rhos": (1.0, rho), "channels": (0.0, ffn), "experts": (0, experts)}
    grid = Grid(**{name: (off, *levels) for name, (off, levels) in given.items() if levels})
    config, problems = presets.config(preset, dense_below=dense_below, block=block), texts.problems()
    pair, how = model.load(), (texts.seed, texts.k, texts.max_new_tokens)
    with bar("search") as progress:
        plan = run(pair, problems, texts.n, max_kl, config, grid, *how, by, progress)
    plan.made.update(task=texts.task, preset=preset)
    plan.save(out)
    for line in in_words(plan):
        Console(stderr=True, highlight=False).print(line, soft_wrap=True)
    typer.echo(json.dumps({"plan": str(out), "made": plan.made}))


@app.command()
def cost(
    target: args.LocalTarget,
    sparse: Annotated[Path, typer.Option(help="Folder of the plan.")],
    at: Annotated[
        list[int] | None, typer.Option(help="Context length; may be repeated. Default: 4096, 16384, 65536.")
    ] = None,
    k: K = 8,
    timed: Annotated[bool, typer.Option("--time", help="Load the model and time the passes as well.")] = False,
    device: args.Device = "auto",
    dtype: args.Dtype = "auto",
    quiet: args.NoMemoryLine = False,
) -> None:
    """Count the operations and bytes of verifying a draft with each part of a plan, against dense verification."""
    from semspec.pair.loading import find, load, readable
    from semspec.sparse.plan import SparsePlan
    from semspec.sparse_fit.break_even import timer
    from semspec.sparse_fit.calibrate import native
    from semspec.sparse_fit.table import cost_rows, costs_on_screen

    plan, lengths = SparsePlan.load(sparse), sorted(set(at or (4096, 16384, 65536)))
    if lengths[0] < 1:
        raise BadRequest(f"a context of {lengths[0]} tokens: give 1 or more")
    shape, clock = find(target).shape, None
    if shape is None:
        raise BadRequest(f"{target} runs through transformers, and a plan needs a model that semspec runs itself")
    if timed:
        longest = lengths[-1] + k + 1
        with loading(quiet) as report:
            kind = readable(dtype, device)
            pair = load(target, device=device, dtype=kind, slots=1, context=longest, report=report)
        clock = timer(native(pair), lengths[-1], k + 1)
    rows = cost_rows(shape, plan, lengths, k + 1, clock)
    Console(stderr=True).print(costs_on_screen(rows))
    typer.echo(json.dumps(rows))


@app.command()
def plot(
    plan: Annotated[Path, typer.Argument(help="Folder of a plan.")],
    out: Annotated[Path, typer.Option(help="Folder for the plots.")],
    figures: Annotated[Path | None, typer.Option(help="A file of `quality --out`.")] = None,
) -> None:
    """Plot the overlap between draft tokens and between layers, and the cost of budgets."""
    from semspec.sparse.plan import SparsePlan
    from semspec.sparse_fit.plot import draw

    rows = _read(figures)["rows"] if figures else []
    for path in draw(SparsePlan.load(plan), rows, out):
        typer.echo(path)


@app.command()
def table(
    figures: Annotated[list[Path], typer.Argument(help="Files of `quality --out`, on the same problems.")],
) -> None:
    """Print the figures of several runs as one Markdown table."""
    from semspec.sparse_fit.table import in_markdown

    typer.echo(in_markdown([_read(path) for path in figures]), nl=False)


@app.command()
def join(
    figures: Annotated[list[Path], typer.Argument(help="Files of `quality --out`, on different problems.")],
    out: Annotated[Path, typer.Option(help="JSON file for the merged figures.")],
) -> None:
    """Merge the figures of the same plans on different problems, e.g. of several seeds."""
    from semspec.sparse_fit.quality import merge
    from semspec.sparse_fit.table import on_screen

    document = merge([_read(path) for path in figures])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    Console(stderr=True).print(on_screen(document["rows"]))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        document["rows"][0]["plan"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BadRequest(f"{path} holds no figures of `semspec sparse quality`: {cause(error)}") from error
    return dict(document)
