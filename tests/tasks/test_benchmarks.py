"""GPQA, CollegeMath, MGSM, ACP, needles in a haystack, and questions in the form of lm-evaluation-harness."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from semspec.errors import BadRequest
from semspec.pair.loading import load
from semspec.tasks import Problem, make
from semspec.tasks.acp import effects
from semspec.tasks.mgsm import LABELS, in_english
from semspec.tasks.niah import NEEDLE, Niah
from semspec.text.tokenizer import encode


def put(folder: Path, path: str, rows: list[dict[str, Any]]) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def content(problem: Problem) -> str:
    assert isinstance(problem.prompt, list)
    return str(problem.prompt[-1]["content"])


# -- GPQA


@pytest.fixture
def gpqa(tmp_path: Path) -> Path:
    (tmp_path / "gpqa").mkdir()
    names = ["Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)), "High-level domain"]
    with (tmp_path / "gpqa" / "gpqa_diamond.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*names, "Record ID"])
        for i in range(40):
            table.writerow([f'Which,\nof "{i}"?', " yes\n", "no", "never", "not, at all", "Physics", f"rec{i}"])
    return tmp_path


def test_choices_are_shuffled_by_a_seed_and_the_letter_follows(gpqa: Path) -> None:
    task = make("gpqa", gpqa)
    problems = task.problems(None, 0)
    assert len(problems) == 40 and problems[3].group == "Physics" and problems[3].id == "gpqa/rec3"
    assert task.max_new_tokens == 14000 and not task.graded
    for p in problems:
        assert f"({p.answer}) yes" in content(p) and 'Which,\nof "' in content(p) and "(D)" in content(p)
        assert task.score(p, f"So \\boxed{{{p.answer}}}") and task.score(p, f"The answer is ({p.answer}).")
        other = "ABCD"[("ABCD".index(p.answer) + 1) % 4]
        assert not task.score(p, f"\\boxed{{{other}}}") and not task.score(p, "")
    assert {p.answer for p in problems} == set("ABCD"), "no letter is right always"
    assert task.problems(None, 5) == problems, "the seed of a run does not change a question"
    assert [p.answer for p in make("gpqa:order=1", gpqa).problems(None, 0)] != [p.answer for p in problems]


# -- mathematics


def test_college_math(tmp_path: Path) -> None:
    rows = [{"question": "Solve $2x = 6$.", "answer": "$x=3$", "data_topic": "algebra"}]
    task = make("college-math", put(tmp_path, "math/college_math.jsonl", rows))
    (p,) = task.problems(None, 0)
    assert "Solve $2x = 6$." in content(p) and "\\boxed{}" in content(p)
    assert task.score(p, "\\boxed{3}") and not task.score(p, "\\boxed{4}")


@pytest.fixture
def mgsm(tmp_path: Path) -> Path:
    (tmp_path / "mgsm").mkdir()
    for code in LABELS:
        (tmp_path / "mgsm" / f"mgsm_{code}.tsv").write_text(f"{code} one?\t1,200\n{code} two?\t18\n", encoding="utf-8")
    return tmp_path


def test_mgsm_reads_the_published_files(mgsm: Path) -> None:
    assert len(make("mgsm", mgsm).problems(None, 0)) == 22
    task = make("mgsm:language=fr+ja", mgsm)
    problems = task.problems(None, 0)
    assert [p.id for p in problems] == ["mgsm/fr/0", "mgsm/fr/1", "mgsm/ja/0", "mgsm/ja/1"]
    assert (
        problems[0].group == "fr" and content(problems[0]).startswith("fr one?\n\n") and "####" in content(problems[0])
    )
    harness = make("mgsm:language=fr,style=harness", mgsm).problems(None, 0)[1]
    assert content(harness) == "Question : fr two?\nRéponse étape par étape :"
    (mgsm / "mgsm" / "mgsm_sw.tsv").write_text("no answer here\n")
    with pytest.raises(BadRequest, match=r"row 1 of .* has no field 'answer'"):
        make("mgsm:language=sw", mgsm).problems(None, 0)


@pytest.mark.parametrize(
    ("code", "right", "wrong"),
    [
        ("en", "The answer is 1,200.", "The answer is 1.2"),
        ("de", "Die Antwort ist 1.200.", "Die Antwort ist 1,2."),
        ("fr", "La réponse est 1\u202f200.", "La réponse est 200."),
        ("es", "#### 1200", "#### 120"),
        ("ja", "答えは1200です。", "答えは12です。"),
        ("zh", "答案是１，２００。", "答案是１２。"),
        ("th", "คำตอบคือ1,200", "คำตอบคือ1"),
        ("bn", "উত্তর হল ১২০০।", "উত্তর হল ১২।"),
    ],
)
def test_numbers_of_other_languages(mgsm: Path, code: str, right: str, wrong: str) -> None:
    task = make(f"mgsm:language={code}", mgsm)
    p = task.problems(None, 0)[0]
    assert task.score(p, right) and not task.score(p, wrong)


def test_numbers_as_english_writes_them() -> None:
    assert in_english("1.234.567,5 und 3,25") == "1234567.5 und 3.25"
    assert in_english("은18개") == "은 18개" and in_english("x2") == "x2"


# -- what an action changes

ROW = {
    "id": 7, "group": "progression_gen", "context": "A door is open.", "question": "What does closing it change?",
    "answer": {"pos": ["(closed d1)", "(dark  r1)"], "neg": ["(open d1)"]},
}  # fmt: skip


def test_effects_are_compared_as_sets(tmp_path: Path) -> None:
    task = make(
        "acp-prog-gen",
        put(tmp_path, "acp/acp_prog_gen.jsonl", [ROW, ROW | {"id": 8, "answer": json.dumps(ROW["answer"])}]),
    )
    p, other = task.problems(None, 0)
    assert p.answer == other.answer and isinstance(p.prompt, list) and task.max_new_tokens == 1000
    assert [m["role"] for m in p.prompt] == ["user", "assistant"] * 2 + ["user"], "two examples, as turns"
    assert content(p).startswith("**Question**: A door is open. What does") and content(p).endswith("**Final Answer**:")
    for right in (
        "[(closed d1), (dark r1)] [(open d1)]",
        "[(Dark r1), (closed d1)]\n[(OPEN d1)]",
        "**Positive effects**: (closed d1), (dark r1)\n\n**Negative Effects:** (open d1)",
        "<think>[(x)]</think>[(dark r1) (closed d1)], [(open d1)]",
    ):
        assert task.score(p, right), right
    for wrong in ("[(closed d1)] [(open d1)]", "[(open d1)] [(closed d1), (dark r1)]", "(closed d1)", "", "[" * 9999):
        assert not task.score(p, wrong), wrong
    assert effects("[(a b)]") == ({"a b"}, set()) and effects("[] [(c)]") == (set(), {"c"})
    assert all(str(message["content"]).count("[") == 2 for message in p.prompt[1:4:2])
    for wrong in (["x"], "{not json", {"pos": ["(a)"]}):
        with pytest.raises(BadRequest, match="the lists pos and neg"):
            make("acp-prog-gen", put(tmp_path, "acp/acp_prog_gen.jsonl", [ROW | {"answer": wrong}])).problems(None, 0)


# -- needles


def test_needles_are_hidden_and_counted() -> None:
    task = make("niah:length=1024")
    (p, q) = task.problems(2, 3)
    assert task.graded and len(set(p.answer)) == 4 and set(p.answer) != set(q.answer)
    word = content(p).rsplit("numbers for ", 1)[1].split(" ")[0]
    for value in p.answer:
        assert NEEDLE.format(word, value) in content(p)
    assert content(p).count("One of the special magic") == 4
    assert task.score(p, ", ".join(p.answer)) == 1.0 and task.score(p, f"{p.answer[0]} and {p.answer[2]}") == 0.5
    assert task.score(p, f"<think>{p.answer[0]}</think> none") == 0.0
    assert make("niah:length=1024").problems(5, 3)[:2] == [p, q]
    for wrong in ({"n": None, "seed": 0}, {"n": 0, "seed": 0}, {"n": 1, "seed": -1}):
        with pytest.raises(BadRequest):
            task.problems(**wrong)


def test_a_haystack_is_as_long_as_asked_for(tmp_path: Path) -> None:
    tokenizer = load("pocket", device="cpu", slots=1, context=256).tokenizer
    (tmp_path / "essays.txt").write_text("Short words here. " * 40 + "\n\nAnd an end without a point")
    for task in (Niah(length=1024), Niah(length=1024, values=7, haystack="essays.txt", data=tmp_path)):
        (p,) = task.for_model(task.problems(1, 0), tokenizer, 4096)
        tokens = len(encode(tokenizer, p.prompt))
        assert 1024 - 128 - 80 < tokens <= 1024 - 128 and all(value in content(p) for value in p.answer)
        (cut,) = task.for_model([p], tokenizer, 700)
        assert len(encode(tokenizer, cut.prompt)) <= 700 - 128 and cut.answer == p.answer
    with pytest.raises(BadRequest, match="do not fit"):
        task.for_model([p], tokenizer, 150)
    (tmp_path / "empty.txt").write_text("\n")
    for haystack, message in (("empty.txt", "has no words"), ("none.txt", "needs the file")):
        with pytest.raises(BadRequest, match=message):
            Niah(haystack=haystack, data=tmp_path).problems(1, 0)


# -- the form of lm-evaluation-harness


def test_gsm8k_with_examples(tmp_path: Path) -> None:
    rows = [{"question": f"{i} + 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i in range(9)]
    put(put(tmp_path, "gsm8k/test.jsonl", rows[8:]), "gsm8k/train.jsonl", rows[:8])
    plain, harness = (make(f"gsm8k{options}", tmp_path) for options in ("", ":shots=8,style=harness"))
    assert isinstance(plain.problems(None, 0)[0].prompt, list) and len(plain.problems(None, 0)[0].prompt) == 1
    (p,) = harness.problems(None, 0)
    assert isinstance(p.prompt, list) and len(p.prompt) == 17
    assert p.prompt[1]["content"] == "It is 1. The final answer is 1" and "\nProblem: 8 + 1?\n" in content(p)
    assert harness.score(p, "Eight and one. The final answer is 9.") and not harness.score(p, "The final answer is 8")


def test_programs_in_that_form(tmp_path: Path) -> None:
    put(
        tmp_path,
        "mbpp/mbpp.jsonl",
        [{"task_id": 11, "text": "Add.", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]}],
    )
    (p,) = make("mbpp:execute=true,style=harness", tmp_path).problems(None, 0)
    assert content(p).startswith("Add. ") and content(p).endswith("\nassert f(1) == 2") and "f(2)" in p.answer
