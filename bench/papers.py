"""What each of our deviations from the papers is worth: their rules to the letter beside ours, on the pocket pair.

    OMP_NUM_THREADS=1 python -m bench.papers table OUT --processes 16             # 1,000 problems; about 15 minutes
    python -m bench.papers table OUT --processes 8 --device cuda                  # the same beside each other on a GPU
    python -m bench.papers table OUT --sampled ears:k=8 --sampled confspec        # other arms in the place of all
    python -m bench.papers replay OUT --device cuda                               # strict presets at 32B/1.5B shapes

`table` goes on where it was cut. It first fits the probes of SemanticSpec as its released code does, and with one thing
changed at a time. It then answers the same problems with every arm: those of FLy greedily, all others at temperature
0.6. Every process answers its own share of the problems with all arms, so arms stay paired. Seconds are of a busy
machine, and are not reported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from semspec import tasks
from semspec.bench.compare_to import compare_to
from semspec.bench.replay import replay
from semspec.bench.run import Bench, Config
from semspec.bench.summary import summarise
from semspec.pair.loading import load
from semspec.probe_fit import cluster, config
from semspec.probe_fit.collect import collect
from semspec.probe_fit.data import Folder
from semspec.probe_fit.join import join
from semspec.probe_fit.label import label
from semspec.probe_fit.meaning import operation, parser, truth
from semspec.probe_fit.train import Training, fit, released

STRICT_FLY = "fly:k=15,reading=released,gate=raw,protect=false"
GREEDY = [
    "fly:k=15", STRICT_FLY, "fly:k=15,entropy=full", "fly:k=15,carry=2", "fly:k=15,carry=6", "fly:k=15,adapt=true",
]  # fmt: skip
SAMPLED = [
    "fly:k=15", "fly:k=15,gate=raw", "fly:k=15,draws=1", STRICT_FLY, "top-or-ratio:k=20",
    "semantic", "semantic:min_prob=0", "semantic:delimiters=released", "semantic:protect=false", "semantic:paper=true",
    "semantic:probes={paper}", "semantic:probes={paper},paper=true", "semantic:probes={standardised},paper=true",
    "semantic:probes={cross},paper=true", "semantic:probes={problems},paper=true",
    "semantic+", "specreason", "random-step:rate=0.85",
]  # fmt: skip
# One thing changed in the training of the paper's probes: inputs, labels, split and endings.
PROBES: dict[str, dict[str, Any]] = {
    "paper": {},
    "standardised": {"standardise": True},
    "cross": {"labels": "cross"},
    "problems": {"split": "problem", "endings": False, "calibration": "isotonic"},
}
SHARE = 50  # problems answered at a time
REPLAYED = ["fly:k=15", STRICT_FLY, "semantic:paper=true", "top-or-ratio:k=20"]


def collect_part(out: Path, seed: int, problems: int, device: str) -> Path:
    """Samples of some problems, labelled by their canonical meaning."""
    torch.set_num_threads(1)
    what = config.Config(
        n=problems, per_problem=3, first_steps=False, delimiters="released", max_new_tokens=400, seed=seed
    )
    folder = collect(what, out / f"part-{seed}", load("pocket", slots=32, context=1024, device=device, dtype="float32"))
    task = tasks.make("pocket").for_fitting()
    sorts = cluster.make("canonical", cluster.Source(parser(task)))
    label(folder, sorts, {"clusters": "canonical", "own": "apart"}, truth(task), operation(task))
    return folder.path


def train_one(folder: Path, out: Path, name: str, model: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    how = replace(released(Training(), model), **PROBES[name])
    found = fit(Folder(folder), model, how, torch.device("cpu")).probe
    found.save(out / name / model)
    return {"probe": name, "model": model, "data": found.data, "metrics": found.metrics}


def answer(
    settings: dict[str, Any], n: int, part: int, parts: int, device: str, kept: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One share of the problems with every arm, kept in a file: a run that was cut goes on."""
    torch.set_num_threads(1)
    key = hashlib.sha256(json.dumps([settings, n, parts, device], sort_keys=True).encode()).hexdigest()[:16]
    file = kept / f"{key}-{part}.json"
    if file.exists():
        about, samples = json.loads(file.read_text())
        return about, samples
    mine = tasks.make("pocket").problems(n, 0)[part::parts]
    here = {"max_new_tokens": 400, "context": 1024, "device": device, "dtype": "float32"}
    bench = Bench(Config("pocket", batch=64, n=len(mine), seed=part, **here, **settings))
    bench.problems = mine
    samples = [
        sample | {"index": part + parts * sample["index"], "passes": [], "text": ""}
        for unit in bench._units()
        for sample in bench._measure(*unit)
    ]
    about = bench._about()
    kept.mkdir(parents=True, exist_ok=True)
    whole = file.with_suffix(".part")
    whole.write_text(json.dumps([about, samples]))
    whole.replace(file)
    return about, samples


