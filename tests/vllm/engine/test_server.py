"""The server that the printed line starts, asked by the `openai` client, with a rule for each request."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import openai
import pytest

from tests.vllm.engine.engines import PROMPTS, RULES, K, N, launch, ours

SMALL = ["--enforce-eager", "--kv-cache-memory-bytes", str(32 << 20), "--max-num-seqs", "8"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def printed() -> str:
    """What `semspec vllm-args` prints first."""
    own = launch()
    words = [sys.executable, "-m", "semspec", "vllm-args", own.target, "--draft", own.draft, "--verifier", own.verifier]
    words += ["-k", K, "--device", "cpu", "--dtype", "float32", "--max-model-len", "256"]
    return subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True).stdout.split("\n")[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    line = re.sub(r"\bpython\b", sys.executable, printed(), count=1)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "0"}
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"{line.replace('PROMETHEUS', 'exec env PROMETHEUS', 1)} {' '.join(SMALL)} --port {port}"],
            stdout=out, stderr=out, env=environment,
        )  # fmt: skip
    try:
        while process.poll() is None:  # however long a busy machine takes
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(f"the server ended: {log.read_text()[-3000:]}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_the_printed_server_answers_with_a_rule_for_each_request(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="-")
    for prompt, rule in zip(PROMPTS, RULES, strict=True):
        extra = {"ignore_eos": True, "return_token_ids": True, "vllm_xargs": {"semspec_loop_repeats": 0}}
        extra["vllm_xargs"] |= {"semspec_verifier": rule} if rule else {}
        answer = client.completions.create(
            model=launch().target, prompt=prompt, max_tokens=N, temperature=0.0, extra_body=extra
        )
        assert json.loads(answer.model_dump_json())["choices"][0]["token_ids"] == ours(launch(), prompt, rule)[0], rule
    assert re.search(r"^semspec:relaxed_tokens_total [1-9]", urlopen(f"{server}/metrics").read().decode(), re.MULTILINE)
    assert Path(launch().target).is_dir()
