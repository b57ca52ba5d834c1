"""Clusterers that ask a model: an entailment classifier, a sentence encoder, or the target itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from semspec.errors import BadRequest, ModelError
from semspec.loop.executor import Executor
from semspec.probe_fit.cluster import Pairwise, numbers_in
from semspec.text.encoder import Encoder, in_batches, load_network
from semspec.text.tokenizer import encode, thinking_markers
from semspec.types import Acquire, Score, ScoreOutput, SequenceGenerator


@dataclass
class WithModel(Pairwise):
    """A Hugging Face model with its tokenizer, loaded when first needed."""

    model: str = ""  # folder or hub id
    batch: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise BadRequest(f"clusterer {self.name!r} needs a model: {self.name}:model=FOLDER, or a hub id")
        if self.batch < 1:
            raise BadRequest(f"clusterer {self.name!r} has batch {self.batch}; give 1 or more")

    @property
    def user(self) -> str:
        return f"clusterer {self.name!r}"


@dataclass
class Nli(WithModel):
    """The same, if each entails the other, to any sequence classifier with a label "entailment"."""

    name = "nli"

    @cached_property
    def _loaded(self) -> tuple[Any, Any, int]:
        network, tokenizer = load_network(self.model, AutoModelForSequenceClassification, self.source.device, self.user)
        labels = {i: str(label).lower() for i, label in network.config.id2label.items()}
        entailment = [int(i) for i, label in labels.items() if label.startswith("entail")]
        if len(entailment) != 1:
            raise ModelError(
                f"{self.model} is no entailment classifier: its labels are {', '.join(labels.values())}; "
                "give one that has a label 'entailment'"
            )
        return network, tokenizer, entailment[0]

    def same(self, text: str, others: Sequence[str]) -> list[bool]:
        network, tokenizer, entailment = self._loaded
        pairs = [(text, other) for other in others] + [(other, text) for other in others]
        logits = in_batches(network, tokenizer, pairs, lambda output, _: output.logits, self.batch)
        entails = (logits.argmax(-1) == entailment).view(2, len(others))
        return entails.all(0).tolist()


@dataclass
class Embedding(WithModel):
    """The same, if sentence embeddings are near (cosine) and both texts speak of the same numbers."""

    name = "embedding"

    threshold: float = 0.75  # for all-MiniLM-L6-v2: rewordings of a step lie above, other steps below
    numbers: bool = True  # encoders hardly see numbers, and a step is little else
    _vectors: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.threshold <= 1:
            raise BadRequest(f"the threshold of clusterer 'embedding' is {self.threshold}; give a cosine, -1 to 1")

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.model, self.source.device, self.batch, self.user)

    def prepare(self, texts: Sequence[str]) -> None:
        self._vectors = dict(zip(texts, self._encoder.embed(texts), strict=True))

    def same(self, text: str, others: Sequence[str]) -> list[bool]:
        near = torch.stack([self._vectors[other] for other in others]) @ self._vectors[text] >= self.threshold
        own = numbers_in(text)
        return [
            bool(n) and (not self.numbers or numbers_in(other) == own) for n, other in zip(near, others, strict=True)
        ]


QUESTION = (
    "Here are two versions of the next step of one solution. Do both say the same thing, that is, do they find the "
    "same quantity with the same result, whatever their wording? Answer with one word, yes or no.\n\n"
    "Version A: {a}\n\nVersion B: {b}"
)


@dataclass
class AskTarget(Pairwise):
    """The same, if the target says so: it reads both in either order, and "yes" must weigh more than "no"."""

    name = "target"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source.pair is None:
            raise BadRequest("clusterer 'target' asks the target model; it needs the pair to be loaded")
        self.pair = self.source.pair

    @cached_property
    def words(self) -> tuple[list[int], list[int]]:
        """The tokens that are "yes" and "no" in any spelling."""
        ids = [i for i in sorted(self.pair.tokenizer.get_vocab().values()) if i < self.pair.target.vocab_size]
        texts = [t.strip().lower() for t in self.pair.tokenizer.batch_decode([[i] for i in ids])]
        yes, no = ([i for i, t in zip(ids, texts, strict=True) if t == word] for word in ("yes", "no"))
        if not yes or not no:
            raise ModelError("the target has no tokens for yes and no, so it cannot be asked; cluster otherwise")
        return yes, no

    def same(self, text: str, others: Sequence[str]) -> list[bool]:
        pairs = [(text, other) for other in others] + [(other, text) for other in others]
        leaning = self.ask([self.prompt(a, b) for a, b in pairs])
        return [x + y > 0 for x, y in zip(leaning[: len(others)], leaning[len(others) :], strict=True)]

    def prompt(self, a: str, b: str) -> list[int]:
        """The question in tokens, up to where yes or no follows; thinking, where there is any, is skipped."""
        tokenizer, question = self.pair.tokenizer, QUESTION.format(a=a, b=b)
        markers = thinking_markers(tokenizer)
        closing = tokenizer.encode("Answer:", add_special_tokens=False)
        if not tokenizer.chat_template:
            return [*encode(tokenizer, question + "\n\n"), *closing]
        tokens = encode(tokenizer, [{"role": "user", "content": question}])
        if markers is None:
            return [*tokens, *closing]
        begin, end = markers
        return [*tokens, *([] if begin in tokens[-2:] else [begin]), end, *closing]  # some templates open the thoughts

    def ask(self, prompts: Sequence[list[int]]) -> list[float]:
        """For each prompt, the log-odds of yes against no as the next word."""
        odds = [0.0] * len(prompts)
        Executor().run_all(self._ask(prompt, odds, i) for i, prompt in enumerate(prompts))
        return odds

    def _ask(self, prompt: list[int], odds: list[float], i: int) -> SequenceGenerator:
        runner = self.pair.target
        (slot,) = yield Acquire([runner])
        try:
            rows: ScoreOutput = yield Score(runner, slot, prompt, logits_to_keep=1)
            yes, no = (rows.logits[0, ids].float().logsumexp(0) for ids in self.words)
            odds[i] = float(yes - no)
        finally:
            runner.release(slot)
