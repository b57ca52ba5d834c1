"""How vLLM has to be started for a verifier: the `vllm serve` line, and the same for `vllm.LLM`. Imports no vllm."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from semspec import verify
from semspec.errors import BadRequest
from semspec.vllm.request import KEY, Choice, Settings

METHODS = ("draft_model", "eagle", "eagle3", "mtp", "ngram")
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything that decides the line."""

    target: str
    draft: str | None = None
    verifier: str = "fly"
    method: str | None = None  # what drafts: one of METHODS; None: the draft model, or ngram without one
    num_draft_tokens: int | None = None  # None: the verifier's own
    runner: str = "v2"  # vLLM's Model Runner; on a CPU v1
    device: str = "cuda"
    dtype: str | None = None
    max_model_len: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    nodes: int = 1  # above 1: over Ray
    fixed: bool = False  # requests may not choose another rule
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise BadRequest(f"vLLM's drafter is {self.method!r}; give {', '.join(METHODS)}")
        if (self.drafts_by in ("draft_model", "eagle", "eagle3")) != (self.draft is not None):
            what = "needs --draft MODEL" if self.draft is None else "takes no draft model; leave --draft out"
            raise BadRequest(f"drafter {self.drafts_by!r} {what}")
        if self.runner not in ("v1", "v2") or (self.runner == "v2" and self.device == "cpu"):
            raise BadRequest(f"runner is {self.runner!r}; give v1 or v2, and v1 on a CPU")
        if min(self.tensor_parallel, self.pipeline_parallel, self.nodes, self.length) < 1:
            raise BadRequest("parallel sizes, nodes and draft lengths are 1 or more")
        if self.device == "cpu" and max(self.pipeline_parallel, self.nodes) > 1:
            raise BadRequest("on a CPU vLLM drafts neither in a pipeline nor over Ray; leave both out")
        if self.fixed and (self.runner == "v1" or self.probabilistic):
            raise BadRequest("requests can be kept from choosing rules on v2, with rules that need draft tokens only")
        Choice.of(self.settings_of_engine, trusted=True)

    @property
    def drafts_by(self) -> str:
        return self.method or ("ngram" if self.draft is None else "draft_model")

    @property
    def length(self) -> int:
        rule = verify.make(self.verifier)
        return rule.default_draft_tokens() if self.num_draft_tokens is None else self.num_draft_tokens

    @property
    def probabilistic(self) -> bool:
        """Whether the rule compares both models' distributions, so drafts are sampled and their logits kept."""
        return verify.make(self.verifier).needs_draft_logits

    @property
    def settings_of_engine(self) -> Settings:
        return Settings(**vars(self.settings) | {"verifier": self.verifier})

    def arguments(self) -> dict[str, Any]:
        """For `vllm.LLM(**arguments)`."""
        speculative: dict[str, Any] = {"method": self.drafts_by, "num_speculative_tokens": self.length}
        if self.draft is not None:
            speculative["model"] = self.draft
        if self.drafts_by == "ngram":
            speculative |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        if self.probabilistic:
            speculative["draft_sample_method"] = "probabilistic"
        own = {k: v for k, v in vars(self.settings_of_engine).items() if k == "verifier" or v != getattr(Settings(), k)}
        found: dict[str, Any] = {"model": self.target, "speculative_config": speculative}
        found["additional_config"] = {KEY: own}
        if self.runner == "v2":
            kind = "FixedRule" if self.fixed else "DraftRules" if self.probabilistic else "TokenRules"
            found["logits_processors"] = [f"semspec.vllm.processor:{kind}"]
        if self.runner == "v1" or self.probabilistic:
            found["worker_cls"] = f"semspec.vllm.worker.{'Cpu' if self.device == 'cpu' else 'Gpu'}Worker"
        else:
            found["worker_extension_cls"] = "semspec.vllm.worker.Stats"
        more = {
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "tensor_parallel_size": self.tensor_parallel if self.tensor_parallel > 1 else None,
            "pipeline_parallel_size": self.pipeline_parallel if self.pipeline_parallel > 1 else None,
            "distributed_executor_backend": "ray" if self.nodes > 1 else None,
        }
        return found | {key: value for key, value in more.items() if value is not None}

    def environment(self) -> dict[str, str]:
        own = {"VLLM_USE_V2_MODEL_RUNNER": "1" if self.runner == "v2" else "0"}
        if self.device != "cpu":
            return own
        ranks = "|".join(map(str, range(self.tensor_parallel)))  # a core for each
        return own | CPU_ENVIRONMENT | ({"VLLM_CPU_OMP_THREADS_BIND": ranks} if self.tensor_parallel > 1 else {})

    def command(self) -> list[str]:
        """What starts the server."""
        given = self.arguments()
        target = given.pop("model")
        # The console command of the CPU build does not start; the module does.
        words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", target]
        words = words if self.device == "cpu" else ["vllm", "serve", target]
        for key, value in given.items():
            text = value[0] if isinstance(value, list) else json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{key.replace('_', '-')}", text]
        return words

    def line(self) -> str:
        """The whole line for a shell. Counters of worker processes reach /metrics through a folder."""
        own = [f"{key}={shlex.quote(value)}" for key, value in self.environment().items()]
        words = [shlex.quote(word) for word in self.command()]
        return " ".join(["PROMETHEUS_MULTIPROC_DIR=$(mktemp -d)", *own, *words])

    def python(self) -> str:
        """The same for a program."""
        return "\n".join(["llm = vllm.LLM(", *(f"    {k}={v!r}," for k, v in self.arguments().items()), ")"])
