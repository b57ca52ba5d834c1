"""`semspec serve`. Nothing heavy is imported before the command runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from semspec.cli.arguments import PairArguments, SpeculationArguments, spread
from semspec.errors import BadRequest, ModelError, SemspecError

KEY = "SEMSPEC_API_KEY"


@spread
def serve(
    model: PairArguments,
    speculation: SpeculationArguments,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name to clients; the target's by default.")] = None,
    lossy: Annotated[
        bool, typer.Option("--allow-lossy/--no-allow-lossy", help="Let requests choose lossy rules, or refuse them.")
    ] = False,
    slots: Annotated[int, typer.Option(help="Sequences decoded at a time; their memory is taken at the start.")] = 16,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Longest prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 4096,
    max_draft_tokens: Annotated[int, typer.Option(help="Longest draft a request may ask for.")] = 64,
    max_choices: Annotated[int, typer.Option(help="Most answers to one request (n).")] = 16,
    max_body: Annotated[int, typer.Option(help="Longest request, in bytes.")] = 1 << 20,
    max_queue: Annotated[int, typer.Option(help="Sequences that may wait for a slot; more get status 429.")] = 256,
    deadline: Annotated[float, typer.Option(help="Seconds a request may take, waiting included.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds that running requests get at the end.")] = 30.0,
    api_key: Annotated[
        list[str] | None, typer.Option(help=f"A key that clients must send; may be repeated. Or ${KEY}.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with one key a line.")] = None,
    cors: Annotated[list[str] | None, typer.Option(help="Origin whose pages may use this server; off.")] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
) -> None:
    """Serve a pair over HTTP as OpenAI does, with a page at / that shows what happens."""
    from semspec.serve import logs
    from semspec.serve.app import make_app
    from semspec.serve.engine import Engine, remembering
    from semspec.serve.limits import Limits, Settings
    from semspec.serve.metrics import Metrics
    from semspec.serve.server import Server, configure

    if model.sparse is not None and not lossy:
        raise BadRequest("with a sparse plan no answer is lossless; allow that with --allow-lossy, or leave it out")
    settings = Settings(
        name=name or Path(model.target).name,
        defaults=speculation.options(allow_lossy=lossy),
        allow_lossy=lossy,
        limits=Limits(
            prompt_tokens=max_prompt_tokens, new_tokens=max_new_tokens, draft_tokens=max_draft_tokens,
            choices=max_choices, body_bytes=max_body, queue=max_queue, deadline=deadline, drain=drain,
        ),
        keys=keys(api_key or [], api_key_file),
        cors=tuple(cors or ()),
        log_prompts=log_prompts,
    )  # fmt: skip
    logs.configure()
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"semspec serves {settings.name} at http://{host}:{port} · "
        f"{slots} slots · {'lossy rules allowed' if lossy else 'lossless only'} · "
        f"{'API key needed' if settings.keys else 'open to whoever can connect'}"
    )
    metrics = Metrics()
    engine = Engine(  # the pair refuses lossy rules itself, whatever comes past the server's own check
        lambda: remembering(model.load(slots, allow_lossy=lossy, report=logs.say)),
        queue=max_queue,
        on_end=metrics.end,
    )
    metrics.watch(engine)
    Server(configure(make_app(engine, metrics, settings), host, port), engine, settings.limits).run()
    if isinstance(engine.error, SemspecError):
        raise engine.error
    if engine.error is not None:
        raise ModelError(f"the engine failed: {engine.error!r}") from engine.error


def keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """From the command line, a file and the environment."""
    found = [*given, *filter(None, [os.environ.get(KEY)])]
    if file is not None:
        try:
            found += [line.strip() for line in file.read_text().splitlines()]
        except OSError as error:
            raise BadRequest(f"the file with API keys cannot be read: {error}") from error
        if not any(found):
            raise BadRequest(f"there is no key in {file}; write one a line")
    if not all(found[: len(given)]):
        raise BadRequest("an API key is empty; leave it out, or give a real one")
    return tuple(filter(None, found))
