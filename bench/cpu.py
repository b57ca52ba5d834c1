"""How fast a real model decodes on this CPU, one sequence at a time: transformers' generate, llama.cpp, and ours.

    make smollm2 && npm install --prefix .models node-llama-cpp
    OMP_NUM_THREADS=1 .venv/bin/python bench/cpu.py --llama .models/node_modules

All arms answer the same prompts greedily, in turn, so that whatever else the machine does falls on all of them alike.
Figures are ratios of the time for each token against the first arm and against llama.cpp, medians over prompts and
rounds with their quartiles, by the wall clock and by the process's own CPU time, which other work on the machine
disturbs less; and beside them what the text is worth: the share of tokens that are float32's own up to the first that
is not, and the loss on float32's text. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
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
REPEATED = "\n\n".join([PASSAGE] * 3) + "\n\n"  # as it is, not as a chat: what follows repeats
PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain in simple words why the sky is blue.",
    f"Repeat the following passage word for word, twice: {PASSAGE}",
    f"Correct the spelling and give the whole passage back: {PASSAGE.replace('harbour', 'harbor')}",
    REPEATED,
]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Seconds = dict[str, float]  # by clock
Arm = Callable[[str], tuple[list[int], Seconds]]


def timed(answer: Callable[[], list[int]]) -> tuple[list[int], Seconds]:
    began = {clock: now() for clock, now in CLOCKS.items()}
    made = answer()
    return made, {clock: now() - began[clock] for clock, now in CLOCKS.items()}


def chat(prompt: str) -> list[dict[str, str]] | str:
    return prompt if prompt is REPEATED else [{"role": "user", "content": prompt}]


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
    given = {"max_new_tokens": tokens, "ignore_eos": True} | options
    return lambda prompt: timed(lambda: pair.generate(chat(prompt), **given).tokens)


def theirs(model: PreTrainedModel, pair: semspec.Pair, tokens: int) -> Arm:
    def answer(prompt: str) -> list[int]:
        ids = torch.tensor([encode(pair.tokenizer, chat(prompt))])
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False
            )
        return out[0, ids.shape[1] :].tolist()

    return lambda prompt: timed(lambda: answer(prompt))


def llama_cpp(packages: Path, model: Path, pair: semspec.Pair, tokens: int) -> Arm:
    """In a process of its own, which reports its own times."""
    script, threads = Path(__file__).with_name("llama.mjs"), str(torch.get_num_threads())
    command = ["node", str(script), str(packages.resolve()), str(model), threads]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(prompt: str) -> tuple[list[int], Seconds]:
        assert process.stdin and process.stdout
        asked = {"tokens": encode(pair.tokenizer, chat(prompt)), "count": tokens}
        print(json.dumps(asked), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            sys.exit(f"llama.cpp ended with status {process.wait()}; is node-llama-cpp in {packages}?")
        made = json.loads(line)
        return made["answer"], {clock: made[clock] for clock in CLOCKS}

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


def ratios(seconds: dict[tuple[str, str], list[float]], name: str, base: str, clock: str) -> dict[str, Any]:
    """How many times as fast as another arm."""
    each = [b / own for b, own in zip(seconds[base, clock], seconds[name, clock], strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    return {"speedup": middle, "quartiles": [low, high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL, help="a .gguf file")
    parser.add_argument("--llama", type=Path, help="a node_modules folder with node-llama-cpp")
    parser.add_argument("--tokens", type=int, default=96, help="for each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int, default=6)
    parser.add_argument("--dtypes", default="float32,int8,int4")
    parser.add_argument("--no-transformers", action="store_true", help="leave that arm out: it is slow")
    asked = parser.parse_args()
    if not asked.model.is_file():
        sys.exit(f"{asked.model} is not there; `make smollm2` fetches it, or give --model")
    kinds = list(dict.fromkeys(["float32", *asked.dtypes.split(",")]))
    pairs = {kind: semspec.load(asked.model, device="cpu", dtype=kind, slots=1) for kind in kinds}
    exact = pairs["float32"]
    arms: dict[str, Arm] = {}
    if not asked.no_transformers:
        arms["transformers"] = theirs(load_with_transformers(asked.model), exact, asked.tokens)
    if asked.llama:
        arms["llama.cpp"] = llama_cpp(asked.llama, asked.model, exact, asked.tokens)
    drafts = {"verifier": "exact", "drafter": "ngram", "num_draft_tokens": asked.draft_tokens}
    of: dict[str, semspec.Pair] = {}
    for kind in asked.dtypes.split(","):
        for name, options in ((f"ours, {kind}", {"verifier": "none"}), (f"ours, {kind}, ngram", drafts)):
            arms[name], of[name] = ours(pairs[kind], asked.tokens, **options), pairs[kind]
    texts = {i: exact.generate(chat(p), max_new_tokens=asked.tokens, ignore_eos=True, verifier="none").tokens
             for i, p in enumerate(PROMPTS)}  # fmt: skip
    for arm in arms.values():
        arm(PROMPTS[0])  # warm-up
    seconds: dict[tuple[str, str], list[float]] = {(name, clock): [] for name in arms for clock in CLOCKS}
    answers: dict[str, dict[int, list[int]]] = {name: {} for name in arms}
    for _ in range(asked.rounds):
        for i, prompt in enumerate(PROMPTS):
            for name, arm in arms.items():
                answers[name][i], spent = arm(prompt)
                for clock in CLOCKS:
                    seconds[name, clock].append(spent[clock])
    report: dict[str, Any] = {
        "model": asked.model.name, "tokens": asked.tokens, "rounds": asked.rounds, "prompts": len(PROMPTS),
        "draft_tokens": asked.draft_tokens, "arms": {},
    } | surroundings()  # fmt: skip
    bases = list(dict.fromkeys([next(iter(arms)), *(["llama.cpp"] if asked.llama else [])]))
    columns = "".join(f"{f'{clock}, against {base}':>27}" for base in bases for clock in CLOCKS)
    print(f"{'arm':20} {'ms/token':>9} {'of CPU':>7}{columns} {'agrees':>7} {'loss':>6}  on text that repeats, CPU")
    for name in arms:
        figures: dict[str, Any] = {
            "ms_per_token": {c: statistics.median(seconds[name, c]) / asked.tokens * 1000 for c in CLOCKS},
            "against": {base: {c: ratios(seconds, name, base, c) for c in CLOCKS} for base in bases},
            "agreement": statistics.mean(agreement(answers[name][i], texts[i]) for i in texts),
        }
        if name in of:
            figures["loss"] = statistics.mean(loss(of[name], PROMPTS[i], texts[i]) for i in texts)
        repeated = ""
        if name.endswith(", ngram"):
            alone = name.removesuffix(", ngram")
            times = [seconds[n, "cpu"][len(PROMPTS) - 1 :: len(PROMPTS)] for n in (alone, name)]
            figures["repeating"] = statistics.median(b / own for b, own in zip(*times, strict=True))
            repeated = f"{figures['repeating']:6.2f}x without drafts"
        report["arms"][name] = figures
        told = "".join(
            f"{f['speedup']:12.2f}x [{f['quartiles'][0]:5.2f}, {f['quartiles'][1]:5.2f}]"
            for f in (figures["against"][base][clock] for base in bases for clock in CLOCKS)
        )
        spent = figures["ms_per_token"]
        worth = f" {figures['agreement']:7.0%}" + (f" {figures['loss']:6.3f}" if "loss" in figures else "")
        print(f"{name:20} {spent['wall']:9.1f} {spent['cpu']:7.1f}{told}{worth}{repeated}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
