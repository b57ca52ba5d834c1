"""Worker classes: for Model Runner V1, and for rules that need the draft's probabilities.

`--worker-cls semspec.vllm.worker.GpuWorker` or, on a CPU, `semspec.vllm.worker.CpuWorker`. On V2 they only hand the
draft's logits to the processor `DraftRules`; on V1, which takes no processors with drafts, they put a sampler of ours
in the place of vLLM's, which decides by rules and leaves the rest to vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_worker import Worker

from semspec.vllm.processor import TokenRules
from semspec.vllm.rounds import EngineStep
from semspec.vllm.setup import EngineRules

try:
    from vllm.v1.worker.cpu_worker import CPUWorker
except ImportError:  # a build for GPUs alone
    CPUWorker = Worker


class Stats:
    """`--worker-extension-cls semspec.vllm.worker.Stats`: collective_rpc("semspec_stats") gives each rank's counts."""

    model_runner: Any

    def semspec_stats(self) -> dict[str, int]:
        runner = self.model_runner
        found = [p.engine for p in getattr(runner.sampler, "logits_processors", ()) if isinstance(p, TokenRules)]
        sampler = getattr(runner, "rejection_sampler", None)
        found += [sampler.engine] if isinstance(sampler, RuleSampler) else []
        return found[0].rounds.stats() if found else {}


class RuleSampler(rejection_sampler.RejectionSampler):
    """vLLM's rejection sampler on V1, with the outcomes of our rules decided before it draws."""

    def __init__(self, runner: Any, engine: EngineRules) -> None:
        super().__init__(runner.sampler, runner.speculative_config, runner.device)
        self.runner, self.engine = runner, engine
        self._slots: dict[str, int] = {}  # request -> slot
        self._rows: Tensor | None = None
        self._draft_probs: Tensor | None = None

    def forward(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        self._rows, self._draft_probs = logits, draft_probs
        try:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        finally:
            self._rows = self._draft_probs = None

    def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, metadata: Any) -> Tensor:
        """[drafts, V] -> the same; the rows after whole drafts are drawn from elsewhere, by vLLM."""
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        requests = self.runner.input_batch.req_ids
        slots = self._enter(requests)
        if self._rows is None or not self.engine.rounds.requests.keys() & set(slots):
            return logits
        whole = self._rows.float().clone()  # [drafts + requests, V]
        whole[metadata.target_logits_indices] = logits
        device = whole.device
        counts = torch.tensor(metadata.num_draft_tokens).to(device, non_blocking=True)
        first = (counts + 1).cumsum(0) - counts - 1
        first_draft = counts.cumsum(0) - counts
        places = torch.arange(metadata.max_spec_len, device=device)
        at = (first_draft[:, None] + places).clamp_max(max(len(metadata.draft_token_ids) - 1, 0))
        ids = torch.where(places < counts[:, None], metadata.draft_token_ids.long()[at], -1)
        batch = self.runner.input_batch
        committed = torch.from_numpy(batch.num_tokens_no_spec[: len(requests)]).long().to(device)
        tokens = torch.from_numpy(batch.token_ids_cpu)
        probs = self._draft_probs if self.engine.drafts == "sampled" else None
        step = EngineStep(
            slots, whole, first, counts, ids, committed,
            tokens_at=lambda at, index: tokens[at.cpu()[:, None], index.cpu()].to(device),
            gaps=True, draft_logits=None if probs is None else probs.log(), first_draft=first_draft,
        )  # fmt: skip
        self.engine.rounds.decide(step)
        return whole[metadata.target_logits_indices]

    def _enter(self, requests: list[str]) -> list[int]:
        """The slot of each request; new ones enter, and those that vLLM has let go leave."""
        known = self.runner.requests
        for name in [name for name in self._slots if name not in known]:
            self.engine.rounds.end(self._slots.pop(name))
        free = iter(sorted(set(range(len(self._slots) + len(requests))) - set(self._slots.values())))
        for name in requests:
            if name not in self._slots:
                self._slots[name] = next(free)
                request = known[name]
                self.engine.begin(self._slots[name], request.sampling_params, len(request.prompt_token_ids or ()))
        return [self._slots[name] for name in requests]


class _WithRules(Stats):
    """What semspec adds to vLLM's worker."""

    vllm_config: Any
    use_v2_model_runner: bool

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)  # type: ignore[misc]
        runner = self.model_runner
        if getattr(runner, "rejection_sampler", None) is None:  # not the last rank of a pipeline
            return
        if self.use_v2_model_runner:
            self._hand_over_drafts(runner)
            return
        config = runner.vllm_config
        slots = 2 * config.scheduler_config.max_num_seqs  # a request may enter before another is known to have left
        engine = EngineRules(config, slots, runner.model_config.get_vocab_size(), runner.device, "sampled")
        runner.rejection_sampler = RuleSampler(runner, engine)

    def _hand_over_drafts(self, runner: Any) -> None:
        rules = [p for p in runner.sampler.logits_processors if isinstance(p, TokenRules)]
        if rules and runner.speculator is not None:
            rules[0].draft_rows = runner.speculator.draft_logits


class GpuWorker(_WithRules, Worker):
    """vLLM's worker on a GPU, with our rules."""


class CpuWorker(_WithRules, CPUWorker):
    """vLLM's worker on a CPU, with our rules."""

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        if not self.use_v2_model_runner:
            rejection_sampler.expand_batch_to_tokens = expand


def expand(x: Tensor, ends: Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Each request's value for each of its draft tokens. vLLM 0.32's own on a CPU writes into a copy unless the values
    are int64, so temperatures and top-p of sampled requests are whatever was in memory."""
    filled = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return filled.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)).long(), output_size=tokens)
