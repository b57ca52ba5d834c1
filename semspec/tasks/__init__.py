"""The tasks, by name. Adding one is one file here and one test file: define a `Task`, list it below.

A task is asked for by name, or by name with options: "pocket:steps=5,split=templates".
"""

from __future__ import annotations

from pathlib import Path

from semspec.registry import Registry
from semspec.tasks.acp import AcpProgGen
from semspec.tasks.aime24 import Aime24
from semspec.tasks.amc23 import Amc23
from semspec.tasks.base import Problem, Task
from semspec.tasks.college_math import CollegeMath
from semspec.tasks.gpqa import Gpqa
from semspec.tasks.gsm8k import Gsm8k
from semspec.tasks.harness import Harness
from semspec.tasks.humaneval import HumanEval
from semspec.tasks.jsonl import JsonLines
from semspec.tasks.longbench import LongBench
from semspec.tasks.math500 import Math500
from semspec.tasks.mbpp import Mbpp
from semspec.tasks.mgsm import Mgsm
from semspec.tasks.mt_bench import MtBench
from semspec.tasks.niah import Niah
from semspec.tasks.pocket import Pocket
from semspec.tasks.spec_bench import SpecBench
from semspec.tasks.svamp import Svamp

REGISTRY = Registry("task", "semspec.tasks", Task)  # type: ignore[type-abstract]
register = REGISTRY.register

for _task in (
    Pocket, Gsm8k, Mgsm, Svamp, Math500, CollegeMath, Aime24, Amc23, Gpqa, HumanEval, Mbpp, AcpProgGen, LongBench, Niah,
    SpecBench, MtBench, JsonLines, Harness,
):  # fmt: skip
    register(_task)


def make(spec: str | Task, data: Path | None = None) -> Task:
    """A task from its name and options; `data` is the folder that has the files of all tasks."""
    if isinstance(spec, Task):
        return spec
    return REGISTRY.make(spec, data=data)


__all__ = ["REGISTRY", "Problem", "Task", "make", "register"]
