"""The line that starts vLLM: what it says, and what it refuses. That it starts is tests/vllm/engine/test_server.py."""

from __future__ import annotations

import json
import shlex

import pytest

from semspec.errors import BadRequest
from semspec.vllm.arguments import Launch
from semspec.vllm.request import Settings


def test_the_line_says_what_the_arguments_say() -> None:
    launch = Launch(target="a b", draft="d", verifier="fly:theta=0.3", tensor_parallel=4, nodes=2, max_model_len=4096)
    words = shlex.split(launch.line())
    assert words[:5] == ["PROMETHEUS_MULTIPROC_DIR=$(mktemp", "-d)", "VLLM_USE_V2_MODEL_RUNNER=1", "vllm", "serve"]
    given = {key: words[words.index(f"--{key.replace('_', '-')}") + 1] for key in launch.arguments() if key != "model"}
    speculative = json.loads(given["speculative_config"])
    assert speculative == {"method": "draft_model", "model": "d", "num_speculative_tokens": 15}
    assert json.loads(given["additional_config"]) == {"semspec": {"verifier": "fly:theta=0.3"}}
    assert given["logits_processors"] == "semspec.vllm.processor:TokenRules"
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == ("4", "ray")
    assert "a b" in words and "model='a b'" in launch.python()
    compile(launch.python(), "printed", "exec")


def test_a_rule_that_needs_probabilities_gets_the_worker_and_sampled_drafts() -> None:
    found = Launch(target="a", draft="d", verifier="ensemble").arguments()
    assert found["speculative_config"]["draft_sample_method"] == "probabilistic"
    assert found["worker_cls"] == "semspec.vllm.worker.GpuWorker"
    assert found["logits_processors"] == ["semspec.vllm.processor:DraftRules"]


def test_a_cpu_has_v1_and_a_core_for_each_rank() -> None:
    launch = Launch(target="a", draft="d", runner="v1", device="cpu", tensor_parallel=2)
    assert launch.environment()["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert launch.arguments()["worker_cls"] == "semspec.vllm.worker.CpuWorker"
    assert "logits_processors" not in launch.arguments() and launch.command()[0] == "python"


def test_lookups_need_no_model_and_settings_go_along() -> None:
    found = Launch(target="a", verifier="topk", settings=Settings(relax_span="thinking"), fixed=True).arguments()
    assert found["speculative_config"]["method"] == "ngram" and "model" not in found["speculative_config"]
    assert found["additional_config"]["semspec"] == {"verifier": "topk", "relax_span": "thinking"}
    assert found["logits_processors"] == ["semspec.vllm.processor:FixedRule"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"verifier": "semantic+"}, "reasoning steps"),
        ({"verifier": "reflective"}, "read more"),
        ({"verifier": "fly:theta=-2"}, "theta"),
        ({"draft": None, "method": "eagle3"}, "needs --draft"),
        ({"method": "ngram"}, "leave --draft out"),
        ({"method": "tree"}, "tree"),
        ({"device": "cpu"}, "runner"),
        ({"tensor_parallel": 0}, "1 or more"),
        ({"device": "cpu", "runner": "v1", "pipeline_parallel": 2}, "pipeline"),
        ({"device": "cpu", "runner": "v1", "nodes": 2}, "Ray"),
        ({"num_draft_tokens": 0}, "1 or more"),
        ({"fixed": True, "verifier": "ensemble"}, "kept from"),
    ],
)
def test_what_cannot_start_is_refused(given: dict, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        Launch(**{"target": "a", "draft": "d", "verifier": "fly"} | given)


def test_the_command(semspec) -> None:
    done = semspec("vllm-args", "a", "--draft", "d", "--verifier", "fly", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["command"][:3] == ["vllm", "serve", "a"]
    refused = semspec("vllm-args", "a", "--verifier", "semantic+")
    assert refused.returncode == 2 and "reasoning steps" in refused.stderr
