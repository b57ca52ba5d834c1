"""Each task reads its file format, chooses by seed, and scores right and wrong outputs."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from semspec import pocket
from semspec.errors import BadRequest
from semspec.pocket import TARGET_HABITS
from semspec.pocket.wording import write_solution
from semspec.tasks import REGISTRY, Problem, Task, make, register
from semspec.tasks.base import choose
from semspec.tasks.code import code_in
from semspec.tasks.pocket import Pocket, meaning, valid

Write = Callable[[str, list[dict[str, Any]]], Path]
FILES = {
    "gsm8k": "gsm8k/test.jsonl",
    "svamp": "svamp/SVAMP.json",
    "math500": "math/math500.jsonl",
    "aime24": "math/aime24.jsonl",
    "amc23": "math/amc23.jsonl",
    "college-math": "math/college_math.jsonl",
    "mgsm:language=fr": "mgsm/mgsm_fr.tsv",
    "gpqa": "gpqa/gpqa_diamond.csv",
    "acp-prog-gen": "acp/acp_prog_gen.jsonl",
    "longbench:sets=lcc": "longbench/lcc.jsonl",
    "humaneval:execute=true": "humaneval/HumanEval.jsonl.gz",
    "mbpp:execute=true": "mbpp/mbpp.jsonl",
    "spec-bench": "spec_bench/question.jsonl",
    "mt-bench": "mt_bench/question.jsonl",
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows to a file of the data folder in the format that its name asks for; returns the folder."""

    def put(path: str, rows: list[dict[str, Any]]) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(rows) if path.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
        if path.endswith(".tsv"):
            text = "".join("\t".join(map(str, row.values())) + "\n" for row in rows)
        if path.endswith(".csv"):
            lines = io.StringIO()
            csv.writer(lines).writerows([list(rows[0]), *(row.values() for row in rows)] if rows else [])
            text = lines.getvalue()
        file.write_bytes(gzip.compress(text.encode()) if path.endswith(".gz") else text.encode())
        return tmp_path

    return put


def question(problem: Problem) -> str:
    assert isinstance(problem.prompt, list) and [message["role"] for message in problem.prompt] == ["user"]
    return str(problem.prompt[0]["content"])


# --- asking for a task


