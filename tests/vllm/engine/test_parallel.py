"""Tensor parallelism: every rank decides by itself, and alike. (On a CPU vLLM cannot draft in a pipeline.)"""

from __future__ import annotations

import os

import pytest

from tests.vllm.engine.engines import check_mixed_batch, engine, launch
from tests.vllm.engine.interpreted import prepare

prepare(v2=False)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks() -> None:
    own = launch(tensor_parallel=2)
    os.environ |= own.environment()
    check_mixed_batch(engine(own, distributed_executor_backend="mp"), own)
