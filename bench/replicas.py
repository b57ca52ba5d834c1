"""Two replicas of the pocket pair, one killed with SIGKILL under streaming clients: what every client saw.

python -m bench.replicas --out results
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
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from semspec import pocket

START_SECONDS = 600.0


def streamed(url: str, number: int, begun: set[int]) -> dict[str, Any]:
    """One client: its text, and how its stream ended."""
    text, end = "", "silence"
    messages = [{"role": "user", "content": pocket.problem(number, 8, "test").text}]
    body = {"model": "pocket", "messages": messages, "stream": True, "temperature": 0, "max_tokens": 300}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
        if response.status_code != 200:
            return {"text": "", "end": f"status {response.status_code}"}
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                end = "done"
            elif data and "error" in (found := json.loads(data)):
                end = found["error"]["code"]
            elif data and found.get("choices"):
                delta = found["choices"][0]["delta"]
                text += delta.get("content") or delta.get("reasoning_content") or ""
                begun.update([number] if text else [])
    return {"text": text, "end": end}


def wait(url: str, ready: int) -> float:
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").json().get("ready") == ready:
                return time.monotonic() - began
        time.sleep(0.25)
    raise RuntimeError(f"there were not {ready} replicas in {START_SECONDS:g} seconds")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--out", type=Path, help="folder for a dated result")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "semspec", "serve", "pocket", "--port", str(port), "--replicas", "2"]
    log = subprocess.DEVNULL
    process = subprocess.Popen([*command, "--slots", "8", "--context", "1024"], stdout=log, stderr=log)
    try:
        started = wait(url, 2)
        with ThreadPoolExecutor(arguments.clients) as pool:
            begun = set[int]()
            clients = [pool.submit(streamed, url, i, begun) for i in range(arguments.clients)]
            while len(begun) < arguments.clients // 2:
                time.sleep(0.01)
            killed = children(process.pid)[0]
            os.kill(killed, signal.SIGKILL)
            began = time.monotonic()
            seen = [client.result() for client in clients]
        replaced = wait(url, 2) if time.monotonic() - began < START_SECONDS else None
        after = streamed(url, 0, set())
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    finally:
        process.kill()
    result = {
        "date": datetime.now(UTC).date().isoformat(), "clients": arguments.clients, "load": os.getloadavg()[0],
        "ends": dict(Counter(one["end"] for one in seen)), "characters": [len(one["text"]) for one in seen],
        "seconds_to_start": round(started, 1), "replaced": replaced is not None, "after": after["end"],
        "exit_status": status,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if arguments.out:
        (arguments.out / f"replicas-{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")
    assert set(result["ends"]) <= {"done", "replica_lost"}, "a stream ended silently"


if __name__ == "__main__":
    main()
