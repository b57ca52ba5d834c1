"""`semspec chat`: a conversation in a terminal, or one turn per line of a pipe."""

from __future__ import annotations

import json
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import semspec
from semspec.cli import arguments as args
from semspec.cli.live import fit
from semspec.cli.progress import loading
from semspec.cli.show import THINKING, figures, report, show, terminal
from semspec.cli.spread import spread
from semspec.errors import OLD_NAME, BadRequest, SemspecError
from semspec.pocket.chat import outside

if TYPE_CHECKING:
    from semspec.options import Options
    from semspec.pair import Pair
    from semspec.pair.result import Result

HELP = {
    "/verifier SPEC": "change the verifier, e.g. none, fly:window=4, exact:k=4,drafter=ngram; without SPEC: list them",
    "/stats": "figures of this chat so far",
    "/save FILE": "write the chat to a file: .json with all figures, anything else as text",
    "/new": "start a new chat",
    "/help": "this list; //text sends a message that begins with a slash",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}
ENDINGS = {
    "cancelled": "stopped",
    "length": "truncated at max_new_tokens",
    "thinking": THINKING,
}


@dataclass(frozen=True, kw_only=True)
class ChatArguments(args.GenerationArguments):
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Maximum tokens of an answer.", rich_help_panel="Generation")
    ] = 1024


@spread
def chat(
    model: args.PairArguments,
    request: ChatArguments,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for every turn.")] = False,
    quiet: args.Quiet = False,
) -> None:
    """Chat with a model in the terminal, where /help lists commands, or one turn per line from a pipe."""
    if system is not None:
        args.valid_text(system, "--system")
    options, quiet = request.options(), quiet or as_json
    with loading(quiet) as memory:
        pair = model.load(slots=1, drafter=options.drafter, allow_lossy=options.allow_lossy, report=memory)
    if not pair.tokenizer.chat_template:
        raise BadRequest(
            f"{model.target} has no chat template; it can go on with a text: semspec generate {model.target} TEXT"
        )
    Chat(pair, options, system, as_json, quiet).run()


class Chat:
    """The conversation and its commands. Answers go to standard output, everything else to standard error."""

    def __init__(self, pair: Pair, options: Options, system: str | None, as_json: bool, quiet: bool) -> None:
        self.pair, self.options, self.system = pair, options, system
        self.as_json, self.quiet = as_json, quiet
        self.console, self.errors = terminal(), terminal(stderr=True)
        self.interactive = sys.stdin.isatty()
        self.session = semspec.Session(pair, system)
        self.turns: list[tuple[Result, int]] = []  # with the number of prompt tokens reused from the cache
        self.saved: set[Path] = set()

    def run(self) -> None:
        if self.interactive and not self.quiet:
            self.say(f"{self.options.verifier} · /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves")
        for line in self.lines():
            try:
                if self.interactive and line.startswith("/") and not line.startswith("//"):
                    if line.split()[0] in ("/quit", "/exit"):
                        break
                    self.command(line)
                else:
                    text = line.removeprefix("/") if self.interactive else line  # a pipe gives no commands
                    self.turn(args.valid_text(text, "this line"))
            except SemspecError as error:
                if not self.interactive:
                    raise
                self.errors.print(Text(str(error), style="red"))
            except KeyboardInterrupt:  # a second Ctrl-C: the conversation is intact, its cache is lost
                if not self.interactive:
                    raise
                self.say("stopped")

    def lines(self) -> Iterator[str]:
        """Lines typed or piped in, except empty ones."""
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
        if not (self.quiet or self.turns) and (note := outside(self.pair.tokenizer.chat_template, text)):
            self.say(note)
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
            if result.text:  # else the session drops the turn
                self.turns.append(turn)
        if self.as_json:
            typer.echo(json.dumps(self.document(*turn), ensure_ascii=False))
        if not self.quiet:
            ending = [ENDINGS[result.finish_reason]] if result.finish_reason in ENDINGS else []
            prefill = f"prefilled {result.prompt_tokens - turn[1]} of {result.prompt_tokens} prompt tokens"
            parts = [*ending, *figures(result.stats), prefill]
            self.say(fit(parts, self.errors.width) if self.errors.is_terminal else " · ".join(parts))

    def document(self, result: Result, reused: int) -> dict[str, Any]:
        return report(result, self.pair.spelling) | {"reused_tokens": reused}

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        methods = (self.verifier, self.stats, self.save, self.new, self.help)
        known = {f"/{method.__name__}": method for method in methods}
        if name == "/method":
            self.say(f"/method is now /verifier; {OLD_NAME}")
            name = "/verifier"
        if name not in known:
            commands = f"the commands are: {', '.join(known)}, /quit"
            raise BadRequest(f"there is no command {name!r}; {commands}. To send this as a message: /{line}")
        known[name](rest.strip())

    def verifier(self, spec: str) -> None:
        from semspec.bench.arms import parse_arm

        if spec:
            arm = parse_arm(spec, self.options.num_draft_tokens, self.options.drafter)
            names = ["verifier", "num_draft_tokens", "drafter"]
            names += ["draft_min_p", "draft_max_entropy", "loop_repeats", "loop_period", "profile"]
            self.options = replace(self.options, **{name: getattr(arm, name) for name in names})
        self.say(f"{self.options.verifier}, draft length {self.options.draft_length()}, drafter {self.options.drafter}")
        if not spec:
            self.list_verifiers()

    def list_verifiers(self) -> None:
        from semspec.catalogue import catalogue
        from semspec.cli.listing import rule_tables

        self.errors.print(*rule_tables(catalogue(["verifiers"])[0]["verifiers"]), sep="\n")

    def stats(self, _: str) -> None:
        pooled = semspec.Stats.pooled(result.stats for result, _ in self.turns)
        read = sum(result.prompt_tokens for result, _ in self.turns)
        reused = sum(reused for _, reused in self.turns)
        table = Table.grid(padding=(0, 2))
        for name, value in {
            "turns": str(len(self.turns)),
            "tokens": f"{pooled.tokens} in {sum(pooled.seconds.values()):.2f} s",
            "tokens / second": f"{pooled.tokens / max(sum(pooled.seconds.values()), 1e-9):.1f}",
            "tau": f"{pooled.tau:.2f} tokens per round",
            "drafted": f"{pooled.drafted}, {pooled.accepted} accepted, {pooled.relaxed} of them relaxed",
            "target passes": str(pooled.target_passes),
            "prompt tokens": f"{read}, {reused} from the cache",
            "seconds": ", ".join(
                f"{what} {seconds:.2f}" for what, seconds in pooled.seconds.items() if seconds or what != "capture"
            ),
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


def equip_input() -> None:
    """Give `input` history, line editing and completion, where readline is available."""
    try:
        import readline
    except ImportError:
        return
    rules = [f"/verifier {name}" for name in args.verifiers()]
    known = [*rules, *(name.partition(" ")[0] for name in HELP)]

    def complete(text: str, state: int) -> str | None:
        return dict(enumerate(word for word in known if word.startswith(text))).get(state)

    readline.set_completer_delims("")  # complete the line as a whole
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """A first Ctrl-C stops between two passes, a second one at once."""
    stopping = False

    def interrupted(*_: object) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        stop()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
