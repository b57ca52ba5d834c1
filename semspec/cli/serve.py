"""`semspec serve`. Nothing heavy is imported before the command runs."""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from semspec.cli.arguments import ServedArguments, SpeculationArguments, valid_text
from semspec.cli.spread import spread
from semspec.errors import BadRequest, ModelError, SemspecError

if TYPE_CHECKING:
    from semspec.pair import Pair
    from semspec.replicas.backend import Replicas
    from semspec.serve.limits import Settings

KEY = "SEMSPEC_API_KEY"
REPLICA_CONNECTIONS = 65536  # all clients reach a replica from one address
SERVERS = "pair"  # the name of two servers to clients, whatever their models are called
Where = Literal["processes", "ray"]
_access = partial(typer.Option, rich_help_panel="Access")
_limit = partial(typer.Option, rich_help_panel="Limits")


@spread
def serve(
    given: ServedArguments,
    speculation: SpeculationArguments,
    host: Annotated[str, _access(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _access(min=0, max=65535, metavar="<int>", help="Port; 0 takes a free one.")] = 8000,
    allowed_host: Annotated[
        list[str] | None,
        _access(help="Additional Host header to accept, besides this machine's names; repeatable."),
    ] = None,
    api_key: Annotated[
        list[str] | None, _access(help=f"A key that clients must send; may be repeated. Or ${KEY}, one key.")
    ] = None,
    api_key_file: Annotated[Path | None, _access(help="File with one key a line; # begins a comment.")] = None,
    cors: Annotated[list[str] | None, _access(help="Origin whose pages may use this server; repeatable.")] = None,
    tls_cert: Annotated[Path | None, _access(help="Certificate chain (PEM); with --tls-key, serves HTTPS.")] = None,
    tls_key: Annotated[Path | None, _access(help="The certificate's private key (PEM).")] = None,
    max_client_connections: Annotated[int, _access(help="Open connections from one address.")] = 256,
    max_client_requests: Annotated[
        int | None, _access(help="Requests of one key, or address, running or waiting; no limit by default.")
    ] = None,
    max_client_rate: Annotated[
        int | None, _access(help="Requests of one key, or address, per minute; no limit by default.")
    ] = None,
    slots: Annotated[int, _limit(help="Sequences decoded at a time; their memory is taken at the start.")] = 16,
    max_queue: Annotated[int, _limit(help="Sequences that may wait for a slot; more get status 429.")] = 256,
    max_prompt_tokens: Annotated[int | None, _limit(help="Longest prompt, in tokens; the context by default.")] = None,
    max_new_tokens: Annotated[int, _limit(help="Longest answer, in tokens.")] = 4096,
    max_request_draft_tokens: Annotated[int, _limit(help="Longest draft a request may ask for, in tokens.")] = 64,
    drafts_off_above: Annotated[
        int | None,
        _limit(help="At this many running or waiting sequences, new lossless requests get no drafts; off by default."),
    ] = None,
    max_choices: Annotated[int, _limit(help="Maximum answers per request (n).")] = 16,
    max_body: Annotated[int, _limit(help="Longest request, in bytes.")] = 1 << 20,
    deadline: Annotated[float, _limit(help="Seconds a request may take, waiting included.")] = 600.0,
    drain: Annotated[float, _limit(help="Seconds that running requests get to finish after SIGTERM or Ctrl-C.")] = 30.0,
    name: Annotated[str | None, typer.Option(help="The model's name to clients; by default the target's.")] = None,
    allow_lossy: Annotated[
        bool | None,
        typer.Option(
            "--allow-lossy/--no-allow-lossy",
            help="Let requests choose lossy verifiers, or refuse them.",
            show_default="no; yes for a pair of servers, whose rules are all lossy",
        ),
    ] = None,
    private_prompts: Annotated[
        bool, typer.Option("--private-prompts", help="Share the prefix cache only between requests of the same client.")
    ] = False,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="Format of tool calls in the model's output: auto, hermes, llama3, mistral, harmony or json."
        ),
    ] = "auto",
    ignore_unknown: Annotated[
        bool,
        typer.Option("--ignore-unknown", help="Log unknown request fields and ignore them, instead of answering 400."),
    ] = False,
    replicas: Annotated[
        int, typer.Option(min=1, metavar="<int>", help="Number of server processes behind this address.")
    ] = 1,
    on: Annotated[
        Where, typer.Option(help="Where replicas run: processes of this machine, or the machines of a Ray cluster.")
    ] = "processes",
    replica_gpus: Annotated[
        float | None, typer.Option(min=0, help="With --on ray: GPUs of a replica.", show_default="1 if there are any")
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
) -> None:
    """Serve a pair as an OpenAI-compatible server, with a page at / that shows where each token came from."""
    from semspec.serve.forwarded import SECRET, inherited, starter

    if (listener := inherited()) is None:
        check_free(host, port)  # before anything is loaded
    check_tls(tls_cert, tls_key)
    from semspec.serve.hosts import host_names
    from semspec.serve.limits import Limits, Settings

    access = Settings(
        limits=Limits(
            prompt_tokens=max_prompt_tokens, new_tokens=max_new_tokens, draft_tokens=max_request_draft_tokens,
            choices=max_choices, body_bytes=max_body, queue=max_queue, deadline=deadline, drain=drain,
            client_connections=max_client_connections, client_requests=max_client_requests,
            client_rate=max_client_rate, speculating=drafts_off_above,
        ),
        hosts=host_names([host, *(allowed_host or [])]),
        keys=keys(api_key or [], None),
        key_file=api_key_file,
        cors=tuple(cors or ()),
    )  # fmt: skip
    if replica_gpus is not None and on != "ray" and SECRET not in os.environ:
        raise BadRequest("--replica-gpus is for --on ray; processes share the GPUs of this machine")
    if replicas > 1 or on == "ray":
        if tls_cert is not None:
            raise BadRequest("--replicas speaks no HTTPS; leave --tls-cert out, and put a proxy that does in front")
        return serve_replicas(replicas, host, port, access, on, replica_gpus)
    model = given.pair()
    lossy = model.of_servers if allow_lossy is None else allow_lossy
    from semspec.serve import logs, memory
    from semspec.serve.app import make_app
    from semspec.serve.engine import Engine
    from semspec.serve.metrics import Metrics
    from semspec.serve.server import Server, configure

    if model.of_servers and private_prompts:
        raise BadRequest("--private-prompts is for models loaded here: servers cache prompts themselves; leave it out")
    if model.sparse is not None and not lossy:
        raise BadRequest("with a sparse plan no answer is lossless; allow that with --allow-lossy, or leave it out")
    settings = replace(
        access,
        name=valid_text(name or (SERVERS if model.of_servers else Path(model.target).name), "the model's name"),
        draft=Path(model.draft).name if model.draft else None,
        defaults=speculation.options(allow_lossy=lossy),
        allow_lossy=lossy,
        ingress_secret=os.environ.get(SECRET, ""),
        log_prompts=log_prompts,
        private_prompts=private_prompts,
        tool_parser=tool_parser,
        ignore_unknown=ignore_unknown,
    )
    logs.configure()
    memory.configure()
    metrics = Metrics(settings.name)

    def load() -> Pair:  # it refuses lossy rules itself, whatever gets past the server's own check
        how = {"cache_tokens": given.cache_tokens, "drafter": settings.defaults.drafter}
        pair = model.load(slots, **how, allow_lossy=lossy, report=logs.say).cached()
        pair.check(settings.defaults)
        if otherwise := pair.computed_otherwise(settings.defaults.profile):
            logs.say(f"the profile was calibrated with another {', '.join(otherwise)}, so its bound may not hold")
        pair.load_drafter(settings.defaults)
        return pair

    engine = Engine(load, settings.limits, on_finish=metrics.finish)
    metrics.watch(engine)
    app = make_app(engine, metrics, settings)
    store = getattr(app.state, "keys", None)
    about = (
        f"{settings.name}: {slots} slots, {'lossy rules allowed' if lossy else 'lossless only'}, "
        f"{'no API key' if store is None else 'API key needed'}"
    )
    if store is not None and hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: store.expire())
    parent = starter() if settings.ingress_secret else None
    config = configure(app, host, port, settings.limits, tls_cert, tls_key)
    Server(config, engine, settings.limits, about, parent).run(None if listener is None else [listener])
    if engine.error is None or not engine.stopped:
        # All is said and closed. To tear the interpreter down takes a second of a free core, minutes of a busy one, and
        # cannot be done under a thread that still loads a model or makes a pass.
        logging.shutdown()
        os._exit(0 if engine.error is None else 1)
    if isinstance(engine.error, SemspecError):
        raise engine.error
    if engine.error is not None:
        raise ModelError(f"the engine failed: {engine.error!r}") from engine.error


