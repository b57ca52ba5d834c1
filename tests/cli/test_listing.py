"""`semspec list`: everything that can be asked for by name, with its options."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

import semspec
from semspec import draft, tasks, verify
from semspec.cli.main import app
from semspec.serve import menu
from semspec.serve.limits import Settings


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


def test_broken_packages_are_named_and_the_rest_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another package is like: one that is not there, and one whose class is not what it says."""
    points = {
        "bad": EntryPoint("bad", "nosuchmod:X", "semspec.rules"),
        "odd": EntryPoint("odd", "tests.cli.test_listing:app", "semspec.rules"),
    }
    monkeypatch.setitem(verify.REGISTRY.__dict__, "_entry_points", points)
    for arguments in ((), ("verifiers",)):
        text = " ".join(told(*arguments).split())
        assert "verifier 'bad' cannot be loaded from nosuchmod:X" in text and "verifier 'odd' cannot be loaded" in text
        assert "typical" in text
    assert "bad" not in told("tasks") and "Given as fly:window=6" in told("fly")
    assert "broken" not in told("fly", "--json")
    found = json.loads(told("--json"))
    assert set(found["broken"]) == {"bad", "odd"} and len(found["verifiers"]) > 20
    done = CliRunner().invoke(app, ["list", "bad"])
    assert "cannot be loaded from nosuchmod:X" in str(done.exception)
    names = [one["name"] for one in menu.menu(Settings())["verifiers"]]
    assert "fly" in names and "bad" not in names


def test_a_rule_with_odd_options_is_listed() -> None:
    @semspec.register_rule
    @dataclass(frozen=True)
    class Odd(semspec.Rule):
        """Odd."""

        name = "odd"
        lossless = False
        words: tuple[str, ...] = ()
        table: dict[str, int] = field(default_factory=dict)
        level: float = field(default=0.5, metadata={"choices": (0.5, 1.0)})
        cap: float | None = field(default=None, metadata={"min": 0})

        def verify(self, drafts: verify.DraftBatch) -> verify.Decisions:
            raise NotImplementedError

    try:
        assert Odd().cap is None and verify.make("odd:cap=2").cap == 2.0  # type: ignore[attr-defined]
        for wrong in ({"cap": -1}, {"cap": "1"}, {"level": None}, {"level": 0.7}, {"level": []}):
            with pytest.raises(semspec.BadRequest, match=r"odd's (cap|level) is"):
                Odd(**wrong)  # type: ignore[arg-type]
        for text in ("cap=x", "words=a", "table=a"):
            with pytest.raises(semspec.BadRequest, match=r"is 'x'; give a number$|cannot be given as text"):
                verify.make(f"odd:{text}")
        assert "0.5 or 1.0" in told("odd")
        (one,) = json.loads(told("odd", "--json"))["verifiers"]
        assert [option["default"] for option in one["options"]] == [[], {}, 0.5, None]
    finally:
        del verify.REGISTRY["odd"]


@pytest.mark.parametrize(
    ("name", "option", "allowed"),
    [
        *((name, "steps", "1, since it asks about one step at a time")
          for name in ("specreason", "confspec", "trigreason", "spec-thinking")),
        ("fly", "carry", "0 to window"),
        ("fly", "draws", "1 or 2"),
        ("cascade-rule", "alpha", "-1 to 1, 0 or more but with diff"),
        ("ngram", "longest", "1 to 32"),
        ("ngram", "shortest", "1 to longest"),
        ("model", "tree", "0 to 63"),
        ("pocket", "split", "train, test, templates or probe"),
        ("pocket", "steps", "0, 3, 4, 5, 6, 7, 8, 9 or 10"),
        ("gsm8k", "shots", "0 or more"),
        ("mgsm", "style", "own or harness"),
        ("jsonl", "match", "nothing, exact, number, contains, math or choice"),
        ("niah", "length", "256 or more"),
    ],
)  # fmt: skip
def test_limits_are_those_that_hold(name: str, option: str, allowed: str) -> None:
    (ones,) = json.loads(told(name, "--json")).values()
    assert {o["name"]: o["allowed"] for o in ones[0]["options"]}[option] == allowed


def test_a_draw_and_a_half_is_none() -> None:
    fly = verify.REGISTRY["fly"]
    assert [fly(draws=n).draws for n in (1, 2)] == [1, 2]  # type: ignore[call-arg,attr-defined]
    for wrong in (1.5, "1", None, [], 3):
        with pytest.raises(semspec.BadRequest, match="fly's draws is"):
            fly(draws=wrong)  # type: ignore[call-arg]
