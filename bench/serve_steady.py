"""Steady load: clients of every API and field at once, some of which are killed. Leaks, memory, equal answers, the log.

    python -m bench.serve_steady --clients 64 --seconds 1800 --out results

Starts a server of its own with the pocket pair, asks everything once alone, then keeps up the load. Fails if an
answer under load differs from the one given alone, if a request fails, if slots or connections are left, if the
process has more memory than was announced or does not end when it is told to, or if the log holds an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from bench.serve import machine, sample, server
from semspec.serve.limits import Limits
from semspec.tasks.pocket import Pocket

CHAT: dict[str, Any] = {"model": "pocket", "temperature": 0, "max_tokens": 60}
LOSSLESS = {"verifier": "exact", "num_draft_tokens": 4}
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculation": LOSSLESS},
    "block": {"speculation": {"verifier": "block", "num_draft_tokens": 4}},
    "stream": {"stream": True, "stream_options": {"include_usage": True}},
    "two answers": {"n": 2, "temperature": 0.8, "seed": 5, "speculation": LOSSLESS},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {"5": 2, "7": -100}, "min_tokens": 4},
    "stop": {"stop": ["boxes", "."], "include_stop_str_in_output": True},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 24},
    "choice": {"guided_choice": ["yes", "no", "perhaps"]},
    "priority": {"priority": -1, "user": "x", "deadline": 300},
}


def body(kind: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    if kind in FIELDS:
        return "/v1/chat/completions", CHAT | {"messages": messages} | FIELDS[kind]
    if kind == "responses":
        return "/v1/responses", {"model": "pocket", "input": messages, "temperature": 0, "max_output_tokens": 60}
    if kind == "messages":
        return "/v1/messages", CHAT | {"messages": messages}
    options = {"temperature": 0, "num_predict": 60}
    return "/api/chat", {"model": "pocket", "messages": messages, "stream": False, "options": options}


KINDS = (*FIELDS, "responses", "messages", "ollama")


def words(kind: str, response: httpx.Response) -> str:
    """What has to be the same every time."""
    if kind == "stream":
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        return "".join((c["choices"][0]["delta"].get("content") or "") for c in chunks if c["choices"])
    found = response.json()
    if kind == "responses":
        return json.dumps([[part["text"] for part in item["content"]] for item in found["output"]])
    if kind == "messages":
        return json.dumps([block.get("text") or block.get("thinking") for block in found["content"]])
    if kind == "ollama":
        return json.dumps([found["message"]["content"], found["done_reason"]])
    return json.dumps([[c["message"]["content"], c["finish_reason"]] for c in found["choices"]])


class Steady:
    def __init__(self, url: str, prompts: list[Any]) -> None:
        self.url, self.prompts = url, prompts
        self.alone: dict[tuple[str, int], str] = {}
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.random = random.Random(1)

    async def ask(self, http: httpx.AsyncClient, kind: str, problem: int) -> None:
        path, given = body(kind, self.prompts[problem])
        response = await http.post(path, json=given)
        if response.status_code != 200:
            self.errors.append(f"{kind}: {response.status_code} {response.text[:200]}")
            return
        text = words(kind, response)
        if self.alone.setdefault((kind, problem), text) != text:
            self.errors.append(f"{kind}: another answer than alone")
        self.counts[kind] += 1

    async def leave(self, http: httpx.AsyncClient, problem: int) -> None:
        """Ask for a stream and go away while it comes."""
        given = CHAT | {"messages": self.prompts[problem], "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=given) as response:
            async for _ in response.aiter_lines():
                if self.random.random() < 0.2:
                    break
        self.counts["killed"] += 1

    async def client(self, end: float) -> None:
        while time.monotonic() < end:
            async with httpx.AsyncClient(base_url=self.url, timeout=600) as http:
                try:
                    if self.random.random() < 0.1:
                        await self.leave(http, self.random.randrange(len(self.prompts)))
                    else:
                        kind, problem = self.random.choice(list(self.alone))
                        await self.ask(http, kind, problem)
                except httpx.HTTPError as error:
                    self.errors.append(repr(error))

    async def run(self, clients: int, seconds: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=600) as http:
            for i, kind in enumerate(KINDS):
                await self.ask(http, kind, i % len(self.prompts))
        self.counts.clear()
        end = time.monotonic() + seconds
        await asyncio.gather(*(self.client(end) for _ in range(clients)))


async def measure(clients: int, seconds: float, slots: int) -> dict[str, Any]:
    prompts = [problem.prompt for problem in Pocket(split="test").problems(8, 0)]
    with tempfile.TemporaryFile("w+") as log:
        memory: list[tuple[float, float]] = []
        with server(slots, 512, log) as (url, pid):
            steady = Steady(url, prompts)
            sampler = asyncio.create_task(sample(pid, memory))
            await steady.run(clients, seconds)
            await asyncio.sleep(3)
            sampler.cancel()
            page = httpx.get(url + "/metrics").text
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            told = time.monotonic()  # to end
        seconds_to_end = round(time.monotonic() - told, 1)
        log.seek(0)
        lines = [json.loads(line) for line in log]
    values = {
        line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if line.startswith("semspec:num")
    }
    ready, draining = (next(line for line in lines if line["event"] == event) for event in ("ready", "draining"))
    quarter = max(1, len(memory) // 4)
    return {
        "clients": clients, "seconds": seconds, "slots": slots, "requests": dict(sorted(steady.counts.items())),
        "errors": steady.errors[:20], "failed": len(steady.errors),
        "slots_in_use_at_the_end": values["semspec:num_requests_running"],
        "waiting_at_the_end": values["semspec:num_requests_waiting"], "open_files_at_the_end": files,
        "sequences_at_the_end": draining["sequences"], "seconds_to_end": seconds_to_end,
        "errors_in_the_log": sum(line["level"] == "error" for line in lines),
        "tracebacks_in_the_log": sum("where" in line for line in lines),
        "memory_mib": {
            "ready": ready["resident_mib"], "announced": ready["at_most_mib"], "most": max(m for _, m in memory),
            "mean_by_quarter": [
                round(sum(m for _, m in memory[i : i + quarter]) / quarter, 1)
                for i in range(0, quarter * 4, quarter)
            ],
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = machine() | asyncio.run(measure(arguments.clients, arguments.seconds, arguments.slots))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"serve-steady-{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    memory = result["memory_mib"]
    left = sum(result[f"{what}_at_the_end"] for what in ("slots_in_use", "waiting", "sequences"))
    late = result["seconds_to_end"] > Limits().drain
    sys.exit(
        bool(result["failed"] or left or result["errors_in_the_log"] or late or memory["most"] > memory["announced"])
    )


if __name__ == "__main__":
    main()
