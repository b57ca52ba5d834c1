"""Model Runner V2 on a CPU: its real Triton kernels, interpreted. To be called before vllm is imported."""

from __future__ import annotations

import os
import types


def prepare(v2: bool) -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if v2 else "0",
        "TRITON_INTERPRET": "1" if v2 else "0",
    }
    if v2:
        import triton.backends as backends

        active = type("Driver", (), {"is_active": staticmethod(lambda: True)})
        backends.backends["cpu"] = types.SimpleNamespace(driver=active, compiler=None)
