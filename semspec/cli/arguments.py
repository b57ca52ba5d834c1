"""Options that several commands share: one definition of each option's name, type, default and help.

A command takes a group of options as one parameter, see spread.py. Nothing heavy is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semspec.errors import BadRequest
from semspec.loop.draft_length import MAX_DRAFT_TOKENS
from semspec.loop.repetition import PERIOD, REPEATS
from semspec.remote.address import is_url

if TYPE_CHECKING:
    from semspec.options import Options
    from semspec.pair import Pair

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4")
SPANS = ("all", "thinking")


def verifiers() -> list[str]:
    return _registered("verify", "semspec.rules")


def tasks() -> list[str]:
    return _registered("tasks", "semspec.tasks")


def drafters() -> list[str]:
    return ["auto", *_registered("draft", "semspec.drafters")]


def _registered(package: str, group: str) -> list[str]:
    """The names in a registry, read from its source: importing it takes seconds, and a shell waits for the answer."""
    sources = [path.read_text() for path in (Path(__file__).parent.parent / package).glob("*.py")]
    own = {name for text in sources for name in re.findall(r'^    name = "(.+)"$', text, re.MULTILINE)}
    return sorted(own | {point.name for point in entry_points(group=group)})


_model = partial(typer.Option, rich_help_panel="Models")
_speculation = partial(typer.Option, rich_help_panel="Speculation")
_sampling = partial(typer.Option, rich_help_panel="Generation")

TARGET = "Target model: a checkpoint folder, a .gguf file, a hub id, pocket, or a server's address (http://host/v1)."
Target = Annotated[str, typer.Argument(help=TARGET)]
OptionalTarget = Annotated[str | None, typer.Argument(help=TARGET)]
LocalTarget = Annotated[
    str, typer.Argument(help="Target model: a checkpoint folder, a .gguf file, a hub id, or pocket.")
]
TargetOption = Annotated[str | None, _model("--target", help="The target, in place of the argument.")]
Draft = Annotated[
    str | None,
    _model(help="Draft model, or its server's address; pocket brings its own. Without one: n-gram lookups."),
]
LocalDraft = Annotated[str | None, _model(help="Draft model; pocket brings its own.")]
Device = Annotated[str, _model(help="auto, cpu, cuda or cuda:N.", autocompletion=lambda: DEVICES)]
DraftDevice = Annotated[
    str | None,
    _model(
        help="Device of the draft model; the target's by default. On another, passes run side by side where it pays.",
        autocompletion=lambda: DEVICES,
    ),
]
Dtype = Annotated[
    str,
    _model(
        help="auto, float32, bfloat16 or float16; fp8, int8 or int4 quantise the weights while loading.",
        autocompletion=lambda: DTYPES,
    ),
]
DraftDtype = Annotated[
    str | None, _model(help="Dtype of the draft model; the target's by default.", autocompletion=lambda: DTYPES)
]
DraftVocab = Annotated[
    str | None,
    _model(help="Limit the draft model's head to this many tokens, or to those in a file made by semspec vocabulary."),
]
KvDtype = Annotated[
    str,
    _model(
        "--kv-dtype",
        help="auto, or fp8: keys and values in half the bytes, on a GPU.",
        autocompletion=lambda: ["auto", "fp8"],
    ),
]
Context = Annotated[int | None, _model(help="Maximum tokens of a sequence; by default the model's, at most 4096.")]
CacheTokens = Annotated[
    int | None,
    _model(help="Tokens in the KV cache of all slots; on a GPU by default what they can use, or what fits."),
]
Sparse = Annotated[Path | None, _model(help="Folder of a sparse verification plan (see semspec sparse). Lossy.")]

Verifier = Annotated[
    str,
    _speculation(
        help="Verifier, e.g. exact, sampling, fly:window=4, none (semspec list has all); profile:FILE (see calibrate).",
        autocompletion=verifiers,
    ),
]
Drafter = Annotated[
    str,
    _speculation(
        help="auto, model, ngram, cascade (a draft model sped up by ngram), or a head: eagle:PATH, dflash:PATH, mtp.",
        autocompletion=drafters,
    ),
]
NumDraftTokens = Annotated[
    str | None,
    _speculation(
        "--num-draft-tokens",
        "-k",
        help="Draft length in tokens: a number, auto (learnt from speed) or auto-repeatable (learnt without a clock, "
        "so a seed repeats). By default auto for exact, else the verifier's own, e.g. 15 for fly.",
    ),
]
MaxDraftTokens = Annotated[int, _speculation(help="Longest draft that auto may choose, in tokens.")]
DraftMinP = Annotated[float, _speculation(help="End a draft when its top token's probability is below this; 0: off.")]
DraftMaxEntropy = Annotated[
    float | None, _speculation(help="End a draft when its entropy (nats) is above this; off by default.")
]
RelaxSpan = Annotated[
    str,
    _speculation(
        help="Where a lossy verifier may accept tokens that the target would not choose: all, or thinking only.",
        autocompletion=lambda: SPANS,
    ),
]
LoopRepeats = Annotated[
    int,
    _speculation(
        help="Switch a lossy verifier to exact when the last block of tokens has repeated this often; 0: off."
    ),
]
LoopPeriod = Annotated[int, _speculation(help="Longest block, in tokens, that counts as repeated.")]
AllowLossy = Annotated[bool, typer.Option("--allow-lossy/--no-allow-lossy", help="Allow or refuse lossy verifiers.")]

MaxNewTokens = Annotated[
    int | None,
    _sampling("--max-new-tokens", "-n", help="Maximum tokens to generate; 256 by default, or what still fits."),
]
MaxThinkingTokens = Annotated[
    int | None, _sampling(help="Maximum tokens of thinking; then its end marker is forced. No limit by default.")
]
Temperature = Annotated[float, _sampling("--temperature", "-t", help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int, _sampling(help="Sample from the k most likely tokens; 0: off.")]
TopP = Annotated[float, _sampling(help="Sample from the most likely tokens with this total probability; 1: off.")]
MinP = Annotated[float, _sampling(help="Drop tokens less likely than this times the top token; 0: off.")]
Seed = Annotated[int | None, _sampling(help="Random seed; a fresh one by default.")]
Stop = Annotated[list[str] | None, _sampling(help="Stop string; may be repeated.")]

MinTokens = Annotated[int, _sampling(help="Minimum tokens before a stop string or end of text may end the answer.")]
PresencePenalty = Annotated[float, _sampling(help="Subtracted once from the logit of every generated token; -2 to 2.")]
FrequencyPenalty = Annotated[float, _sampling(help="Subtracted for each time that a token was generated; -2 to 2.")]
RepetitionPenalty = Annotated[float, _sampling(help="Divides logits of tokens in the prompt or answer; 1: off.")]
LogitBias = Annotated[list[str] | None, _sampling(help="TOKEN_ID=NUMBER, added to its logit; may be repeated.")]
JsonSchema = Annotated[Path | None, _sampling(help="File with a JSON schema that the answer must match.")]
Regex = Annotated[str | None, _sampling(help="Pattern that the answer must match.")]
Choices = Annotated[list[str] | None, _sampling("--choice", help="Allowed answer; repeat it for each.")]
Grammar = Annotated[Path | None, _sampling(help="File with a grammar (Lark) that the answer must match.")]

NoMemoryLine = Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the memory estimate.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the text only.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Data = Annotated[Path | None, typer.Option(help="Folder with the data sets; none is needed for pocket and niah.")]
Problems = Annotated[
    int | None,
    typer.Option("--problems", help="Number of problems; all of a data set by default. pocket and niah need a number."),
]
ProblemSeed = Annotated[int, typer.Option(help="Seed that chooses the problems and the noise.")]
Repeats = Annotated[int, typer.Option(help="Runs of every problem, each with another seed.")]
MaxAnswer = Annotated[
    int | None, typer.Option("--max-new-tokens", help="Longest answer, in tokens; the task's own by default.")
]


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Which models, and how they are loaded."""

    target: Target
    draft: Draft = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    draft_dtype: DraftDtype = None
    kv_dtype: KvDtype = "auto"
    context: Context = None

    def load(self, slots: int, **more: Any) -> Pair:
        from semspec.pair.loading import load

        return load(**vars(self), slots=slots, **more)


