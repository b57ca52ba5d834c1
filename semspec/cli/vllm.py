"""`semspec vllm-args`: how to start vLLM with one of our verifiers."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from semspec.cli import arguments
from semspec.errors import BadRequest
from semspec.loop.repetition import PERIOD, REPEATS
from semspec.remote.address import is_url

_parallel = {"rich_help_panel": "Machines"}


def vllm_args(
    target: Annotated[str, typer.Argument(help="Target model as vLLM names it: a folder or a hub id.")],
    draft: Annotated[str | None, typer.Option(help="Draft model or EAGLE head; without one, n-gram lookups.")] = None,
    verifier: arguments.Verifier = "fly",
    drafter: Annotated[
        str | None,
        typer.Option(
            help="vLLM's method: draft_model (default with --draft), ngram (default without), eagle, eagle3 or mtp."
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option("--num-draft-tokens", "-k", help="Draft length; by default the verifier's own.")
    ] = None,
    relax_span: arguments.RelaxSpan = "all",
    loop_repeats: arguments.LoopRepeats = REPEATS,
    loop_period: arguments.LoopPeriod = PERIOD,
    fixed: Annotated[bool, typer.Option("--fixed", help="Requests may not choose another verifier.")] = False,
    runner: Annotated[str | None, typer.Option(help="vLLM's Model Runner: v1 (default on a CPU) or v2.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.", **_parallel)] = "cuda",
    dtype: Annotated[str | None, typer.Option(help="As vLLM's --dtype.", **_parallel)] = None,
    max_model_len: Annotated[int | None, typer.Option(help="As vLLM's --max-model-len.", **_parallel)] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share each layer.", **_parallel)] = 1,
    pipeline_parallel: Annotated[
        int, typer.Option(help="Pipeline stages: groups of GPUs, one after the other.", **_parallel)
    ] = 1,
    nodes: Annotated[int, typer.Option(help="Above 1: machines of a Ray cluster.", **_parallel)] = 1,
    as_json: arguments.Json = False,
) -> None:
    """Print how to start vLLM with this verifier: the line for a shell, and the arguments for Python."""
    if is_url(target) or target == "pocket":
        raise BadRequest(f"vLLM cannot load {target}; give a checkpoint folder or a hub id")
    from semspec.vllm.arguments import Launch
    from semspec.vllm.request import Settings

    launch = Launch(
        target=target, draft=draft, verifier=verifier, method=drafter, num_draft_tokens=num_draft_tokens,
        runner=runner or ("v1" if device == "cpu" else "v2"), device=device, dtype=dtype, max_model_len=max_model_len,
        tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, nodes=nodes, fixed=fixed,
        settings=Settings(relax_span=relax_span, loop_repeats=loop_repeats, loop_period=loop_period),
    )  # fmt: skip
    if as_json:
        found = {"command": launch.command(), "environment": launch.environment(), "arguments": launch.arguments()}
        typer.echo(json.dumps(found | {"launch": asdict(launch)}))
        return
    typer.echo(f"{launch.line()}\n\n# or, in Python, with these variables set before vllm is imported:")
    typer.echo(f"# {json.dumps(launch.environment())}\n{launch.python()}")
