"""Model Runner V2: rules as a logits processor, `--logits-processors semspec.vllm.processor:TokenRules`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from semspec.errors import BadRequest
from semspec.vllm.request import PREFIX, Choice, Settings, sampling_of
from semspec.vllm.rounds import EngineStep
from semspec.vllm.setup import EngineRules


class TokenRules(LogitsProcessor):
    """Rules that need the target's rows and the draft's tokens; a request may choose its own."""

    drafts: ClassVar[Literal["ids", "all"]] = "ids"  # whether the draft's probabilities are known

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.states = req_states
        self.engine = EngineRules(
            vllm_config, req_states.max_num_reqs, req_states.vocab_size, req_states.device, self.drafts,
            text_in=lambda slot: req_states.all_token_ids.gpu[slot],
        )  # fmt: skip
        self.draft_rows: Tensor | None = None  # [slots, K, V] before temperature; set by semspec's worker

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Where requests are admitted: whatever is wrong with one is told to whoever sent it."""
        choice = Choice.of(Settings().of_request(sampling_params.extra_args))
        if choice is not None:
            sampling_of(sampling_params, 0)
            if choice.rule.needs_draft_logits and cls.drafts == "ids":
                raise BadRequest(
                    f"verifier {choice.rule.name!r} needs the draft's probabilities; they are not kept here"
                )

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        prompt, has = (int(length.np[req_idx]) for length in (self.states.prompt_len, self.states.prefill_len))
        return self.engine.begin(req_idx, sampling_params, prompt, has if has > prompt else 0)

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        slots = ctx.idx_mapping_np.tolist()
        if not self.engine.rounds.requests.keys() & set(slots):
            return logits
        # Rows of a request follow each other. How many each has is known on the device only.
        owner = (ctx.expanded_local_pos == 0).cumsum(0) - 1  # [R]
        rows = torch.zeros(len(slots), dtype=torch.long, device=logits.device)
        rows.scatter_add_(0, owner, torch.ones_like(owner))
        first = rows.cumsum(0) - rows
        places = torch.arange(self.engine.rounds.draft_tokens, device=logits.device)
        after = (first[:, None] + 1 + places).clamp_max(len(logits) - 1)
        ids = torch.where(places < rows[:, None] - 1, ctx.input_ids[after], -1)
        counts = (ids >= 0).long().cumprod(1).sum(1)  # vLLM marks what is no draft by -1
        position = ctx.pos[first].long() + 1
        bounds, prefilled = ctx.seq_lens_upper_bound_np, self.states.prefill_len.np
        draft_logits, first_draft = self._drafts(ctx.idx_mapping, slots)
        self.engine.rounds.decide(
            EngineStep(
                slots, logits, first, counts, ids, position,
                tokens_at=lambda at, index: self.states.all_token_ids.gpu[ctx.idx_mapping[at].long()[:, None], index],
                reading=frozenset(i for i, slot in enumerate(slots) if bounds[i] <= prefilled[slot]),
                lengths=bounds.tolist(), draft_logits=draft_logits, first_draft=first_draft,
            )
        )  # fmt: skip
        return logits

    def _drafts(self, mapping: Tensor, slots: list[int]) -> tuple[Tensor | None, Tensor | None]:
        """What drafts were drawn from: as they are where greedy, else with the temperature; vLLM's have no filters."""
        if self.draft_rows is None:
            return None, None
        rows = self.draft_rows[mapping.long()].float()  # [B, K, V]
        requests = [self.engine.rounds.requests.get(slot) for slot in slots]
        heat = [1.0 if r is None or r.sampling.greedy else r.sampling.temperature for r in requests]
        rows = rows / torch.tensor(heat).to(rows.device, non_blocking=True)[:, None, None]
        first = torch.arange(len(heat), device=rows.device) * rows.shape[1]
        return rows.flatten(0, 1), first


class FixedRule(TokenRules):
    """The engine's rule for every request."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        own = sorted(key for key in sampling_params.extra_args or {} if str(key).startswith(PREFIX))
        if own:
            raise BadRequest(f"{own[0][:80]} cannot be chosen here; the server was started with one rule for all")


class DraftRules(TokenRules):
    """Also rules that compare both models' distributions; semspec's worker hands those over."""

    drafts = "all"
