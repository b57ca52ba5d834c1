"""A pair whose models have different tokenizers, from end to end: whatever works with one tokenizer works with two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import semspec
from recipes.pocket.rename import rename
from semspec import BadRequest, ModelError, Options
from semspec.pair import prepare
from semspec.pair.session import Session
from semspec.pocket import problem
from semspec.pocket.shipped import PROBES, SHIPPED
from tests.checkpoints import CHAT, edit_config, make_model, make_tokenizer, save
from tests.text.tokenizers_of_all_kinds import byte_level, letters, sentencepiece, with_markers

PROMPTS = ["the quick brown", "one two three four one two three", "naïve 日本", "q"]
LENGTH = 32
LONG = {"max_new_tokens": LENGTH, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> dict[str, Path]:
    """The target, and drafts with tokenizers of other kinds, one of them with the same plain vocabulary."""
    made = {"target": target_folder}
    near = with_markers(make_tokenizer(("<end>",)), "<more>")
    for name, tokenizer in {"bytes": byte_level(380), "pieces": sentencepiece("first"), "near": near}.items():
        tokenizer.chat_template = CHAT.replace("assistant: ", "bot> ")
        model = make_model("llama3.1", seed=3, vocab_size=len(tokenizer) + 7, eos_token_id=tokenizer.eos_token_id)
        made[name] = save(model, tmp_path_factory.mktemp(name), tokenizer)
    return made


@pytest.fixture(scope="module", params=["bytes", "pieces", "near"])
def pair(folders: dict[str, Path], request: pytest.FixtureRequest) -> semspec.Pair:
    return semspec.load(folders["target"], folders[request.param], device="cpu")


def test_the_text_is_the_targets_for_every_lossless_rule(pair: semspec.Pair) -> None:
    for temperature in (0.0, 0.9):
        given = LONG | {"temperature": temperature, "seed": 3}
        expected = [r.tokens for r in pair.generate(PROMPTS, verifier="none", **given)]
        for drafter, k in (("model", 5), ("model", 1), ("cascade", 4), ("ngram", 4)):
            found = pair.generate(PROMPTS, drafter=drafter, num_draft_tokens=k, **given)
            assert [r.tokens for r in found] == expected
    greedy = [r.tokens for r in pair.generate(PROMPTS, verifier="none", **LONG)]
    for verifier in ("sampling", "block"):
        assert [r.tokens for r in pair.generate(PROMPTS, verifier=verifier, num_draft_tokens=4, **LONG)] == greedy
    unsure = pair.generate(PROMPTS, num_draft_tokens=12, draft_min_p=0.2, **LONG)
    assert [r.tokens for r in unsure] == greedy and sum(r.stats.drafted for r in unsure)


def test_options_that_change_logits_hold_in_the_targets_tokens(pair: semspec.Pair) -> None:
    """The draft knows nothing of them in its own tokens: what it drafts is cut, or rejected by the rule."""
    pattern = "[a-z ]{3,8}(fox|dog)"
    wishes: list[dict[str, Any]] = [
        {"presence_penalty": 1.0, "repetition_penalty": 1.2, "bad_words": ["the"], "max_new_tokens": 10},
        {"structured_outputs": {"regex": pattern}},
    ]
    for wish in wishes:
        given = wish | {"temperature": 1.0, "seed": 3}
        alone = [r.tokens for r in pair.generate(PROMPTS[:2], verifier="none", **given)]
        assert [r.tokens for r in pair.generate(PROMPTS[:2], num_draft_tokens=4, **given)] == alone
    for verifier in ("sampling", "accept-all-steps"):
        for result in pair.generate(PROMPTS[:2], verifier=verifier, **given):
            assert re.fullmatch(pattern, result.text), (verifier, result.text)


def test_a_batch_equals_single_runs(pair: semspec.Pair) -> None:
    options = [
        Options(num_draft_tokens=3, **LONG),
        Options(verifier="sampling", temperature=1.0, seed=5, num_draft_tokens=4, **LONG),
        Options(verifier="block", temperature=0.7, top_p=0.9, seed=6, num_draft_tokens=4, **LONG),
        Options(verifier="fly:window=2", num_draft_tokens=8, **LONG),
    ]
    batch = pair.generate(PROMPTS, options)
    for prompt, option, result in zip(PROMPTS, options, batch, strict=True):
        single = pair.generate(prompt, option)
        assert single.tokens == result.tokens and single.stats.histogram == result.stats.histogram
    assert pair.draft is not None and pair.draft.free == pair.target.free == 8


def test_streams_stop_strings_and_logprobs(pair: semspec.Pair) -> None:
    whole = pair.generate(PROMPTS[0], verifier="none", logprobs=2, **LONG)
    found = list(pair.stream(PROMPTS[0], logprobs=2, num_draft_tokens=4, **LONG))
    assert "".join(event.text for event in found) == whole.text
    own = [lp for event in found for lp in event.logprobs or []]
    assert [lp.token for lp in own] == whole.tokens
    assert all(abs(a.logprob - b.logprob) < 1e-3 for a, b in zip(own, whole.logprobs, strict=True))
    stop = whole.text[10:13]
    ended = pair.generate(PROMPTS[0], stop=stop, num_draft_tokens=4, **LONG)
    assert ended.finish_reason == "stop" and ended.text == whole.text[: whole.text.index(stop)]


def test_a_session_reads_nothing_again(pair: semspec.Pair) -> None:
    with Session(pair) as session:
        for question in ("the sky", "one two", "blue"):
            answer = "".join(event.text for event in session.ask(question, num_draft_tokens=4, **LONG))
            alone = pair.generate(session.messages[:-1], verifier="none", **LONG)
            assert answer == alone.text
        assert session.reused > 8
        draft = pair.caches.draft
        assert draft is not None and draft.hits > 8, "the draft's cache is found again, too"


def test_steps_are_text(pair: semspec.Pair) -> None:
    for verifier in ("accept-no-step", "random-step:rate=0.5", "accept-all-steps:steps=3,ahead=0", "specreason"):
        found = pair.generate(PROMPTS, verifier=verifier, temperature=0.8, seed=1, **LONG)
        assert all(len(r.tokens) == LENGTH for r in found)
    expected = pair.generate(PROMPTS, verifier="none", **LONG)
    found = pair.generate(PROMPTS, verifier="accept-no-step:rewrite=sampling", **LONG)
    assert [r.tokens for r in found] == [r.tokens for r in expected]


def test_the_draft_alone_speaks_its_own_tokens(pair: semspec.Pair) -> None:
    alone = pair.draft_alone()
    assert alone.target is pair.draft and alone.tokenizer is not pair.tokenizer
    assert alone.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True).text


def test_ids_are_exchanged_where_only_special_tokens_differ(folders: dict[str, Path]) -> None:
    pair = semspec.load(folders["target"], folders["near"], device="cpu")
    assert pair.exchange is not None and pair.exchange.kind == "ids"
    twin = semspec.load(folders["target"], folders["target"], device="cpu")
    assert twin.exchange is None


def test_the_same_draft_with_other_ids_drafts_the_same(tmp_path: Path) -> None:
    """The pocket draft under other names: what it proposes is the same text, so as much is accepted, round by round."""
    other = semspec.load("pocket", rename(SHIPPED["pocket-draft"], tmp_path / "renamed"), device="cpu")
    assert other.exchange is not None and other.exchange.kind == "text" and other.exchange.shared_share > 0.99
    pair, chats = semspec.load("pocket", device="cpu"), [[{"role": "user", "content": problem(i).text}] for i in (1, 2)]
    probes = str(PROBES)
    for given in (
        {}, {"verifier": "accept-all-steps"}, {"verifier": f"semantic+:probes={probes}"}, {"drafter": "cascade"},
        {"verifier": "sampling", "temperature": 0.8, "seed": 2},
    ):  # fmt: skip
        found, same = (each.generate(chats, max_new_tokens=60, num_draft_tokens=6, **given) for each in (other, pair))
        sampled = given.get("verifier") == "sampling"  # the race for a token depends on its id
        if not sampled:
            assert [r.tokens for r in found] == [r.tokens for r in same]
            assert [r.stats.histogram for r in found] == [r.stats.histogram for r in same]
        assert min(r.stats.tau for r in found) > 1.2


def test_the_shipped_draft_with_another_tokenizer() -> None:
    """Words in pieces, line ends apart: the text is the target's, and a good part of it comes from the draft."""
    pair = semspec.load("pocket", "pocket-other-draft", device="cpu")
    assert pair.exchange is not None and pair.exchange.kind == "text"
    chats = [[{"role": "user", "content": problem(i, split="test").text}] for i in range(4)]
    expected = pair.generate(chats, verifier="none", max_new_tokens=80)
    found = pair.generate(chats, verifier="exact", num_draft_tokens=8, max_new_tokens=80)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert sum(r.stats.tau for r in found) / 4 > 3
    steps = pair.generate(chats, verifier="semantic+", max_new_tokens=80)  # the target's own judge
    assert sum(r.stats.step_outcomes["accepted"] for r in steps) > 0
    with pytest.raises(BadRequest, match="the draft probe that came with this pair was not made for the model it has"):
        pair.generate(chats[0], verifier="semantic")


