"""LongBench: its file form, several answers, the three measures against references in plain Python, the cut."""

from __future__ import annotations

import difflib
import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.pair.loading import load
from semspec.tasks import Problem, base, make
from semspec.tasks.longbench import PARTS
from semspec.tasks.similarity import edit_similarity, rouge_l, token_f1
from semspec.tasks.truncation import fit_prompt, without_middle
from semspec.text.tokenizer import encode


def row(name: str, i: int = 0, **changes: Any) -> dict[str, Any]:
    """As published: every field that a row has."""
    made = {
        "input": f"Who is number {i}?", "context": f"Passage {i}: " + "Ana was born in Oslo. " * 30,
        "answers": ["Oslo", "the city of Oslo"], "length": 150, "dataset": name, "language": "en",
        "all_classes": None, "_id": f"{name}-{i}",
    }  # fmt: skip
    return made | changes


def write(folder: Path, rows: int = 2, **changes: Any) -> Path:
    (folder / "longbench").mkdir(exist_ok=True)
    for name in PARTS:
        lines = [json.dumps(row(name, i, **changes)) for i in range(rows)]
        (folder / "longbench" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load("pocket", device="cpu", slots=1, context=256).tokenizer


def test_every_set_has_its_prompt_budget_and_group(tmp_path: Path) -> None:
    task = make("longbench", write(tmp_path))
    problems = task.problems(None, 0)
    assert [p.group for p in problems] == [name for name in PARTS for _ in range(2)]
    budgets = {p.group: p.max_new_tokens for p in problems}
    assert budgets == {"gov_report": 512, "2wikimqa": 32, "hotpotqa": 32, "lcc": 64, "repobench-p": 64}
    for p in problems:
        text = p.prompt if isinstance(p.prompt, str) else p.prompt[0]["content"]
        assert "Ana was born in Oslo." in text and isinstance(p.prompt, str) == (p.group in ("lcc", "repobench-p"))
        assert ("Who is number" in text) == (p.group != "gov_report") and task.new_tokens(p) == budgets[p.group]
        assert task.new_tokens(p, 7) == 7
    some = make("longbench:sets=lcc+hotpotqa", tmp_path).problems(3, 1)
    assert {p.group for p in some} <= {"lcc", "hotpotqa"} and len({p.id for p in some}) == 3


def test_the_best_of_several_answers_counts(tmp_path: Path) -> None:
    task = make("longbench:sets=hotpotqa", write(tmp_path))
    (problem, _) = task.problems(None, 0)
    assert task.graded and task.score(problem, "Oslo.") == 1.0 == task.score(problem, "The city of Oslo")
    assert task.score(problem, "In Oslo") == pytest.approx(2 / 3) and task.score(problem, "Bergen") == 0.0
    assert task.score(problem, "<think>Bergen?</think>\nOslo") == 1.0, "reasoning is no part of an answer"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": "Oslo"}, "a list of one or more texts"),
        ({"answers": []}, "a list of one or more texts"),
        ({"dataset": "qasper"}, "in a file of gov_report"),
        ({"_id": "same"}, "one _id to several rows"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        make("longbench", write(tmp_path, **changes)).problems(None, 0)


def test_braces_in_a_text_are_text(tmp_path: Path) -> None:
    text = "int main() { return {x}; } {context} {0} "
    task = make("longbench:sets=repobench-p", write(tmp_path, 1, context=text, input="y = {"))
    assert f"{text}y = {{Next line of code:\n" in str(task.problems(None, 0)[0].prompt)


@pytest.mark.parametrize(("sets", "missing"), [("gov_report", "rouge_score"), ("lcc", "rapidfuzz")])
def test_a_missing_library_is_said_before_the_run(sets: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = base.find_spec
    monkeypatch.setattr(base, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(BadRequest, match=r"not installed; `pip install 'semspec\[bench\]'`"):
        make(f"longbench:sets={sets}")
    make("longbench:sets=hotpotqa")


# -- measures

words = st.text(alphabet="ab Tthe.an,'\n", max_size=30)


def f1_by_hand(text: str, reference: str) -> float:
    def tokens(s: str) -> list[str]:
        kept = "".join(c for c in s.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", kept).split()

    ours, theirs = tokens(text), tokens(reference)
    left, same = list(theirs), 0
    for token in ours:
        if token in left:
            left.remove(token)
            same += 1
    if not same:
        return 0.0
    precision, recall = same / len(ours), same / len(theirs)
    return 2 * precision * recall / (precision + recall)


@given(words, words)
def test_token_f1(text: str, reference: str) -> None:
    assert token_f1(text, reference) == pytest.approx(f1_by_hand(text, reference))
    assert token_f1("the an a", reference) == 0.0


def lcs(a: list[str], b: list[str]) -> int:
    if not a or not b:
        return 0
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


@given(words, words)
def test_rouge_l(text: str, reference: str) -> None:
    ours, theirs = (re.findall(r"[a-z0-9]+", s.lower()) for s in (text, reference))
    common = lcs(ours, theirs)
    exact = 2 * common / (len(ours) + len(theirs)) if common else 0.0
    assert rouge_l(text, reference) == pytest.approx(exact)


@given(words, words)
def test_edit_similarity(text: str, reference: str) -> None:
    """fuzz.ratio: twice the longest common subsequence of characters over both lengths, in whole per cent."""
    line = text.lstrip("\n").split("\n")[0]
    whole = len(line) + len(reference)
    exact = 2 * lcs(list(line), list(reference)) / whole if whole else 1.0
    assert edit_similarity(text, reference) == pytest.approx(exact, abs=0.0051)
    assert edit_similarity(text, reference) * 100 == pytest.approx(round(edit_similarity(text, reference) * 100))


def test_code_is_the_first_line_that_is_code() -> None:
    answer = "```python\n# the sum\nreturn a + b\nprint(a)"
    assert edit_similarity(answer, "return a + b") == 1.0
    assert edit_similarity("// nothing", "x") == edit_similarity("", "x") == 0.0
    plain = difflib.SequenceMatcher(None, "return a+b", "return a + b").ratio()
    assert edit_similarity("return a+b", "return a + b") == pytest.approx(plain, abs=0.01)


# -- the cut


@given(st.integers(2, 60), st.integers(1, 40))
def test_the_middle_goes(tokenizer: PreTrainedTokenizerBase, budget: int, words: int) -> None:
    text = " ".join(f"book {i}" for i in range(words))
    tokens = tokenizer.encode(text)
    cut = without_middle(text, tokenizer, budget)
    if len(tokens) <= budget:
        assert cut == text
    else:
        half = budget // 2
        ends = [str(tokenizer.decode(part)) for part in (tokens[:half], tokens[len(tokens) - half :])]
        assert cut == ends[0] + ends[1] and text.startswith(ends[0]) and text.endswith(ends[1].lstrip())


def test_a_prompt_is_cut_to_what_the_context_leaves(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    task = make("longbench", write(tmp_path))
    problems = task.problems(None, 0)
    assert all(len(encode(tokenizer, p.prompt)) > 120 for p in problems)
    for p in task.for_model(problems, tokenizer, 120 + 64, 64):
        assert 80 < len(encode(tokenizer, p.prompt)) <= 120
    published = make("longbench:longest=60", tmp_path)
    for p in published.for_model(problems, tokenizer, 4096):
        text = p.prompt if isinstance(p.prompt, str) else p.prompt[0]["content"]
        assert len(tokenizer.encode(text)) <= 62, "tokens that meet at the cut may split otherwise"
    with pytest.raises(BadRequest, match="longer --context"):
        task.for_model(problems, tokenizer, 40, 32)
    same = Problem("x", "short")
    assert fit_prompt(same, tokenizer, 100, 100) == same
