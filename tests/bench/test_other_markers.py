"""Answers are read with the markers of the model that wrote them, the target's or the draft's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

import semspec
from semspec.bench.run import Bench, Config
from semspec.tasks.answers import visible
from semspec.text.tokenizer import CommonMarkers
from tests.bench.conftest import samples
from tests.checkpoints import make_tokenizer

PROBLEMS = 6


def run(folder: Path, **how: object) -> list[dict]:
    given = {"task": "pocket", "n": PROBLEMS, "batch": PROBLEMS, "device": "cpu", "context": 768, "methods": []}
    Bench(Config(**given | how)).run(folder)
    return samples(folder)


def test_a_draft_alone_with_other_markers_is_right_as_often_as_its_card_says(tmp_path: Path) -> None:
    rows = run(tmp_path, draft="pocket-other-draft", task="pocket:steps=3")
    alone = [row for row in rows if row["arm"] == "draft"]
    assert all(row["text"].startswith("<think>") and "thinking>" not in row["text"] for row in alone)
    assert sum(row["correct"] for row in alone) >= PROBLEMS // 2, "85 % of 1,000 in the card; 5 of these"
    assert all(row["correct"] for row in rows if row["arm"] == "none")


def test_a_target_with_other_markers_is_read_by_scorers_and_referees(tmp_path: Path) -> None:
    rows = run(
        tmp_path, target="pocket-other-draft", draft="pocket-draft", methods=["oracle:lead=0"], task="pocket:steps=3"
    )
    assert sum(row["correct"] for row in rows if row["arm"] == "none") >= PROBLEMS // 2
    first = [row["drafted_steps"][0] for row in rows if row["arm"] == "oracle:lead=0"]
    assert any(step["text"].startswith("<think>") and step["valid"] for step in first)
    assert any(step["valid"] and step["outcome"] == "accepted" for step in first)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("markers", [("[THINK]", "[/THINK]"), ("<think>", "</think>"), ("<thinking>", "</thinking>")])
def test_markers_are_found_whether_or_not_they_are_in_the_text(special: bool, markers: tuple[str, str]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(word, special=special, normalized=False) for word in markers])
    begin, end = tokenizer.convert_tokens_to_ids(list(markers))
    thought, said = (tokenizer.encode(text, add_special_tokens=False) for text in ("it is 7 or 8", "The answer is 8."))
    marked = CommonMarkers(tokenizer)

    def read(tokens: list[int], characters: int | None = None) -> str:
        return marked(tokens, tokenizer.decode(tokens, skip_special_tokens=True)[:characters])

    tokens = [begin, *thought, end, *said]
    assert read(tokens) == "<think>it is 7 or 8</think>The answer is 8."
    assert marked(tokens, tokenizer.decode(tokens)) == read(tokens), "with special tokens, too"
    assert visible(read(tokens)) == "The answer is 8."
    assert visible(read([*thought, end, *said])) == "The answer is 8.", "the prompt has opened the thinking"
    assert visible(read([begin, *thought])) == "", "it never ended"
    assert read([*tokens, begin, *thought]) == read(tokens) + "<think>it is 7 or 8"
    cut = len("it is") if special else len(markers[0] + "it is")
    assert read(tokens, cut) == "<think>it is", "a text that a stop string has cut"
    assert read(said) == "The answer is 8." == CommonMarkers(make_tokenizer())(said, "The answer is 8.")


def test_the_pair_of_a_draft_alone_has_its_own_markers() -> None:
    pair = semspec.load("pocket", "pocket-other-draft", device="cpu", slots=1, context=256)
    tokens = pair.draft_alone().tokenizer.encode("</thinking> So", add_special_tokens=False)
    assert pair.draft_alone().resources.common_markers(tokens, "</thinking> So") == "</think> So"
    assert pair.resources.common_markers([], "</thinking> So") == "</thinking> So", "another's markers are text"


def test_a_pair_with_nothing_learnt_exchanges_text_as_before() -> None:
    pair = semspec.load("pocket", "pocket-other-draft", device="cpu", slots=1, context=256)
    how = {"verifier": "exact", "num_draft_tokens": 6, "max_new_tokens": 30, "ignore_eos": True}
    prompt = [{"role": "user", "content": "Ana has 12 books. Ben has 3 more books than Ana. How many has Ben?"}]
    once, again = (each.generate(prompt, **how) for each in (pair, pair.fresh()))
    assert once.tokens == again.tokens and once.stats.drafted == again.stats.drafted > 0
    with pytest.raises(semspec.BadRequest, match="the target has 2112 tokens and the draft model 1024"):
        semspec.Pair(pair.target, pair.tokenizer, pair.draft, pair.eos)
