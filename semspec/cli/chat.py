"""`semspec chat`: a conversation in a terminal, or one turn per line of a pipe."""

from __future__ import annotations

import json
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import semspec
from semspec.cli import arguments as args
from semspec.cli.live import fit
from semspec.cli.progress import memory_line
from semspec.cli.show import figures, report, show, terminal
from semspec.errors import BadRequest, SemspecError

if TYPE_CHECKING:
    from semspec.options import Options
    from semspec.pair import Pair
    from semspec.pair.result import Result

HELP = {
    "/method SPEC": "answer with another rule from here on, e.g. none, fly:window=4 or exact:k=4,drafter=ngram",
    "/stats": "what this chat has taken so far",
    "/save FILE": "write the chat to a file: .json with all figures, anything else as text",
    "/new": "forget everything and begin anew",
    "/help": "this list; //text sends a message that begins with a stroke",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}


def chat(
    target: args.Target,
    draft: args.Draft = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first message.")] = None,
    verifier: args.Verifier = "exact",
    drafter: args.Drafter = "auto",
    num_draft_tokens: args.NumDraftTokens = None,
    draft_min_p: args.DraftMinP = 0.0,
    draft_max_entropy: args.DraftMaxEntropy = None,
    max_new_tokens: args.MaxNewTokens = 1024,
    temperature: args.Temperature = 0.0,
    top_k: args.TopK = 0,
    top_p: args.TopP = 1.0,
    min_p: args.MinP = 0.0,
    seed: args.Seed = None,
    relax_span: args.RelaxSpan = "all",
    loop_repeats: args.LoopRepeats = 4,
    loop_period: args.LoopPeriod = 128,
    lossy: args.Lossy = True,
    stop: args.Stop = None,
    device: args.Device = "auto",
    draft_device: args.DraftDevice = None,
    dtype: args.Dtype = "auto",
    context: args.Context = None,
    sparse: args.Sparse = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for every turn.")] = False,
    quiet: args.Quiet = False,
) -> None:
    """Talk with a pair, turn by turn; earlier turns are not computed again. /help lists the commands."""
    options = semspec.Options(
        verifier=verifier, drafter=drafter, num_draft_tokens=args.draft_length(num_draft_tokens),
        draft_min_p=draft_min_p, draft_max_entropy=draft_max_entropy, max_new_tokens=max_new_tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop or (),
        relax_span=relax_span, loop_repeats=loop_repeats, loop_period=loop_period,
        allow_lossy=lossy,
    )  # fmt: skip
    pair = semspec.load(
        target, draft, device=device, draft_device=draft_device, dtype=dtype, slots=1, context=context,
        sparse=sparse, allow_lossy=lossy,
        report=memory_line(quiet or as_json),
    )  # fmt: skip
    if not pair.tokenizer.chat_template:
        raise BadRequest(f"{target} has no chat template; it can go on with a text: semspec generate {target} TEXT")
    Chat(pair, options, system, as_json, quiet or as_json).run()


