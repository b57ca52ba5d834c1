"""A short run of the pocket pair, made once for all tests here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import semspec
from semspec.bench.run import Bench, Config

CONFIG = Config(
    task="pocket:steps=3",
    methods=["exact:k=3", "sampling"],
    n=6,
    temperature=0.6,
    max_new_tokens=24,
    device="cpu",
    context=512,
)


@pytest.fixture(scope="module")
def pocket() -> semspec.Pair:
    return semspec.load("pocket", device="cpu", slots=4, context=512)


@pytest.fixture(scope="module")
def finished(pocket: semspec.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run; tests only read it."""
    folder = tmp_path_factory.mktemp("run")
    Bench(CONFIG, pocket).run(folder)
    return folder


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
