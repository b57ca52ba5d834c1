"""Rules by name: valid requests, and the errors of mistyped ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from semspec import verify
from semspec.errors import BadRequest
from semspec.types import Sampling
from semspec.verify import REGISTRY, Decisions, DraftBatch, Rule, make, register
from semspec.verify.batch import FORMER
from semspec.verify.block import Block
from semspec.verify.exact import Exact
from semspec.verify.none import NoSpeculation
from semspec.verify.sampling import SpeculativeSampling
from tests.verify.build import One, build, hot, outcomes


@dataclass(frozen=True)
class Lenient(Rule):
    """Accepts a token that is among the target's best few, for a test."""

    name = "lenient"
    lossless = False

    best_few: int = 2
    margin: float = 0.5
    strict: bool = False
    flavour: str = "plain"

    def verify(self, drafts: DraftBatch) -> Decisions:
        ranks = drafts.target_logits.argsort(-1, descending=True)[drafts.rows[:, :-1], : self.best_few]
        ok = (ranks == drafts.ids[..., None]).any(-1)
        count = (ok & drafts.exists).long().cumprod(-1).sum(-1)
        relaxed = drafts.ids != drafts.target_choice()[:, :-1]
        return Decisions(count, drafts.target_choice().gather(1, count[:, None])[:, 0], relaxed)


@pytest.fixture(autouse=True)
def lenient() -> Iterator[None]:
    register(Lenient)
    yield
    del verify.REGISTRY["lenient"]


def refusal(spec: str) -> str:
    with pytest.raises(BadRequest) as error:
        make(spec)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "kind"), [("none", NoSpeculation), ("exact", Exact), ("sampling", SpeculativeSampling), ("block", Block)]
)
def test_the_lossless_rules_are_there_by_name(name: str, kind: type[Rule]) -> None:
    rule = make(name)
    assert type(rule) is kind and rule.name == name and rule.lossless and rule.unit == "token"
    assert rule == make(name), "equal rules are verified together"


def test_every_registered_rule_declares_itself() -> None:
    for name, kind in verify.REGISTRY.items():
        rule = make(name)
        assert kind.name == name and isinstance(rule.lossless, bool) and rule.unit in ("token", "step")
        assert rule.layout([1, 2])[:2] == [1, 2]
        hash(rule)


def test_only_rules_that_compare_distributions_ask_for_draft_logits() -> None:
    asking = {name for name, rule in REGISTRY.items() if rule.needs_draft_logits}
    assert asking == {"sampling", "block", "traversal", "ensemble", "cascade-rule", "adaptive", "top-or-ratio", "ears"}


def test_only_none_does_without_drafts() -> None:
    assert [name for name in ("none", "exact", "sampling", "block") if not make(name).speculates] == ["none"]


def test_a_rule_object_is_taken_as_it_is() -> None:
    rule = Lenient(best_few=7)
    assert make(rule) is rule


def test_a_registered_rule_has_its_defaults() -> None:
    assert make("lenient") == Lenient(2, 0.5, False, "plain")
    assert make("lenient:") == make("lenient")


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("lenient:best_few=3", Lenient(best_few=3)),
        ("lenient:best-few=3,margin=0.25", Lenient(best_few=3, margin=0.25)),
        ("lenient: best_few = 4 , strict = yes ", Lenient(best_few=4, strict=True)),
        ("lenient:strict=True,flavour=sour", Lenient(strict=True, flavour="sour")),
        ("lenient:strict=0,margin=1", Lenient(strict=False, margin=1.0)),
    ],
)
def test_options_are_read_as_the_type_of_their_default(spec: str, rule: Rule) -> None:
    made = make(spec)
    assert made == rule
    assert type(made.margin) is float and type(made.strict) is bool  # type: ignore[attr-defined]


def test_an_unknown_name_is_told_the_names() -> None:
    known = f"the verifiers are: {', '.join(sorted(REGISTRY))}"
    assert refusal("exakt") == f"there is no verifier 'exakt'; {known}; did you mean exact?"
    assert refusal("qqqqqq") == f"there is no verifier 'qqqqqq'; {known}"
    assert "there is no verifier ''" in refusal("")
    assert "a verifier is given by name, such as 'none'; this is 7" in refusal(7)  # type: ignore[arg-type]
    assert "no option 'k'; give the draft length beside it: -k 6, or num_draft_tokens=6" in refusal("exact:k=6")
    assert "give one of them, as 'fly'" in refusal(["fly", "exact"])  # type: ignore[arg-type]


def test_an_unknown_option_is_told_the_options() -> None:
    assert refusal("lenient:bestfew=3") == (
        "verifier 'lenient' has no option 'bestfew'; its options are: best_few, margin, strict, flavour; "
        "did you mean best_few?"
    )
    assert refusal("block:window=3") == "verifier 'block' has no option 'window'; its options are: none"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lenient:best_few=two", "option 'best_few' of verifier 'lenient' is 'two'; give a whole number, e.g. 2"),
        ("lenient:best_few=2.5", "is '2.5'; give a whole number, e.g. 2"),
        ("lenient:margin=wide", "is 'wide'; give a number, e.g. 0.5"),
        ("lenient:strict=maybe", "is 'maybe'; give true or false, e.g. False"),
        ("lenient:best_few", "option 'best_few' of verifier 'lenient' is ''"),
        ("lenient:strict=", "option 'strict' of verifier 'lenient' is ''"),
    ],
)
def test_a_bad_value_is_told_what_to_give(spec: str, message: str) -> None:
    assert message in refusal(spec)


def test_a_rule_of_ones_own_is_used_like_any_other() -> None:
    rows = [hot(1), [0.0, 1.0, 2.0, 0.0, 0.0, 0.0], hot(3)]
    assert outcomes(make("lenient"), One(rows, [1, 1])) == [(2, 3)]
    assert outcomes(make("lenient:best_few=1"), One(rows, [1, 1])) == [(1, 2)]


def test_options_cannot_be_changed_afterwards() -> None:
    rule = make("lenient")
    with pytest.raises(AttributeError):
        rule.margin = 0.9  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", ["semantic+:{}=0.7", "specreason:{}=5"])
def test_a_former_name_of_an_option_is_taken_with_a_warning(spec: str) -> None:
    with pytest.warns(DeprecationWarning, match="'least' of verifier .* is now called 'threshold'"):
        old = make(spec.format("least"))
    assert old == make(spec.format("threshold"))
    with pytest.warns(DeprecationWarning, match="'bonus' of verifier .* is now called 'bonus_temperature'"):
        assert make("random-step:bonus=0.5") == make("random-step:bonus_temperature=0.5")
    with pytest.warns(DeprecationWarning, match="threshold"), pytest.raises(BadRequest, match="given twice"):
        make(f"{spec.format('least')},threshold=1")


def test_rules_written_for_the_last_release_find_what_they_call() -> None:
    drafts = build(One([[0.0, 1.0, 2.0]] * 2, [1], [[0.0, 1.0, 0.5]], Sampling(0.7)))
    for name, now in FORMER.items():
        with pytest.warns(DeprecationWarning, match=f"{name} is now {now}"):
            old = getattr(drafts, name)
        assert old is getattr(drafts, now) or torch.equal(old(), getattr(drafts, now)())
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        drafts.nothing  # noqa: B018
