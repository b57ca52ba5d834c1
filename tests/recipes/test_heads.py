"""The prompts that a head for a chat model learns from: a mixture, always the same, with nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

from recipes.heads import prompts


def test_prompts_are_a_fixed_mixture(tmp_path: Path) -> None:
    for name in ("gsm8k", "mbpp", "svamp"):
        (tmp_path / name).mkdir()
    stories = [{"question": f"Story {i}?"} for i in range(9)]
    (tmp_path / "gsm8k/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stories))
    (tmp_path / "mbpp/mbpp.jsonl").write_text(json.dumps({"text": "Write a function."}) + "\n")
    (tmp_path / "svamp/SVAMP.json").write_text(json.dumps([{"Body": "Five pens.", "Question": "How many?"}]))
    out = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path, n in zip(out, ("40", "60"), strict=True):
        prompts.main(["--data", str(tmp_path), "--prompts", n, "--out", str(path)])
    first, second = ([json.loads(line)["question"] for line in path.read_text().splitlines()] for path in out)
    assert second[:40] == first and len(set(second)) == 60
    wanted = ("Story 1?", "Write a function.", "Five pens.", "Translate German", "Summarize: ", "people in this")
    assert all(any(part in prompt for prompt in second) for part in wanted)
    assert not any("{}" in prompt for prompt in second)