class Chat:
    """The conversation as the person at the terminal has it. Answers go to standard output, all else to the other."""

    def __init__(self, pair: Pair, options: Options, system: str | None, as_json: bool, quiet: bool) -> None:
        self.pair, self.options, self.system = pair, options, system
        self.as_json, self.quiet = as_json, quiet
        self.console, self.errors = terminal(), terminal(stderr=True)
        self.interactive = sys.stdin.isatty()
        self.session = semspec.Session(pair, system)
        self.turns: list[tuple[Result, int]] = []  # with the tokens that had not to be read
        self.saved: set[Path] = set()

    def run(self) -> None:
        if self.interactive and not self.quiet:
            self.say(f"{self.options.verifier} · /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves")
        for line in self.lines():
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if line.split()[0] in ("/quit", "/exit"):
                        break
                    self.command(line)
                else:
                    self.turn(line.removeprefix("/"))
            except SemspecError as error:
                if not self.interactive:
                    raise
                self.errors.print(Text(str(error), style="red"))
            except KeyboardInterrupt:  # a second Ctrl-C; the conversation is whole, its cache is not
                if not self.interactive:
                    raise
                self.say("stopped")

    def lines(self) -> Iterator[str]:
        """What is typed or piped in, without empty lines."""
        prompted = self.interactive and sys.stdout.isatty()
        if prompted:
            equip_input()
        while True:
            try:
                line = input("> ") if prompted else sys.stdin.readline()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.say("\nCtrl-D leaves")
                continue
            except EOFError:
                self.errors.print()
                return
            if not prompted and not line:
                return
            if line.strip():
                yield line.strip()

    def turn(self, text: str) -> None:
        try:
            stream = self.session.ask(text, self.options)
        except BadRequest as error:
            raise BadRequest(f"{error} (/new begins a new chat)") if self.turns else error from None
        try:
            with on_interrupt(stream.stop) if self.interactive else nullcontext():
                if self.as_json:
                    deque(stream, maxlen=0)
                else:
                    show(stream, self.console, live=not self.quiet)
        finally:
            stream.close()
            result = stream.result()
            turn = (result, self.session.reused)
            if result.text:  # else the session forgets that it was asked
                self.turns.append(turn)
        if self.as_json:
            typer.echo(json.dumps(self.document(*turn), ensure_ascii=False))
        if not self.quiet:
            self.say(self.fitted([*self.ending(result), *figures(result.stats), self.reading(*turn)]))

    def ending(self, result: Result) -> list[str]:
        """How an answer ended, if not by itself."""
        endings = {"cancelled": "stopped", "length": "cut at its longest"}
        return [endings[result.finish_reason]] if result.finish_reason in endings else []

    def reading(self, result: Result, reused: int) -> str:
        return f"read {result.prompt_tokens - reused} of {result.prompt_tokens} prompt tokens"

    def document(self, result: Result, reused: int) -> dict[str, Any]:
        return report(result, self.pair.spelling) | {"reused_tokens": reused}

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        known: dict[str, Callable[[str], None]] = {
            "/method": self.method,
            "/stats": self.stats,
            "/save": self.save,
            "/new": self.new,
            "/help": self.help,
        }
        if name not in known:
            raise BadRequest(f"there is no command {name!r}; the commands are: {', '.join(known)}, /quit")
        known[name](rest.strip())

    def method(self, spec: str) -> None:
        from semspec.bench.arms import parse_arm

        if spec:
            arm = parse_arm(spec, self.options.num_draft_tokens, self.options.drafter)
            names = (
                "verifier",
                "num_draft_tokens",
                "drafter",
                "draft_min_p",
                "draft_max_entropy",
                "loop_repeats",
                "loop_period",
            )
            self.options = replace(self.options, **{name: getattr(arm, name) for name in names})
        self.say(f"{self.options.verifier}, drafts of {self.options.draft_length()} from {self.options.drafter}")
        if not spec:
            self.say(f"the rules are: {', '.join(args.verifiers())}")

    def stats(self, _: str) -> None:
        pooled = semspec.Stats.pooled(result.stats for result, _ in self.turns)
        read = sum(result.prompt_tokens for result, _ in self.turns)
        reused = sum(reused for _, reused in self.turns)
        table = Table.grid(padding=(0, 2))
        for name, value in {
            "turns": str(len(self.turns)),
            "tokens written": f"{pooled.tokens} in {sum(pooled.seconds.values()):.2f} s",
            "tokens a second": f"{pooled.tokens / max(sum(pooled.seconds.values()), 1e-9):.1f}",
            "tau": f"{pooled.tau:.2f} tokens a step",
            "drafted": f"{pooled.drafted}, of which {pooled.accepted} stood, {pooled.relaxed} of them relaxed",
            "target passes": str(pooled.target_passes),
            "prompt tokens": f"{read}, of which {reused} were not read again",
            "seconds": ", ".join(f"{what} {seconds:.2f}" for what, seconds in pooled.seconds.items()),
        }.items():
            table.add_row(Text(name, style="dim"), value)
        self.errors.print(table)

    def save(self, name: str) -> None:
        if not name:
            raise BadRequest("say where to: /save FILE")
        path = Path(name).expanduser()
        if path.exists() and path.resolve() not in self.saved:
            raise BadRequest(f"{path} exists; give another name")
        if path.suffix == ".json":
            turns = [self.document(*turn) for turn in self.turns]
            text = json.dumps({"messages": self.session.messages, "turns": turns}, ensure_ascii=False, indent=1) + "\n"
        else:
            text = "\n".join(f"## {m['role']}\n\n{m['content']}\n" for m in self.session.messages)
        try:
            path.write_text(text)
        except OSError as error:
            raise BadRequest(f"{path} cannot be written: {error.strerror}") from error
        self.saved.add(path.resolve())
        self.say(f"saved to {path}")

    def new(self, _: str) -> None:
        self.session.close()
        self.session, self.turns = semspec.Session(self.pair, self.system), []
        self.say("a new chat")

    def help(self, _: str) -> None:
        table = Table.grid(padding=(0, 2))
        for name, what in HELP.items():
            table.add_row(name, Text(what, style="dim"))
        self.errors.print(table)

    def say(self, text: str) -> None:
        self.errors.print(Text(text, style="dim"))

    def fitted(self, parts: list[str]) -> str:
        return fit(parts, self.errors.width) if self.errors.is_terminal else " · ".join(parts)


def equip_input() -> None:
    """Give `input` a history, keys to edit with, and commands to complete, where there is a library for it."""
    try:
        import readline
    except ImportError:
        return
    rules = [f"/method {name}" for name in args.verifiers()]
    known = [*rules, *(name.partition(" ")[0] for name in HELP)]

    def complete(text: str, state: int) -> str | None:
        return dict(enumerate(word for word in known if word.startswith(text))).get(state)

    readline.set_completer_delims("")  # a line is completed as a whole
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """A first Ctrl-C asks for an end, between two passes; a second one insists."""
    asked = False

    def interrupted(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stop()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
