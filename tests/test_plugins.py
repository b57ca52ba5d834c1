"""Rules, tasks, drafters and clusterers of one's own: registered by hand, and from a package made on the spot."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import semspec
from semspec import draft, tasks, verify
from semspec.probe_fit import cluster
from semspec.registry import Registry
from semspec.verify import Decisions, DraftBatch

MODULE = """
from dataclasses import dataclass

import torch

from semspec.draft import DrafterKind, NgramDrafter
from semspec.probe_fit.cluster import Canonical
from semspec.tasks import Problem, Task
from semspec.verify import Decisions, DraftBatch, Rule


@dataclass(frozen=True)
class Never(Rule):
    name = "never"
    lossless = True
    stubborn: int = 1

    def verify(self, drafts: DraftBatch) -> Decisions:
        return Decisions(torch.zeros_like(drafts.counts), drafts.target_choice()[:, 0])


@dataclass(frozen=True)
class Greetings(Task):
    name = "greetings"
    scored = False
    max_new_tokens = 4

    def problems(self, n, seed):
        return [Problem(f"greetings/{i}", "hello " * (i + 1), "") for i in range(n or 2)]

    def score(self, problem, text):
        return None


@dataclass(frozen=True)
class Short(DrafterKind):
    name = "short"

    def build(self, draft, early_exit):
        return NgramDrafter(longest=1)


class Mine(Canonical):
    name = "mine"


class NoRule:
    name = "no-rule"
"""
ENTRY_POINTS = """
[semspec.rules]
never = my_plugin:Never
no-rule = my_plugin:NoRule
missing = my_plugin:Nothing

[semspec.tasks]
greetings = my_plugin:Greetings

[semspec.drafters]
short = my_plugin:Short

[semspec.clusterers]
mine = my_plugin:Mine
"""
SCRIPT = """
import semspec
from semspec import draft, tasks, verify
from semspec.cli import arguments
from semspec.errors import BadRequest
from semspec.probe_fit import cluster

assert "never" in verify.REGISTRY and "never" in semspec.verifiers.REGISTRY
assert verify.make("never:stubborn=3").stubborn == 3
pair = semspec.load("pocket", device="cpu", slots=1, context=128)
ask = dict(max_new_tokens=12, ignore_eos=True)
text = pair.generate("Mia has 3 pens.", verifier="none", **ask).text
answer = pair.generate("Mia has 3 pens.", verifier="never", drafter="short", **ask)
assert answer.text == text and answer.stats.drafted > 0 and answer.stats.accepted == 0 and answer.lossless
assert tasks.make("greetings").problems(2, 0)[1].prompt == "hello hello "
assert cluster.registry()["mine"].__name__ == "Mine"
assert "never" in arguments.verifiers() and "greetings" in arguments.tasks() and "short" in arguments.drafters()
for name, what in [("no-rule", "no subclass of Rule"), ("missing", "cannot be loaded from my_plugin:Nothing")]:
    try:
        verify.make(name)
    except BadRequest as error:
        assert what in str(error), error
    else:
        raise AssertionError(name)
print("ok")
"""


def test_a_package_brings_its_own(tmp_path: Path) -> None:
    (tmp_path / "my_plugin.py").write_text(MODULE)
    info = tmp_path / "my_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "try.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "try.py"], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ok\n", done.stderr


def test_rules_tasks_drafters_and_clusterers_are_registered_by_hand() -> None:
    @semspec.register_rule
    @dataclass(frozen=True)
    class Half(semspec.Rule):
        name = "half"
        lossless = False

        def verify(self, drafts: DraftBatch) -> Decisions:
            choice = drafts.target_choice()
            accepted = drafts.counts // 2
            return Decisions(accepted, choice.gather(1, accepted[:, None])[:, 0])

    try:
        pair = semspec.load("pocket", device="cpu", slots=1, context=128)
        result = pair.generate("Mia has 3 pens.", verifier="half", max_new_tokens=20, ignore_eos=True)
        assert all(event.accepted == event.drafted // 2 for event in result.events[:-1]) and not result.lossless
    finally:
        del verify.REGISTRY["half"]
    assert semspec.register_task == tasks.register and semspec.register_drafter == draft.register
    assert semspec.register_clusterer is cluster.register
    with pytest.warns(DeprecationWarning, match="register_rule"):
        assert semspec.register == semspec.register_rule


@pytest.mark.parametrize("wrong", [object, int, type("Nameless", (verify.Rule,), {}), "exact"])
def test_what_is_no_rule_is_refused(wrong: object) -> None:
    with pytest.raises(semspec.BadRequest, match="is a subclass of Rule with a `name`"):
        verify.register(wrong)  # type: ignore[arg-type]


def test_built_in_names_are_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry[verify.Rule] = Registry("verifier", "semspec.rules", verify.Rule)  # type: ignore[type-abstract]
    registry.register(verify.REGISTRY["exact"])
    registry.__dict__["_entry_points"] = {"exact": None, "other": None}
    assert registry["exact"] is verify.REGISTRY["exact"] and sorted(registry) == ["exact", "other"]


def test_a_name_that_is_taken_is_refused() -> None:
    @dataclass(frozen=True)
    class Exacter(semspec.Rule):
        name = "exact"
        lossless = False

        def verify(self, drafts: DraftBatch) -> Decisions:
            raise NotImplementedError

    with pytest.raises(semspec.BadRequest, match="there is a verifier 'exact' already"):
        semspec.register_rule(Exacter)
    assert verify.make("exact").lossless
