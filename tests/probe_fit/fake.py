"""A pair of fake models over a small vocabulary that has words, blank lines, and markers of thinking."""

from __future__ import annotations

from semspec.pair import Pair
from semspec.probe_fit.config import Config
from semspec.probe_fit.data import Trace
from semspec.probe_fit.traces import cut
from semspec.text.steps import StepDelimiters
from tests.fakes import FakeRunner, Logits, chain
from tests.text.test_steps import END, END_THINK, PIECES, byte_level

VOCAB = END_THINK + 1
LANGUAGES: dict[str, Logits] = {"target": chain(VOCAB, seed=1), "draft": chain(VOCAB, seed=2)}
A, DELIMITER = PIECES.index("a"), PIECES.index(".\n\n")
CONFIG = Config(samples=3, max_step_tokens=12, target_layers=(1, -1), draft_layers=(0,), shard=2, traces="given.jsonl")


def fake_pair(slots: int = 8, capacity: int = 64) -> Pair:
    runners = {m: FakeRunner(logits, VOCAB, slots, capacity) for m, logits in LANGUAGES.items()}
    for model, runner in runners.items():
        runner.fingerprint = f"fake-{model}"  # type: ignore[attr-defined]
    return Pair(runners["target"], byte_level(), runners["draft"], frozenset({END}))


def steps(limit: int = 12) -> StepDelimiters:
    return StepDelimiters.of(byte_level(), max_step_tokens=limit)


def traces(count: int = 3) -> list[Trace]:
    """Trace i has i + 2 steps, then ends thinking; its prompt is its own."""
    return [
        Trace(f"problem/{i}", [A, i], [*[A, 1, DELIMITER] * (i + 2), END_THINK, A, DELIMITER, END])
        for i in range(count)
    ]


def prefixes(count: int = 3):  # type: ignore[no-untyped-def]
    return list(enumerate(cut(traces(count), steps(), byte_level())))