def serve_replicas(count: int, host: str, port: int, access: Settings, on: Where, gpus: float | None) -> None:
    """This command so many times, each on a port of its own, behind one address."""
    from semspec.replicas.ingress import Ingress
    from semspec.replicas.server import IngressServer
    from semspec.serve import logs
    from semspec.serve.server import configure

    logs.configure()
    alone = ["--replicas", "1", "--on", "processes", "--host", "127.0.0.1"]
    alone += ["--max-client-connections", str(REPLICA_CONNECTIONS)]
    words = ["-m", "semspec", *sys.argv[1:], *alone]  # of an option that is given twice, the last counts
    replicas = on_ray(words, count, access, gpus) if on == "ray" else processes(words, count)
    ingress = Ingress(replicas, access)
    server = IngressServer(configure(ingress.app, host, port, access.limits), ingress)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, server.handle_hangup)
    server.run()


def processes(words: list[str], count: int) -> Replicas:
    from semspec.replicas.processes import Processes
    from semspec.replicas.supervisor import Supervisor

    return Processes(Supervisor(lambda port: [sys.executable, *words, "--port", str(port)], count))


def on_ray(words: list[str], count: int, access: Settings, gpus: float | None) -> Replicas:
    try:
        from semspec.replicas.on_ray import RayReplicas
    except ImportError as error:
        raise BadRequest(f"--on ray needs Ray Serve 2.60 ({error}); pip install 'semspec[ray]'") from None
    return RayReplicas(words, count, access.limits.drain, gpus)


def check_free(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except (OSError, UnicodeError) as error:
        what = getattr(error, "strerror", None) or error
        raise BadRequest(
            f"cannot listen on {host}:{port}: {what}; give another --port (0: a free one) or --host"
        ) from None


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Refuse files that HTTPS cannot be spoken with."""
    if (cert is None) != (key is None):
        raise BadRequest("HTTPS needs both --tls-cert and --tls-key")
    if cert is not None and key is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise BadRequest(f"--tls-cert and --tls-key cannot be used: {error.strerror or error}") from None


def keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """From the command line, the environment and a file."""
    if not all(given):
        raise BadRequest("an API key is empty; leave it out, or give a real one")
    found = [*given, *filter(None, [os.environ.get(KEY)])]
    if file is not None:
        from semspec.serve.auth import read_key_file

        found += [key for _, key in read_key_file(file)]
    return tuple(dict.fromkeys(found))