def test_the_registry_has_the_tasks() -> None:
    names = (
        "pocket gsm8k mgsm svamp math500 college-math aime24 amc23 gpqa humaneval mbpp acp-prog-gen longbench niah "
        "spec-bench mt-bench jsonl lm_eval"
    )
    assert list(REGISTRY) == names.split()
    for name, task in REGISTRY.items():
        assert task.name == name and task.max_new_tokens > 0 and isinstance(task.scored, bool)
    assert not REGISTRY["spec-bench"].scored and not REGISTRY["mt-bench"].scored


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "there is no task 'nothing'; the tasks are: acp-prog-gen, aime24"),
        ("pocket:depth=3", "has no option 'depth'; its options are: steps, split, long"),
        ("svamp:data=x", "has no option 'data'; its options are: none"),
        ("gsm8k:style=odd", "gsm8k's style is 'odd'; give own or harness"),
        ("gsm8k:shots=-1", "0 or more"),
        ("humaneval:execute=true,style=odd", "humaneval's style is 'odd'"),
        ("mgsm:language=fr+xx", "no language 'xx'; give some of en\\+de"),
        ("longbench:sets=lcc+poems", "no set 'poems'; give some of gov_report\\+2wikimqa"),
        ("longbench:longest=-1", "give 0 or more"),
        ("niah:length=100", "give 256 or more"),
        ("niah:values=0", "give 1 to 40"),
        ("pocket:steps=many", "give a whole number, e.g. 0"),
        ("pocket:long=maybe", "give true or false"),
        ("pocket:steps=3,steps=4", "given twice"),
        ("pocket:steps=99", "give 0, 3, 4, 5, 6, 7, 8, 9 or 10"),
        ("pocket:split=dev", "pocket's split is 'dev'; give train, test"),
        ("spec-bench:category=poems", "give nothing, mt_bench, translation"),
        ("humaneval", "humaneval:execute=true"),
        ("mbpp:execute=no", "mbpp:execute=true"),
        ("mbpp:execute=true,timeout=0", "timeout is 0.0; give a number above 0"),
        ("jsonl", "jsonl:FILE"),
        ("jsonl:fiel=own.jsonl", "no option 'fiel'"),
        ("jsonl:path=x,match=vibes", "give nothing, exact, number"),
    ],
)
def test_what_cannot_be_made(spec: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        make(spec, None)


def test_make_takes_a_task_and_a_spec() -> None:
    task = make("pocket:steps=5,split=templates,long=true")
    assert task == Pocket(steps=5, split="templates", long=True)
    assert make(task) is task


def test_a_new_task_is_one_class() -> None:
    class Mine(Task):
        name = "mine"
        max_new_tokens = 8

        def problems(self, n: int | None, seed: int) -> list[Problem]:
            return [Problem("a", "b")]

    try:
        assert make(register(Mine).name).problems(None, 0)[0].prompt == "b"
        with pytest.raises(BadRequest, match="no right answers"):
            make("mine").score(Problem("a", "b"), "c")
    finally:
        del REGISTRY["mine"]


@pytest.mark.parametrize(("spec", "path"), FILES.items())
def test_a_missing_file_is_named_and_never_fetched(spec: str, path: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=f"{path}.*--data DIR"):
        make(spec, None).problems(None, 0)
    with pytest.raises(BadRequest, match=f"{tmp_path / path}.*--data DIR"):
        make(spec, tmp_path).problems(None, 0)


@pytest.mark.parametrize(("spec", "path"), FILES.items())
def test_a_broken_file_is_a_sentence(spec: str, path: str, tmp_path: Path, write: Write) -> None:
    write(path, [{"other": 1}])
    with pytest.raises(BadRequest, match=r"row 1 of .* has no field"):
        make(spec, tmp_path).problems(None, 0)
    (tmp_path / path).write_bytes(b"\xff{not json")
    with pytest.raises(BadRequest, match="cannot be read"):
        make(spec, tmp_path).problems(None, 0)
    write(path, [])
    with pytest.raises(BadRequest, match="no rows"):
        make(spec, tmp_path).problems(None, 0)


def test_the_seed_alone_decides_the_choice() -> None:
    problems = [Problem(str(i), "") for i in range(100)]
    names = [p.id for p in choose(problems, 20, 7, "t")]
    assert names == [p.id for p in choose(problems, 20, 7, "t")]
    assert names == [p.id for p in choose(problems, 50, 7, "t")][:20], "more problems add to fewer"
    assert names != [p.id for p in choose(problems, 20, 8, "t")]
    assert len(set(names)) == 20
    assert choose(problems, None, 7, "t") == problems
    for n in (0, -1, 101):
        with pytest.raises(BadRequest, match="from 1 to 100"):
            choose(problems, n, 7, "t")


# --- pocket


def test_pocket_scores_solutions() -> None:
    task = make("pocket:steps=4")
    assert isinstance(task, Pocket)
    for problem in task.problems(20, 3):
        story = task.story(problem)
        assert problem.group == "4 steps" and problem.answer == story.answer and question(problem) == story.text
        solution = pocket.write_solution(story, pocket.TARGET_HABITS, Random(1))
        assert task.score(problem, solution)
        assert not task.score(problem, solution.split("</think>")[0])
        thoughts, end, _ = solution.partition("</think>")
        assert not task.score(problem, f"{thoughts}{end}\n\nThe answer is {story.answer + 1}.")
        first = pocket.steps_of(solution)[0]
        assert meaning(first) is not None and valid(first, story)


def test_pocket_problems_depend_on_seed_and_split_only() -> None:
    task = make("pocket")
    assert task.problems(5, 1) == make("pocket").problems(5, 1)
    assert task.problems(8, 1)[:5] == task.problems(5, 1)
    everything = [
        question(p) for spec in ("pocket", "pocket:split=templates") for s in (0, 1) for p in make(spec).problems(20, s)
    ]
    assert len(set(everything)) == len(everything)
    assert len(question(make("pocket:long=true").problems(1, 0)[0])) > 2 * len(question(task.problems(1, 0)[0]))
    with pytest.raises(BadRequest, match="a number with --problems"):
        task.problems(None, 0)
    with pytest.raises(BadRequest, match="1 to"):
        task.problems(0, 0)


# --- numbers and formulas


def test_gsm8k(write: Write) -> None:
    solution = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 250 = $<<9*250=2250>>2,250.\n#### 2,250"
    task = make("gsm8k", write(FILES["gsm8k"], [{"question": "How much?", "answer": solution}]))
    (problem,) = task.problems(None, 0)
    assert problem.id == "gsm8k/0" and problem.group == "2 steps" and problem.answer == "2,250"
    assert question(problem).startswith("How much?\n") and "####" in question(problem)
    for right in (solution, "#### 2250", "So \\boxed{2250}.", "It is $2,250.00 in all."):
        assert task.score(problem, right), right
    for wrong in ("#### 2251", "2 and then 250", "<think>2250", ""):
        assert not task.score(problem, wrong), wrong


def test_gsm8k_rows_need_an_answer(write: Write) -> None:
    with pytest.raises(BadRequest, match=r"row 1 .* has no '#### number'"):
        make("gsm8k", write(FILES["gsm8k"], [{"question": "a", "answer": "b"}])).problems(None, 0)


def test_svamp(write: Write) -> None:
    rows = [
        {
            "ID": "chal-1",
            "Body": "If a pack is 25 dollars off",
            "Question": "What is it?",
            "Answer": 51.0,
            "Type": "Sub",
        },
        {"ID": "chal-2", "Body": "He has 3. ", "Question": "How many?", "Answer": 1.0, "Type": "Common-Divison"},
    ]
    task = make("svamp", write(FILES["svamp"], rows))
    first, second = task.problems(None, 0)
    assert question(first).startswith("If a pack is 25 dollars off, what is it?\n")
    assert question(second).startswith("He has 3. How many?\n")
    assert (first.id, first.group, second.group) == ("svamp/chal-1", "Sub", "Common-Division")
    assert task.score(first, "#### 51") and not task.score(first, "#### 52")


def test_math500(write: Write) -> None:
    row = {
        "problem": "Convert $(0,3)$.",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "level": 2,
        "unique_id": "a/8",
    }
    task = make("math500", write(FILES["math500"], [row]))
    (problem,) = task.problems(None, 0)
    assert (problem.id, problem.group) == ("a/8", "level 2")
    assert "\\boxed{}" in question(problem)
    assert task.score(problem, "<think>\\boxed{1}</think>So $\\boxed{(3, \\tfrac{\\pi}{2})}$.")
    assert not task.score(problem, "So $\\boxed{(3, \\tfrac{\\pi}{3})}$.")


@pytest.mark.parametrize(("name", "answer", "stored"), [("aime24", "025", "025"), ("amc23", 25.0, "25")])
def test_contests_with_numbers(name: str, answer: Any, stored: str, write: Write) -> None:
    task = make(name, write(FILES[name], [{"id": 60, "problem": "Find it.", "answer": answer}]))
    (problem,) = task.problems(None, 0)
    assert (problem.id, problem.answer) == (f"{name}/60", stored)
    assert task.score(problem, "\\boxed{25}") and task.score(problem, "\\boxed{025}")
    assert not task.score(problem, "\\boxed{26}")


# --- code

ADD = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef add_all(xs: List[int]) -> int:\n    """Add them.\n    """\n',
    "entry_point": "add_all",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("    return sum(xs)\n", True),
        ("    return 3\n", False),
        ("```python\n    return sum(xs)\n```", True),
        ("Here:\n```python\ndef add_all(xs: List[int]) -> int:\n    return sum(xs)\n```\nIt adds.", True),
        ("```python\ndef add_all(xs):\n    return sum(xs)\n```\nTest:\n```python\nprint(add_all([1]))\n```", True),
        ("```py\ndef add_all(xs):\n    return sum(xs)\n", True),
        (
            "<think>```python\ndef add_all(xs): return 0\n```</think>\n```\ndef add_all(xs):\n  return sum(xs)\n```",
            True,
        ),
        ("```python\ndef add_all(xs):\n    exit()\n```", False),
        ("I cannot.", False),
        ("", False),
    ],
)
def test_humaneval(text: str, right: bool, write: Write) -> None:
    task = make("humaneval:execute=true", write(FILES["humaneval:execute=true"], [ADD]))
    (problem,) = task.problems(None, 0)
    assert problem.id == "HumanEval/0" and "def add_all" in question(problem)
    assert task.score(problem, text) == right


