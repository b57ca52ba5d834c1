"""The checks for a GPU can fail: faults planted into what they look at are found, on a CPU in float16."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_checks import course, no_rougher, runner

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def courses() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    exact = course(runner("smollm3", CPU, torch.float32, plain=True))
    return course(runner("smollm3", CPU, torch.float16)), course(runner("smollm3", CPU, torch.float16, True)), exact


def test_rounding_is_no_fault(courses) -> None:
    no_rougher(*courses, "as it is")


def test_one_wrong_row_is_found(courses) -> None:
    ours, rough, exact = courses
    wrong = [rows.clone() for rows in ours]
    few = min(range(len(wrong)), key=lambda i: len(wrong[i]))  # a pass of one row, in which luck counts most
    wrong[few][0] = wrong[few - 1][0]
    with pytest.raises(AssertionError):
        no_rougher(wrong, rough, exact, "planted")


def test_rounding_twice_as_much_is_found(courses) -> None:
    ours, rough, exact = courses
    more = [2 * mine - right for mine, right in zip(ours, exact, strict=True)]
    with pytest.raises(AssertionError, match="over all passes"):
        no_rougher(more, rough, exact, "planted")
