"""`semspec sparse calibrate`, `quality`, `table` and `plot`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from semspec.cli import arguments as args
from semspec.cli.progress import bar, memory_line
from semspec.errors import BadRequest

app = typer.Typer(
    help="Plans for checking drafts with less: blocks of the cache, channels, experts.", no_args_is_help=True
)

Target = Annotated[str, typer.Argument(help="Target model: a checkpoint folder, a hub id, or pocket.")]
Task = Annotated[str, typer.Option(help="Whose problems, e.g. pocket:long=true.", autocompletion=args.tasks)]
Data = Annotated[Path | None, typer.Option(help="Folder with the data sets.")]
N = Annotated[int, typer.Option(help="Number of problems.")]
Seed = Annotated[int, typer.Option(help="Chooses problems.")]
K = Annotated[int, typer.Option("--num-draft-tokens", "-k", help="Length of the drafts that are checked.")]
Longest = Annotated[int | None, typer.Option(help="Longest answer; the task's own by default.")]


@app.command()
def calibrate(
    target: Target,
    out: Annotated[Path, typer.Option(help="Folder of the plan.")],
    task: Task = "pocket:long=true",
    n: N = 8,
    data: Data = None,
    seed: Seed = 0,
    k: K = 8,
    max_new_tokens: Longest = None,
    rho: Annotated[float, typer.Option(help="Share of the cache to read beyond dense-below; 1 reads all of it.")] = 0.1,
    dense_below: Annotated[int, typer.Option(help="Tokens up to which all of the cache is read.")] = 1024,
    block: Annotated[int, typer.Option(help="Tokens in a block of the cache.")] = 16,
    sinks: Annotated[int, typer.Option(help="First blocks that are always read.")] = 1,
    recent: Annotated[int, typer.Option(help="Latest blocks that are always read.")] = 2,
    score: Annotated[
        str,
        typer.Option(
            help="Score blocks by the first token's products (first, the paper's), by the share any token gives their "
            "mean key (share), or by how far their keys reach (reach)."
        ),
    ] = "reach",
    spread: Annotated[
        str, typer.Option(help="The best blocks of all heads together (pairs), or of each (heads).")
    ] = "pairs",
    rest: Annotated[
        str,
        typer.Option(help="What is seen of blocks that are not read: nothing, or their mean key and value (mean)."),
    ] = "mean",
    reuse: Annotated[
        float, typer.Option(help="Layers whose blocks overlap so much with the last anchor's take over its choice.")
    ] = 0.7,
    shallow: Annotated[int, typer.Option(help="First layers that always choose for themselves.")] = 4,
    ffn: Annotated[float, typer.Option(help="Share of a token's channels to leave out; 0 is off.")] = 0.0,
    ffn_by: Annotated[str, typer.Option(help="Leave channels out by token, or by the union of a draft's.")] = "union",
    experts: Annotated[int, typer.Option(help="Most experts of a token to leave out; 0 is off.")] = 0,
    quantile: Annotated[float, typer.Option(help="Share of tokens below each beta; the paper has the median.")] = 0.5,
    refresh: Annotated[int, typer.Option(help="Sparse passes before a dense one writes theirs anew; 0: never.")] = 0,
    auto: Annotated[
        bool, typer.Option("--auto", help="Time checks on this device, and leave nothing out where that is no faster.")
    ] = False,
    device: args.Device = "auto",
    dtype: args.Dtype = "auto",
    context: args.Context = None,
    quiet: args.NoMemoryLine = False,
) -> None:
    """Make a plan for a model from texts that it writes itself."""
    from semspec import tasks
    from semspec.pair.loading import load
    from semspec.sparse.attention import AttentionPlan
    from semspec.sparse_fit.break_even import where_it_pays
    from semspec.sparse_fit.calibrate import Wish
    from semspec.sparse_fit.calibrate import calibrate as run

    attention = None
    if rho < 1:
        attention = AttentionPlan(block, dense_below, rho, sinks, recent, score, spread, rest=rest)
    wish = Wish(attention, reuse, shallow, ffn, ffn_by, experts, quantile, refresh)
    made = tasks.make(task, data)
    pair = load(target, device=device, dtype=dtype, slots=1, context=context, report=memory_line(quiet))
    with bar("calibrate") as progress:
        plan = run(pair, made, n, wish, seed, k, max_new_tokens or made.max_new_tokens, progress)
    plan.made["task"] = task
    if auto:
        plan = where_it_pays(pair, made, plan, seed, k)
    plan.save(out)
    Console(stderr=True, highlight=False).print(f"{out}: {plan}")
    told: dict[str, Any] = {"plan": str(out), "model": plan.model, "made": plan.made}
    if plan.attention:
        told["anchors"] = plan.attention.anchors
        told["token_overlap"] = [round(float(row.nanmean()), 3) for row in plan.seen["token_overlap"]]
    if plan.ffn:
        told["thresholds"] = [round(t, 5) for t in plan.ffn.thresholds.tolist()]
        told["union_share"] = [round(s, 3) for s in plan.seen["union_share"].nan_to_num(-1).tolist()]
    if plan.experts:
        told["betas"] = [[round(b, 4) for b in row] for row in plan.experts.betas.tolist()]
    typer.echo(json.dumps(told))


@app.command()
def quality(
    target: Target,
    sparse: Annotated[Path, typer.Option(help="Folder of the plan to take apart.")],
    draft: args.Draft = None,
    task: Task = "pocket:long=true",
    n: N = 20,
    data: Data = None,
    seed: Seed = 0,
    k: K = 8,
    verifier: args.Verifier = "exact",
    drafter: args.Drafter = "auto",
    max_new_tokens: Longest = None,
    rho: Annotated[list[float] | None, typer.Option(help="A budget of attention; may be repeated.")] = None,
    most: Annotated[list[int] | None, typer.Option(help="Most experts to leave out; may be repeated.")] = None,
    always: Annotated[
        list[int] | None, typer.Option(help="Experts to leave out of every token, by no rule; may be repeated.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Variants with this in their name, e.g. attention; may be repeated.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Problems worked on together.")] = 8,
    label: Annotated[str, typer.Option(help="What `table` puts before the names of these variants.")] = "",
    out: Annotated[Path | None, typer.Option(help="File for the figures, as JSON.")] = None,
    device: args.Device = "auto",
    dtype: args.Dtype = "auto",
    context: args.Context = None,
    quiet: args.NoMemoryLine = False,
) -> None:
    """Each part of a plan alone and all together, by budget, against dense checks: output, accuracy, tau."""
    from semspec import tasks
    from semspec.pair.loading import load
    from semspec.sparse.plan import SparsePlan
    from semspec.sparse_fit.quality import measure, picked, variants
    from semspec.sparse_fit.table import on_screen

    plan, made = SparsePlan.load(sparse), tasks.make(task, data)
    pair = load(
        target, draft, device=device, dtype=dtype, slots=min(slots, n), context=context, report=memory_line(quiet)
    )
    plans = picked(variants(plan, pair.target.depth, rho or [], most or [], always or []), only or [])
    document = {"task": task, "seed": seed, "k": k, "verifier": verifier, "drafter": drafter, "target": target}
    document |= {"label": label, "plan": str(plan), "dtype": dtype, "device": str(pair.target.device)}
    ids = [problem.id for problem in made.problems(n, seed)]
    with bar(f"quality on {task}") as progress:
        for rows in measure(pair, made, n, plans, seed, k, verifier, max_new_tokens, drafter, progress):
            done = rows[0]["same_text"]["total"]
            document |= {"problems": done, "ids": ids[:done], "rows": rows}
            if out is not None:  # what has been measured is kept, whatever happens to the rest
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(document, indent=1) + "\n")
    Console(stderr=True).print(on_screen(rows))
    shown = [{name: value for name, value in row.items() if name != "each"} for row in rows]
    typer.echo(json.dumps(document | {"rows": shown}))


@app.command()
def plot(
    plan: Annotated[Path, typer.Argument(help="Folder of a plan.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")],
    figures: Annotated[Path | None, typer.Option(help="A file that `quality --out` wrote.")] = None,
) -> None:
    """Pictures: overlap between draft tokens and between layers; what budgets cost."""
    from semspec.sparse.plan import SparsePlan
    from semspec.sparse_fit.plot import draw

    rows = _read(figures)["rows"] if figures else []
    for path in draw(SparsePlan.load(plan), rows, out):
        typer.echo(path)


@app.command()
def table(
    figures: Annotated[list[Path], typer.Argument(help="Files that `quality --out` wrote, on the same problems.")],
) -> None:
    """Figures of several runs as one table in Markdown."""
    from semspec.sparse_fit.table import in_markdown

    typer.echo(in_markdown([_read(path) for path in figures]), nl=False)


@app.command()
def join(
    figures: Annotated[list[Path], typer.Argument(help="Files that `quality --out` wrote, of different problems.")],
    out: Annotated[Path, typer.Option(help="File for the figures of all, as JSON.")],
) -> None:
    """Figures of the same plans on different problems (other seeds, other machines) as one."""
    from semspec.sparse_fit.quality import joined
    from semspec.sparse_fit.table import on_screen

    document = joined([_read(path) for path in figures])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    Console(stderr=True).print(on_screen(document["rows"]))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        document["rows"][0]["plan"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BadRequest(f"{path} holds no figures of `semspec sparse quality`: {error!r}") from error
    return dict(document)
