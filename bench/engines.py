"""Step rules over two servers beside the same rules in process: answers, speed, round trips.

    python -m bench.engines --out results/engines.json                       # 200 problems, two servers of our own
    python -m bench.engines --engine vllm --python PYTHON --problems 20      # two vLLM servers, with that interpreter
    python -m bench.engines --target http://host:8001/v1 --draft http://host:8002/v1

The pocket pair, greedy. Each server is a process of its own; all share this machine's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
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
from semspec.pair import Pair
from semspec.pocket import problem, score
from semspec.pocket.shipped import JUDGE_OF_EVIDENCE, SHIPPED
from semspec.statistics import Share, difference

TOKENS = 400
START_SECONDS = 1200
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


def run(pair: Pair, verifier: str, problems: list[Any], batch: int) -> dict[str, Any]:
    """All answers, so many at a time, and what they took."""
    results, began = [], time.perf_counter()
    for begin in range(0, len(problems), batch):
        chats = [[{"role": "user", "content": p.text}] for p in problems[begin : begin + batch]]
        results += pair.generate(chats, verifier=verifier, max_new_tokens=TOKENS)
        print(f"{verifier.partition(':')[0]}: {len(results)} of {len(problems)}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    stats = sum((r.stats for r in results), semspec.Stats())
    right = [bool(score(r.text, p)) for r, p in zip(results, problems, strict=True)]
    drafted = sum(stats.step_outcomes[outcome] for outcome in ("accepted", "refused", "handed over"))
    return {
        "correct": Share(sum(right), len(right)).as_dict(),
        "tokens_per_second": round(stats.tokens / seconds, 1),
        "seconds": round(seconds, 1),
        "tokens": stats.tokens,
        "steps": dict(stats.step_outcomes),
        "calls": dict(stats.calls),
        "draft_calls_per_drafted_step": round(stats.calls["draft"] / drafted, 3) if drafted else None,
        "finish": dict(Counter(str(r.finish_reason) for r in results)),
        "right": right,
        "texts": [r.text for r in results],
    }


def measure(arguments: argparse.Namespace, target: str, draft: str) -> None:
    problems = [problem(seed, split="test") for seed in range(arguments.problems)]
    semantic = f"semantic+:probes={JUDGE_OF_EVIDENCE}"
    servers = semspec.load(target, draft, slots=arguments.batch)
    here = semspec.load("pocket", device="cpu", slots=arguments.batch, context=1024)
    arms = {
        "semantic+ over servers": (servers, semantic),
        "semantic+ in process": (here, semantic),
        "target alone over servers": (servers, "none"),
        "likely-step over servers": (servers, "likely-step"),
        "accept-all-steps over servers": (servers, "accept-all-steps:lead=0"),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (pair, verifier) in arms.items():
        found[name] = run(pair, verifier, problems, arguments.batch)
        write(arguments, report(arguments, found))


def report(arguments: argparse.Namespace, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is known after some of the arms, without single answers."""
    document = {
        "problems": arguments.problems, "batch": arguments.batch, "engine": arguments.engine,
        "cores": os.cpu_count(), "machine": platform.processor() or platform.machine(), "load": os.getloadavg()[0],
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
