"""The folder of a run: run.json (configuration and machine), samples.jsonl (every output), summary.json.

Samples are appended and flushed to the disk unit by unit, so a run can be killed at any time and started again.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from semspec.errors import BadRequest

Key = tuple[str, str, int]  # arm, problem, repeat
Sample = dict[str, Any]


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file, self.samples_file = path / "run.json", path / "samples.jsonl"

    def open(self, run: dict[str, Any]) -> set[Key]:
        """Begin a run, or go on with the same one; returns the samples it already has."""
        self.path.mkdir(parents=True, exist_ok=True)
        before = self.before()
        if before is not None:
            for part in ("config", "arms"):
                if before.get(part) != run[part]:
                    raise self._another(_difference(before.get(part), run[part]), "give the same options")
            for name, digest in run.get("inputs", {}).items():  # a name stays where what it names is written anew
                if (known := before.get("inputs", {}).get(name)) not in (None, digest):
                    raise self._another(f"the content of {name} was {known} and is {digest}", "put it back")
        elif self.samples_file.exists():
            raise BadRequest(f"{self.path} has samples but no run.json; give another --out")
        else:
            write_json(self.run_file, run)
        return self._mend()

    def before(self) -> dict[str, Any] | None:
        """The run that is there already."""
        return _run_of(self.path) if self.run_file.exists() else None

    def _another(self, changed: str, what_to_do: str) -> BadRequest:
        return BadRequest(f"{self.path} holds another run ({changed}); {what_to_do}, or give another --out")

    def _mend(self) -> set[Key]:
        """Drop a line that was being written when the run was killed."""
        if not self.samples_file.exists():
            return set()
        data = self.samples_file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        samples, good = _samples(whole, self.samples_file)
        if good < len(data):
            with self.samples_file.open("r+b") as file:
                file.truncate(good)
        return set(map(key_of, samples))

    def append(self, samples: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in samples)
        with self.samples_file.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, summary: dict[str, Any]) -> None:
        write_json(self.run_file, _run_of(self.path) | {"finished": True})
        write_json(self.path / "summary.json", summary)


def load_run(folder: Path) -> tuple[dict[str, Any], list[Sample]]:
    """What a run's folder holds, also while the run is under way or after it was killed."""
    run = _run_of(folder)
    return run, deduplicated(_samples(_read(folder, "samples.jsonl"), folder / "samples.jsonl")[0])


def _samples(data: bytes, path: Path) -> tuple[list[Sample], int]:
    """And how many of the bytes are whole lines: the last may have been in writing when the run was killed."""
    found, good, lines = list[Sample](), 0, data.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            sample = json.loads(line) if line.strip() else None
            if sample is not None:
                key_of(sample)
                found.append(sample)
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise BadRequest(
                f"line {number} of {path} is damaged; remove it and start the run again to fill the gap"
            ) from None
        good += len(line)
    return found, good


def _run_of(folder: Path) -> dict[str, Any]:
    text = _read(folder, "run.json")
    try:
        run = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"{folder} cannot be read as a run ({error}); run it again into another folder") from None
    arms = run.get("arms") if isinstance(run, dict) else None
    if not isinstance(arms, list) or not all(isinstance(arm, dict) and {"name", "role"} <= arm.keys() for arm in arms):
        raise BadRequest(f"{folder / 'run.json'} lists no arms; it was not written by `semspec bench`")
    return dict(run)


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        raise BadRequest(f"{folder} is not a run: it has no {name}; make one with `semspec bench --out`") from None
    except OSError as error:
        raise BadRequest(f"{folder} cannot be read as a run ({error}); run it again into another folder") from None


def key_of(sample: Sample) -> Key:
    return sample["arm"], sample["problem"], sample["repeat"]


def deduplicated(samples: Iterable[Sample]) -> list[Sample]:
    """Each (arm, problem, repeat) once, the first that was recorded."""
    first: dict[Key, Sample] = {}
    for sample in samples:
        first.setdefault(key_of(sample), sample)
    return list(first.values())


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.rename(path)


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *before]:
            if before.get(key) != now.get(key):
                return f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
    return "other methods"


def surroundings() -> dict[str, Any]:
    """The time, versions, hardware and the state of the source, for run.json and other results."""
    import torch
    import transformers

    import semspec
    from semspec.model.threads import share_of_core

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "semspec": semspec.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu},
        "core_share": share_of_core(),  # that a thread gets now: less than 1 if others use the machine
        "git": _git(),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git() -> dict[str, Any] | None:
    """Commit of the source, and whether it was changed since; None for an installed package."""
    where = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.CalledProcessError):
        return None
