"""The recipe for the papers' data sets writes files that the tasks and `--traces` read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.papers import main
from semspec.tasks import make

ROWS: dict[str, list[dict[str, Any]]] = {
    "HuggingFaceH4/MATH-500": [{"problem": "1 + 1?", "answer": "2"}],
    "math-ai/amc23": [{"question": "2 + 2?", "answer": "4"}],
    "HuggingFaceH4/aime_2024": [{"problem": "3 + 3?", "answer": "6"}],
    "Idavidrein/gpqa": [
        {"Question": "Which?", "Correct Answer": " yes", **{f"Incorrect Answer {i}": f"no {i}" for i in (1, 2, 3)}}
    ],
    "ibm-research/acp_bench": [
        {"id": 1, "context": "A.", "question": "B?", "answer": {"pos": ["(on a)"], "neg": ["(off a)"]}, "PDDL": "(x)"}
    ],
    "juletxara/mgsm": [{"question": "Wie\tviele?\n", "answer": None, "answer_number": 18}],
    "simplescaling/s1K-1.1": [
        {"cot_type": "math", "question": "4 + 4?", "deepseek_thinking_trajectory": "Four and four.\n\nSo 8."},
        {"cot_type": "math", "question": "Long?", "deepseek_thinking_trajectory": "a\n\n" * 200},
        {"cot_type": "crossword", "question": "Other?", "deepseek_thinking_trajectory": "b"},
    ],
}


def test_what_it_writes_can_be_read(tmp_path: Path) -> None:
    main(lambda hub, *_, **__: ROWS[hub], tmp_path)
    data = tmp_path / "data"
    for name, answer in (("math500", "2"), ("amc23", "4"), ("aime24", "6")):
        (problem,) = (task := make(name, data)).problems(None, 0)
        assert task.score(problem, f"It is \\boxed{{{answer}}}.") and not task.score(problem, "\\boxed{7}")
    gpqa = make("gpqa", data)
    (problem,) = gpqa.problems(None, 0)
    letter = next(letter for letter in "ABCD" if f"({letter}) yes" in str(problem.prompt))
    assert gpqa.score(problem, f"\\boxed{{{letter}}}")
    acp = make("acp-prog-gen", data)
    assert acp.score(acp.problems(None, 0)[0], "[(on a)] [(off a)]")
    thai = make("mgsm:language=th", data)
    assert thai.score(thai.problems(None, 0)[0], "#### 18")
    lines = (tmp_path / "s1k-math.jsonl").read_text().splitlines()
    assert [json.loads(line)["problem"] for line in lines] == ["s1k/0"]  # one is too long, one of another kind
    (problem,) = make(f"jsonl:path={tmp_path / 's1k-math.jsonl'}").problems(None, 0)
    assert "4 + 4?" in str(problem.prompt)
