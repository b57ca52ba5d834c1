"""Every line that docs/vllm.md has printed is one that vLLM itself takes: its parser, its names, its configuration."""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from semspec.vllm.arguments import Launch
from tests.test_docs import commands
from tests.vllm.engine.engines import launch
from tests.vllm.engine.interpreted import prepare

prepare(v2=True)
DOCS = Path(__file__).parents[3] / "docs" / "vllm.md"
LINES = [line for line in commands(DOCS.read_text()) if line.startswith("semspec vllm-args")]


@cache
def parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def printed(semspec: Any, line: str) -> dict[str, Any]:
    done = semspec(*shlex.split(line)[1:], "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_papers_large_models_are_among_them() -> None:
    assert sum("405B" in line for line in LINES) == 2 and any("70B" in line for line in LINES)
    assert any("--nodes 2 --pipeline-parallel 2" in line for line in LINES)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[18:70])
def test_vllm_reads_the_line_as_it_is_meant(line: str, semspec: Any) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from semspec.vllm.processor import TokenRules
    from semspec.vllm.worker import Stats

    found = printed(semspec, line)
    serve, model = found["command"][:2], found["command"][2]
    assert serve == ["vllm", "serve"]
    own = parser().parse_args(["--model", model, *found["command"][3:]])
    for name, value in found["arguments"].items():
        assert getattr(own, name) == value, name
    (processor,) = found["arguments"]["logits_processors"]
    assert issubclass(resolve_obj_by_qualname(processor.replace(":", ".")), TokenRules)
    assert resolve_obj_by_qualname(found["arguments"]["worker_extension_cls"]) is Stats


@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        ({"tensor_parallel": 2}, 2),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, 4),
    ],
)
def test_vllm_makes_an_engine_of_such_a_line(parallel: dict[str, int], world: int) -> None:
    """All that is decided before a model is loaded, with small models in the place of large ones."""
    from vllm import EngineArgs

    own: Launch = launch("v2", **parallel)
    config = EngineArgs(**own.arguments() | {"distributed_executor_backend": "mp"}).create_engine_config()
    assert config.parallel_config.world_size == world and config.use_v2_model_runner
    assert config.speculative_config.num_speculative_tokens == own.length
    assert config.speculative_config.draft_parallel_config.tensor_parallel_size == parallel["tensor_parallel"]
    assert config.additional_config == {"semspec": {"verifier": own.verifier}}
