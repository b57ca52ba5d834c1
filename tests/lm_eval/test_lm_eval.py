"""lm-evaluation-harness over a pair: its scores are bench's on the same files, its likelihoods the target's own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

import semspec
from semspec import tasks
from semspec.bench.run import Bench, Config
from semspec.errors import BadRequest
from semspec.lm_eval.model import SemspecLM
from semspec.pocket.shipped import SHIPPED
from semspec.tasks.pocket import Pocket

PROBLEMS = 4
YAML = """
task: tiny_gsm8k
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}, train: {data}}}
test_split: test
fewshot_split: train
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
num_fewshot: 0
generation_kwargs: {{until: ["Question:"], do_sample: false, max_gen_toks: 160}}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    regexes_to_ignore: [",", "(?s).*#### ", "\\\\.$"]
filter_list:
  - name: strict-match
    filter:
      - {{function: regex, regex_pattern: "answer is (\\\\-?[0-9\\\\.\\\\,]+)"}}
      - {{function: take_first}}
"""
LIKELIHOOD = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: ["yes", "no"]
num_fewshot: 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GSM8K-style files: word problems of the pocket world, whose model marks its answers by four hashes or a box."""
    place = tmp_path_factory.mktemp("tasks")
    task = Pocket()
    rows = []
    for problem in task.problems(PROBLEMS, 3):
        text = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]
        rows.append({"question": text, "answer": f"It is so.\n#### {problem.answer}"})
    data = place / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "tiny.yaml").write_text(YAML.format(data=data))
    (place / "choice.yaml").write_text(LIKELIHOOD.format(data=data))
    return place


@pytest.fixture(scope="module")
def pocket() -> semspec.Pair:
    return semspec.load("pocket", device="cpu", slots=4)


@pytest.mark.parametrize("verifier", ["exact", "fly"])
def test_the_harness_scores_as_bench_does(folder: Path, pocket, tmp_path: Path, verifier: str) -> None:
    model = SemspecLM(pair=pocket, verifier=verifier, num_draft_tokens=8, batch_size=4)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(
        model=model, tasks=["tiny_gsm8k"], task_manager=manager, bootstrap_iters=0, apply_chat_template=True
    )
    samples = sorted(found["samples"]["tiny_gsm8k"], key=lambda sample: sample["doc_id"])
    theirs, texts = [s["exact_match"] for s in samples], [s["resps"][0][0] for s in samples]
    config = Config(f"lm_eval:tiny_gsm8k,include={folder},chat=true", [verifier], num_draft_tokens=8)
    bench = Bench(config, pair=pocket)
    bench.run(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    own = {row["problem"]: row for row in rows if row["arm"].startswith(verifier)}
    ours = [own[f"tiny_gsm8k/{i}"] for i in range(PROBLEMS)]
    assert [float(row["correct"]) for row in ours] == theirs
    assert [row["text"] for row in ours] == texts
    assert sum(theirs) > 0, "some are right"
    assert sum(stats.accepted for stats in model.stats), "drafts were used"


def test_likelihoods_are_those_of_the_model(pocket) -> None:
    model, texts = SemspecLM(pair=pocket, batch_size=3), ["Mia has 4 bags.", "Tom", "How many pens are there in all?"]
    reference = AutoModelForCausalLM.from_pretrained(SHIPPED["pocket"], dtype=torch.float32)
    requests = [Instance("loglikelihood", {}, (text, " The answer"), 0) for text in texts]
    requests.append(Instance("loglikelihood", {}, ("", "Tom has pens"), 0))
    for (logprob, greedy), request in zip(model.loglikelihood(requests), requests, strict=True):
        context, continuation = request.args
        ids = model.tok_encode(context + continuation)
        n = len(ids) - len(model.tok_encode(context))
        if not context:
            ids = [model.prefix_token_id, *ids]
        rows = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        own = rows.gather(1, torch.tensor(ids[1:])[:, None])[-n:, 0]
        assert logprob == pytest.approx(float(own.sum()), abs=1e-2)
        assert greedy == bool((rows.argmax(-1)[-n:] == torch.tensor(ids[-n:])).all())


def test_a_text_longer_than_the_context_rolls(pocket) -> None:
    short = semspec.load("pocket", device="cpu", slots=2, context=32)
    text = "Mia has 4 bags with 6 pens each. " * 5
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0)]
    (rolled,), (whole,) = (SemspecLM(pair=p).loglikelihood_rolling(requests) for p in (short, pocket))
    assert rolled < 0 and whole < 0 and rolled != whole


