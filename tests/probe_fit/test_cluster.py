from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from semspec.errors import BadRequest, ModelError
from semspec.pair import Pair
from semspec.pocket import DRAFT_HABITS, TARGET_HABITS, meaning, problem, write_steps
from semspec.probe_fit.cluster import Pairwise, Source, asks_target, make, numbers_in
from semspec.probe_fit.compare import AskTarget, Embedding, Nli
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeRunner

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", "e", "apples", "boats"]


def wordings(seed: int) -> list[str]:
    """Steps of one problem, each written several ways."""
    story = problem(seed)
    return [s for habits in (TARGET_HABITS, DRAFT_HABITS) for k in range(2) for s in write_steps(story, habits, Random(k))]  # noqa: E501  # fmt: skip


def test_canonical_sorts_by_what_the_parser_says() -> None:
    texts = wordings(3)
    clusters = make("canonical", Source(parse=meaning)).cluster(texts)
    for i, text in enumerate(texts):
        for j, other in enumerate(texts):
            assert (clusters[i] == clusters[j]) == (meaning(text) == meaning(other))
    assert len(set(clusters)) < len(set(texts))


def test_canonical_tells_what_it_cannot_read_apart_by_words() -> None:
    clusters = make("canonical", Source(parse=lambda text: None)).cluster(["x y", "x  y\n\n", "z", "x y "])
    assert clusters == [0, 0, 1, 0]


def test_canonical_needs_a_parser() -> None:
    with pytest.raises(BadRequest, match="no parser"):
        make("canonical", Source())


@dataclass
class SameLetter(Pairwise):
    name = "same-letter"

    def same(self, text: str, others: Sequence[str]) -> list[bool]:
        self.asked = getattr(self, "asked", 0) + len(others)
        return [text[0] == other[0] for other in others]


def test_pairwise_is_greedy_and_asks_about_the_first_of_each_cluster_only() -> None:
    clusterer = SameLetter(Source())
    assert clusterer.cluster(["a1", "b1", "a2", "a1 \n\n", "c", "b2"]) == [0, 1, 0, 0, 2, 1]
    assert clusterer.asked == 1 + 2 + 2 + 3  # equal texts are not compared


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3 + 4 = 7, so 7", {3, 4, 7}), ("costs 1,200.50 now", {1200.5}), ("none.", set()), ("so 7.", {7})],
)
def test_numbers(text: str, numbers: set[float]) -> None:
    assert numbers_in(text) == numbers


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random entailment classifier that has opinions."""
    folder = tmp_path_factory.mktemp("nli")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(4)
    labels = {0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"}
    config = BertConfig(vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, initializer_range=2.0, id2label=labels)  # noqa: E501  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_nli_asks_for_entailment_in_both_directions(classifier: Path) -> None:
    clusterer = make(f"nli:model={classifier},batch=3", Source(device="cpu"))
    assert isinstance(clusterer, Nli)
    network, tokenizer, entailment = clusterer._loaded
    assert entailment == 2
    texts = ["a b", "b c", "c d e", "e", "d a", "b b", "c a c", "e e d"]

    def entails(a: str, b: str) -> bool:
        with torch.no_grad():
            return network(**tokenizer(a, b, return_tensors="pt")).logits.argmax().item() == 2

    oneway = 0
    for text in texts:
        expected = [entails(text, other) and entails(other, text) for other in texts]
        assert clusterer.same(text, texts) == expected
        oneway += sum(entails(text, other) != entails(other, text) for other in texts)
    assert oneway, "this classifier cannot tell one direction from two"


def test_a_classifier_without_entailment_is_refused(classifier: Path, tmp_path: Path) -> None:
    model = BertForSequenceClassification.from_pretrained(classifier)
    model.config.id2label = {0: "good", 1: "bad", 2: "ugly"}
    model.save_pretrained(tmp_path)
    BertTokenizerFast.from_pretrained(classifier).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="good, bad, ugly"):
        make(f"nli:model={tmp_path}", Source(device="cpu")).cluster(["a", "b"])


@pytest.mark.parametrize(
    ("spec", "said"),
    [("nli", "needs a model"), ("embedding:model=x,threshold=2", "cosine"), ("nli:model=x,batch=0", "1 or more"), ("judge", "pair"), ("nothing", "canonical")],  # noqa: E501
)  # fmt: skip
def test_bad_clusterers_are_refused(spec: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        make(spec, Source())


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The real sentence encoder."""
    folder = Path(os.environ.get("SEMSPEC_MINILM", ".models/all-MiniLM-L6-v2"))
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder} is not there; `make minilm` fetches it, or set SEMSPEC_MINILM to where it lies")
    return folder