def test_mbpp(write: Write) -> None:
    row = {"text": "Write a function to add.", "test_setup_code": "", "test_list": ["assert set(add(1, 2)) == {3}"]}
    rows = [{**row, "task_id": number} for number in (10, 11, 510, 511)]
    task = make("mbpp:execute=true,timeout=1", write(FILES["mbpp:execute=true"], rows))
    problems = task.problems(None, 0)
    assert [problem.id for problem in problems] == ["mbpp/11", "mbpp/510"], "the published test part"
    assert "assert set(add(1, 2))" in question(problems[0])
    assert task.score(problems[0], "```python\ndef add(a, b):\n    return [a + b]\n```")
    assert not task.score(problems[0], "```python\ndef add(a, b):\n    return [a]\n```")
    assert not task.score(problems[0], "```python\nwhile True: pass\n```")


def test_code_in() -> None:
    assert code_in("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```") == "x = 1\n\ny = 2\n"
    assert code_in("```python\ndef f(): 1\n```\n```python\nf()\n```", ["f"]) == "def f(): 1\n"
    assert code_in("<think>```python\nx = 1\n```") == ""


# --- prompts without answers


def test_spec_bench(write: Write) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 200, "category": "rag", "turns": ["Look."], "reference": ["x"]},
    ]
    data = write(FILES["spec-bench"], rows)
    first, second = make("spec-bench", data).problems(None, 0)
    assert (first.id, first.group, first.turns, question(first)) == ("spec-bench/81", "mt_bench", ("Again.",), "Write.")
    assert (second.group, second.turns) == ("rag", ())
    assert make("spec-bench:category=rag", data).problems(None, 0) == [second]
    assert make("spec-bench:category=mt-bench", data).problems(None, 0) == [first]
    assert make("spec-bench:category=single-turn", data).problems(None, 0) == [second]
    with pytest.raises(BadRequest, match="nothing can be scored"):
        make("spec-bench", data).score(first, "text")


