"""All rules on real text, by one command: prompts of Spec-Bench and MT-Bench, greedy and sampled at 0.7.

    python -m bench.real_text .models/SmolLM2-135M-Instruct.Q4_1.gguf --draft DRAFT --data data --out runs/real
    python -m bench.real_text TARGET --draft DRAFT --probes PROBES --data data     # rules with probes, too
    python -m bench.real_text TARGET --drafter eagle:HEAD --data data --turns 1 --tokens 32 -k 5 --batch 16
    python -m bench.real_text TARGET --data data --spec-bench 5 --mt-bench 2 --tokens 40    # a short one, with lookups

Without a draft model drafts come from a head, or are looked up in the text, and rules that need more are left out.
Every combination of task and temperature is a run of `semspec bench` in a folder of its own, which goes on if it was
cut. Each first prompt is read once for all methods, outside the clock. The prompts have no right answers; what a table
says of quality is what `semspec bench` measures without them.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from semspec.bench.folder import load_run, surroundings
from semspec.bench.markdown import write_tables
from semspec.bench.outside import AUTO, outside_measures
from semspec.bench.run import Bench, Config
from semspec.bench.summary import summarise
from semspec.verify import make

TEMPERATURES = (0.0, 0.7)
# Spec-Bench has all of MT-Bench's prompts, too: one that came twice would count as two.
TASKS = {"spec-bench": "spec-bench:category=single_turn,turns={}", "mt-bench": "mt-bench:turns={}"}
ANY = ("exact", "fly", "topk", "typical", "margin", "threshold", "reflective", "regret", "mars", "csd",
       "random:rate=0.5", "accept-all")  # fmt: skip
SAMPLED = ("sampling", "block", "ears")  # when greedy they are exact
WITH_PROBABILITIES = ("ensemble", "cascade-rule", "adaptive", "top-or-ratio")  # of the draft
STEPS = ("likely-step", "specreason", "spec-thinking", "glimprouter", "trigreason", "confspec",
         "random-step:rate=0.85", "accept-all-steps")  # fmt: skip
PROBED = ("semantic", "semantic+")
LONGER = {"fly": 15}  # a window of 6 tokens has to lie behind a relaxed one


def methods(temperature: float, draft: bool, head: bool, k: int | None, probes: str | None = None) -> list[str]:
    """Those that have something to do: all rules but those that need a referee, and without probes those that need
    them."""
    rules = [*ANY, *(SAMPLED if temperature else ()), *(WITH_PROBABILITIES if draft or head else ())]
    lengths = [max(k, make(rule).min_draft_tokens()) if k else LONGER.get(rule, 8) for rule in rules]
    tokens = [f"{rule}{',' if ':' in rule else ':'}k={n}" for rule, n in zip(rules, lengths, strict=True)]
    probed = [f"{rule}:probes={probes}" for rule in PROBED] if probes else []
    return [*tokens, *((*STEPS, *probed) if draft else ())]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--probes", help="folder of probes, for `semantic` and `semantic+`")
    parser.add_argument("--drafter", default="auto", help="e.g. eagle:HEAD")
    parser.add_argument("--data", type=Path, required=True, help="folder with spec_bench and mt_bench")
    parser.add_argument("--spec-bench", type=int, default=120, help="prompts of Spec-Bench, without MT-Bench's")
    parser.add_argument("--mt-bench", type=int, default=80, help="of MT-Bench")
    parser.add_argument("--turns", type=int, default=0, help="of a conversation; 0: all")
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 0.7")
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("-k", type=int, help="draft length, or the least that a rule takes; default: 8, and 15 for fly")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--resamples", type=int, default=3, help="samples of the target with other seeds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--method", action="append", help="only these rules; may be repeated")
    parser.add_argument("--encoder", default=AUTO, help="sentence model of the measure `meaning`, or none")
    parser.add_argument("--out", type=Path, default=Path("runs/real-text"))
    args = parser.parse_args(arguments)
    summaries = []
    for temperature in args.temperature or TEMPERATURES:
        chosen = methods(temperature, args.draft is not None, args.drafter.startswith("eagle"), args.k, args.probes)
        chosen = [m for m in chosen if args.method is None or make(m.split(":")[0]).name in args.method]
        folders = []
        for name, problems in (("spec-bench", args.spec_bench), ("mt-bench", args.mt_bench)):
            if not problems:
                continue
            config = Config(
                TASKS[name].format(args.turns), chosen, problems, args.target, args.draft, str(args.data),
                batch=args.batch, drafter=args.drafter, temperature=temperature, max_new_tokens=args.tokens,
                device=args.device, dtype=args.dtype, context=args.context,
                resamples=args.resamples, shared_prompts=True,
            )  # fmt: skip
            folders.append(args.out / f"{name}-{temperature:g}")
            print(f"{folders[-1]}: {problems} prompts, {len(chosen)} methods", flush=True)
            Bench(config).run(folders[-1], lambda done, total: print(f"{done} of {total}", end="\r", flush=True))
            gc.collect()  # the pair refers to itself, and the next one is planned into what is free
        summaries.append(pooled(folders, args.encoder))
        (args.out / "tables.md").write_text(write_tables(summaries, [], None), encoding="utf-8")
        (args.out / "summary.json").write_text(
            json.dumps({**surroundings(), "runs": summaries}, indent=1), encoding="utf-8"
        )
    print(f"tables: {args.out / 'tables.md'}, summaries: {args.out / 'summary.json'}")


def pooled(folders: list[Path], encoder: str) -> dict[str, Any]:
    """The prompts of all these runs as those of one."""
    runs, samples, extra, by = [], list[dict[str, Any]](), dict[str, Any](), dict[str, str]()
    for folder in folders:
        run, own = load_run(folder)
        batch = run["config"]["batch"]
        before = -(-(1 + max((s["index"] for s in samples), default=-1)) // batch) * batch  # no batch is of two runs
        values, by = outside_measures(folder, run, own, encoder)
        for measure, found in values.items():
            extra[measure] = extra.get(measure, {}) | found
        runs.append(run)
        samples += [sample | {"index": before + sample["index"]} for sample in own]
    config = runs[0]["config"] | {
        "task": " and ".join(run["config"]["task"] for run in runs), "n": sum(run["config"]["n"] for run in runs)
    }  # fmt: skip
    return summarise(runs[0] | {"config": config}, samples, extra=extra, by=by)


if __name__ == "__main__":
    main()
