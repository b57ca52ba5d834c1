"""The command line. Exit codes: 0 done, 2 bad request, 3 model cannot be used, 130 interrupted, 1 anything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import semspec
from semspec.bench import commands as bench_commands
from semspec.bench.commands import draft_length
from semspec.errors import SemspecError
from semspec.info import info
from semspec.probe import commands as probe_commands
from semspec.serve import commands as serve_commands
from semspec.show import coloured, reasons, relaxed_tokens

if TYPE_CHECKING:
    from semspec.options import Options
    from semspec.pair import Pair, Result

app = typer.Typer(
    help="Speculative decoding with a pluggable verifier: a small model writes ahead, the big one only checks.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_commands.app, name="bench")
app.command()(bench_commands.compare)
app.add_typer(probe_commands.app, name="probe")
app.command()(serve_commands.serve)
app.command()(info)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(semspec.__version__)
        raise typer.Exit()


@app.command()
def generate(
    target: Annotated[str, typer.Argument(help="Target model: a checkpoint folder, a .gguf file or a hub id.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from standard input.")],
    draft: Annotated[
        str | None, typer.Option(help="Draft model. Without one, drafts are looked up in the text.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    verifier: Annotated[str, typer.Option(help="Rule, e.g. exact, sampling, fly:window=4, none.")] = "exact",
    drafter: Annotated[str, typer.Option(help="auto, model, ngram or cascade (a model sped up by ngram).")] = "auto",
    num_draft_tokens: Annotated[str, typer.Option("--num-draft-tokens", "-k", help="Draft length, or auto.")] = "8",
    draft_min_p: Annotated[float, typer.Option(help="Stop drafting where the draft's best has less; 0 is off.")] = 0.0,
    draft_max_entropy: Annotated[float | None, typer.Option(help="Or where its entropy is above this.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", "-n", help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k best tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the best tokens of this mass; 1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best; 0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")] = None,
    relax_span: Annotated[str, typer.Option(help="Where a lossy rule may relax: all or thinking.")] = "all",
    lossy: Annotated[bool, typer.Option("--allow-lossy/--no-allow-lossy", help="Refuse lossy rules or not.")] = True,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer at this text; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    draft_device: Annotated[str | None, typer.Option(help="Where the draft model runs, if elsewhere.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or int8.")] = "auto",
    context: Annotated[int | None, typer.Option(help="Tokens a sequence may have, prompt included.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the text only.")] = False,
    why: Annotated[bool, typer.Option("--why", help="List every relaxed token with the rule's reason.")] = False,
) -> None:
    """Answer one prompt, tokens coloured by origin: green from the draft, yellow relaxed, plain from the target."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options = semspec.Options(
        verifier=verifier, drafter=drafter, num_draft_tokens=draft_length(num_draft_tokens),
        draft_min_p=draft_min_p, draft_max_entropy=draft_max_entropy, max_new_tokens=max_new_tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop or (),
        relax_span=relax_span, allow_lossy=lossy,
    )  # fmt: skip
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    pair = semspec.load(
        target, draft, device=device, draft_device=draft_device, dtype=dtype, slots=1, context=context,
        report=None if quiet or as_json else lambda line: errors.print(line, style="dim"),
    )  # fmt: skip
    asked = [{"role": "user", "content": text}] if chat else text
    if as_json:
        typer.echo(json.dumps(report(pair.generate(asked, options), pair.spelling), ensure_ascii=False))
    else:
        result = show(pair, asked, options)
        if why:
            errors.print(reasons(relaxed_tokens(result, pair.spelling)))
        if not quiet:
            errors.print(summary(result), style="dim")


@app.command()
def demo(
    problems: Annotated[int, typer.Option(help="How many problems to solve.")] = 6,
    seed: Annotated[int, typer.Option(help="Which problems.")] = 0,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k", help="Draft length.")] = 2,
) -> None:
    """See it work: the shipped pocket pair solves problems on the CPU, alone and with drafts. Needs nothing else."""
    from semspec.demo import demo as run_demo

    run_demo(Console(highlight=False), problems, seed, num_draft_tokens)


def show(pair: Pair, prompt: Any, options: Options) -> Result:
    """Stream an answer to the terminal, coloured by origin."""
    console = Console(highlight=False, soft_wrap=True)
    stream = pair.stream(prompt, options)
    for event in stream:
        console.print(coloured([event]), end="")
    console.print()
    return stream.result()


def summary(result: Result) -> str:
    """One line about what it took."""
    s = result.stats
    seconds = sum(s.seconds.values())
    kind = "lossless" if result.lossless else f"{s.relaxed} relaxed"
    return (
        f"{s.tokens} tokens in {seconds:.2f} s ({s.tokens / max(seconds, 1e-9):.1f}/s) · {result.verifier}, {kind} · "
        f"tau {s.tau:.2f} · {s.accepted}/{s.drafted} drafted tokens stood · {s.target_passes} target passes · "
        f"{result.finish_reason}"
    )


def report(result: Result, spelling: Callable[[int], str]) -> dict[str, Any]:
    """A result as JSON."""
    return {
        "text": result.text,
        "tokens": result.tokens,
        "origins": [origin for event in result.events for origin in event.origins],
        "relaxed": relaxed_tokens(result, spelling),
        "finish_reason": result.finish_reason,
        "verifier": result.verifier,
        "lossless": result.lossless,
        "seed": result.seed,
        "prompt_tokens": result.prompt_tokens,
        "stats": result.stats.to_dict(),
    }


def run() -> None:
    """The `semspec` command: refusals become one readable line and an exit code."""
    try:
        app()
    except SemspecError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"semspec: {error}", style="red"))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