def test_the_command_of_the_docs(folder: Path, tmp_path: Path) -> None:
    """As a user gives it: options of a verifier parted by semicolons, likelihoods and texts in one run."""
    words = [sys.executable, "-m", "semspec.lm_eval", "--model", "semspec", "--tasks", "tiny_gsm8k,tiny_choice"]
    words += ["--model_args", "target=pocket,verifier=fly:window=4;theta=0.3,num_draft_tokens=8,device=cpu"]
    words += ["--include_path", str(folder), "--batch_size", "4", "--limit", "2", "--output_path", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny_gsm8k" in done.stdout and "tiny_choice" in done.stdout


def test_mistakes_are_told(folder: Path, pocket) -> None:
    with pytest.raises(BadRequest, match="has no argument 'drafft'"):
        SemspecLM(target="pocket", drafft="x")
    with pytest.raises(BadRequest, match="target="):
        SemspecLM()
    for spec, named in (
        ("lm_eval", "needs the name"),
        (f"lm_eval:tiny_choice,include={folder}", "likelihoods"),
        (f"lm_eval:tiny_gsm8k,include={folder},shots=x", "shots"),
    ):
        with pytest.raises(BadRequest, match=named):
            tasks.make(spec)
    task = tasks.make(f"lm_eval:tiny_gsm8k,include={folder},metric=no-such")
    with pytest.raises(BadRequest, match="no-such"):
        task.score(task.problems(1, 0)[0], "#### 3")
    request = Instance("generate_until", {}, ("Tom", {"until": [], "num_beams": 4}), 0)
    with pytest.raises(BadRequest, match="num_beams"):
        SemspecLM(pair=pocket).generate_until([request])


def test_a_harness_task_as_a_chat(folder: Path) -> None:
    task = tasks.make(f"lm_eval:tiny_gsm8k,include={folder},chat=true,shots=1")
    prompt = task.problems(None, 0)[0].prompt
    assert [message["role"] for message in prompt] == ["user", "assistant", "user"]
    assert task.stop == ("Question:",) and task.max_new_tokens == 160


def test_repeated_samples_of_a_prompt_differ(pocket) -> None:
    lm, how = SemspecLM(pair=pocket), {"do_sample": True, "temperature": 1.0, "max_gen_toks": 40}
    asked = [Instance("generate_until", {}, ("Mia has 4 bags with 6 pens each.", how), i) for i in range(4)]
    assert len(set(lm.generate_until(asked, disable_tqdm=True))) > 1


def asked(prompts: list[str], **how: Any) -> list[Instance]:
    given = {"until": [], "do_sample": False, "max_gen_toks": 40} | how
    return [Instance("generate_until", {}, (prompt, given), i) for i, prompt in enumerate(prompts)]


TEXTS = ["Mia has 4 bags.", "Tom", "How many pens are there in all?", "Ana has 12 books. Ben has 3 fewer.", "A"]


@pytest.mark.parametrize("batch", [2, "auto", 8])
def test_texts_do_not_depend_on_the_size_of_batches(pocket, batch: int | str) -> None:
    one, many = (SemspecLM(pair=pocket, verifier="fly", batch_size=size) for size in (1, batch))
    texts = one.generate_until(asked(TEXTS), disable_tqdm=True)
    assert many.generate_until(asked(TEXTS), disable_tqdm=True) == texts and any(texts)


def test_the_first_of_several_ends_a_text(pocket) -> None:
    lm = SemspecLM(pair=pocket, verifier="fly", batch_size=4)
    (whole,) = lm.generate_until(asked(TEXTS[:1]), disable_tqdm=True)
    early, late = whole[6:9], whole[12:15]
    for until in ([late, early], [early], early, [late, early, ""], [late, "no such text", early]):
        (text,) = lm.generate_until(asked(TEXTS[:1], until=until), disable_tqdm=True)
        assert text == whole[: whole.index(early)], until


def test_what_is_cached_is_not_asked_again(folder: Path, pocket, tmp_path: Path, monkeypatch: Any) -> None:
    def evaluate() -> Any:
        model = SemspecLM(pair=pocket, batch_size=2, num_draft_tokens=8)
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        return simple_evaluate(
            model=model, tasks=["tiny_gsm8k", "tiny_choice"], task_manager=manager, bootstrap_iters=0, limit=2,
            use_cache=str(tmp_path / "cache"),
        )["results"]  # fmt: skip

    first = evaluate()
    monkeypatch.setattr(pocket.executor, "submit", lambda *_: pytest.fail("it is in the cache"))
    assert evaluate() == first


def test_a_text_that_fails_leaves_none_of_its_batch_behind(pocket, monkeypatch: Any) -> None:
    lm, tick = SemspecLM(pair=pocket, batch_size=4), pocket.executor.tick
    left = iter(range(3))

    def interrupted() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        tick()

    monkeypatch.setattr(pocket.executor, "tick", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.generate_until(asked(TEXTS[:3]), disable_tqdm=True)
    assert not pocket.executor.tasks and pocket.target.free == 4


def test_the_console_command_is_the_module(pocket) -> None:
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["semspec-lm-eval"].partition(":")
    assert getattr(importlib.import_module(module), name) is importlib.import_module("semspec.lm_eval.__main__").run
    with pytest.raises(BadRequest, match="local-completions"):
        SemspecLM(target="http://localhost:1/v1")
