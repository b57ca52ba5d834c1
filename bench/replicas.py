"""Two replicas of the pocket pair, one killed with SIGKILL under streaming clients: what every client saw.

    python -m bench.replicas --out results
    python -m bench.replicas --on ray --out results        # where Ray is installed

On Ray the actor is killed; its server has to end with it, and `--kill server` kills that one instead.
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
    try:
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
    except httpx.HTTPError as error:
        end = f"broken: {type(error).__name__}"
    return {"text": text, "end": end}


def wait(url: str, ready: int) -> float:
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").json().get("ready") == ready:
                return time.monotonic() - began
        time.sleep(0.25)
    raise RuntimeError(f"there were not {ready} replicas in {START_SECONDS:g} seconds")


def servers(pid: int) -> dict[int, int]:
    """The replicas' servers among all that this process has started, each with its parent."""
    found = {}
    with contextlib.suppress(OSError):  # one that has ended meanwhile
        for child in [
            child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
        ]:
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            found |= {int(child): pid} if "semspec" in words and "--port" in words else servers(int(child))
    return found


def replaced(url: str, pid: int, before: dict[int, int]) -> float:
    """Seconds until as many are ready again, one of them a new one."""
    began = time.monotonic()
    while not servers(pid).keys() - before.keys():
        if time.monotonic() - began > START_SECONDS:
            raise RuntimeError("the replica was not replaced")
        time.sleep(0.05)
    wait(url, len(before))
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--on", choices=("processes", "ray"), default="processes")
    parser.add_argument("--kill", choices=("actor", "server"), default="actor")
    parser.add_argument("--log", type=Path, default=Path(os.devnull))
    parser.add_argument("--out", type=Path, help="folder for a dated result")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "semspec", "serve", "pocket", "--port", str(port), "--replicas", "2"]
    command += ["--on", arguments.on, "--slots", "8", "--context", "1024"]
    with arguments.log.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        started = wait(url, 2)
        before = servers(process.pid)
        with ThreadPoolExecutor(arguments.clients) as pool:
            begun = set[int]()
            clients = [pool.submit(streamed, url, i, begun) for i in range(arguments.clients)]
            while len(begun) < arguments.clients // 2:
                time.sleep(0.01)
            server, parent = min(before.items())
            actor = arguments.on == "ray" and arguments.kill == "actor"
            os.kill(parent if actor else server, signal.SIGKILL)
            again = replaced(url, process.pid, before)
            seen = [client.result() for client in clients]
            orphan = Path(f"/proc/{server}").exists()
            after = Counter(one["end"] for one in pool.map(streamed, [url] * 16, range(16), [set[int]()] * 16))
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    finally:
        process.kill()
    result = {
        "date": datetime.now(UTC).date().isoformat(), "on": arguments.on, "clients": arguments.clients,
        "killed": "actor" if actor else "server", "load": os.getloadavg()[0],
        "ends": dict(Counter(one["end"] for one in seen)), "characters": [len(one["text"]) for one in seen],
        "seconds_to_start": round(started, 1), "seconds_until_replaced": round(again, 1),
        "the_killed_one_still_runs": orphan, "after": dict(after), "exit_status": status,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if arguments.out:
        name = "replicas" if arguments.on == "processes" else f"replicas-ray-{result['killed']}"
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{name}-{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")
    assert set(result["ends"]) <= {"done", "replica_lost"}, "a stream ended silently"
    assert not orphan, "a server was left behind"


if __name__ == "__main__":
    main()
