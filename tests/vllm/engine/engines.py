"""Tiny models in vLLM and in our own engine, and what is compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

import semspec
from semspec.loop.stats import Stats
from semspec.vllm.arguments import Launch
from tests.checkpoints import make_model, save

K, N = 6, 30
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13], [20, 21], [30, 31, 32], [40, 41, 42], [50, 51]]
RULES = ["", "exact", "fly:window=1,theta=0.1", "typical", "margin:ratio=0.2", "accept-all"]  # "": the engine's own
DEFAULT = "topk"
SHAPE = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 2}  # vLLM's CPU attention has no smaller heads


@cache
def models() -> tuple[Path, Path]:
    """A target, and a draft that is it with disturbed weights."""
    folder = Path(mkdtemp())
    model = make_model("llama3", **SHAPE)
    save(model, folder / "target")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    save(model, folder / "draft")
    return folder / "target", folder / "draft"


def launch(runner: str = "v1", **more: Any) -> Launch:
    target, draft = models()
    given = {"target": str(target), "draft": str(draft), "verifier": DEFAULT, "num_draft_tokens": K, "dtype": "float32"}
    device = "cpu" if runner == "v1" else "cuda"  # the device of the line; a test of V2 interprets its kernels
    return Launch(**given | {"runner": runner, "device": device, "max_model_len": 256} | more)


def engine(launch: Launch, **more: Any) -> Any:
    from vllm import LLM

    small = {"enforce_eager": True, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 8, "disable_log_stats": False}
    return LLM(**launch.arguments() | small | more)


@contextmanager
def running(launch: Launch, **more: Any) -> Iterator[Any]:
    """One of several engines in this process, each gone when the next is made."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = engine(launch, **more)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@cache
def pair(target: str, draft: str) -> semspec.Pair:
    return semspec.load(target, draft, device="cpu", dtype="float32", slots=4)


def ours(
    launch: Launch, prompt: list[int], rule: str, n: int = N, start: list[int] | None = None, **more: Any
) -> tuple[list[int], Stats]:
    """Our engine's text: the first token is the target's own, as in vLLM, whose drafts begin after it. Asked for more,
    since the last drafts of a text are shorter."""
    own = pair(launch.target, launch.draft or "")

    def run(tokens: list[int], length: int, **options: Any) -> Any:
        (ticket,) = own.submit([(tokens, semspec.Options(max_new_tokens=length, ignore_eos=True, **options))])
        while not ticket.task.done:
            own.executor.tick()
        ticket.collect()
        return ticket.result()

    first = run(prompt, 1, verifier="none").tokens if start is None else start
    result = run(prompt + first, n + 2 * K, verifier=rule or DEFAULT, num_draft_tokens=K, loop_repeats=0, **more)
    return (first + result.tokens)[:n], result.stats


def written(llm: Any, prompts: list[list[int]], rules: list[str], n: int = N, **sampling: Any) -> list[list[int]]:
    """vLLM's texts, all in one batch."""
    from vllm import SamplingParams

    given = {"temperature": 0.0, "max_tokens": n, "ignore_eos": True} | sampling
    asked = [{"semspec_loop_repeats": 0} | ({"semspec_verifier": rule} if rule else {}) for rule in rules]
    params = [SamplingParams(**given, extra_args=extra) for extra in asked]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_mixed_batch(llm: Any, launch: Launch) -> None:
    """Strict and loose requests together: each has the text of our engine, and the loose ones relax something."""
    before = relaxed(llm)
    texts = written(llm, PROMPTS, RULES)
    for prompt, rule, text in zip(PROMPTS, RULES, texts, strict=True):
        expected, stats = ours(launch, prompt, rule)
        assert text == expected, f"{rule or DEFAULT}: {text} is not {expected}"
        assert bool(stats.relaxed) == (rule != "exact"), "the test has something to relax"
    assert relaxed(llm) - before > 0


def relaxed(llm: Any) -> int:
    """Every rank that samples counts the same; of a pipeline those of the last stage do."""
    counts = [stats["relaxed_tokens"] for stats in llm.collective_rpc("semspec_stats") if stats]
    assert len(set(counts)) == 1
    return counts[0]


def metric(llm: Any, name: str) -> int:
    return next(int(m.value) for m in llm.get_metrics() if m.name == f"vllm:spec_decode_num_{name}")
