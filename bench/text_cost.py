"""What it costs to exchange text: the work of the host in a round, by length of the context, and whole rounds.

    python -m bench.text_cost --out results/text-cost.json
    python -m bench.text_cost --host-only --target-tokenizer SmolLM2.gguf --draft-entries 34000 --device cpu

The host's part is timed by itself: reading what the target has written, and spelling the draft's tokens in the
target's, with a draft that is right, over a text of problems and solutions. Whole rounds compare the pocket draft with
the same draft under other names (recipes/pocket/rename.py), which proposes the same text: equal acceptance. The share
of a round's host time is of the host's part of rounds of the pocket pair without an exchange: all but the passes. Times
of the host are CPU time of its thread, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import semspec
from recipes.pocket.data import tokenizer_texts
from recipes.pocket.rename import rename
from recipes.pocket.tokenizer import OTHER, train_tokenizer
from semspec.draft import TranslatingDrafter
from semspec.model.wrapper import RunnerWrapper
from semspec.options import Options
from semspec.pair import Pair
from semspec.pocket import problem
from semspec.pocket.shipped import SHIPPED
from semspec.text.exchange import Exchange, Side
from semspec.text.tokenizer import load_tokenizer
from semspec.types import Decode, DecodeOutput, Draft, DraftRequest, ProposalGenerator, Runner, Score, ScoreOutput

LENGTHS = (1024, 8192, 32768)
DRAFTED, ROUNDS = 8, 200
BIG_ROUND_MS = 30.6  # of 8 draft tokens at 32B/1.5B shapes on an H200, docs/gpu.md


class Given:
    """A drafter that proposes the next of these tokens, at no cost."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.runners = tokens, list[Runner]()

    def begin(self, slots: list[int]) -> None: ...
    def accept(self, length: int) -> None: ...
    def close(self) -> None: ...

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        return Draft(self.tokens[len(context) : len(context) + request.max_tokens])
        yield


def host_us(exchange: Exchange, text: str, length: int) -> float:
    """Median microseconds of a round's translating, after so many tokens of context."""
    tokens = exchange.target_speller.tokens(text)
    own = exchange.draft_speller.tokens(text)
    drafter = TranslatingDrafter(Given(own), exchange, [], 0)
    drafter.begin([])
    context, spent = tokens[:length], []
    for _ in range(ROUNDS):
        began = time.thread_time()
        try:
            next(drafter.propose(context, DraftRequest(DRAFTED)))
        except StopIteration:
            drafter.accept(len(context) + DRAFTED - 1)
        spent.append(time.thread_time() - began)
        context += tokens[len(context) : len(context) + DRAFTED]
    return 1e6 * statistics.median(spent[ROUNDS // 4 :])


class Timed(RunnerWrapper):
    """A runner, and the CPU time of its passes."""

    seconds = 0.0

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        began = time.thread_time()
        found = self.inner.score(requests)
        self.seconds += time.thread_time() - began
        return found

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        began = time.thread_time()
        found = self.inner.decode(requests)
        self.seconds += time.thread_time() - began
        return found


def round_host_us(problems: int = 12) -> float:
    """Microseconds of the host's part of a round, text and all, with one tokenizer."""
    runners: list[Timed] = []

    def timed(runner: Runner) -> Runner:
        runners.append(Timed(runner))
        return runners[-1]

    pair = semspec.load("pocket", device="cpu", slots=1, context=1024).wrapped(timed)
    options = Options(verifier="exact", num_draft_tokens=DRAFTED, max_new_tokens=128, ignore_eos=True)
    found = []
    for seed in range(problems):
        chat, before = [{"role": "user", "content": problem(seed, split="test").text}], sum(r.seconds for r in runners)
        began = time.thread_time()
        rounds = sum(pair.generate(chat, options).stats.histogram.values())
        found.append((time.thread_time() - began - sum(r.seconds for r in runners) + before) / rounds)
    return 1e6 * statistics.median(found)


def another_tokenizer(entries: int, texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level merges learnt from the sources of transformers, which have words enough."""
    folder = Path(transformers.__file__).parent / "models"
    texts = [*texts, *(path.read_text() for path in sorted(folder.glob("**/*.py"))[:900])]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=entries, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def round_ms(pair: Pair, problems: int, batch: int) -> tuple[float, float]:
    """Milliseconds of a round of `exact`, and its tau."""
    chats = [[{"role": "user", "content": problem(seed, split="test").text}] for seed in range(problems)]
    options, found = Options(verifier="exact", num_draft_tokens=DRAFTED, max_new_tokens=128, ignore_eos=True), []
    pair.generate(chats[:batch], options)
    began = time.perf_counter()
    for first in range(0, problems, batch):
        found += pair.generate(chats[first : first + batch], options)
    seconds = time.perf_counter() - began
    rounds = [sum(r.stats.histogram.values()) for r in found]
    waves = sum(max(rounds[first : first + batch]) for first in range(0, problems, batch))
    return 1e3 * seconds / waves, sum(len(r.tokens) for r in found) / sum(rounds)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    texts = tokenizer_texts(1500)
    ours = load_tokenizer(Path(arguments.target_tokenizer or SHIPPED["pocket"]))
    theirs = load_tokenizer(Path(arguments.draft_tokenizer)) if arguments.draft_tokenizer else None
    if arguments.draft_entries:
        theirs = another_tokenizer(arguments.draft_entries, texts)
    theirs = theirs or train_tokenizer(texts[:600], OTHER)
    sides = [Side(t, len(t), frozenset([t.eos_token_id])) for t in (ours, theirs)]
    exchange, text = Exchange(*sides), "".join(" " + text for text in texts)
    host = {length: host_us(exchange, text, length) for length in LENGTHS}
    found: dict[str, Any] = {
        "vocabularies": [side.vocab_size for side in sides],
        "host_us_by_context": host,
        "share_of_a_big_round": host[LENGTHS[-1]] / 1e3 / BIG_ROUND_MS,
        "round_host_us": (rest := round_host_us()),
        "share_of_host_time": host[LENGTHS[-1]] / (rest + host[LENGTHS[-1]]),
    }
    if not arguments.host_only:
        found["rounds"] = compare(arguments)
    return found


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of both pairs in turn."""
    rows, how = [], {"device": arguments.device, "slots": 32, "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        other = semspec.load("pocket", rename(SHIPPED["pocket-draft"], Path(folder) / "draft"), **how)
    pair = semspec.load("pocket", **how)
    for batch in (1, 32):
        problems = 4 if batch == 1 else 64
        times = [[round_ms(each, problems, batch) for each in (pair, other)] for _ in range(arguments.repeat)]
        same, renamed = ([t[i] for t in times] for i in (0, 1))
        middle = [statistics.median(ms for ms, _ in each) for each in (same, renamed)]
        row = {"batch": batch, "same_ms": middle[0], "other_ms": middle[1], "ratio": middle[1] / middle[0]}
        rows.append(row | {"tau": [same[0][1], renamed[0][1]]})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--target-tokenizer", help="a folder or .gguf file; by default the pocket target's")
    parser.add_argument("--draft-tokenizer", help="by default one trained here")
    parser.add_argument("--draft-entries", type=int, help="train one of so many entries")
    parser.add_argument("--host-only", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