@dataclass(frozen=True, kw_only=True)
class LocalArguments(ModelArguments):
    """The same where servers cannot be asked what is needed."""

    target: LocalTarget
    draft: LocalDraft = None


@dataclass(frozen=True, kw_only=True)
class PairArguments(ModelArguments):
    draft_device: DraftDevice = None
    draft_vocab: DraftVocab = None
    sparse: Sparse = None

    @property
    def of_servers(self) -> bool:
        """Whether it is two servers that exchange text."""
        return self.draft is not None and is_url(self.target)


@dataclass(frozen=True, kw_only=True)
class ServedArguments(PairArguments):
    """The same, with a target that may also be given as an option."""

    target: OptionalTarget = None  # type: ignore[assignment]
    target_option: TargetOption = None
    cache_tokens: CacheTokens = None

    def pair(self) -> PairArguments:
        target = self.target_option or self.target
        if not target:
            raise BadRequest("there is no target; give one as the argument, or with --target")
        return PairArguments(**{f.name: getattr(self, f.name) for f in fields(PairArguments)} | {"target": target})


@dataclass(frozen=True, kw_only=True)
class SpeculationArguments:
    """How drafts are made and verified. The fields are those of `Options`; what is not is read by `options`."""

    verifier: Verifier = "exact"
    drafter: Drafter = "auto"
    num_draft_tokens: NumDraftTokens = None
    relax_span: RelaxSpan = "all"
    loop_repeats: LoopRepeats = REPEATS
    loop_period: LoopPeriod = PERIOD

    def options(self, **more: Any) -> Options:
        from semspec.options import Options
        from semspec.profile import read_profile

        given = {f.name: getattr(self, f.name) for f in fields(Options) if hasattr(self, f.name)}
        given["num_draft_tokens"] = draft_length(self.num_draft_tokens)
        if (profile := read_profile(self.verifier)) is not None:
            for name in ("num_draft_tokens", "drafter"):
                if given[name] not in (None, "auto"):
                    raise BadRequest(f"the profile says which {name} to use; leave it out, or name the verifier itself")
            given |= profile.settings()
        return Options(**given | more)


