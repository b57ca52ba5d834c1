"""SemanticSpec end to end at full size, on synthetic models: the real shapes, with weights of noise.

    python bench/synthetic_e2e.py --out results/gpu-synthetic-e2e.json  # 32B/1.5B on a GPU with 90 GB free, under 90 s
    python bench/synthetic_e2e.py --shape tiny --device cpu        # does it run? seconds

Samples steps of both models (`semspec.probe_fit.collect`), labels them, trains both probes and the judge, and decodes
with these: the target alone, `semantic`, `semantic+`, and the two ends of what a step rule can decide.

Real are the shapes, the size of the vocabulary, every byte that a pass reads, the passes, the sampling, and the code.
So the seconds are those of a real pair that decides the same things. The text is not real. The words come from a
tokenizer made here, with a word for each id that both models share; every 20th ends in a blank line, so that steps end
by themselves, and there is no end of thinking or of text. What a step means is its first word, sorted into --meanings.
The judge's threshold accepts half of the draft's sampled steps. What probes predict for such steps, how many are
accepted and whatever else depends on text says nothing about any model: a speedup here is that of this share of steps.

Prints tables, and as its last line JSON, which also goes to the file named by --out. --seconds bounds it all: no shard
of prefixes is started in the second half of them; when they are over, a text is cut off, and the rest is left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.table import Table

from bench.synthetic_e2e_text import EVERY, FirstWord, make_tokenizer, spelling
from semspec.bench.shapes import SHAPES, random_runner
from semspec.cli.probe_options import Teaching
from semspec.loop.stats import current_outcomes
from semspec.model import ModelRunner
from semspec.model.graphs import GraphCache
from semspec.model.placement import choose_device
from semspec.options import Options
from semspec.pair import Pair
from semspec.probe import Probe
from semspec.probe_fit.cluster import Source
from semspec.probe_fit.collect import collect
from semspec.probe_fit.config import Config
from semspec.probe_fit.data import Folder
from semspec.probe_fit.label import label
from semspec.probe_fit.rows import load_rows
from semspec.probe_fit.train import fit, predict

TEMPERATURE, TOP_P = 0.6, 0.95  # the paper's
MIN_PROBLEMS = 3  # to train, to validate and to test with


class Over(Exception):
    """The time for sampling is over; what is on the disk is what there is."""


@dataclass
class Clock:
    seconds: float
    began: float

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.began

    def over(self, share: float = 1.0) -> bool:
        return self.spent > share * self.seconds


class SyntheticRun:
    """Both models and what is done with them, stage by stage. `report` is all that is known so far."""

    def __init__(self, args: argparse.Namespace, clock: Clock, out: Path) -> None:
        self.args, self.clock, self.out = args, clock, out
        self.device = choose_device(args.device)
        self.rng = random.Random(args.seed)
        self.stages: dict[str, dict[str, Any]] = {}
        self.runners: list[ModelRunner] = []
        self.arms: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def captured(self) -> float:
        """Seconds that went into compiling kernels and capturing graphs until now."""
        fasts = [runner.graph_runner for runner in self.runners if runner.graph_runner]
        return sum(fast.launcher.seconds for fast in fasts if isinstance(fast.launcher, GraphCache))

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        found: dict[str, Any] = {}
        self.wait()
        began, before = time.perf_counter(), self.captured()
        yield found
        self.wait()
        self.stages[name] = {"seconds": time.perf_counter() - began, "captures": self.captured() - before} | found
        print(f"{name}: {json.dumps(self.stages[name])}", flush=True)

    # -- stages

    def build(self) -> None:
        args = self.args
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        longest = max((args.per_problem + 1) * args.max_step_tokens, args.tokens)
        capacity = args.prompt + longest + args.max_step_tokens + 16
        torch.manual_seed(args.seed)
        with self.stage("models") as found:
            self.runners = [random_runner(c, args.slots, capacity, self.device, dtype) for c in SHAPES[args.shape]]
            target, draft = self.runners
            target.vocab_size = draft.vocab_size = min(target.vocab_size, draft.vocab_size)
            sizes = {name: r.shape.parameters for name, r in (("target", target), ("draft", draft))}
            found |= {"parameters": sizes, "vocab": target.vocab_size, "capacity": capacity}
        with self.stage("tokenizer"):
            self.pair = Pair(target, make_tokenizer(target.vocab_size), draft)

    def words(self, n: int) -> str:
        """So many tokens that end nothing."""
        ids = (self.rng.randrange(self.pair.target.vocab_size // EVERY) * EVERY for _ in range(n))
        return "".join(spelling(i) for i in ids)

    def traces(self) -> Path:
        """As many steps for each problem as there are prefixes, in a file such as `probe collect --traces` takes."""
        args, path, end = self.args, self.out / "given.jsonl", spelling(EVERY - 1)
        with path.open("w") as file:
            for i in range(args.problems):
                steps = [self.words(self.rng.randrange(2, args.max_step_tokens)) for _ in range(args.per_problem)]
                row = {"problem": f"synthetic/{i}", "prompt": self.words(args.prompt), "text": end.join([*steps, ""])}
                print(json.dumps(row), file=file)
        return path

    def collect(self) -> None:
        args, traces, marks = self.args, self.traces(), list[float]()
        config = Config(
            traces=str(traces), per_problem=args.per_problem, samples=args.samples, temperature=TEMPERATURE,
            top_p=TOP_P, max_step_tokens=args.max_step_tokens, seed=args.seed, shard=args.slots,
        )  # fmt: skip

        def progress(done: int, total: int) -> None:
            marks.append(self.clock.spent)
            if done < total and done and self.clock.over(0.5):
                raise Over

        with self.stage("collection") as found:
            captured = self.captured()
            try:
                collect(config, self.out, self.pair, progress)
            except Over:
                self.left_out.append("some prefixes")
            shards = [Folder(self.out).read_samples(shard) for shard in Folder(self.out).shards]
            took = [after - before for before, after in pairwise(marks)]
            samples = sum(len(shard) for shard in shards)
            found |= {
                "problems": len({s.problem for shard in shards for s in shard}),
                "prefixes": len({s.prefix for shard in shards for s in shard}),
                "samples": samples,
                "tokens": sum(len(s.tokens) for shard in shards for s in shard),
                "shard_seconds": took,
                "samples_a_second": samples / (sum(took) - self.captured() + captured),  # once all is captured
            }

    def label(self) -> None:
        with self.stage("labels") as found:
            clusterer = FirstWord(Source(), self.args.meanings)
            label(Folder(self.out), clusterer, {"clusters": f"{clusterer.name}:meanings={self.args.meanings}"})
            found["shards"] = len(Folder(self.out).shards)

    def train(self) -> None:
        few = self.stages["collection"]["problems"] < MIN_PROBLEMS  # time was over early
        for name, (model, how) in Teaching(epochs=self.args.epochs).trainings().items():
            if few or self.clock.over():
                self.left_out.append(f"probe {name}")
                continue
            with self.stage(f"probe {name}") as found:
                probe = fit(Folder(self.out), model, how, self.device).probe
                if name == "judge":
                    found["threshold"] = probe.data["threshold"] = self.median_score(probe)
                probe.save(self.out / name)
                found |= {"rows": probe.data["rows"], "epochs": probe.data["training"]["epochs"]}

    def median_score(self, judge: Probe) -> float:
        """The judge's median score of the draft's steps."""
        rows = load_rows(Folder(self.out), "target", judge.features, "written")
        return float(judge.calibrator(predict(judge.head, rows))[rows.cross].median())

    def decode(self) -> None:
        limit, prompt = f"max_step_tokens={self.args.max_step_tokens}", self.words(self.args.prompt)
        probes = f"probes={self.out},{limit}"
        rules = {
            "none": "none",
            "semantic": f"semantic:{probes}",
            "semantic+": f"semantic+:{probes}",
            "all steps accepted": f"random-step:rate=1,{limit}",
            "no step accepted": f"random-step:rate=0,{limit}",
        }
        for name, rule in rules.items():
            needed = {"semantic": ("target", "draft"), "semantic+": ("judge",)}.get(name, ())
            if self.clock.over() or not all((self.out / probe).is_dir() for probe in needed):
                self.left_out.append(name)
                continue
            self.write(rule, prompt, max(1, self.args.tokens // 3))  # graphs are captured when first needed
            self.arms.append({"arm": name} | self.write(rule, prompt, self.args.tokens))
            print(json.dumps(self.arms[-1]), flush=True)

    def write(self, rule: str, prompt: str, tokens: int) -> dict[str, Any]:
        """One answer, the reading of its prompt included."""
        options = Options(
            verifier=rule, temperature=TEMPERATURE, top_p=TOP_P, seed=self.args.seed, max_new_tokens=tokens
        )
        self.wait()
        began = time.perf_counter()
        with self.pair.stream(prompt, options) as stream:
            for _ in stream:
                if self.clock.over():
                    break
        self.wait()
        seconds = time.perf_counter() - began
        result, stats = stream.result(), stream.stats
        written = max(1, len(result.tokens))
        return {
            "tokens": len(result.tokens), "seconds": seconds, "tokens_a_second": len(result.tokens) / seconds,
            "target_passes": stats.target_passes, "tokens_a_pass": written / max(1, stats.target_passes),
            "steps": dict(stats.step_outcomes), "cut_off": len(result.tokens) < tokens,
            "parts_seconds": dict(stats.seconds),
        }  # fmt: skip

    def report(self) -> dict[str, Any]:
        asked = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self.args).items()}
        found: dict[str, Any] = {
            "date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU", "asked": asked,
            "stages": self.stages, "arms": self.arms, "left_out": self.left_out, "seconds": self.clock.spent,
        }  # fmt: skip
        if self.device.type == "cuda":
            found["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
        return found


def show(report: dict[str, Any], console: Console) -> None:
    shape, device = report["asked"]["shape"], report["device"]
    table = Table(
        "stage", "seconds", "captures", "what", title=f"synthetic {shape} on {device}, weights and text are noise"
    )
    for name, stage in report["stages"].items():
        what = ", ".join(f"{key} {_short(value)}" for key, value in stage.items() if key not in ("seconds", "captures"))
        table.add_row(name, f"{stage['seconds']:.2f}", f"{stage['captures']:.2f}", what)
    console.print(table)
    target_only = next((arm["tokens_a_second"] for arm in report["arms"] if arm["arm"] == "none"), None)
    columns = (
        "tokens",
        "seconds",
        "tokens/s",
        "speedup",
        "target passes",
        "tokens a pass",
        "steps accepted",
        "rejected",
    )
    table = Table("rule", *columns, title=f"one answer after {report['asked']['prompt']} tokens")
    for arm in report["arms"]:
        table.add_row(
            arm["arm"], f"{arm['tokens']}{' (cut off)' if arm['cut_off'] else ''}", f"{arm['seconds']:.2f}",
            f"{arm['tokens_a_second']:.1f}", f"{arm['tokens_a_second'] / target_only:.2f}" if target_only else "",
            str(arm["target_passes"]), f"{arm['tokens_a_pass']:.2f}",
            str(arm["steps"].get("accepted", 0)), str(current_outcomes(arm["steps"])["rejected"]),
        )  # fmt: skip
    console.print(table)
    if report["left_out"]:
        console.print(f"left out, {report['asked']['seconds']:.0f} s being over: {', '.join(report['left_out'])}")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " / ".join(f"{key} {_short(part)}" for key, part in value.items())
    if isinstance(value, list):
        return " + ".join(_short(part) for part in value)
    return f"{value:.1f}" if isinstance(value, float) else f"{value:,}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="32B/1.5B", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--problems", type=int, default=8, help="traces that prefixes are cut from; 3 or more")
    parser.add_argument("--per-problem", type=int, default=4, help="prefixes of each")
    parser.add_argument("--samples", type=int, default=20, help="steps of each model after each prefix")
    parser.add_argument("--slots", type=int, default=32, help="prefixes sampled at a time")
    parser.add_argument("--max-step-tokens", type=int, default=48)
    parser.add_argument("--meanings", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=512, help="tokens before every text")
    parser.add_argument("--tokens", type=int, default=192, help="tokens that each rule writes")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=80.0, help="see above")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args(words)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no GPU here; --shape tiny --device cpu shows on a CPU that everything runs")
    if args.problems < MIN_PROBLEMS:
        parser.error(f"--problems is {args.problems}; training, validating and testing need {MIN_PROBLEMS} or more")
    with tempfile.TemporaryDirectory() as folder:
        run = SyntheticRun(args, Clock(args.seconds, time.perf_counter()), Path(folder))
        for work in (run.build, run.collect, run.label, run.train, run.decode):
            work()
            report = run.report()
            if args.out:  # whatever becomes of the rest
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report) + "\n")
    show(report, Console(width=None if sys.stdout.isatty() else 120))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
