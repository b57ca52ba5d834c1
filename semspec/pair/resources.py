"""What belongs to a pair's models and tokenizer, for rules (`verify.RuleResources`) and requests; made when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest, ModelError
from semspec.model.heads.block import BlockHead
from semspec.model.heads.eagle import EagleHead
from semspec.model.heads.fit import Fitted, fitted
from semspec.model.heads.mtp import MtpHead
from semspec.model.heads.runner import StateRunner
from semspec.pocket import shipped
from semspec.probe import Probe, fingerprint, precision
from semspec.probe.evidence import number_tokens
from semspec.text.exchange import Exchange
from semspec.text.steps import StepDelimiters
from semspec.text.structured import Grammars
from semspec.text.token_bytes import TokenBytes
from semspec.text.tokenizer import CommonMarkers, encode, thinking_markers
from semspec.types import Runner

SPELLED = 1 << 15  # tokens whose bytes are remembered
WORDS = 1024  # short texts whose tokens are: twice as many as one request may have to avoid
CUES = 64  # words whose tokens are: a byte for each token of the vocabulary
MARK = "answer-so-far"  # stands for it in a rendered chat
HEADS: dict[str, type[EagleHead] | type[BlockHead] | type[MtpHead]] = {
    "eagle": EagleHead,
    "dflash": BlockHead,
    "mtp": MtpHead,
}  # by kind of drafter
# What a target answers while a draft head is measured.
QUESTION = "Mia has 4 bags with 6 pens each. Tom has 5 more pens than Mia. How many pens does Tom have? Explain."


class Resources:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        target: Runner,
        draft: Runner | None,
        eos: frozenset[int],
        probe_folder: Path | None,
        exchange: Exchange | None = None,
    ) -> None:
        self.exchange = exchange  # None: both models have the same tokens
        self.tokenizer, self.target, self.draft, self.eos = tokenizer, target, draft, eos
        self.probe_folder = probe_folder
        self._probes: dict[Path, Probe] = {}
        self._heads: dict[tuple[str, str], Fitted] = {}  # by kind of drafter and path
        self.wrap_head: Callable[[StateRunner], Any] = lambda head: head  # around each that is given out

    def text_of(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    @cached_property
    def bytes_of(self) -> Callable[[int], bytes]:
        """What a token adds to a text. The logprobs of a prompt ask for the same few thousand again and again."""
        return lru_cache(SPELLED)(TokenBytes(self.tokenizer).of)

    def tokens_of(self, text: str) -> list[int]:
        """A text in the target's tokens, without special ones."""
        return list(self._tokens_of(text))

    @cached_property
    def _tokens_of(self) -> Callable[[str], list[int]]:
        """Of several answers to one request, each has the same words to avoid and questions to ask."""

        def encode_words(text: str) -> list[int]:
            return [t for t in self.tokenizer.encode(text, add_special_tokens=False) if t < self.target.vocab_size]

        return lru_cache(WORDS)(encode_words)

    def next_turn(self, question: str) -> list[int]:
        """What ends the answer so far, puts a question and begins the reply, by the chat template if there is one."""
        if not self._chats:
            return self.tokens_of(f"\n\n{question}\n\n")
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
        turns.append({"role": "user", "content": question})
        whole = str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        return self.tokens_of(whole.rpartition(MARK)[2])

    def tokens_with(self, word: str) -> Tensor:
        """[V] which tokens contain this word, in whatever case"""
        return self._tokens_with(word).clone()  # what a rule does with it stays its own

    @cached_property
    def _tokens_with(self) -> Callable[[str], Tensor]:
        """Every answer has the same few cues, and spelling out a real vocabulary takes half a second."""
        texts = [t.lower() for t in self.tokenizer.batch_decode([[i] for i in range(self.target.vocab_size)])]

        def holders(word: str) -> Tensor:
            return torch.tensor([word in text for text in texts], device=self.target.device)

        return lru_cache(CUES)(holders)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.target.vocab_size, self.eos)

    @cached_property
    def fingerprints(self) -> tuple[str, str]:
        """Of the target and the draft; "" where there is none."""
        return fingerprint(self.target), "" if self.draft is None else fingerprint(self.draft)

    @cached_property
    def precisions(self) -> dict[str, str]:
        """How both models compute, under the names of the options that set it; empty where there is none."""
        dtype, kv_dtype = precision(self.target)
        return {
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "draft_dtype": "" if self.draft is None else precision(self.draft)[0],
        }

    @cached_property
    def thinking(self) -> tuple[int, int] | None:
        return thinking_markers(self.tokenizer)

    @cached_property
    def common_markers(self) -> CommonMarkers:
        return CommonMarkers(self.tokenizer)

    @cached_property
    def protected(self) -> Tensor:
        """[V] tokens that no rule may relax: whatever is outside the plain vocabulary, and markers of thinking"""
        outside = {*self.tokenizer.get_added_vocab().values(), *self.tokenizer.all_special_ids, *self.eos}
        outside |= {*(self.thinking or ())}
        mask = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        mask[[i for i in outside if i < self.target.vocab_size]] = True
        return mask.to(self.target.device)

    @cached_property
    def _number_tokens(self) -> Tensor:
        return number_tokens(self.tokenizer, self.target.vocab_size).to(self.target.device)

    def numbers(self) -> Tensor:
        """[V] tokens with a digit in them"""
        return self._number_tokens

    @cached_property
    def _draft_numbers(self) -> Tensor | None:
        if self.exchange is None or self.draft is None:
            return None
        return number_tokens(self.exchange.draft.tokenizer, self.draft.vocab_size).to(self.draft.device)

    def draft_numbers(self) -> Tensor | None:
        """The same of a draft model with other tokens."""
        return self._draft_numbers

    @cached_property
    def _steps(self) -> StepDelimiters:
        return StepDelimiters.of(self.tokenizer, self.eos)

    def steps(self, max_tokens: int, delimiters: str = "all") -> StepDelimiters:
        """Where reasoning steps end."""
        return replace(self._steps.by(delimiters), max_tokens=max_tokens)

    def probes(self, folder: str = "") -> tuple[Probe, Probe]:
        """The target's and the draft's probe, from a folder with both; by default those that came with the pair."""
        place = self._folder(folder)
        if place is None or self.draft is None:
            raise BadRequest(
                "this pair has no probes, which semantic verification needs; make them with `semspec probe fit`, "
                "and name their folder: semantic:probes=DIR"
            )
        return self._probe(place / "target", self.target, folder), self._probe(place / "draft", self.draft, folder)

    def judge_probe(self, folder: str = "") -> Probe:
        """The probe that judges whole steps, from a folder that has one; by default the one that came with the pair."""
        place = self._folder(folder)
        if place is None:
            raise BadRequest(
                "this pair has no judge probe, which semantic+ needs; make one with `semspec probe fit`, and name its "
                "folder: semantic+:probes=DIR"
            )
        return self._probe(place / "judge", self.target, folder)

    def head(self, kind: str, path: str, threshold: float, target: Runner) -> StateRunner:
        """The draft head in this folder, as it fits the target; loaded once, whatever is asked of it."""
        found = self._heads.get((kind, path))
        if found is None:
            text = encode(self.tokenizer, [{"role": "user", "content": QUESTION}] if self._chats else QUESTION)
            found = fitted(
                HEADS[kind].load(shipped.HEADS.get(path, path), target), target, text, path or kind, self.eos
            )
        runner = found.above(threshold)
        self._heads[kind, path] = found
        return cast(StateRunner, self.wrap_head(runner))

    @property
    def _chats(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def _folder(self, folder: str) -> Path | None:
        return Path(folder) if folder else self.probe_folder

    def _probe(self, path: Path, runner: Runner, folder: str) -> Probe:
        if path not in self._probes:
            try:
                self._probes[path] = Probe.load(path, fingerprint(runner), runner.device)
            except ModelError as error:
                if folder:
                    raise
                # Whoever asks for the rule did not name them, and cannot know what came with the pair.
                raise BadRequest(
                    f"the {path.name} probe that came with this pair was not made for the model it has; make one with "
                    "`semspec probe fit`, and name its folder where the rule takes `probes`"
                ) from error
        return self._probes[path]
