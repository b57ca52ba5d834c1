"""The files for operators are true: what they name exists."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from semspec.cli.main import app
from semspec.serve.limits import Limits, Settings
from tests.serve.live import serving
from tests.serve.scripted import scripted_pair

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


def queries(part: Any) -> list[tuple[str, str]]:
    """Every query of a dashboard, however deep, with the words of its legend."""
    if isinstance(part, dict):
        own = [(part["expr"], part.get("legendFormat", ""))] if isinstance(part.get("expr"), str) else []
        return own + [q for value in part.values() for q in queries(value)]
    return [q for value in part for q in queries(value)] if isinstance(part, list) else []


def faults(query: str, legend: str, there: dict[str, set[str]]) -> list[str]:
    """What a query names that the server has not: metrics, and labels of those metrics."""
    found = []
    groups = {label for names in re.findall(r"\bby \(([^)]*)\)", query) for label in names.split(", ")}
    for name, selector in re.findall(r"((?:vllm|semspec):\w+|process_\w+)(\{[^}]*\})?", query):
        asked = groups | set(re.findall(r"(\w+)=", selector)) | set(re.findall(r"{{(\w+)}}", legend))
        found += [name] if name not in there else [f"{name} has no {label}" for label in sorted(asked - there[name])]
    return found


@pytest.fixture(scope="module")
def there() -> dict[str, set[str]]:
    """The samples of a server that has answered somebody with a key, each with its labels."""
    pair = scripted_pair({"hello": ["Good day."]})
    with serving(lambda: pair, Settings(name="s", keys=("k",))) as live:
        chat = {"model": "s", "messages": [{"role": "user", "content": "hello"}]}
        key = {"authorization": "Bearer k"}
        assert live.post("/v1/chat/completions", chat, headers=key).status_code == 200 and live.idle()
        page = live.get("/metrics", headers=key).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def test_a_dashboard_asks_for_metrics_that_there_are(there: dict[str, set[str]]):
    board = json.loads((DEPLOY / "grafana.json").read_text())
    assert board["title"] and board["panels"] and board["schemaVersion"] > 30
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    asked = queries(board)
    assert len(asked) > 15 and not [fault for query in asked for fault in faults(*query, there)]
    variables = [v["query"]["query"] for v in board["templating"]["list"] if isinstance(v["query"], dict)]
    for metric, label in (re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", v).groups() for v in variables):  # type: ignore[union-attr]
        assert label in there[metric]


@pytest.mark.parametrize(
    ("query", "legend", "fault"),
    [
        ('sum(rate(vllm:generated_tokens_total{model_name=~"$m"}[1m]))', "", "vllm:generated_tokens_total"),
        ('sum(vllm:num_requests_running{model=~"$m"})', "", "vllm:num_requests_running has no model"),
        ("sum by (reason) (rate(vllm:request_success_total[1m]))", "", "vllm:request_success_total has no reason"),
        ("semspec:num_slots", "{{verifier}}", "semspec:num_slots has no verifier"),
    ],
)
def test_a_wrong_name_in_a_dashboard_would_be_seen(there: dict[str, set[str]], query: str, legend: str, fault: str):
    assert faults(query, legend, there) == [fault]


def test_the_container_is_made_of_what_there_is():
    """It cannot be built where tests run: it is parsed, and what it names is looked for."""
    parser = DockerfileParser(fileobj=io.BytesIO((DEPLOY / "Containerfile").read_bytes()))
    steps = [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]
    names = [name for name, _ in steps]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert names[0] == "FROM" and set(names) <= known and names.index("USER") < names.index("ENTRYPOINT")
    copied = [file for name, value in steps if name == "COPY" for file in value.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "semspec"} <= set(copied)
    assert not [name for name in copied if not (ROOT / name).exists()]
    given = dict(steps)
    program, command, *words = [*json.loads(given["ENTRYPOINT"]), *json.loads(given["CMD"])]
    assert (program, command) == ("semspec", "serve") and words[-1] == "pocket"
    options = {option for p in get_command(app).commands[command].params for option in p.opts}  # type: ignore[attr-defined]
    assert {word for word in words if word.startswith("--")} <= options
    (code,) = re.findall(r'-c "([^"]+)"', given["HEALTHCHECK"])
    compile(code, "healthcheck", "exec")
    assert re.findall(r"localhost:(\d+)(/\w+)", code) == [(given["EXPOSE"], "/live")]


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path):
    text = (DEPLOY / "semspec.service").read_text()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.M)
    assert int(stop) > Limits().drain + 10, "it would be killed while it lets answers finish"
    (command,) = re.findall(r"^ExecStart=(\S+) ", text, re.M)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "semspec.service"
    unit.write_text(text.replace(command, "/bin/true"))
    found = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "semspec.service" not in found.stderr and found.returncode == 0, found.stderr
    unit.write_text(text.replace(command, "/bin/true").replace("Restart=on-failure", "Restart=perhaps"))
    assert "perhaps" in subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True).stderr
