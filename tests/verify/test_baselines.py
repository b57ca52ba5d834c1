"""The baselines of SemanticSpec's tables, against their released rules in plain Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import semspec
from semspec.errors import BadRequest
from semspec.sampling.noise import ACCEPT, TARGET, stream, uniform
from semspec.types import Sampling
from semspec.verify import make
from semspec.verify.spec_thinking import SpecThinking
from semspec.verify.specreason import REPLY, SpecReason
from tests.verify.binding import RuleResources
from tests.verify.build import One, build, random_one
from tests.verify.test_fly import draw, softmax


def token_baseline(one: One) -> tuple[int, int]:
    """In the target's top 2, or u < min(1, p / q) with the target's plain probability; its best token in place of a
    rejected one, a draw after the whole draft."""
    assert one.draft is not None
    for j, token in enumerate(one.ids):
        row = one.target[j]
        ranked = sorted(range(len(row)), key=lambda v: -row[v])
        if token in ranked[:2]:
            continue
        p, q = softmax(row)[token], softmax(one.draft[j])[token]
        u = uniform(*(torch.tensor(x) for x in (one.sampling.seed, one.position + j, stream(ACCEPT, one.round)))).item()
        if not u < min(1.0, p / q):
            return j, ranked[0]
    return len(one.ids), draw(one, len(one.ids), TARGET)


@pytest.mark.parametrize("heat", [0.6, 1.0])
def test_the_token_baseline_is_the_released_one(heat: float) -> None:
    ones = [random_one(seed, 1 + seed % 20, Sampling(heat)) for seed in range(500)]
    decisions = make("top-or-ratio").verify(build(*ones))
    found = list(zip(decisions.accepted.tolist(), decisions.next.tolist(), strict=True))
    assert found == [token_baseline(one) for one in ones]
    assert len({accepted for accepted, _ in found}) > 5


def test_its_drafts_have_20_tokens_and_are_sampled() -> None:
    rule = make("top-or-ratio")
    assert rule.default_draft_tokens() == 20
    assert rule.request(20, Sampling(0.6), 0).sampling == Sampling(0.6)
    with pytest.raises(BadRequest, match="top is 0"):
        make("top-or-ratio:top=0")
    one = replace(random_one(3, 4, Sampling(0.6)), ids=[5, 5, 5, 5])
    everything = make("top-or-ratio:top=6").verify(build(one))
    assert everything.accepted.tolist() == [4]


def marks(rule: SpecReason, answer: list[float]) -> float:
    return rule._score(torch.tensor([answer])).item()


def published_score(answer: list[float], how: str) -> float:
    """The token the target generates, 0 if it is no digit; or the mean of the digits among its ten likeliest."""
    ranked = sorted(range(len(answer)), key=lambda v: -answer[v])
    digits = {ord(str(d)) % 50: d for d in range(10)}
    if how == "greedy":
        return digits.get(ranked[0], 0)
    p = {digits[v]: softmax(answer)[v] for v in ranked[:10] if v in digits}
    return sum(d * weight for d, weight in p.items()) / sum(p.values()) if p else 0.0


@pytest.mark.parametrize("how", ["greedy", "mean"])
def test_specreasons_marks_are_the_published_ones(how: str) -> None:
    rule = SpecReason(score=how).bind(RuleResources())
    assert isinstance(rule, SpecReason)
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(300):
        answer = (torch.randn(50, generator=random) * 2).tolist()
        assert marks(rule, answer) == pytest.approx(published_score(answer, how), abs=1e-4)
        found.append(published_score(answer, how))
    assert 0 in found and max(found) > 6, "digits and other tokens"


def test_the_published_set_up_of_specreason() -> None:
    rule = make("specreason:paper=true")
    assert isinstance(rule, SpecReason)
    assert (rule.threshold, rule.form, rule.score, rule.lead, rule.max_step_tokens) == (7, "chat", "greedy", 0, 512)
    bound = rule.bind(RuleResources())
    assert isinstance(bound, SpecReason) and bound.tokens[0] == 7, "the question is a turn of its own"
    assert bound.tokens[-len(REPLY) :] == tuple(ord(c) % 50 for c in REPLY), "and the target's reply is begun for it"


def test_a_question_of_your_own_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "question.txt").write_text("How, well?\n")
    for form in ("inline", "chat"):
        bound = SpecReason(form=form, prompt=str(tmp_path / "question.txt")).bind(RuleResources())
        wanted = [ord(c) % 50 for c in "How, well?"]
        assert isinstance(bound, SpecReason)
        found = list(bound.tokens)
        assert found == wanted if form == "inline" else found[1 : 1 + len(wanted)] == wanted
    with pytest.raises(BadRequest, match="prompt cannot be read"):
        SpecReason(prompt=str(tmp_path / "none")).bind(RuleResources())
    for spec in ("specreason:form=letter", "specreason:score=stars"):
        with pytest.raises(BadRequest, match="; give"):
            make(spec)


def test_the_next_turn_is_the_chat_templates(pair: semspec.Pair) -> None:
    resources = pair.resources
    text = resources.text_of(resources.next_turn("How good?"))
    if not resources.tokenizer.chat_template:
        assert text == "\n\nHow good?\n\n"
        turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        resources.tokenizer.chat_template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
        try:
            text = resources.text_of(resources.next_turn("How good?"))
        finally:
            resources.tokenizer.chat_template = None
    assert "How good?" in text and not text.startswith("<user>") and "answer-so-far" not in text


def test_words_are_found_in_tokens(pair: semspec.Pair) -> None:
    found = pair.resources.tokens_with("a").nonzero()[:, 0].tolist()
    texts = [pair.tokenizer.decode([i]).lower() for i in range(pair.target.vocab_size)]
    assert found == [i for i, text in enumerate(texts) if "a" in text] and found


def test_a_vocabulary_is_spelled_out_once(pair: semspec.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer of a rule with cues asks for the tokens of all of them."""
    first = pair.resources.tokens_with("b")
    spelled: list[object] = []
    monkeypatch.setattr(pair.tokenizer, "batch_decode", lambda *a, **k: spelled.append(a) or [])
    assert torch.equal(pair.resources.tokens_with("b"), first) and pair.resources.tokens_with("c").any()
    first.fill_(True)  # a rule's own
    assert not pair.resources.tokens_with("b").all() and not spelled