def test_rules_say_what_they_need(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = semspec.load(folders["target"], folders["bytes"], device="cpu")
    monkeypatch.setattr(prepare, "MIN_SHARED", 1.1)
    with pytest.raises(BadRequest, match=r"'sampling' compares probabilities .* share only \d+ .*choose a verifier"):
        pair.generate(PROMPTS[0], verifier="sampling")
    with pytest.raises(BadRequest, match="'block' compares"):
        pair.generate(PROMPTS[0], verifier="accept-no-step:rewrite=block")
    assert pair.generate(PROMPTS[0], max_new_tokens=5).tokens
    assert pair.generate(PROMPTS[0], verifier="sampling", drafter="ngram", max_new_tokens=5).tokens


def test_what_cannot_work_is_refused_before_loading(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded: list[str] = []
    digits = save(make_model("llama3", vocab_size=16), tmp_path / "digits", letters("0123456789"))
    with pytest.raises(ModelError, match="the tokenizers have too little in common"):
        semspec.load(folders["target"], digits, device="cpu", report=loaded.append)
    bare = save(make_model("llama3"), tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="bare has weights but no tokenizer"):
        semspec.load(folders["target"], bare, device="cpu", report=loaded.append)
    pairs = save(make_model("llama3"), tmp_path / "t5")
    edit_config(pairs, model_type="t5", architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True)
    with pytest.raises(ModelError, match="'t5' is an encoder-decoder"):
        semspec.load(folders["target"], pairs, device="cpu", report=loaded.append)
    assert not loaded
