"""Every family of checkpoints against transformers: the same logits, the same hidden states, the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import semspec
from semspec.model import ModelRunner, cpu_gemm
from semspec.model.linear import DenseLinear
from semspec.sampling.noise import TARGET
from semspec.types import Decode, Sampling, Score, ScoreOutput
from tests.checkpoints import FAMILIES, VOCAB, make_model, make_tokenizer, save

LENGTH = 150
DEPTH = 3
ALL_LAYERS = tuple(range(DEPTH + 1))


@dataclass
class Case:
    model: PreTrainedModel
    runner: ModelRunner

    def transformers(self, tokens: list[int]) -> tuple[Tensor, Sequence[Tensor]]:
        """Logits [n, V] and hidden states, layer by layer [n, width]."""
        with torch.inference_mode():
            out = self.model(torch.tensor([tokens]), output_hidden_states=True)
        return out.logits[0], [hidden[0] for hidden in out.hidden_states]

    def score(self, slot: int, tokens: list[int], layers: tuple[int, ...] = ()) -> ScoreOutput:
        return self.runner.score([Score(self.runner, slot, tokens, len(tokens), layers)])[0]


OTHER_PATHS = {f"{name}, turned and packed": name for name in ("llama3.1", "llama-bias", "gemma3", "qwen3-moe")}
IN_NUMPY = {f"{name}, in NumPy": name for name in ("llama3.1", "llama-bias", "gemma3", "qwen3", "phi4-mini")}


@pytest.fixture(scope="module", params=[*FAMILIES, *OTHER_PATHS, *IN_NUMPY])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Every family as large models go about it, one operation of torch at a time; some also with few.py's products,
    which models of this size do not have of themselves, and with single.py's passes of one token, which they do."""
    name = (OTHER_PATHS | IN_NUMPY).get(request.param, request.param)
    model = make_model(name)
    folder: Path = save(model, tmp_path_factory.mktemp(name))
    with pytest.MonkeyPatch.context() as patch:
        if request.param in OTHER_PATHS:
            patch.setattr(
                cpu_gemm.GemmPaths, "of", lambda *_: cpu_gemm.GemmPaths(transposed=True, packed=cpu_gemm.can_pack())
            )
        runner = ModelRunner.load(folder, device="cpu", slots=3)
    head = runner.transformer.head
    assert isinstance(head, DenseLinear) and head.transposed == (request.param in OTHER_PATHS)
    if request.param in IN_NUMPY:
        assert runner.numpy_decoder is not None
    else:
        runner.numpy_decoder = None
    return Case(model, runner)


def text(seed: int = 0, length: int = LENGTH) -> list[int]:
    return torch.randint(VOCAB, [length], generator=torch.Generator().manual_seed(seed)).tolist()


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def close_states(ours: Tensor, theirs: Tensor) -> None:
    """Hidden states have no fixed size (the residual stream grows with depth), so they are measured in units of it."""
    size = theirs.norm() / max(theirs.numel(), 1) ** 0.5
    close(ours / size, theirs / size)


def test_logits_equal_those_of_transformers(case: Case) -> None:
    slot = case.runner.acquire()
    rows = case.score(slot, text())
    case.runner.release(slot)
    expected, _ = case.transformers(text())
    assert expected.std() > 0.5, "a model without opinions would agree with anything"
    close(rows.logits, expected)


def test_hidden_states_of_every_layer_equal_those_of_transformers(case: Case) -> None:
    slot = case.runner.acquire()
    rows = case.score(slot, text(1), ALL_LAYERS)
    case.runner.release(slot)
    _, expected = case.transformers(text(1))
    assert len(expected) == len(rows.hidden) == DEPTH + 1 == case.runner.num_layers + 1
    for layer in ALL_LAYERS:
        close_states(rows.hidden[layer], expected[layer])


def test_ragged_pieces_with_truncation_between_give_the_same_logits(case: Case) -> None:
    """As decoding does: score a few tokens, take some back, go on differently."""
    tokens = text(2)
    expected, _ = case.transformers(tokens)
    slot = case.runner.acquire()
    wrong = text(3)
    for piece, back in [(1, 0), (40, 9), (1, 1), (17, 0), (8, 8), (60, 33), (3, 2), (150, 0)]:
        start = case.runner.length(slot)
        end = min(start + piece, LENGTH)
        rows = case.score(slot, tokens[start:end])
        close(rows.logits, expected[start:end])
        if back:
            case.runner.truncate(slot, end - back)
            case.score(slot, wrong[:5])  # a draft that is rejected
            case.runner.truncate(slot, end - back)
    assert case.runner.length(slot) == LENGTH
    case.runner.release(slot)


def test_a_batch_of_ragged_passes_gives_what_each_sequence_gives_alone(case: Case) -> None:
    texts = [text(seed, length) for seed, length in [(4, 120), (5, 7), (6, 64)]]
    slots = [case.runner.acquire() for _ in texts]
    expected = [case.transformers(tokens) for tokens in texts]
    cuts = [[0, 50, 51, 120], [0, 1, 4, 7], [0, 30, 62, 64]]
    for step in range(3):
        feeds = [tokens[cut[step] : cut[step + 1]] for tokens, cut in zip(texts, cuts, strict=True)]
        keeps = [max(len(feed) - 2 * step, 0) for feed in feeds]  # some want all rows, some a few, some none
        requests = [
            Score(case.runner, slot, feed, keep, (1, DEPTH))
            for slot, feed, keep in zip(slots, feeds, keeps, strict=True)
        ]
        for rows, keep, cut, (logits, hidden) in zip(case.runner.score(requests), keeps, cuts, expected, strict=True):
            window = slice(cut[step + 1] - keep, cut[step + 1])
            close(rows.logits, logits[window])
            for layer in (1, DEPTH):
                close_states(rows.hidden[layer], hidden[layer][window])
    for slot in slots:
        case.runner.release(slot)


def test_greedy_text_of_512_tokens_is_that_of_transformers(case: Case) -> None:
    prompt = text(7, 20)
    slot = case.runner.acquire()
    ours = case.runner.decode([Decode(case.runner, slot, prompt, 512, Sampling(), TARGET)])[0].tokens
    case.runner.release(slot)
    case.model.generation_config.eos_token_id = None
    theirs = case.model.generate(torch.tensor([prompt]), max_new_tokens=512, do_sample=False)[0, len(prompt) :]
    assert len(set(ours)) > 20, "a text that says nothing would prove nothing"
    assert ours == theirs.tolist()


def test_exact_writes_what_none_writes(case: Case) -> None:
    draft = ModelRunner(case.runner.transformer, 1, case.runner.max_seq_len)
    pair = semspec.Pair(case.runner, make_tokenizer(), draft)
    options = {"max_new_tokens": 64, "ignore_eos": True}
    plain = pair.generate("the quick brown fox", verifier="none", **options)
    drafted = pair.generate("the quick brown fox", verifier="exact", num_draft_tokens=5, **options)
    assert drafted.tokens == plain.tokens and drafted.stats.accepted > 30