class Words(RuleResources):
    """Tokens that are words."""

    vocabulary = ("so", "Wait", " hold", " on", " check", "ing", "final", " answer", "alternatively", ".")

    def tokens_with(self, word: str) -> torch.Tensor:
        return torch.tensor([word in text.lower() for text in self.vocabulary])


def cued(texts: str, **options: int) -> bool:
    """Whether a step of these words is taken over by the target."""
    rule = SpecThinking(**options).bind(Words())  # type: ignore[arg-type]
    ids = [next(i for i, text in enumerate(Words.vocabulary) if text.strip().lower() == word) for word in texts.split()]
    rows = [[0.0] * 10 for _ in range(len(ids) + 1)]
    both = build(One(rows, ids), One(rows + [[0.0] * 10] * 4, [0] * (len(ids) + 4)))
    accepted = rule.verify(both).accepted.tolist()
    assert accepted[1] == len(ids) + 4, "a step without cues"
    return accepted[0] == 0


def test_spec_thinking_looks_for_cues_at_the_start_of_a_step() -> None:
    assert cued("so wait .") and cued("hold on .") and cued("so check ing") and cued("final answer")
    assert not cued("so hold .") and not cued("hold . on") and not cued("final . answer so")
    assert not cued("so so so wait", look=3) and cued("so so so wait", look=4)


def test_spec_thinking_prolongs_where_the_target_checks() -> None:
    rule = SpecThinking().bind(Words())
    assert isinstance(rule, SpecThinking)
    assert (rule.takeover_tokens(), rule.prolong([0, 4, 5]), rule.prolong([0, 1, 9])) == (20, 125, 0)
    for spec in ("spec-thinking:look=0", "spec-thinking:takeover=0", "spec-thinking:recheck=-1"):
        with pytest.raises(BadRequest, match="or more"):
            make(spec)
