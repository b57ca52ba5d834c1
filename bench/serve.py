"""Load: many clients at once on the pocket pair, against one. Errors, equal answers, speed, latency, memory.

    python -m bench.serve --clients 64 --seconds 120 --out results

Starts a server of its own, measures each method with one client and then with many. Then one whose slots share a pool
that is too small, with instructions that many requests share, several answers to some, and all rules and lengths at
once. Writes a dated result.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx
import torch

import semspec
from semspec.bench.folder import cpu_name
from semspec.tasks.pocket import Pocket

METHODS: dict[str, dict[str, Any]] = {
    "none": {"off": True},
    "default": {},
    "exact, k=4": {"verifier": "exact", "num_draft_tokens": 4},
    "block, k=4": {"verifier": "block", "num_draft_tokens": 4},
    "fly, k=15": {"verifier": "fly", "num_draft_tokens": 15},
}
LOSSLESS = ("none", "default", "exact, k=4", "block, k=4")
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
MIXED: list[dict[str, Any]] = [  # one of them with each problem of the last run, whatever rule the others have
    {"presence_penalty": 1.0, "frequency_penalty": 0.3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"repetition_penalty": 1.2, "min_tokens": 40},
    {"guided_regex": "[a-z]{4}-[0-9]{4}", "max_thinking_tokens": 8},
    {"bad_words": ["So"], "stop": ["."], "include_stop_str_in_output": True},
    {"guided_choice": ["yes, it is", "yes, it was", "no"], "max_thinking_tokens": 8},
    {"logit_bias": {"100": 5.0, "200": -5.0}, "temperature": 0.8, "seed": 3},
    {"allowed_token_ids": list(range(19, 1000)), "logprobs": True, "ignore_eos": True},
]
MIXED_RUN, POOL_RUN = "mixed options", "small pool"
INSTRUCTIONS = [f"You are a {kind} teacher who explains each step. " * 8 for kind in ("careful", "friendly", "brief")]
SAMPLED = {"temperature": 0.8, "n": 4}  # with rules whose text depends on seeds alone
MAX_NEW_TOKENS = 120
THREADS = 1  # of the model's arithmetic; the other core is for HTTP and the clients


@dataclass
class Run:
    """What one method did with one number of clients."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the server, which other work on the machine disturbs less
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unequal: int = 0

    def summary(self) -> dict[str, Any]:
        return {
            "requests": len(self.latencies),
            "errors": len(self.errors),
            "unequal_answers": self.unequal,
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "tokens_per_cpu_second": round(self.tokens / self.cpu_seconds, 1),
            "latency_p50": quantile(self.latencies, 50),
            "latency_p95": quantile(self.latencies, 95),
            "first_token_p50": quantile(self.first, 50),
            "first_token_p95": quantile(self.first, 95),
        }


def quantile(values: list[float], percent: int) -> float | None:
    if len(values) < 2:
        return None
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 3)


class Load:
    def __init__(self, url: str, pid: int, prompts: list[Any]) -> None:
        self.url, self.pid, self.prompts = url, pid, prompts
        self.answers: dict[tuple[int, str], str] = {}  # one request at a time, of the target without drafts if lossless

    async def measure(self, method: str, clients: int, seconds: float) -> Run:
        run, start, cpu = Run(), time.perf_counter(), cpu_seconds(self.pid)
        end = start + seconds
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            problems = iter(range(10**9))  # every client takes the next

            async def client() -> None:
                while time.perf_counter() < end:
                    await self.ask(http, run, method, next(problems) % len(self.prompts))

            await asyncio.gather(*(client() for _ in range(clients)))
        run.seconds, run.cpu_seconds = time.perf_counter() - start, cpu_seconds(self.pid) - cpu
        return run

    async def reference(self, *methods: str) -> None:
        """Every problem by itself: all other answers are compared with these."""
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as http:
            for problem in range(len(self.prompts)):
                for method in methods:
                    await self.ask(http, Run(), method, problem)
        assert len(self.answers) == len(methods) * len(self.prompts), "the server answers nobody"

    def body(self, method: str, problem: int) -> dict[str, Any]:
        body = {
            "model": "pocket", "messages": self.prompts[problem], "temperature": 0, "max_tokens": MAX_NEW_TOKENS,
            "speculation": METHODS.get(method, {"num_draft_tokens": 4}),
        }  # fmt: skip
        if method == MIXED_RUN:
            body |= MIXED[problem % len(MIXED)]
        if method == POOL_RUN:
            system = {"role": "system", "content": INSTRUCTIONS[problem % len(INSTRUCTIONS)]}
            rule = list(METHODS)[problem % len(METHODS)]
            body |= {
                "messages": [system, *self.prompts[problem]],
                "max_tokens": 20 * (1 + problem % 7),
                "seed": problem,
            }
            body |= {"speculation": METHODS[rule]} | (SAMPLED if rule in ("none", "exact, k=4") else {})
        return body

    async def ask(self, http: httpx.AsyncClient, run: Run, method: str, problem: int) -> None:
        body = self.body(method, problem)
        start = time.perf_counter()
        try:
            response = await http.post("/v1/chat/completions", json=body)
            response.raise_for_status()
        except httpx.HTTPError as error:
            run.errors.append(repr(error))
            return
        answer = response.json()
        messages = [choice["message"] for choice in answer["choices"]]
        text = "\n".join(message.get("reasoning_content", "") + message["content"] for message in messages)
        run.latencies.append(time.perf_counter() - start)
        if len(messages) == 1:
            run.first.append(answer["metrics"]["time_to_first_token_ms"] / 1000)
        run.tokens += answer["usage"]["completion_tokens"]
        key = "" if method in LOSSLESS else method
        if key in ("", MIXED_RUN, POOL_RUN) and self.answers.setdefault((problem, key), text) != text:
            run.unequal += 1


