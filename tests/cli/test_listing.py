"""`semspec list`: everything that can be asked for by name, with its options."""

from __future__ import annotations

import dataclasses
import json

from typer.testing import CliRunner

from semspec import draft, tasks, verify
from semspec.cli.main import app


def told(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["list", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_all_of_them_are_listed_with_what_they_need():
    found = json.loads(told("--json"))
    for kind, registry in {"verifiers": verify.REGISTRY, "drafters": draft.REGISTRY, "tasks": tasks.REGISTRY}.items():
        assert [one["name"] for one in found[kind]] == list(registry)
        assert all(one["about"] for one in found[kind])
    needs = {one["name"]: one["needs"] for ones in found.values() for one in ones}
    assert needs["exact"] == [] and needs["sampling"] == ["draft probabilities"]
    assert needs["semantic+"] == ["draft model", "probes"] and needs["oracle"] == ["draft model", "referee"]
    assert needs["ngram"] == [] and needs["eagle"] == ["draft head"]


def test_every_name_is_in_a_table_once():
    lines = [line.split(" ")[0] for line in told().splitlines() if line and not line.startswith(" ")]
    for name in (*verify.REGISTRY, *draft.REGISTRY, *tasks.REGISTRY):
        assert lines.count(name) == 1, name
    assert "exact" not in told("tasks").split() and "gsm8k" in told("tasks").split()


def test_one_of_them_is_shown_with_its_options():
    text = told("fly")
    assert "lossy · verifies tokens · draft length 15" in text and "Given as fly:window=6" in text
    own = [f.name for f in dataclasses.fields(verify.REGISTRY["fly"])]
    assert [line.split()[0] for line in text.splitlines() if line.split()[0] in own] == own
    assert "0 or more" in text and "paper, released or vllm" in text
    (steps,) = json.loads(told("semantic+", "--json"))["verifiers"]
    options = {option["name"]: option for option in steps["options"]}
    assert options["lead"]["default"] == 0 and options["lead"]["allowed"] == "0 or more"  # of the class it overrides
    assert not {"judge_probe", "numbers"} & set(options)  # filled in by the program


def test_the_default_draft_length_is_what_a_request_gets():
    assert "draft length auto" in told("exact") and "draft length" not in told("none")
    lengths = {one["name"]: one["num_draft_tokens"] for one in json.loads(told("verifiers", "--json"))["verifiers"]}
    assert (lengths["exact"], lengths["none"], lengths["fly"], lengths["typical"]) == ("auto", None, 15, 8)
    assert "Given as exact:couple=false" in told("exact"), "as the parser reads it"


def test_an_unknown_name_is_answered_with_a_near_one():
    done = CliRunner().invoke(app, ["list", "flyy"])
    assert "did you mean fly?" in str(done.exception)
