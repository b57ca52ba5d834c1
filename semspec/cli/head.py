"""`semspec head train`. Nothing heavy is imported before the command runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from semspec.cli import arguments
from semspec.cli.progress import bar, interruptible, loading
from semspec.errors import BadRequest

app = typer.Typer(help="Train draft heads, which draft from the target's hidden states.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Train draft heads, which draft from the target's hidden states."""


@app.command()
def train(
    target: arguments.LocalTarget,
    out: Annotated[Path, typer.Option(help="Folder for the head; an unfinished one is continued.")],
    prompts: Annotated[
        str,
        typer.Option(
            help="A .jsonl, .json, .csv or .txt file of prompts, or a task (pocket); self: a chat model writes them."
        ),
    ],
    draft: Annotated[
        str | None, typer.Option(help="Draft model that speeds up writing the texts; none by default.")
    ] = None,
    problems: Annotated[int | None, typer.Option(help="Number of prompts; all of a file by default.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest text that the target writes after a prompt, in tokens.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Sampling temperature of the texts; 0 is greedy.")
    ] = 0.0,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 2000,
    batch: Annotated[int, typer.Option(help="Texts per training step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per text and training step.")] = 512,
    depth: Annotated[int, typer.Option(help="Draft positions trained per token (EAGLE-3's training-time test).")] = 5,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    layers: Annotated[
        str, typer.Option(help="Target layers whose states it reads, e.g. 2,15,27; an early, a middle and a late one.")
    ] = "",
    draft_vocab: Annotated[int | None, typer.Option(help="Tokens that it can draft; at most 32000 by default.")] = None,
    ffn: Annotated[int | None, typer.Option(help="Intermediate size of its layer; the target's by default.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses prompts, batches and first weights.")] = 0,
    device: arguments.Device = "auto",
    dtype: arguments.Dtype = "auto",
    context: arguments.Context = None,
    slots: Annotated[int, typer.Option(help="Texts written at a time.")] = 16,
    quiet: arguments.NoMemoryLine = False,
) -> None:
    """Train an EAGLE-3 head on what the target itself writes. The same command goes on after an interruption, and with
    more --steps or --problems trains further."""
    from semspec.head_fit import own_prompts, texts
    from semspec.head_fit.checkpoint import Checkpoint, Training
    from semspec.head_fit.export import export, frequent, layers_in, layers_of, lying_there, published, size_of, tau_of
    from semspec.head_fit.train import Trainer, name_of
    from semspec.options import Options
    from semspec.pair.loading import load
    from semspec.tasks import make

    own = prompts == own_prompts.NAME
    if problems is None and not prompts.endswith(texts.FILES):
        if not own:
            make(prompts)  # refuses what is neither a task nor the name of a file
        raise BadRequest(f"{prompts} has as many prompts as you ask for; give a number with --problems")
    asked = [] if own else texts.prompts(prompts, problems, seed)
    rule = "exact" if draft else "none"  # many texts at a time seldom gain by drafts
    options = Options(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, verifier=rule)
    # What is wrong with it is said before anything is loaded.
    how, begun = Training(layers_in(layers), steps, batch, length, depth, rate, seed), Checkpoint.read(out)
    if begun is not None:
        begun.refuse_options(how, draft_vocab, ffn, out)
    with loading(quiet) as report:
        pair = load(target, draft, device=device, dtype=dtype, context=context, slots=slots, report=report)
    if begun is not None:
        begun.refuse_target(name_of(pair.target), out)
    how = replace(how, layers=layers_of(pair.target, layers) if begun is None else begun.how.layers)
    out.mkdir(parents=True, exist_ok=True)
    if own:
        with bar("prompts") as progress, interruptible(progress.kept(out)):
            asked = own_prompts.write_prompts(pair, problems or 0, seed, out, progress, slots)
    with bar("texts") as progress, interruptible(progress.kept(out)):
        written = texts.write(pair, asked, out, options, progress, slots)
    # Chosen once: a trained head's rows belong to these tokens.
    ids = frequent(written, pair.target.vocab_size, draft_vocab) if begun is None else begun.ids
    size = size_of(pair.target, how.layers, len(ids), ffn) if begun is None else begun.size
    trainer = Trainer(pair.target, written, ids, size, how, out)
    before = lying_there(trainer, out)
    say = partial(Console(stderr=True, highlight=False, markup=False).print, soft_wrap=True)
    if begun is not None and begun.done == steps and len(written) > len(begun.texts):
        say(
            f"all {steps} steps of this training are done, so {len(written) - len(begun.texts)} further texts teach it "
            "nothing; give more --steps to train on with them"
        )
    with bar("train") as progress, interruptible(progress.kept(out)):
        trainer.run(progress)
    made = published(trainer)
    curve, was = trainer.curve(made), None if before is None else trainer.curve(before)
    if was is not None and tau_of(was) > tau_of(curve):
        say(
            f"after {steps} steps the head gives {tau_of(curve):.2f} tokens a round on the held-out texts; the one in "
            f"{out} gives {tau_of(was):.2f} and stays. Train on with more --steps, or remove "
            f"{out / 'model.safetensors'} and give the same command to have the new one"
        )
        curve = was
    elif before is None or any(not before[key].equal(made[key]) for key in made):
        export(trainer, out, target, pair.target.vocab_size, pair.target.max_seq_len, curve, prompts)
    shares = ", ".join(f"{share:.0%}" for share in curve)
    what = f"accepted {shares} at draft tokens 1 to {depth}, {tau_of(curve):.2f} tokens a round"
    say(f"head in {out}: {what}; use it with --drafter eagle:{out}")
