"""Several candidates for a step with the shipped models: who refuses them, and a draft with another tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

import semspec
from semspec.errors import BadRequest
from semspec.model.runner import ModelRunner

QUESTION = "Laura fills 6 boxes with a dozen beads each. Mila has 9 bags of 3 beads. How many do they have together?"
PROMPT = [{"role": "user", "content": QUESTION}]


@pytest.mark.parametrize("rule", ["accept-all-steps:lead=0", "random-step:rate=0.5,lead=0", "likely-step:sample=true"])
def test_a_draft_with_another_tokenizer_samples_candidates(rule: str) -> None:
    pair = semspec.load("pocket", draft="pocket-other-draft", device="cpu", slots=3, context=512)
    several = f"{rule},candidates=3"
    with pytest.raises(BadRequest, match="another tokenizer has one candidate"):
        pair.generate(PROMPT, verifier=several)
    asked: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 90}
    together = pair.generate([PROMPT] * 3, verifier=several, seed=5, **asked)
    alone = pair.generate(PROMPT, verifier=several, seed=5, **asked)
    assert together[0].tokens == alone.tokens and alone.stats.candidates
    assert pair.target.free == 3, "every slot was given back"


def test_pairs_that_have_one_candidate_refuse_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = semspec.load("pocket", device="cpu", slots=1, context=512)
    with pytest.raises(BadRequest, match="another tokenizer has one candidate"):
        semspec.load("pocket", draft="pocket-other-draft", device="cpu").generate(
            PROMPT, verifier="semantic+:candidates=2", temperature=0.7
        )
    monkeypatch.setattr(ModelRunner, "trees", False)
    with pytest.raises(BadRequest, match="cannot read several candidates; leave out candidates"):
        pair.generate(PROMPT, verifier="likely-step:candidates=2")


def test_a_cascade_writes_the_same_candidates() -> None:
    pair = semspec.load("pocket", device="cpu", slots=2, context=512)
    asked: dict[str, Any] = {"verifier": "likely-step:candidates=3,threshold=-0.3", "max_new_tokens": 80}
    one, other = (pair.generate(PROMPT, drafter=drafter, **asked) for drafter in ("model", "cascade"))
    assert one.tokens == other.tokens and one.stats.candidates == other.stats.candidates != {}
