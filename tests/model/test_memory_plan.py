"""The memory plan: true, told beforehand, and refused with a way out where it cannot be had."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import semspec
from semspec.bench.replay import SHAPES, planned
from semspec.cli.main import app
from semspec.errors import BadRequest, ModelError
from semspec.model import Source, cpu_gemm, graph_memory, memory_plan, source
from semspec.model.buckets import BATCHES, MAX_QUERIES, MAX_ROWS, QUERIES
from semspec.model.config import Shape
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import NoGraphs
from semspec.model.kernels import DEFAULT_FLAGS, reference_kernels
from semspec.model.linear import DenseLinear
from semspec.model.memory_plan import MemoryPlan, check
from semspec.model.runner import ModelRunner
from semspec.pair import loading
from semspec.sparse import FfnPlan, SparsePlan
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import edit_config, make_model, save
from tests.model.test_hf_runner import build

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> object:
    return lambda count: monkeypatch.setattr(memory_plan, "available", lambda device: count)


def taken(runner: ModelRunner) -> int:
    """Bytes of all matrices and of the KV memory."""
    model = runner.transformer
    tensors = {id(model.embedding): model.embedding}
    linears = [model.head] + [
        x for layer in model.layers for x in (layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down)
    ]  # type: ignore[union-attr]
    for linear in linears:
        assert isinstance(linear, DenseLinear)
        tensors[id(linear.weight)] = linear.weight
    return sum(t.nbytes for t in tensors.values()) + runner.cache.keys.nbytes + runner.cache.values.nbytes


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3", "phi4-mini"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_is_what_is_taken(family: str, dtype: str, tmp_path: Path) -> None:
    source = Source.find(save(make_model(family), tmp_path / "m"))
    planned = source.plan("cpu", dtype, slots=3, context=200)
    runner = source.load("cpu", dtype, 3, 200)
    assert isinstance(runner, ModelRunner)
    assert planned.total == pytest.approx(taken(runner), rel=0.01)  # norms and biases are small change


def test_weights_that_are_packed_are_planned_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gemm, "MIN_PACKED_BYTES", 0)
    monkeypatch.setattr(cpu_gemm, "can_pack", lambda: True)
    monkeypatch.setattr(cpu_gemm, "pack", lambda weight: weight.clone())
    for family in ("llama3.1", "qwen3"):  # with a head of its own, and with the embedding as head
        source = Source.find(save(make_model(family), tmp_path / family))
        planned = source.plan("cpu", "float32", slots=3, context=200)
        runner = source.load("cpu", "float32", 3, 200)
        assert isinstance(runner, ModelRunner)
        transformer = runner.transformer
        linears = [transformer.head, *(m for layer in transformer.layers for m in (layer.qkv, layer.out))]
        linears += [m for layer in transformer.layers for m in (layer.ffn.gate_up, layer.ffn.down)]
        packed = sum(m.packed.nbytes for m in linears)
        assert packed and planned.total == pytest.approx(taken(runner) + packed, rel=0.01)


def test_int8_plans_a_byte_for_each_weight_and_floats_for_the_embedding(tmp_path: Path) -> None:
    model = make_model("llama3.1")
    planned = Source.find(save(model, tmp_path / "m")).plan("cpu", "int8", 1, 100)
    embedding = model.get_input_embeddings().weight.numel()
    assert planned.weights == pytest.approx(model.num_parameters() + 4 * embedding, rel=0.01)
    assert planned.per_token == 2 * 3 * 2 * 16 * 4
    mixture = Source.find(save(make_model("mixtral"), tmp_path / "x")).plan("cpu", "int8", 1, 100)
    assert mixture.per_token == 2 * 3 * 2 * 16 * 8  # a mixture of experts attends in double precision


def test_the_plan_of_a_model_of_transformers_counts_the_tensors_in_its_files(tmp_path: Path) -> None:
    model = build("gpt2")
    planned = Source.find(save(model, tmp_path / "m")).plan("cpu", "float32", 1, 100)
    assert planned.weights == pytest.approx(4 * model.num_parameters(), rel=0.01)


def test_a_model_of_transformers_with_more_layers_than_tensors_is_refused(tmp_path: Path) -> None:
    folder = save(build("gpt2"), tmp_path / "m")
    edit_config(folder, n_layer=6)
    with pytest.raises(ModelError, match=r"lacks \d+ tensors of its config, such as transformer\.h\.\d"):
        Source.find(folder).load("cpu", "float32", 1, 32)


def test_an_impossible_plan_is_an_error_before_anything_is_read(
    target_folder: Path, draft_folder: Path, free: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "load", lambda *args: pytest.fail("weights were read"))
    free(3_000_000)  # type: ignore[operator]
    with pytest.raises(ModelError) as error:
        semspec.load(target_folder, draft_folder, device="cpu", slots=8)
    message = str(error.value)
    needed = [Source.find(f).plan("cpu", "auto", 8, None).total for f in (target_folder, draft_folder)]
    assert f"that is {memory_plan.size(sum(needed) - 3_000_000)} too much; slots=1 would fit" in message


@given(st.integers(1, 10**10), st.integers(1, 10**6), st.integers(1, 64), st.integers(2, 10**5), st.integers(1, 10**10))
def test_what_an_error_suggests_fits(weights: int, per_token: int, slots: int, context: int, free: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "available", lambda device: free)
        asked = MemoryPlan("m", CPU, weights, per_token, slots, context)
        if asked.total <= free:
            check([asked])
            return
        with pytest.raises(ModelError) as error:
            check([asked])
        found = re.search(r"slots=(\d+)(?:, context=(\d+))? would fit", str(error.value))
        if found:
            check([MemoryPlan("m", CPU, weights, per_token, int(found[1]), int(found[2] or context))])
        else:
            assert "take a narrower dtype" in str(error.value) and weights + 256 * per_token > free


@pytest.fixture
def a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that can be planned for, though there is none."""
    monkeypatch.setattr(source, "choose_device", lambda device: torch.device(device))


