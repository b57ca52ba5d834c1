"""A runner's kernels are launched on its own GPU, whichever is current: seen with a fake one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from semspec.model import ModelRunner
from semspec.model.heads.block_runner import BlockRunner
from semspec.model.heads.runner import HeadRunner
from semspec.model.hf_runner import TransformersRunner
from semspec.model.placement import on_its_device


def test_methods_run_with_their_own_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["cuda:0"]

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        current.append(str(which))
        yield
        current.pop()

    class Runner:
        def __init__(self, where: str) -> None:
            self.device = torch.device(where)

        @on_its_device
        def score(self, rows: int) -> tuple[str, int]:
            return current[-1], rows

    monkeypatch.setattr(torch.cuda, "device", device)
    draft, target, processor = (Runner(where) for where in ("cuda:1", "cuda:0", "cpu"))
    assert draft.score(3) == ("cuda:1", 3) and target.score(4) == ("cuda:0", 4) and current == ["cuda:0"]
    assert processor.score(5) == ("cuda:0", 5), "which it does not care about"


@pytest.mark.parametrize("runner", [ModelRunner, HeadRunner, BlockRunner, TransformersRunner])
@pytest.mark.parametrize("method", ["score", "decode"])
def test_all_runners_that_launch_kernels_do_so(runner: type, method: str) -> None:
    assert getattr(runner, method).__code__.co_name == "run"
