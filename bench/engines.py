"""Step rules over two servers beside the same rules in process: answers, speed, round trips.

    python -m bench.engines --out results/engines.json                       # 200 problems, two servers of our own
    python -m bench.engines --engine vllm --python PYTHON --problems 20      # two vLLM servers, with that interpreter
    python -m bench.engines --target http://host:8001/v1 --draft http://host:8002/v1

The pocket pair, greedy. Each server is a process of its own; all share this machine's cores. With `--answers` a run
that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

import semspec
from semspec.bench.folder import cpu_name
from semspec.loop.stats import current_outcomes
from semspec.pair import Pair
from semspec.pair.remote import connect
from semspec.pocket import problem, score
from semspec.pocket.shipped import JUDGE_OF_EVIDENCE, SHIPPED
from semspec.statistics import Share, difference

TOKENS = 400
START_SECONDS = 1200
SECONDS = 900.0  # for one answer: the machine may be busy with other things
NAMES = ("pocket", "pocket-draft")  # the target's, then the draft's
Launched = tuple[int, "subprocess.Popen[bytes]"]


def command(engine: str, python: str, name: str, port: int, slots: int) -> list[str]:
    folder = str(SHIPPED[name])
    if engine == "vllm":
        return [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", name,
            "--port", str(port), "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", str(slots),
            "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20),
        ]  # fmt: skip
    return [
        python, "-m", "semspec", "serve", folder, "--name", name, "--port", str(port), "--slots", str(slots),
        "--verifier", "none", "--context", "1024",
    ]  # fmt: skip


@contextlib.contextmanager
def launched(engine: str, python: str, name: str, slots: int, logs: Path) -> Iterator[Launched]:
    """One server's port and process, until it is not needed any more."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    quiet |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # else both servers take the same core
    with (logs / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command(engine, python, name, port, slots), stdout=log, stderr=log, env=os.environ | quiet
        )
        try:
            yield port, process
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def url_of(port: int, process: subprocess.Popen[bytes]) -> str:
    """Where the server is, once it is ready."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return f"http://127.0.0.1:{port}/v1"
        time.sleep(0.5)
    raise RuntimeError("a server did not start; see its log (--logs)")


def run(pair: Pair, name: str, verifier: str, problems: list[Any], batch: int, kept: Kept) -> dict[str, Any]:
    """All answers, so many at a time, and what they took."""
    for begin in range(0, len(problems), batch):
        part = problems[begin : begin + batch]
        if (name, begin) in kept.parts:
            continue
        began = time.perf_counter()
        results = pair.generate(
            [[{"role": "user", "content": p.text}] for p in part], verifier=verifier, max_new_tokens=TOKENS
        )
        seconds = time.perf_counter() - began
        stats = sum((r.stats for r in results), semspec.Stats())
        kept.add(
            name, begin,
            {
                "right": [bool(score(r.text, p)) for r, p in zip(results, part, strict=True)],
                "texts": [r.text for r in results], "seconds": seconds, "tokens": stats.tokens,
                "steps": dict(stats.step_outcomes), "calls": dict(stats.calls),
                "finish": Counter(str(r.finish_reason) for r in results), "load": os.getloadavg()[0],
            },
        )  # fmt: skip
        print(f"{name}: {begin + len(part)} of {len(problems)}", file=sys.stderr, flush=True)
    return joined([kept.parts[name, begin] for begin in range(0, len(problems), batch)])


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    def summed(key: str) -> dict[str, int]:
        return dict(sum((Counter(part[key]) for part in parts), Counter[str]()))

    right = [one for part in parts for one in part["right"]]
    seconds, tokens = sum(part["seconds"] for part in parts), sum(part["tokens"] for part in parts)
    steps, calls = dict(current_outcomes(summed("steps"))), summed("calls")
    drafted = sum(steps.get(outcome, 0) for outcome in ("accepted", "rejected", "handed over"))
    every = drafted + steps.get("target", 0) + len(right)  # the target itself ends each text
    return {
        "correct": Share(sum(right), len(right)).as_dict(),
        "tokens_per_second": round(tokens / seconds, 1),
        "seconds": round(seconds, 1),
        "tokens": tokens,
        "steps": steps,
        "calls": calls,
        "draft_calls_per_drafted_step": round(calls.get("draft", 0) / drafted, 3) if drafted else None,
        "calls_per_step": round((calls["draft"] + calls["target"]) / every, 3) if drafted and calls else None,
        "finish": summed("finish"),
        "load": round(sum(part["load"] for part in parts) / len(parts), 1),
        "right": right,
        "texts": [text for part in parts for text in part["texts"]],
    }


class Kept:
    """Parts that were answered, by arm and first problem; in a file, one line each, if there is one."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file and file.exists() else []
        self.parts: dict[tuple[str, int], dict[str, Any]] = {
            (found["arm"], found["begin"]): found for found in map(json.loads, lines)
        }

    def add(self, arm: str, begin: int, found: dict[str, Any]) -> None:
        self.parts[arm, begin] = found
        if self.file:
            with self.file.open("a") as out:
                out.write(json.dumps({"arm": arm, "begin": begin} | found) + "\n")


def measure(arguments: argparse.Namespace, target: str, draft: str) -> None:
    problems = [problem(seed, split="test") for seed in range(arguments.problems)]
    semantic = f"semantic+:probes={JUDGE_OF_EVIDENCE}"
    servers = connect(target, draft, slots=arguments.batch, seconds=SECONDS)
    here = semspec.load("pocket", device="cpu", slots=arguments.batch, context=1024)
    arms = {
        "semantic+ over servers": (servers, semantic),
        "semantic+ in process": (here, semantic),
        "target alone over servers": (servers, "none"),
        "likely-step over servers": (servers, "likely-step"),
        "accept-all-steps over servers": (servers, "accept-all-steps:lead=0"),
    }
    found: dict[str, dict[str, Any]] = {}
    kept = Kept(arguments.answers)
    for name, (pair, verifier) in arms.items():
        found[name] = run(pair, name, verifier, problems, arguments.batch, kept)
        write(arguments, report(arguments, found))


def report(arguments: argparse.Namespace, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is known after some of the arms, without single answers."""
    document = {
        "problems": arguments.problems, "batch": arguments.batch, "engine": arguments.engine,
        "cores": os.cpu_count(), "machine": cpu_name(), "load": os.getloadavg()[0],
        "arms": {name: {k: v for k, v in arm.items() if k not in ("right", "texts")} for name, arm in found.items()},
    }  # fmt: skip
    over, inside = found.get("semantic+ over servers"), found.get("semantic+ in process")
    if over and inside:
        gap = difference([float(r) for r in over["right"]], [float(r) for r in inside["right"]])
        document["correct_over_servers_less_in_process"] = None if gap is None else gap.as_dict()
        document["same_text_as_in_process"] = sum(a == b for a, b in zip(over["texts"], inside["texts"], strict=True))
    return document


def write(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1)
    print(text, flush=True)
    if arguments.out:
        arguments.out.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--engine", choices=("semspec", "vllm"), default="semspec")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the engine")
    parser.add_argument("--target", help="a server that runs already; its model is pocket")
    parser.add_argument("--draft")
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--answers", type=Path, help="file that keeps all answers; those in it are not asked again")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        urls = [arguments.target, arguments.draft]
        if not all(urls):
            how = (arguments.engine, arguments.python)
            both = [stack.enter_context(launched(*how, name, arguments.batch, arguments.logs)) for name in NAMES]
            urls = [url_of(*each) for each in both]
        measure(arguments, *urls)


if __name__ == "__main__":
    main()
