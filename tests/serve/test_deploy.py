"""The files for operators are true: what they name exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from semspec.serve.limits import Limits
from tests.serve.live import Live

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


def expressions(part: Any) -> list[str]:
    """Every query of a dashboard, however deep."""
    if isinstance(part, dict):
        own = [part["expr"]] if isinstance(part.get("expr"), str) else []
        return own + [e for value in part.values() for e in expressions(value)]
    return [e for value in part for e in expressions(value)] if isinstance(part, list) else []


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"(?:vllm|semspec):\w+|process_\w+", expression))


def test_a_dashboard_asks_for_metrics_that_there_are(tiny: Live):
    board = json.loads((DEPLOY / "grafana.json").read_text())
    assert board["title"] and board["panels"] and board["schemaVersion"] > 30
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    asked = set().union(*map(metrics_in, expressions(board)))
    families = list(text_string_to_metric_families(tiny.get("/metrics").text))
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    there = {family.name + end for family in families for end in ends.get(family.type, ("",))}
    assert len(asked) > 15 and not asked - there, sorted(asked - there)
    labels = {name for e in expressions(board) for name in re.findall(r"by \((\w+)\)", e)} - {"le"}
    assert labels <= {"finished_reason", "verifier", "client", "status", "position"}


def test_the_container_is_made_of_files_that_there_are():
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert {"pyproject.toml", "semspec"} <= set(copied)
    assert not [name for name in copied if not (ROOT / name).exists()]
    for line in lines:
        if line.startswith(("CMD ", "ENTRYPOINT ")):
            assert all(isinstance(word, str) for word in json.loads(line.split(" ", 1)[1])), line


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