def test_spec_bench_articles_make_long_prompts(write: Write) -> None:
    texts = {"summarization": [f"Summarize: {c * 30}" for c in "abcdef"], "rag": ["r" * 300]}
    rows = [{"category": kind, "turns": [text]} for kind, some in texts.items() for text in some]
    task = make("spec-bench:long=80", write(FILES["spec-bench"], rows))
    problems = task.problems(None, 0)
    bodies = [question(p).removesuffix("\n\nSummarize the articles above.") for p in problems]
    assert [len(body) for body in bodies] == [20, 30, 40, 50]  # and 60 are not left
    assert "".join(bodies).replace("\n", "").startswith("a" * 30 + "b" * 30) and "Summarize" not in "".join(bodies)
    assert all("r" in question(p) and "a" * 5 not in question(p) for p in task.for_fitting().problems(None, 0))
    with pytest.raises(BadRequest, match="give 0 or more"):
        make("spec-bench:long=-1")


def test_mt_bench(write: Write) -> None:
    data = write(FILES["mt-bench"], [{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}])
    (problem,) = make("mt-bench", data).problems(1, 0)
    assert (problem.id, problem.group, problem.turns) == ("mt-bench/81", "writing", ("Again.",))
    assert make("mt-bench:turns=1", data).problems(1, 0)[0].turns == ()
    with pytest.raises(BadRequest, match="give 0 or more"):
        make("mt-bench:turns=-1")
    with pytest.raises(BadRequest, match="has no turns"):
        make("mt-bench", write(FILES["mt-bench"], [{"turns": []}])).problems(None, 0)


# --- anyone's own


def test_jsonl_prompts(write: Write, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    write("own.jsonl", [{"prompt": "Once"}, {"question": "Why?", "id": "why", "group": "g"}, {"messages": messages}])
    task = make(f"jsonl:path={tmp_path / 'own.jsonl'}")
    first, second, third = task.problems(None, 0)
    assert not task.scored
    assert (first.id, first.prompt) == ("jsonl/0", "Once")
    assert (second.id, question(second), second.group) == ("why", "Why?", "g")
    assert third.prompt == messages
    turns = write("turns.jsonl", [{"question_id": 81, "turns": ["Compose.", "Again."]}]) / "turns.jsonl"
    (talk,) = make(f"jsonl:path={turns}").problems(None, 0)
    assert (question(talk), talk.turns) == ("Compose.", ("Again.",)), "a file in the form of MT-bench"
    for spec in ("jsonl:path=own.jsonl", "jsonl:own.jsonl", "jsonl:own.jsonl,match="):
        assert make(spec, tmp_path).problems(None, 0) == [first, second, third]
    with pytest.raises(BadRequest, match="nothing can be scored"):
        task.score(first, "text")


def test_a_prompt_that_a_file_repeats_counts_once(tmp_path: Path) -> None:
    """Else one prompt, copied 200 times, would show that a rule loses nothing."""
    file = tmp_path / "logged.txt"
    file.write_text("Why?\nSince when?\nWhy?\nWhy?\n")
    task = make(f"jsonl:path={file}")
    assert [(p.id, question(p)) for p in task.problems(None, 0)] == [("jsonl/0", "Why?"), ("jsonl/1", "Since when?")]
    assert len(task.problems(2, 0)) == 2
    with pytest.raises(BadRequest, match=r"of the 4 rows of .* 2 are different"):
        task.problems(3, 0)
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "Why?", "answer": "a"}\n{"question": "Why?", "answer": "b"}\n')
    assert len(make(f"jsonl:path={own},match=exact").problems(None, 0)) == 2, "with other answers they are others"
    assert len(make(f"jsonl:path={own}").problems(None, 0)) == 1, "but where answers are not compared"


