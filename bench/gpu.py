"""What passes cost on this GPU, against what its memory allows. Weights are noise; only shapes matter for time.

    python bench/gpu.py --check                      # is everything right? PASS or FAIL for each item
    python bench/gpu.py --only pass,decode,round     # a part of the table
    python bench/gpu.py --only transformers          # the same steps in transformers, by itself: both do not fit
    python bench/gpu.py --only sparse                # checks of drafts with blocks of the cache left out
    python bench/gpu.py --only paper                 # the paper's sparse plan at 32B/1.5B, with operations and bytes
    python bench/gpu.py --only experts,ffn           # the same with experts and with channels left out
    python bench/gpu.py --only trees,long_trees      # tree drafts, and a draft head
    python bench/gpu.py --only breakdown             # kernels by name, and the gaps between them
    python bench/gpu.py --only arms,round,batch      # which of several ways is fastest, and rounds made with it
    python bench/gpu.py --only tune                  # which tiles the attention kernel should have
    python bench/gpu.py --only fp8_tiles,long_fp8    # the same over keys and values in fp8; passes over them
    python bench/gpu.py --only rules                 # rules after a pass: in graphs or not, filters bisected or sorted
    python bench/gpu.py --only load                  # pages of the cache, batches up to 64, prompts in pieces
    python bench/gpu.py --only packed                # the tokens of a tick in one row against rectangles
    python bench/gpu.py --only bars --seconds 600    # all that is asked of a server under load, beside vLLM's figures
    python bench/gpu.py --only auto                  # of these, draft lengths that know the load against fixed ones
    python bench/gpu.py --only quantised_experts     # a layer of a mixture in bfloat16, fp8, int4 and fp4
    python bench/gpu.py --only products              # our product of few rows against cuBLAS, by size of weights

Prints one table, and as its last line JSON, which also goes to the file named by --out. The limit is the bytes that a
pass must read (weights, keys and values) over the bandwidth of a large copy, measured here. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.gpu_arms import parse, told, told_arm
from bench.gpu_sections import ASIDE, FORMER, SECTIONS, Bench
from semspec.bench.shapes import SHAPES
from semspec.model.kernels import DEFAULT_FLAGS

__all__ = ["Bench"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="verify kernels and the runner, and time nothing")
    parser.add_argument(
        "--part", default="0/1", help="i/n: every n-th check from the i-th, to run n processes at a time"
    )
    parser.add_argument("--match", default="", help="only checks, or cases of tune, with this in their names")
    parser.add_argument(
        "--only",
        default=",".join(SECTIONS),
        help="sections: " + ", ".join((*SECTIONS, *ASIDE)),
    )
    parser.add_argument("--shape", default="32B/1.5B", choices=SHAPES)
    parser.add_argument("--long-shape", default="8B/1B", choices=SHAPES)
    parser.add_argument("--mixture-shape", default="30B-A3B/0.6B", choices=SHAPES)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--long", type=int, default=65536)
    parser.add_argument("--longest", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=170.0, help="begin no section after so much time")
    parser.add_argument("--plain", action="store_true", help="one operation at a time, without graphs and kernels")
    parser.add_argument(
        "--flags", "--choices", dest="choices", type=parse, default=DEFAULT_FLAGS,
        help="kernels in place of the defaults, as in fused_activation=0,fused_rope=0 or skinny_gemm_bytes=0",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=8, help="sequences of the section batch")
    parser.add_argument("--cuts", type=Path, help="what bench/gpu_tune_quantised.py found, for the section quantised")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    asked = parser.parse_args()
    sections = [FORMER.get(name, name) for name in asked.only.split(",")]
    if unknown := [name for name in sections if name not in (*SECTIONS, *ASIDE)]:
        parser.error(f"there is no section {unknown[0]!r}; give some of: {', '.join((*SECTIONS, *ASIDE))}")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu runs the script on a CPU, where its figures mean nothing")
    report: dict[str, Any] = {
        "date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "CPU", "shape": asked.shape,
        "context": asked.context, "plain": asked.plain, "choices": told(asked.choices),
    }  # fmt: skip
    began = time.perf_counter()
    failed = False
    if asked.check:
        report["checks"] = run_checks(torch.device(asked.device), asked.part, asked.match)
        failed = any(result != "PASS" for result in report["checks"].values())
    else:
        with torch.inference_mode():
            bench = Bench(asked)
            report["bandwidth_GBps"] = bench.bandwidth / 1e9
            print(f"{report['device']}, copies at {bench.bandwidth / 1e12:.2f} TB/s, {asked.shape} at {asked.context}")
            print(f"{'what':40} {'ms':>9} {'limit':>9} {'ratio':>8} {'must':>9}")
            for section in sections:
                if time.perf_counter() - began > asked.seconds:
                    print(f"{section} left out: {asked.seconds:.0f} s are over")
                    continue
                started = time.perf_counter()
                try:
                    bench.section(section)
                finally:  # whatever becomes of the sections that follow, and what an interrupted one has found
                    winners = {which: told_arm(arm) for which, arm in bench.arms.items()}
                    write(report | {"rows": bench.rows, "winners": winners}, asked.out)
                print(f"    ({section} took {time.perf_counter() - started:.0f} s)", flush=True)
                report |= {"rows": bench.rows, "winners": winners}
    report["seconds"] = time.perf_counter() - began
    if asked.device == "cuda":
        report["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
    write(report, asked.out)
    print(json.dumps(report))
    sys.exit(failed)


def write(report: dict[str, Any], out: Path | None) -> None:
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report) + "\n")


def run_checks(device: torch.device, part: str, match: str) -> dict[str, str]:
    from bench.gpu_checks_one_token import CHECKS

    first, parts = (int(number) for number in part.split("/"))
    results = {}
    for name, function in [(n, f) for n, f in CHECKS.items() if match in n][first::parts]:
        began = time.perf_counter()
        try:
            function(device)
            results[name] = "PASS"
        except Exception as failure:  # whatever it is, the other checks are worth knowing
            results[name] = f"FAIL: {type(failure).__name__}: {str(failure)[:300]}"
        print(f"{results[name][:4]} {name} ({time.perf_counter() - began:.1f} s){results[name][4:]}", flush=True)
    return results


if __name__ == "__main__":
    main()
