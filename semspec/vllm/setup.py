"""What both ways in share: the engine's settings, checked when it is started, and what rules need of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from transformers import AutoTokenizer
from vllm.distributed import get_tensor_model_parallel_rank

from semspec.errors import SemspecError
from semspec.pair.resources import Resources
from semspec.types import Runner, Sampling
from semspec.vllm import check_version
from semspec.vllm.request import KEY, Choice, Settings, sampling_of
from semspec.vllm.rounds import Rounds

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetVocabulary:
    """All that `Resources` asks of a target that vLLM runs."""

    vocab_size: int
    device: torch.device


class EngineRules:
    """The rules of one vLLM engine: its settings and the rounds of its requests."""

    def __init__(
        self, config: Any, slots: int, vocab: int, device: torch.device, drafts: Literal["ids", "sampled", "all"],
        text_in: Callable[[int], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`drafts`: whose draft's probabilities are known, nobody's, those of sampled requests or everybody's."""
        check_version()
        speculative, model = config.speculative_config, config.model_config
        if speculative is None:
            raise SemspecError("there are no drafts to verify; start vLLM with --speculative-config")
        if speculative.rejection_sample_method != "standard":
            raise SemspecError(
                f"rejection_sample_method is {speculative.rejection_sample_method!r}; leave it at standard"
            )
        if model.logprobs_mode.startswith("processed"):
            raise SemspecError(f"logprobs_mode is {model.logprobs_mode!r}, and a rule changes those; take raw_logprobs")
        if model.skip_tokenizer_init:
            raise SemspecError("the tokenizer tells the tokens that are never relaxed; leave out skip_tokenizer_init")
        self.settings = Settings.of((config.additional_config or {}).get(KEY, {}))
        self.drafts = drafts if speculative.draft_sample_method == "probabilistic" else "ids"
        self._seed, self._slots = int(model.seed or 0), slots
        self.rounds = Rounds(
            Resources(_tokenizer(model), cast(Runner, TargetVocabulary(vocab, device)), None, _ends(model), None),
            slots,
            speculative.num_speculative_tokens,
            reports=get_tensor_model_parallel_rank() == 0,
            text_in=text_in,
        )
        self.default = Choice.of(self.settings, trusted=True)
        if self.default is not None and self.drafts == "ids":
            self._refuse_without_draft(self.default)

    def begin(self, slot: int, params: Any, prompt: int, resumed: int = 0) -> bool:
        """A request enters, or comes back; returns whether a rule of ours verifies it. It was admitted, so nothing is
        refused here."""
        try:
            if slot >= self._slots:
                raise SemspecError(f"more than {self._slots} requests are known at a time")
            choice = self.default
            if params.extra_args:
                choice = Choice.of(self.settings.of_request(params.extra_args))
            if choice is not None and (self.drafts == "ids" or (self.drafts == "sampled" and not params.temperature)):
                self._refuse_without_draft(choice)
            return self.rounds.begin(slot, choice, lambda serial: self._sampling(params, serial), prompt, resumed)
        except SemspecError as error:
            log.warning("a request is decoded losslessly: %s", error)
            self.rounds.end(slot)
            return False

    def _refuse_without_draft(self, choice: Choice) -> None:
        if choice.rule.needs_draft_logits:
            raise SemspecError(
                f"verifier {choice.rule.name!r} needs the draft's probabilities; start vLLM with semspec's worker and "
                "draft_sample_method=probabilistic, as `semspec vllm-args` prints it (on V1: for temperatures above 0)"
            )

    def _sampling(self, params: Any, serial: int) -> Sampling:
        # Every rank sees the same requests in the same order, so all draw alike.
        return sampling_of(params, (self._seed << 32) + serial)


def _tokenizer(model: Any) -> Any:
    return AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )


def _ends(model: Any) -> frozenset[int]:
    """End-of-text tokens that the model's configs name."""
    found: list[Any] = []
    generation: Mapping[str, Any] = model.try_get_generation_config() or {}
    for named in (getattr(model.hf_text_config, "eos_token_id", None), generation.get("eos_token_id")):
        found += named if isinstance(named, list) else [named]
    return frozenset(i for i in found if isinstance(i, int) and i >= 0)
