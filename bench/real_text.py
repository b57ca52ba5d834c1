"""All rules on real text, by one command: prompts of Spec-Bench and MT-Bench, greedy and sampled at 0.7.

    python -m bench.real_text .models/SmolLM2-135M-Instruct.Q4_1.gguf --draft DRAFT --data data --out runs/real
    python -m bench.real_text TARGET --data data --spec-bench 5 --mt-bench 2 --tokens 40    # a short one, with lookups

Without a draft model drafts are looked up in the text, and rules that need one are left out. Every combination of task
and temperature is a run of `semspec bench` in a folder of its own, which goes on if it was cut. The prompts have no
right answers; what a table says of quality is what `semspec bench` measures without them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from semspec.bench.folder import load_run
from semspec.bench.markdown import write_tables
from semspec.bench.run import Bench, Config
from semspec.bench.summary import summarise
from semspec.verify import make

TEMPERATURES = (0.0, 0.7)
ANY = (
    "exact:k=8", "fly:k=15", "topk:k=8", "typical:k=8", "margin:k=8", "threshold:k=8", "reflective:k=8", "regret:k=8",
    "mars:k=8", "csd:k=8", "random:k=8,rate=0.5", "accept-all:k=8",
)  # fmt: skip
SAMPLED = ("sampling:k=8", "block:k=8", "ears:k=8")  # when greedy they are exact
WITH_DRAFT = ("ensemble:k=8", "cascade-rule:k=8", "adaptive:k=8", "top-or-ratio:k=8")
STEPS = ("specreason", "glimprouter", "trigreason", "confspec", "random-step:rate=0.85", "accept-all-steps")


def methods(temperature: float, has_draft: bool) -> list[str]:
    """Those that have something to do; all rules but the ones that need probes or a referee."""
    chosen = [*ANY, *(SAMPLED if temperature else ())]
    return [*chosen, *WITH_DRAFT, *STEPS] if has_draft else chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--data", type=Path, required=True, help="folder with spec_bench and mt_bench")
    parser.add_argument("--spec-bench", type=int, default=120, help="prompts of Spec-Bench")
    parser.add_argument("--mt-bench", type=int, default=80, help="of MT-Bench, of two turns each")
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--method", action="append", help="only these; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("runs/real-text"))
    args = parser.parse_args()
    folders = []
    for task, problems in (("spec-bench", args.spec_bench), ("mt-bench", args.mt_bench)):
        for temperature in TEMPERATURES if problems else ():
            chosen = methods(temperature, args.draft is not None)
            chosen = [m for m in chosen if args.method is None or make(m.split(":")[0]).name in args.method]
            config = Config(
                task, chosen, problems, args.target, args.draft, str(args.data), batch=args.batch,
                temperature=temperature, max_new_tokens=args.tokens, device=args.device, context=args.context,
            )  # fmt: skip
            folders.append(args.out / f"{task}-{temperature:g}")
            print(f"{folders[-1]}: {problems} prompts, {len(chosen)} methods", flush=True)
            Bench(config).run(folders[-1], lambda done, total: print(f"{done} of {total}", end="\r", flush=True))
    summaries = [summarise(*load_run(folder)) for folder in folders]
    (args.out / "tables.md").write_text(write_tables(summaries, [], None), encoding="utf-8")
    about = {key: value for key, value in load_run(folders[0])[0].items() if key in ("created", "versions", "hardware")}
    document = {"about": about | {"finished": True}, "runs": summaries}
    (args.out / "summary.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(f"tables: {args.out / 'tables.md'}, summaries: {args.out / 'summary.json'}")


if __name__ == "__main__":
    main()
