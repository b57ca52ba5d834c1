"""The files for operators are true: what they name exists."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
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


def test_an_application_for_ray_is_ours(monkeypatch: pytest.MonkeyPatch):
    """Ray is not installed where tests run: what it would be given is looked at."""
    built: list[Any] = []

    def ingress(build: Any) -> Any:
        built.append(build)
        return lambda kind: kind

    def deployment(**options: Any) -> Any:
        assert options["num_replicas"] == 3 and options["graceful_shutdown_timeout_s"] > Limits().drain + 10
        return lambda kind: type(kind.__name__, (kind,), {"bind": classmethod(lambda cls: cls())})

    fake = SimpleNamespace(ingress=ingress, deployment=deployment)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=fake))
    for name, value in {"REPLICAS": "3", "API_KEY": "secret", "HOSTS": "models.example"}.items():
        monkeypatch.setenv(f"SEMSPEC_{name}", value)
    runpy.run_path(str(DEPLOY / "ray_serve.py"))
    app = built[0]()
    assert app.state.keys and "/v1/chat/completions" in {route.path for route in app.routes}
    engine = app.state.engine
    monkeypatch.setattr(engine, "start", lambda: None)
    monkeypatch.setattr(engine, "stop", lambda: None)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    async def live() -> None:
        beginning = app.router.lifespan_context(app)
        entering = asyncio.create_task(beginning.__aenter__())
        await asyncio.sleep(0.3)
        assert not entering.done(), "no requests before the models are there"
        engine.state = "ready"
        await entering
        assert not ended
        engine.state = "failed"
        while not ended:
            await asyncio.sleep(0.05)
        await beginning.__aexit__(None, None, None)

    asyncio.run(live())
    assert ended == [1]


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
