"""How fast a real model decodes on this CPU, one sequence at a time: transformers' generate, and ours.

    make smollm2 && .venv/bin/python bench/cpu.py

All arms answer the same prompts greedily, in turn, so that whatever else the machine does falls on all of them alike.
Figures are ratios of the time for each token against transformers, medians over prompts and rounds with their
quartiles, by the wall clock and by this process's own CPU time, which other work on the machine disturbs less; and
beside them what the text is worth: the share of tokens that are transformers' own up to the first that
is not, and the loss on transformers' text. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import semspec
from semspec.bench.folder import surroundings
from semspec.text.tokenizer import encode
from semspec.types import Score

MODEL = Path(".models/SmolLM2-135M-Instruct.Q4_1.gguf")
PASSAGE = (
    "The harbour of the old town was built by fishermen who needed shelter from the northern winds. Later the harbour "
    "was widened for merchant ships, and the fishermen moved to the southern shore."
)
PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain in simple words why the sky is blue.",
    f"Repeat the following passage word for word, twice: {PASSAGE}",
    f"Correct the spelling and give the whole passage back: {PASSAGE.replace('harbour', 'harbor')}",
]
Arm = Callable[[str], list[int]]


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def load_with_transformers(path: Path) -> PreTrainedModel:
    """Its own reading of the file; `from_pretrained` would do the same but insists on accelerate."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    model.generation_config.eos_token_id = None  # every arm writes the same number of tokens
    return model


def ours(pair: semspec.Pair, tokens: int, **options: Any) -> Arm:
    return lambda prompt: pair.generate(chat(prompt), max_new_tokens=tokens, ignore_eos=True, **options).tokens


def theirs(model: PreTrainedModel, pair: semspec.Pair, tokens: int) -> Arm:
    def answer(prompt: str) -> list[int]:
        ids = torch.tensor([encode(pair.tokenizer, chat(prompt))])
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False
            )
        return out[0, ids.shape[1] :].tolist()

    return answer


def loss(pair: semspec.Pair, prompt: str, answer: list[int]) -> float:
    """Nats for each token of a text that is given."""
    runner, asked = pair.target, encode(pair.tokenizer, chat(prompt))
    slot = runner.acquire()
    logits = runner.score([Score(runner, slot, asked + answer[:-1], len(answer))])[0].logits
    runner.release(slot)
    return float(torch.nn.functional.cross_entropy(logits.float(), torch.tensor(answer)))


def agreement(answer: list[int], reference: list[int]) -> float:
    same = 0
    while same < len(reference) and answer[same] == reference[same]:
        same += 1
    return same / len(reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL, help="a .gguf file")
    parser.add_argument("--tokens", type=int, default=96, help="for each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int, default=6)
    asked = parser.parse_args()
    if not asked.model.is_file():
        sys.exit(f"{asked.model} is not there; `make smollm2` fetches it, or give --model")
    pairs = {kind: semspec.load(asked.model, device="cpu", dtype=kind, slots=1) for kind in ("float32", "int8")}
    exact, small = pairs["float32"], pairs["int8"]
    ngram = {"verifier": "exact", "drafter": "ngram", "num_draft_tokens": asked.draft_tokens}
    arms: dict[str, Arm] = {
        "transformers": theirs(load_with_transformers(asked.model), exact, asked.tokens),
        "ours": ours(exact, asked.tokens, verifier="none"),
        "ours, ngram": ours(exact, asked.tokens, **ngram),
        "ours, int8": ours(small, asked.tokens, verifier="none"),
        "ours, int8, ngram": ours(small, asked.tokens, **ngram),
    }
    for arm in arms.values():
        arm(PROMPTS[0])  # warm-up
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    seconds: dict[tuple[str, str], list[float]] = {(name, clock): [] for name in arms for clock in clocks}
    answers: dict[str, dict[int, list[int]]] = {name: {} for name in arms}
    for _ in range(asked.rounds):
        for i, prompt in enumerate(PROMPTS):
            for name, arm in arms.items():
                began = {clock: now() for clock, now in clocks.items()}
                answers[name][i] = arm(prompt)
                for clock, now in clocks.items():
                    seconds[name, clock].append(now() - began[clock])
    report: dict[str, Any] = {
        "model": asked.model.name, "tokens": asked.tokens, "rounds": asked.rounds, "prompts": len(PROMPTS),
        "draft_tokens": asked.draft_tokens, "arms": {},
    } | surroundings()  # fmt: skip
    print(f"{'arm':18} {'ms/token':>9} {'by wall clock':>22} {'by CPU time':>22} {'agrees':>7} {'loss':>6}")
    for name in arms:
        figures: dict[str, Any] = {}
        for clock in clocks:
            own = seconds[name, clock]
            ratios = [base / mine for base, mine in zip(seconds["transformers", clock], own, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            figures[clock] = {
                "ms_per_token": statistics.median(own) / asked.tokens * 1000,
                "speedup": middle,
                "quartiles": [low, high],
            }
        pair = small if "int8" in name else exact
        reference = answers["transformers"]
        figures["agreement"] = statistics.mean(agreement(answers[name][i], reference[i]) for i in reference)
        figures["loss"] = statistics.mean(loss(pair, PROMPTS[i], reference[i]) for i in reference)
        report["arms"][name] = figures
        told = "".join(
            f" {f['speedup']:7.2f}x [{f['quartiles'][0]:.2f}, {f['quartiles'][1]:.2f}]"
            for f in (figures[clock] for clock in clocks)
        )
        spent = figures["wall"]["ms_per_token"]
        print(f"{name:18} {spent:9.1f}{told} {figures['agreement']:7.0%} {figures['loss']:6.3f}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
