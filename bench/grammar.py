"""What structured output costs on a CPU: masks of llguidance and xgrammar side by side, and throughput with a schema.

    python bench/grammar.py masks         # seconds of a mask over a vocabulary of 50,000 (xgrammar if it is installed)
    python bench/grammar.py throughput    # tokens per CPU second of the pocket pair, batch 8, with and without a schema

Times are of this process alone (CPU seconds), so that other work on the machine counts less. One JSON document is
printed.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 50_000
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "emails": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            "kind": {"enum": ["customer", "employee", "other"]},
        },
        "required": ["name", "age", "emails", "kind"],
        "additionalProperties": False,
    },
    "orders": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                "lines": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"item": {"type": "string"}, "count": {"type": "integer"}},
                        "required": ["item", "count"],
                        "additionalProperties": False,
                    },
                },
                "paid": {"type": "boolean"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["id", "lines", "paid", "note"],
            "additionalProperties": False,
        },
    },
    "any object": {"type": "object"},
}
TEXTS = {
    "person": {"name": "Ada Lovelace", "age": 36, "emails": ["ada@example.org", "a.l@example.com"], "kind": "other"},
    "orders": [
        {"id": "ABC-1234", "lines": [{"item": "a dozen pens", "count": 12}], "paid": True, "note": None},
        {"id": "XYZ-0001", "lines": [{"item": "bag", "count": 1}], "paid": False, "note": "leave at the door"},
    ],
    "any object": {
        "title": "a text of some length, with words",
        "tags": ["one", "two"],
        "depth": {"x": [1, 2.5, None]},
    },
}


def tokenizer(vocab: int) -> Any:
    """A byte-level BPE over Python's own library: large, and to be had everywhere."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<eos>"], initial_alphabet=alphabet)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    folders = ("email", "json", "http", "xml", "unittest", "asyncio", "idlelib", "test", "lib2to3", "distutils")
    files += [f for name in folders for f in sorted(Path(sysconfig.get_paths()["stdlib"], name).rglob("*.py"))[:400]]
    bpe.train_from_iterator((f.read_text(errors="ignore") for f in files), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


def masks() -> dict[str, Any]:
    tokens = tokenizer(VOCAB)
    engines: dict[str, Callable[[dict[str, Any], list[int]], Iterator[float]]] = {"llguidance": _llguidance(tokens)}
    try:
        engines["xgrammar"] = _xgrammar(tokens)
    except ImportError:
        print("xgrammar is not installed; only llguidance is measured", file=sys.stderr)
    found: dict[str, Any] = {"vocabulary": len(tokens)}
    for name, schema in SCHEMAS.items():
        ids = tokens.encode(json.dumps(TEXTS[name]))
        for engine, run in engines.items():
            compiled, *steps = run(schema, ids)
            found[f"{name}, {engine}"] = {
                "compile_ms": round(1e3 * compiled, 2),
                "tokens": len(ids),
                "mask_us_mean": round(1e6 * statistics.fmean(steps), 1),
                "mask_us_median": round(1e6 * statistics.median(steps), 1),
                "mask_us_worst": round(1e6 * max(steps), 1),
            }
    return found


def _llguidance(tokens: Any) -> Callable[[dict[str, Any], list[int]], Iterator[float]]:
    from llguidance import LLMatcher, hf
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    library = hf.from_tokenizer(tokens)
    mask = allocate_token_bitmask(1, len(tokens))

    def run(schema: dict[str, Any], ids: list[int]) -> Iterator[float]:
        start = time.process_time()
        matcher = LLMatcher(library, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        yield time.process_time() - start
        for token in ids:
            start = time.process_time()
            fill_next_token_bitmask(matcher, mask, 0)
            yield time.process_time() - start
            assert matcher.consume_token(token)

    return run


def _xgrammar(tokens: Any) -> Callable[[dict[str, Any], list[int]], Iterator[float]]:
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokens, vocab_size=len(tokens))
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def run(schema: dict[str, Any], ids: list[int]) -> Iterator[float]:
        start = time.process_time()
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema, any_whitespace=True))
        yield time.process_time() - start
        for token in ids:
            start = time.process_time()
            matcher.fill_next_token_bitmask(mask, 0)
            yield time.process_time() - start
            assert matcher.accept_token(token)

    return run


def throughput(batch: int = 8, tokens: int = 96, repeats: int = 3) -> dict[str, Any]:
    import torch

    import semspec

    torch.set_num_threads(1)
    pair = semspec.load("pocket", device="cpu", slots=batch)
    prompts = [f"Write {i} numbers:" for i in range(batch)]
    row = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    kinds = {
        "numbers": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 400}},
        "rows": {"json": {"type": "array", "items": row, "minItems": 400}},
    }
    found: dict[str, Any] = {"batch": batch, "new_tokens": tokens}
    for verifier, how in {"none": {}, "exact": {"num_draft_tokens": 4}}.items():
        rates: dict[str, list[float]] = {}
        for _ in range(repeats):
            for name, structured in {"free": None, **kinds}.items():
                start = time.process_time()
                results = pair.generate(
                    prompts, verifier=verifier, max_new_tokens=tokens, ignore_eos=True, structured_outputs=structured,
                    temperature=0.8, seed=1, max_thinking_tokens=1, **how,
                )  # fmt: skip
                seconds = time.process_time() - start
                rates.setdefault(name, []).append(sum(len(r.tokens) for r in results) / seconds)
        best = {name: max(each) for name, each in rates.items()}
        found[verifier] = {
            name: {"tokens_per_cpu_second": round(rate, 1), "of_free": round(rate / best["free"], 3)}
            for name, rate in best.items()
        }
    return found


def machine() -> dict[str, Any]:
    packages = ("llguidance", "torch", "numpy")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        **{p: version(p) for p in packages},
    }


if __name__ == "__main__":
    kinds = {"masks": masks, "throughput": throughput}
    if len(sys.argv) != 2 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    np.seterr(all="ignore")
    print(json.dumps(machine() | {sys.argv[1]: kinds[sys.argv[1]]()}, indent=1))
