"""On a GPU: kernels against float64, and the runner, its graphs captured, against the plain one on a CPU."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_checks_one_token import CHECKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    CHECKS[name](torch.device("cuda"))