def test_real_embeddings_agree_with_the_parser_on_rewordings(minilm: Path) -> None:
    clusterer = make(f"embedding:model={minilm}", Source(device="cpu"))
    canonical = make("canonical", Source(parse=meaning))
    agree = pairs = 0
    for seed in range(4):
        texts = wordings(100 + seed)
        one, other = clusterer.cluster(texts), canonical.cluster(texts)
        both = [(one[i] == one[j], other[i] == other[j]) for i in range(len(texts)) for j in range(i)]
        agree, pairs = agree + sum(a == b for a, b in both), pairs + len(both)
    assert agree / pairs > 0.95


def test_numbers_must_agree_because_embeddings_do_not_see_them(minilm: Path) -> None:
    texts = [
        "Adding 12 and 30 gives 42 apples.",
        "12 plus 30 is 42 apples in total.",
        "Adding 12 and 30 gives 43 apples.",
    ]
    with_numbers = make(f"embedding:model={minilm}", Source(device="cpu"))
    assert with_numbers.cluster(texts) == [0, 0, 1]
    without = make(f"embedding:model={minilm},numbers=no", Source(device="cpu"))
    assert without.cluster(texts) == [0, 0, 0]
    assert isinstance(without, Embedding)
    alone = torch.cat([without._encoder.embed([text]) for text in texts])
    torch.testing.assert_close(without._encoder.embed(texts), alone, atol=1e-5, rtol=0)  # padding does not count


def test_the_old_name_of_asking_the_target_goes_on_for_a_while() -> None:
    with pytest.warns(DeprecationWarning, match="now called 'target'"), pytest.raises(BadRequest, match="the pair"):
        make("judge:order=first", Source())
    assert asks_target("target:order=first") and not asks_target("canonical")


def asked(says) -> AskTarget:  # type: ignore[no-untyped-def]
    """A judge whose model answers by a function of the two versions that it reads in its prompt."""
    tokenizer = make_tokenizer(("<eos>", "<think>", "</think>", "yes", "no"))
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])

    def logits(context: list[int]) -> list[float]:
        read = tokenizer.decode(context)
        assert read.endswith("<think></think>Answer:")
        a, b = read.split("Version A: ")[1].split("\n\nVersion B: ")
        row = [0.0] * len(tokenizer)
        row[yes], row[no] = says(a, b.split("\n")[0]), 0.5
        return row

    runner = FakeRunner(logits, len(tokenizer), slots=3)
    return AskTarget(Source(pair=Pair(runner, tokenizer)))


def test_the_judge_is_the_target_asked_in_both_orders() -> None:
    clusterer = asked(lambda a, b: 1.0 if a[0] == b[0] else 0.0)
    assert clusterer.cluster(["ant", "bee", "ape", "bat", "cat"]) == [0, 1, 0, 1, 2]
    partial = asked(lambda a, b: 5.0 if a < b else 0.0)  # +4.5 one way, -0.5 the other
    assert partial.same("x", ["y"]) == [True]
    assert asked(lambda a, b: 0.9 if a < b else 0.0).same("x", ["y"]) == [False]
    assert clusterer.pair.target.free == 3


def test_a_target_without_the_words_cannot_be_asked() -> None:
    tokenizer = make_tokenizer()
    judge = AskTarget(Source(pair=Pair(FakeRunner(lambda _: [0.0] * 300, 300), tokenizer)))
    with pytest.raises(ModelError, match="yes and no"):
        judge.same("a", ["b"])