def test_a_gpus_plan_counts_graphs(target_folder: Path, a_card: None, free: object) -> None:
    found = Source.find(target_folder)
    here, there = (found.plan(device, "float32", 8, 192) for device in ("cpu", "cuda"))
    assert here.graphs == 0 and "graphs" not in str(here)
    assert there.graphs > 512 * found.vocab_size * 4, "the logits of one pass are the least of it"
    spare = 8 * 64 * there.per_token  # a page for each slot
    assert there.total == here.total + spare + there.graphs and str(there).endswith(
        f" + graphs up to {memory_plan.size(there.graphs)}"
    )
    free(there.total - 1)  # type: ignore[operator]
    with pytest.raises(ModelError, match="that is 1 bytes too much; slots=7 would fit"):
        check([there])
    free(there.graphs + there.weights)  # type: ignore[operator]
    with pytest.raises(ModelError, match="weights and graphs leave no memory for a text; take fewer slots, a narrower"):
        check([there])


def test_a_gpus_plan_counts_the_projections_that_a_sparse_plan_keeps_transposed(
    target_folder: Path, tmp_path: Path, a_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Source.find(target_folder).shape
    assert shape is not None
    thresholds = torch.zeros(shape.num_layers)
    thresholds[0] = 0.1
    planned: list[MemoryPlan] = []

    def stop(plans: list[MemoryPlan]) -> None:
        planned.extend(plans)
        raise ModelError("enough")

    monkeypatch.setattr(loading, "check", stop)
    monkeypatch.setattr(memory_plan, "available", lambda device: None)
    for device, by in (("cuda", "union"), ("cuda", "token"), ("cpu", "union")):
        with pytest.raises(ModelError, match="enough"):
            semspec.load(target_folder, device=device, dtype="float32", sparse=SparsePlan(ffn=FfnPlan(thresholds, by)))
    one = shape.width * shape.ffn * 4
    assert [plan.transposed for plan in planned] == [one, 0, 0], "only fused passes read them, of layers that need it"
    dense = Source.find(target_folder).plan("cuda", "float32", 8, None, rules=True)
    assert planned[0].total == dense.total + one and "transposed projections" in str(planned[0])


def test_a_replay_plans_the_graphs_of_a_gpu() -> None:
    config = SHAPES["8B/1B"][0]
    here, there = (planned("8B", config, 4, 512, device, torch.bfloat16) for device in (CPU, GPU))
    shape = Shape.of(config)
    assert here.graphs == 0 and there.graphs == graph_memory.graph_bytes(shape, GPU, 2, 4, 512) > 0
    assert there.kv == 2 * shape.num_layers * shape.kv_heads * shape.head_dim * 2 * 4 * (512 + 64), (
        "a page to spare for each slot"
    )


def test_a_model_of_transformers_has_no_graphs(tmp_path: Path, a_card: None) -> None:
    assert Source.find(save(build("gpt2"), tmp_path / "m")).plan("cuda", "float32", 8, 100).graphs == 0


def test_a_target_is_planned_with_the_memory_of_rules(target_folder: Path, a_card: None) -> None:
    source = Source.find(target_folder)
    alone, judged = source.plan("cuda", "float32", 8, 100), source.plan("cuda", "float32", 8, 100, rules=True)
    rules = judged.graphs - alone.graphs
    assert rules == graph_memory.rule_bytes(source.vocab_size, GPU, 8) >= source.vocab_size * (160 + 128) * 48
    two, many = (graph_memory.rule_bytes(source.vocab_size, GPU, slots) for slots in (3, 64))
    assert many == two, "more trees than two are verified one after the other"
    assert (
        graph_memory.rule_bytes(source.vocab_size, GPU, 1) < rules
        and graph_memory.rule_bytes(source.vocab_size, CPU, 8) == 0
    )


def test_fewer_slots_and_less_context_never_need_more_memory(target_folder: Path) -> None:
    shape = Source.find(target_folder).shape
    by_slots = [graph_memory.graph_bytes(shape, GPU, 2, slots, 100) for slots in range(1, 100)]
    by_context = [graph_memory.graph_bytes(shape, GPU, 2, 8, context) for context in range(2, 500, 50)]
    assert by_slots == sorted(by_slots) and by_context == sorted(by_context) and by_slots[0] < by_slots[-1]


def test_buffers_at_fixed_places_take_what_was_planned(tmp_path: Path) -> None:
    """All sizes that there are for so many slots, on a CPU, where buffers are the same."""
    slots = 4
    runner = Source.find(save(make_model("gemma3"), tmp_path / "m")).load("cpu", "float32", slots, 100)
    assert isinstance(runner, ModelRunner)
    flags = replace(DEFAULT_FLAGS, packed=False)  # test_packed_passes.py has the others
    runner.use(GraphRunner(runner.transformer, runner.cache, reference_kernels(), NoGraphs(), flags))
    runner.numpy_decoder = None  # a CPU's own way
    assert runner.graph_runner is not None and runner.graph_decode is not None
    shape = runner.shape
    tables = [t for pair in runner.graph_runner.fused.rotary.values() if pair is not None for t in pair]
    static_bytes = (
        runner.graph_runner.logits.nbytes + runner.graph_decode.stops.table.nbytes + sum(t.nbytes for t in tables)
    )
    assert graph_memory.static_bytes(shape, 4, 100) == static_bytes
    held = [runner.acquire() for _ in range(slots)]
    for batch in (b for b in BATCHES if b <= slots):
        for queries in QUERIES:
            runner.score([Score(runner, slot, [1] * queries, 1) for slot in held[:batch]])
            for slot in held:
                runner.truncate(slot, 0)
        for sampling in (Sampling(), Sampling(temperature=0.7, top_p=0.9, seed=1)):
            runner.decode([
                Decode(runner, slot, [1] * MAX_QUERIES, 9, sampling, 0, keep_logits=True, layers=(shape.num_layers,))
                for slot in held[:batch]
            ])  # fmt: skip
            for slot in held:
                runner.truncate(slot, 0)
    buffers = sum(buffer.nbytes for buffer in runner.graph_runner._buffers.values())
    states = sum(b * q for b in BATCHES if b <= slots for q in QUERIES if b * q <= MAX_ROWS) * shape.width * 4
    assert graph_memory.lazy_bytes(shape, 4, slots, packed=False) == buffers + states


def test_target_and_draft_share_weights_unless_transformers_runs_them(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = save(build("gpt2"), tmp_path / "m")
    for folder, shared in ((target_folder, True), (foreign, False)):
        told: list[str] = []
        semspec.load(folder, folder, device="cpu", slots=1, context=64, report=told.append)
        weights = Source.find(folder).plan("cpu", "auto", 1, 64).weights
        ours, theirs, _ = told[0].split("; ")
        assert f"weights {memory_plan.size(weights)} +" in ours
        assert f"weights {memory_plan.size(0 if shared else weights)} +" in theirs


def test_where_free_memory_is_unknown_nothing_is_refused(free: object) -> None:
    free(None)  # type: ignore[operator]
    check([MemoryPlan("m", CPU, 10**18, 1, 1, 1)])


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   5000 kB\n")
    monkeypatch.setattr(memory_plan, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_plan, "CGROUP", tmp_path)
    assert memory_plan.available(CPU) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory_plan.available(CPU) == 5000 * 1024
    (tmp_path / "memory.max").write_text("4000\n")
    assert memory_plan.available(CPU) == 3000
    monkeypatch.setattr(memory_plan, "MEMINFO", tmp_path / "nowhere")
    assert memory_plan.available(CPU) is None


def test_the_command_line_tells_the_plan_on_standard_error_in_one_line(target_folder: Path) -> None:
    args = ["generate", str(target_folder), "the fox", "-n", "2", "--context", "64"]
    told = CliRunner().invoke(app, args)
    line = told.stderr.splitlines()[0]
    assert re.match(r"\S+ on cpu: weights \d+ kB \+ KV of 1 x 64 tokens \d+ kB; .* in all, .* free on cpu", line)
    assert "weights" not in told.stdout
    assert "weights" not in CliRunner().invoke(app, [*args, "--quiet"]).stderr


@pytest.mark.parametrize(
    "args",
    [
        ["bench", "--problems", "1", "--max-new-tokens", "2", "--target", "MODEL", "--out", "OUT"],
        ["probe", "collect", "MODEL", "MODEL", "--problems", "1", "--out", "OUT"],
        ["sparse", "calibrate", "MODEL", "--problems", "1", "--out", "OUT"],
        ["sparse", "quality", "MODEL", "--problems", "1", "--sparse", "PLAN"],
    ],
    ids=lambda args: " ".join(args[:2]),
)
def test_so_do_the_commands_that_work_for_long(
    args: list[str], target_folder: Path, tmp_path: Path, free: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semspec.sparse.plan.SparsePlan.load", lambda path: None)
    names = {"MODEL": str(target_folder), "OUT": str(tmp_path / "out"), "PLAN": str(tmp_path)}
    args = [names.get(arg, arg) for arg in args] + ["--device", "cpu", "--context", "64"]
    free(10)  # type: ignore[operator]
    for quiet in (False, True):
        told = CliRunner().invoke(app, [*args, "--quiet"] if quiet else args)
        assert isinstance(told.exception, ModelError | SystemExit), told.output  # nothing has been read
        lines = [line for line in told.stderr.splitlines() if " + KV of " in line and "too much" not in line]
        assert len(lines) == (0 if quiet else 1)


def test_by_default_a_cpu_gets_float32_and_bfloat16_where_only_that_fits(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    wide = semspec.load(target_folder, device="cpu", slots=1, report=said.append)
    assert wide.target.transformer.dtype == torch.float32 and len(said) == 1
    needed = Source.find(target_folder).plan("cpu", "auto", 1, None).total
    monkeypatch.setattr(memory_plan, "available", lambda device: needed - 1)
    narrow = semspec.load(target_folder, device="cpu", slots=1, report=said.append)
    assert narrow.target.transformer.dtype == torch.bfloat16 and "so it is bfloat16" in said[1]
    monkeypatch.setattr(memory_plan, "available", lambda device: needed // 4)
    with pytest.raises(semspec.ModelError, match="too much"):
        semspec.load(target_folder, device="cpu", slots=1)
    monkeypatch.setattr(memory_plan, "available", lambda device: needed - 1)
    with pytest.raises(semspec.ModelError, match="too much"):
        semspec.load(target_folder, device="cpu", dtype="float32", slots=1)


def test_where_slots_cannot_all_be_full_they_share_what_there_is(target_folder: Path, a_card: None, free: Any) -> None:
    """32 slots of 200 tokens that want more than there is: the pool is what fits, and says so; one text always fits."""
    plans = [Source.find(target_folder).plan("cuda", "float32", 32, 200) for _ in range(2)]
    fixed, per_token = sum(plan.total - plan.kv for plan in plans), sum(plan.per_token for plan in plans)
    free(sum(plan.total for plan in plans))
    assert memory_plan.fitted(plans) == plans, "nothing is taken from who fits"
    free(fixed + 1000 * per_token)
    shared = memory_plan.fitted(plans)
    check(shared)
    assert [plan.held for plan in shared] == [15 * 64, 15 * 64]
    assert "KV of 960 tokens, in 32 slots of at most 200," in str(shared[0])
    free(fixed + 150 * per_token)
    with pytest.raises(ModelError, match="too much"):
        check(memory_plan.fitted(plans))
    assert [plan.held for plan in memory_plan.fitted(plans, tokens=640)] == [640, 640]
    here = Source.find(target_folder).plan("cpu", "float32", 32, 200)
    free(10**6)
    assert memory_plan.fitted([here]) == [here], "on a CPU a slot has room for its whole context"
    for refused in ({"cache_tokens": 0}, {"cache_tokens": 640, "dtype": "int8"}):
        with pytest.raises(BadRequest, match=r"cache_tokens is \d+; give the tokens that all slots hold together"):
            semspec.load(target_folder, device="cpu", **refused)
    with pytest.raises(BadRequest, match=r"with a sparse plan of attention and .* each slot of the target has room"):
        loading._announce([replace(plans[0], paged=False), plans[1]], 640, None)
