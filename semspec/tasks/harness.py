"""`lm_eval`: a task of lm-evaluation-harness, with its prompts, stop strings and scorer: "lm_eval:gsm8k".

Data come from local files or from what `datasets` has cached; nothing is downloaded, as with every task here.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from semspec.errors import BadRequest
from semspec.tasks.base import Problem, Task, choose, needs
from semspec.text.tokenizer import Prompt

MAX_NEW_TOKENS = 256  # the harness's own, where a task has none


@dataclass(frozen=True)
class Harness(Task):
    name = "lm_eval"
    max_new_tokens = MAX_NEW_TOKENS  # where the harness's task names none
    graded = True
    main_option = "task"

    task: str = field(default="", metadata={"label": "its name there"})
    include: str = field(default="", metadata={"label": "folder of further tasks, as the harness's --include_path"})
    shots: int = field(default=-1, metadata={"label": "solved examples; -1: as the task says", "min": -1})
    chat: bool = field(default=False, metadata={"label": "chat messages, as the harness's --apply_chat_template"})
    metric: str = field(default="", metadata={"label": "one of the task's metrics; its first by default"})
    filter: str = field(default="", metadata={"label": "one of the task's filters; its first by default"})

    def __post_init__(self) -> None:
        if not self.task:
            raise BadRequest("task 'lm_eval' needs the name of a task of lm-evaluation-harness, as in lm_eval:gsm8k")
        super().__post_init__()
        needs(self.name, "lm_eval", "lm-evaluation-harness", "its prompts and scorers", "lm_eval")
        settings = self._task.config.generation_kwargs or {}
        until = settings.get("until") or []
        stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "max_new_tokens", int(settings.get("max_gen_toks") or MAX_NEW_TOKENS))

    @cached_property
    def _task(self) -> Any:
        """The harness's task, with all its requests."""
        for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ.setdefault(variable, "1")
        try:
            found = list(_manager(self.include, self.task).load([self.task])["tasks"].values())
        except Exception as error:  # whatever its loaders and those of `datasets` raise
            raise BadRequest(
                f"lm-evaluation-harness cannot load its task {self.task!r}: {error!s:.300}; is the name right, and are "
                "its data here? (nothing is downloaded: fetch them once with `datasets`, or give a task of local files)"
            ) from error
        if len(found) != 1:
            raise BadRequest(f"{self.task!r} is a group of {len(found)} tasks; give one of them")
        task = found[0]
        if task.OUTPUT_TYPE != "generate_until":
            raise BadRequest(
                f"the harness's task {self.task!r} compares likelihoods ({task.OUTPUT_TYPE}), and verifiers change "
                "what is generated; give a task that generates"
            )
        if self.shots >= 0:
            task.set_config(key="num_fewshot", value=self.shots)
        task.set_fewshot_seed(seed=1234)  # the harness's own
        chat = {"apply_chat_template": True, "fewshot_as_multiturn": True, "chat_template": _messages}
        task.build_all_requests(**chat if self.chat else {})
        return task

    def problems(self, n: int | None, seed: int) -> list[Problem]:
        found = [self._problem(instance) for instance in self._task.instances]
        return choose(found, n, seed, f"{self.name}:{self.task}")

    def _problem(self, instance: Any) -> Problem:
        context = instance.args[0]
        prompt: Prompt = json.loads(context) if self.chat else context
        return Problem(f"{self.task}/{instance.doc_id}", prompt, self._task.doc_to_target(instance.doc))

    @cached_property
    def _instances(self) -> dict[str, Any]:
        return {f"{self.task}/{instance.doc_id}": instance for instance in self._task.instances}

    def score(self, problem: Problem, text: str) -> float:
        instance = copy.copy(self._instances[problem.id])
        instance.resps, instance.filtered_resps = [text], {}
        for found in self._task._filters:
            found.apply([instance])
        answers: dict[str, Any] = instance.filtered_resps
        given = _pick(answers, self.filter, f"filter of {self.task!r}")
        scores = self._task.process_results(instance.doc, [given])
        return float(_pick(scores, self.metric, f"metric of {self.task!r}"))


@cache
def _index(include: str, defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include or None, include_defaults=defaults)


def _manager(include: str, task: str) -> Any:
    """The harness's own tasks are thousands of files, which are read only if the task is none of the user's."""
    if include and task in _index(include, False).all_tasks:
        return _index(include, False)
    return _index(include, True)


def _messages(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """A chat as it is: our tokenizer applies the template."""
    if not add_generation_prompt:
        raise BadRequest("this task begins the answer itself, which chat=true cannot; leave chat out")
    return json.dumps(history)


def _pick(found: dict[str, Any], name: str, what: str) -> Any:
    if name and name not in found:
        raise BadRequest(f"there is no {what} called {name!r}; there are: {', '.join(found)}")
    return found[name or next(iter(found))]