@pytest.mark.parametrize("name", ["own.txt", "own.jsonl", "own.json", "own.csv"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_prompts_of_a_file_with_a_mark_before_it_or_one_a_line(tmp_path: Path, name: str, encoding: str) -> None:
    """Some editors begin a file of UTF-8 with U+FEFF, which is no part of the first prompt."""
    rows = [{"question": "Why?"}, {"question": "Since when?"}]
    text = {
        "own.txt": "Why?\r\n\n  Since when? \n",
        "own.jsonl": "\n".join(map(json.dumps, rows)),
        "own.json": json.dumps(rows),
        "own.csv": "question\nWhy?\nSince when?\n",
    }[name]
    (tmp_path / name).write_bytes(text.encode(encoding))
    assert [question(p) for p in make(f"jsonl:path={tmp_path / name}").problems(None, 0)] == ["Why?", "Since when?"]


@pytest.mark.parametrize(
    ("match", "answer", "right", "wrong"),
    [
        ("exact", "Paris", "paris", "Paris it is"),
        ("number", 12, "#### 12.0", "#### 13"),
        ("number", "1/2", "It is 0.5", "It is 0.6"),
        ("contains", "Paris", "I say Paris!", "I say Rome!"),
        ("math", "\\frac{1}{2}", "\\boxed{0.5}", "\\boxed{0.25}"),
        ("choice", "B", "The answer is (B).", "The answer is (C)."),
    ],
)
def test_jsonl_matches(match: str, answer: Any, right: str, wrong: str, write: Write) -> None:
    task = make(f"jsonl:path=own.jsonl,match={match}", write("own.jsonl", [{"question": "?", "answer": answer}]))
    (problem,) = task.problems(None, 0)
    assert task.scored
    assert task.score(problem, right) and not task.score(problem, wrong)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "?"}], "row 1 .* has no field 'answer'"),
        ([{"question": "?", "answer": ["a"]}], "give a text or a number"),
        ([{"question": "?", "answer": "many"}], "match=number cannot read"),
        ([{"answer": 1}], "give it a 'prompt', a 'question', 'messages' or a user's 'turns'"),
        ([{"messages": [], "answer": 1}], "give it a 'prompt'"),
        ([{"question": "?", "answer": 1, "id": 5}] * 2, "one id to several rows"),
    ],
)
def test_jsonl_refuses(rows: list[dict[str, Any]], message: str, write: Write) -> None:
    with pytest.raises(BadRequest, match=message):
        make("jsonl:path=own.jsonl,match=number", write("own.jsonl", rows)).problems(None, 0)


def test_jsonl_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"nowhere\.jsonl.*does not exist"):
        make("jsonl:path=nowhere.jsonl", tmp_path).problems(None, 0)
    (tmp_path / "list.jsonl").write_text("[1]\n")
    with pytest.raises(BadRequest, match=r"row 1 .* is not a JSON object"):
        make("jsonl:path=list.jsonl", tmp_path).problems(None, 0)


def test_what_is_fitted_is_never_tested_on() -> None:
    """Probes learn from other pocket problems than those that methods are measured on."""
    task = make("pocket")
    tested, fitted = ({p.id for p in t.problems(20, 0)} for t in (task, task.for_fitting()))
    assert not tested & fitted
    stories = [{p.prompt[-1]["content"] for p in t.problems(20, 0)} for t in (task, task.for_fitting())]  # type: ignore[index]
    assert not stories[0] & stories[1] and task.for_fitting().for_fitting() == task.for_fitting()


def test_the_pocket_referee_judges_every_step_of_a_solution_as_it_is_written() -> None:
    """The first step comes with the mark that opens the thoughts; a wrong number is seen in any of them."""
    task = Pocket()
    for problem in task.problems(20, 5):
        story, referee = task.story(problem), task.referee(problem)
        text = write_solution(story, TARGET_HABITS, Random(1)).split("</think>")[0]
        steps = [step + "\n\n" for step in text.split("\n\n") if step.strip()]
        assert steps[0].startswith("<think>") and len(steps) >= 3
        for i, step in enumerate(steps):
            before = "".join(steps[:i])
            assert referee(before, step), (problem.id, step)
            digits = [j for j, c in enumerate(step) if c.isdigit()]
            wrong = step[: digits[-1]] + str((int(step[digits[-1]]) + 1) % 10) + step[digits[-1] + 1 :]
            assert not referee(before, wrong), (problem.id, wrong)
        assert not referee("", "</think>") and not referee("", "")