@contextmanager
def server(slots: int, context: int, log: TextIO, cache_tokens: int | None = None) -> Iterator[tuple[str, int]]:
    """Start a server that writes its log there; its URL and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "semspec", "serve", "pocket", "--allow-lossy"]
    command += ["--port", str(port), "--slots", str(slots), "--context", str(context)]
    command += [] if cache_tokens is None else ["--cache-tokens", str(cache_tokens)]
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    process = subprocess.Popen(command, stderr=log, env=env)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                if httpx.get(url + "/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        else:
            raise RuntimeError("the server did not get ready within a minute")
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(120)  # a busy machine takes its time


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    """MiB of memory that a process has now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def sample(pid: int, into: list[tuple[float, float]]) -> None:
    start = time.monotonic()
    while True:
        into.append((round(time.monotonic() - start, 1), round(resident(pid), 1)))
        await asyncio.sleep(1)


async def measure(clients: int, seconds: float, slots: int, context: int) -> dict[str, Any]:
    task = Pocket(split="test")
    with tempfile.TemporaryFile("w+") as log, server(slots, context, log) as (url, pid):
        load = Load(url, pid, [problem.prompt for problem in task.problems(24, 0)])
        memory: list[tuple[float, float]] = []
        rows = {}
        single = {}
        await load.reference("none", MIXED_RUN)
        for method in (*METHODS, MIXED_RUN):
            single[method] = await load.measure(method, 1, max(4.0, seconds / 16))
        sampler = asyncio.create_task(sample(pid, memory))
        share = seconds / (len(METHODS) + 1)
        for method in (*METHODS, MIXED_RUN):
            together = await load.measure(method, clients, share)
            one, many = single[method].summary(), together.summary()
            times = many["tokens_per_second"] / one["tokens_per_second"]
            rows[method] = {"one_client": one, "many_clients": many, "times": round(times, 2)}
            print(json.dumps({method: rows[method]}), flush=True)
        sampler.cancel()
        running = metric(url, "num_requests_running")
        log.seek(0)
        ready = next(line for line in map(json.loads, log) if line["event"] == "ready")
    return {
        "clients": clients,
        "seconds": seconds,
        "slots": slots,
        "context": context,
        "longest_answer": MAX_NEW_TOKENS,
        "threads": THREADS,
        "methods": rows,
        "slots_in_use_at_the_end": running,
        "memory_mib": {
            "ready": ready["resident_mib"],
            "announced": ready["at_most_mib"],
            "most": max(mib for _, mib in memory),
            "at_the_end": memory[-1][1],
        },
    }


async def measure_pool(clients: int, seconds: float, slots: int, context: int, cache_tokens: int) -> dict[str, Any]:
    """A pool that all together overflow: whoever is preempted still gets the answer he gets alone."""
    with tempfile.TemporaryFile("w+") as log, server(slots, context, log, cache_tokens) as (url, pid):
        load = Load(url, pid, [problem.prompt for problem in Pocket(split="test").problems(35, 1)])
        await load.reference(POOL_RUN)
        alone = await load.measure(POOL_RUN, 1, max(4.0, seconds / 4))
        before = {name: metric(url, name) for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")}
        preempted = metric(url, "num_preemptions_total")
        together = await load.measure(POOL_RUN, clients, seconds)
        looked_up, found = (metric(url, name) - old for name, old in before.items())
        one, many = alone.summary(), together.summary()
        used, remembered = metric(url, "kv_cache_pages_used"), metric(url, "kv_cache_pages_remembered")
        return {
            "cache_tokens": cache_tokens,
            "one_client": one,
            "many_clients": many,
            "times": round(many["tokens_per_second"] / one["tokens_per_second"], 2),
            "preemptions": metric(url, "num_preemptions_total") - preempted,
            "prompt_tokens_found": round(found / looked_up, 3),
            "pages_remembered_at_the_end": remembered,
            "pages_lost": used - remembered,
            "slots_in_use_at_the_end": metric(url, "num_requests_running"),
        }


def metric(url: str, name: str) -> float:
    """The sum over its labels."""
    lines = [line for line in httpx.get(url + "/metrics").text.splitlines() if line.startswith(f"semspec:{name}{{")]
    return sum(float(line.split()[-1]) for line in lines)


def machine() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "semspec": semspec.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "processor": cpu_name(),
        "load_average_before": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--cache-tokens", type=int, default=6000, help="of the small pool")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = machine()
    result |= asyncio.run(measure(arguments.clients, arguments.seconds, arguments.slots, arguments.context))
    share = arguments.seconds / (len(METHODS) + 1)
    where = (arguments.slots, arguments.context, arguments.cache_tokens)
    result["pool"] = pool = asyncio.run(measure_pool(arguments.clients, share, *where))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"serve-{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")
    many = [row["many_clients"] for row in (*result["methods"].values(), pool)]
    failed = (
        sum(row["errors"] + row["unequal_answers"] for row in many) + pool["pages_lost"] + (not pool["preemptions"])
    )
    print(json.dumps({k: v for k, v in result.items() if k != "methods"}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