def fit_probes(
    pool: ProcessPoolExecutor, out: Path, processes: int, problems: int, device: str
) -> list[dict[str, Any]]:
    """All of PROBES, on one collection."""
    seeds = [(out / "fit", 1000 + i, max(3, problems // processes), device) for i in range(processes)]
    parts = list(pool.map(collect_part, *zip(*seeds, strict=True)))
    joined = join([Folder(path) for path in parts], out / "fit" / "all").path
    which = [(joined, out / "probes", name, model) for name in PROBES for model in ("target", "draft")]
    return list(pool.map(train_one, *zip(*which, strict=True)))


def table(out: Path, n: int, processes: int, fitted_on: int, match: str, device: str, others: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    folders = {name: str(out / "probes" / name) for name in PROBES}
    names = {method.format(**folders): method.format(**{k: k for k in folders}) for method in others or SAMPLED}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        document: dict[str, Any] = {"runs": [], "versus": [], "fits": []}
        if fitted_on and not others:
            if not (fits := out / "fits.json").exists():
                fits.write_text(json.dumps(fit_probes(pool, out, processes, fitted_on, device)))
            document["fits"] = json.loads(fits.read_text())
        for methods, against, how in (
            (list(names), "semantic", {"temperature": 0.6, "top_p": 0.95}),
            *([] if others else [(GREEDY, GREEDY[0], {})]),
        ):
            kept = [m for m in methods if re.search(match, m) and (fitted_on or "probes=" not in m)]
            parts = max(processes, -(-n // SHARE))
            shares = [({"methods": kept, **how}, n, i, parts, device, out / "answers") for i in range(parts)]
            found = list(pool.map(answer, *zip(*shares, strict=True)))
            run, samples = found[0][0], [sample for _, some in found for sample in some]
            for row in (*run["arms"], *samples):
                key = "name" if "name" in row else "arm"
                row[key] = names.get(row[key], row[key])
            document["runs"].append(summarise(run, samples))
            if against in kept:
                document["versus"].append({"against": against, "arms": compare_to(run, samples, against)})
            document.setdefault("about", {k: run[k] for k in ("created", "label", "versions", "hardware", "git")})
            (out / "table.json").write_text(json.dumps(document, indent=1) + "\n")
            show(document["runs"][-1])


def show(run: dict[str, Any]) -> None:
    for name, arm in run["arms"].items():
        right, tau = arm["accuracy"], arm["tau_pooled"] or 0
        within = f"[{100 * right['low']:.1f}, {100 * right['high']:.1f}]"
        steps = (arm.get("steps_accepted") or {}).get("share")
        print(
            f"{name:52} {100 * right['share']:5.1f} {within:14} tau {tau:6.2f} passes {arm['target_passes']} {steps}",
            flush=True,
        )


def timed(out: Path, n: int, device: str, shape: str) -> None:
    """Record the strict presets, then do their passes again at another shape; at temperature 0.6."""
    settings = Config("pocket", REPLAYED, n=n, temperature=0.6, top_p=0.95, device=device, max_new_tokens=400)
    Bench(settings).run(out / "recorded")
    summary = replay(out / "recorded", shape, out / "replayed", device)
    rows = [json.loads(line) for line in (out / "replayed" / "samples.jsonl").open()]
    rates = {}
    for name, arm in summary["arms"].items():
        tokens, seconds = arm["tokens"], sum(row["seconds"] for row in rows if row["arm"] == name)
        rates[name] = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        print(f"{name:60} {tokens / seconds:8.1f} tokens per second")
    (out / "replay.json").write_text(json.dumps({"runs": [summary], "rates": rates}, indent=1) + "\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=("table", "replay"))
    options.add_argument("out", type=Path)
    options.add_argument("--problems", type=int)
    options.add_argument("--processes", type=int, default=16)
    options.add_argument(
        "--fitted-on", type=int, default=192, help="Problems that probes are fitted on; 0: no such arms."
    )
    options.add_argument("--sampled", action="append", default=[], help="An arm at 0.6, instead; may be repeated.")
    options.add_argument("--match", default="", help="Only arms with this in their names, a regular expression.")
    options.add_argument("--device", help="The CPU by default for `table`, else a GPU if there is one.")
    options.add_argument("--shape", default="32B/1.5B")
    given = options.parse_args()
    if given.what == "table":
        how = given.fitted_on, given.match, given.device or "cpu", given.sampled
        table(given.out, given.problems or 1000, given.processes, *how)
    else:
        timed(given.out, given.problems or 24, given.device or "auto", given.shape)
