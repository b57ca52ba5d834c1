"""What quantised weights cost in quality: the pocket pair as plain floats, fp8, int8 and int4, on held-out problems.

    .venv/bin/python bench/quantised_quality.py --n 1000 --out quality.json     # a GPU, or patience

For each precision of both models: accuracy of the target alone with its interval, and how far its distributions are
from the plain ones on the plain target's own text (mean KL in nats, share of positions with the same best token); tau
of `exact`. For each precision of the draft alone: tau, and how many of `exact`'s texts are token for token the plain
target's. That is all of them in float32; in bfloat16 near ties may fall differently, with any draft.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import semspec
from semspec import tasks
from semspec.bench.folder import surroundings
from semspec.pair.result import Result
from semspec.statistics import Share
from semspec.text.tokenizer import encode
from semspec.types import Score

KINDS = ("fp8", "int8", "int4")


class Quality:
    def __init__(self, n: int, device: str, batch: int, k: int) -> None:
        self.task = tasks.make("pocket", None)
        self.problems = self.task.problems(n, 0)
        self.prompts = [problem.prompt for problem in self.problems]
        self.device, self.batch, self.k = device, batch, k

    def load(self, dtype: str, draft_dtype: str | None = None) -> semspec.Pair:
        return semspec.load(
            "pocket", device=self.device, dtype=dtype, draft_dtype=draft_dtype, slots=self.batch, context=1024
        )

    def answers(self, pair: semspec.Pair, verifier: str) -> list[Result]:
        return pair.generate(self.prompts, verifier=verifier, num_draft_tokens=self.k, max_new_tokens=400)

    def right(self, results: list[Result]) -> Share:
        scores = [self.task.score(p, r.text) for p, r in zip(self.problems, results, strict=True)]
        return Share(sum(score == 1 for score in scores), len(scores))

    @torch.inference_mode()
    def logits(self, pair: semspec.Pair, answer: list[int], i: int) -> torch.Tensor:
        runner, asked = pair.target, encode(pair.tokenizer, self.prompts[i])
        slot = runner.acquire()
        rows = runner.score([Score(runner, slot, asked + answer[:-1], len(answer))])[0].logits.float()
        runner.release(slot)
        return rows

    def distance(self, plain: semspec.Pair, other: semspec.Pair, texts: list[list[int]], most: int) -> dict[str, float]:
        """Over the first texts: the mean KL of the other's distributions, and how often its best token is the same."""
        divergence, same, count = 0.0, 0, 0
        for i, text in enumerate(texts[:most]):
            p, q = (self.logits(pair, text, i).log_softmax(-1) for pair in (plain, other))
            divergence += float((p.exp() * (p - q)).sum())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            count += len(p)
        return {"kl_nats": divergence / count, "same_best_token": same / count, "positions": count}


def tau(results: list[Result]) -> float:
    return sum(r.stats.tokens for r in results) / sum(r.stats.rounds for r in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("-k", type=int, default=8, help="draft length")
    parser.add_argument("--texts", type=int, default=200, help="texts on which distributions are compared")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only these; may be repeated")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    kinds = [kind for kind in KINDS if asked.kind is None or kind in asked.kind]
    quality = Quality(asked.n, asked.device, asked.batch, asked.k)
    gpu = quality.load("auto").target.device.type == "cuda"
    report: dict[str, Any] = {**surroundings(), "n": asked.n, "k": asked.k, "pairs": {}, "drafts": {}}

    def tell(group: str, name: str, figures: dict[str, Any], began: float) -> None:
        report[group][name] = figures
        told = ", ".join(f"{key} {v:.4g}" if isinstance(v, float) else f"{key} {v}" for key, v in figures.items())
        print(f"{group} {name}: {told} ({time.perf_counter() - began:.0f} s)", flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(report, indent=1))

    for base in ("bfloat16", "float32") if gpu else ("float32",):
        began = time.perf_counter()
        plain = quality.load(base)
        alone = quality.answers(plain, "none")
        texts = [r.tokens for r in alone]
        drafted = quality.answers(plain, "exact")
        equal = sum(r.tokens == text for r, text in zip(drafted, texts, strict=True))
        tell("pairs", base, {"right": str(quality.right(alone)), "tau": tau(drafted), "equal_texts": equal}, began)
        for kind in kinds if base == "bfloat16" or not gpu else ("fp8",):
            began = time.perf_counter()
            mixed = quality.load(base, kind)
            drafted = quality.answers(mixed, "exact")
            equal = sum(r.tokens == text for r, text in zip(drafted, texts, strict=True))
            tell("drafts", f"{base} with {kind} draft", {"tau": tau(drafted), "equal_texts": equal}, began)
            del mixed
        if base == "float32" and gpu:
            continue
        for kind in kinds:
            began = time.perf_counter()
            other = quality.load(kind)
            figures: dict[str, Any] = {"right": str(quality.right(quality.answers(other, "none")))}
            figures["tau"] = tau(quality.answers(other, "exact"))
            tell("pairs", kind, figures | quality.distance(plain, other, texts, asked.texts), began)
            del other


if __name__ == "__main__":
    main()