@dataclass(frozen=True, kw_only=True)
class GenerationArguments(SpeculationArguments):
    """All options of a request that the command line has."""

    draft_min_p: DraftMinP = 0.0
    draft_max_entropy: DraftMaxEntropy = None
    max_draft_tokens: MaxDraftTokens = MAX_DRAFT_TOKENS
    allow_lossy: AllowLossy = True
    max_new_tokens: MaxNewTokens = None
    max_thinking_tokens: MaxThinkingTokens = None
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    seed: Seed = None
    stop: Stop = None
    min_tokens: MinTokens = 0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: LogitBias = None
    json_schema: JsonSchema = None
    regex: Regex = None
    choice: Choices = None
    grammar: Grammar = None

    def options(self, **more: Any) -> Options:
        texts = {name: [valid_text(t, f"--{name}") for t in getattr(self, name) or ()] for name in ("stop", "choice")}
        return super().options(
            stop=texts["stop"], logit_bias=_biases(self.logit_bias) if self.logit_bias else None,
            structured_outputs=self._structured(texts["choice"]), **more,
        )  # fmt: skip

    def _structured(self, choice: list[str]) -> dict[str, Any] | None:
        files = {"json": self.json_schema, "grammar": self.grammar}
        wanted: dict[str, Any] = {kind: _read(path) for kind, path in files.items() if path is not None}
        wanted |= {} if self.regex is None else {"regex": valid_text(self.regex, "--regex")}
        wanted |= {"choice": choice} if choice else {}
        if len(wanted) > 1:
            raise BadRequest("give one of --json-schema, --regex, --choice and --grammar; there are several")
        return wanted or None


def _biases(given: Iterable[str]) -> dict[str, float]:
    parts = [text.partition("=") for text in given]
    try:
        return {token.strip(): float(value) for token, _, value in parts}
    except ValueError:
        raise BadRequest("--logit-bias is TOKEN_ID=NUMBER, such as 17=-100") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from None


def draft_length(text: str | None) -> int | str | None:
    """A number, or a word such as auto, which `Options` checks."""
    return int(text) if text is not None and re.fullmatch(r"\s*[+-]?[0-9]{1,9}\s*", text) else text


def valid_text(text: str, source: str) -> str:
    """Refuse text that is not Unicode. Bytes that are not valid UTF-8 arrive as lone surrogates, see `cli.main.run`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{source} is not valid UTF-8 (at character {error.start + 1}); convert it to UTF-8, e.g. with iconv"
        ) from None
    return text.removeprefix("\ufeff")  # with which some editors begin a file: no part of the text
