"""Real (tiny) checkpoints from end to end: batches, options, stop strings, streams, cancellation and refusals."""

from __future__ import annotations

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import semspec
from semspec import BadRequest, ModelError, Options, verify
from semspec.model.wrapper import unwrap
from semspec.verify import Rule
from semspec.verify.exact import Exact
from tests.checkpoints import edit_config, make_model, make_tokenizer, save

PROMPT = "the quick brown"


def reference(folder: Path, prompt: str, n: int) -> list[int]:
    """transformers' own greedy text."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, ids["input_ids"].shape[1] :].tolist()


def test_512_tokens_through_the_loop_are_those_of_transformers(pair: semspec.Pair, target_folder: Path):
    expected = reference(target_folder, PROMPT, 512)
    for options in (Options(verifier="none"), Options(num_draft_tokens=7), Options(drafter="cascade")):
        assert pair.generate(PROMPT, options, max_new_tokens=512, ignore_eos=True).tokens == expected


@pytest.mark.parametrize("drafter", ["model", "ngram", "cascade"])
def test_exact_equals_none_for_a_batch_of_prompts_and_any_draft_length(pair: semspec.Pair, drafter: str):
    prompts = ["the lazy dog", "one two three four one two three", "light scatters", "q", "sky sky sky sky sky"]
    common = {"max_new_tokens": 40, "ignore_eos": True}
    expected = [r.tokens for r in pair.generate(prompts, verifier="none", **common)]
    for k in (1, 2, 5, 16):
        drafted = pair.generate(prompts, verifier="exact", drafter=drafter, num_draft_tokens=k, **common)
        assert [r.tokens for r in drafted] == expected


@pytest.mark.parametrize("drafter", ["model", "ngram", "cascade"])
def test_adaptive_draft_lengths_change_no_text(pair: semspec.Pair, drafter: str):
    prompts, common = ["the lazy dog", "one two three four one two", "q"], {"max_new_tokens": 80, "ignore_eos": True}
    for temperature in (0.0, 0.8):
        given = common | {"temperature": temperature, "seed": 4}
        expected = [r.tokens for r in pair.generate(prompts, verifier="none", **given)]
        for _ in range(2):  # the second time with the estimates of the first, which depend on the clock
            moving = pair.generate(prompts, drafter=drafter, num_draft_tokens="auto", **given)
            assert [r.tokens for r in moving] == expected
    expected = [r.tokens for r in pair.generate(prompts, verifier="none", **common)]
    for verifier in ("sampling", "block"):
        for lengths in ("auto", "auto-repeatable"):
            found = pair.generate(prompts, verifier=verifier, drafter=drafter, num_draft_tokens=lengths, **common)
            assert [r.tokens for r in found] == expected
    if drafter != "ngram":
        unsure = pair.generate(prompts, drafter=drafter, num_draft_tokens=12, draft_min_p=0.3, **common)
        assert [r.tokens for r in unsure] == [r.tokens for r in pair.generate(prompts, verifier="none", **common)]
        assert len({n for r in unsure for n in r.stats.drafts}) > 2


@pytest.mark.parametrize("verifier", ["sampling", "block", "fly", "typical"])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_repeatable_draft_lengths_give_the_same_tokens_whatever_else_is_decoded(
    pair: semspec.Pair, drafter: str, verifier: str
):
    given = {"verifier": verifier, "drafter": drafter, "num_draft_tokens": "auto-repeatable", "ignore_eos": True}
    options = semspec.Options(**given, temperature=0.9, seed=4, max_new_tokens=60)
    others = [semspec.Options(verifier=v, num_draft_tokens="auto", max_new_tokens=40) for v in ("exact", verifier)]
    alone = pair.generate(PROMPT, options)
    crowded = pair.generate([PROMPT, "one two", "q", PROMPT], [options, *others, options])
    for result in (pair.generate(PROMPT, options), crowded[0], crowded[-1]):
        assert result.tokens == alone.tokens
        assert [e.drafted for e in result.events] == [e.drafted for e in alone.events]
    short = pair.generate(PROMPT, options, max_draft_tokens=2)
    assert max(e.drafted for e in short.events) <= max(2, semspec.verify.make(verifier).min_draft_tokens())


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("verifier", ["none", "exact", "sampling", "block"])
def test_greedy_text_is_that_of_transformers(pair: semspec.Pair, target_folder: Path, verifier: str, drafter: str):
    how = {"verifier": verifier, "drafter": drafter, "num_draft_tokens": 8}
    result = pair.generate(PROMPT, **how, max_new_tokens=120, ignore_eos=True)
    assert result.tokens == reference(target_folder, PROMPT, 120)
    assert result.lossless and result.finish_reason == "length" and result.stats.tokens == 120
    if verifier != "none" and drafter == "model":
        assert result.stats.tau > 1.2, "the draft fixture should be right about half of the time"


def test_the_same_model_as_its_own_draft_accepts_everything(target_folder: Path):
    pair = semspec.load(target_folder, target_folder, device="cpu")
    result = pair.generate(PROMPT, num_draft_tokens=5, max_new_tokens=60, ignore_eos=True)
    assert result.stats.accepted == result.stats.drafted and result.stats.target_passes == 10
    sampled = pair.generate(
        PROMPT, verifier="block", temperature=1.0, num_draft_tokens=5, max_new_tokens=60, ignore_eos=True, seed=1
    )
    assert sampled.stats.accepted >= 0.98 * sampled.stats.drafted


def test_a_batch_equals_single_runs_token_for_token(pair: semspec.Pair):
    options = [
        Options(verifier="exact", num_draft_tokens=3, max_new_tokens=70),
        Options(verifier="none", max_new_tokens=33, temperature=0.7, seed=5),
        Options(verifier="sampling", num_draft_tokens=8, max_new_tokens=50, temperature=1.0, top_k=20, seed=6),
        Options(verifier="block", num_draft_tokens=5, max_new_tokens=64, temperature=0.6, top_p=0.9, seed=7),
        Options(verifier="exact", drafter="ngram", num_draft_tokens=10, max_new_tokens=90, ignore_eos=True),
        Options(verifier="sampling", drafter="ngram", max_new_tokens=40, temperature=1.2, min_p=0.05, seed=8),
        Options(verifier="exact", max_new_tokens=45, temperature=0.9, seed=9),
        Options(verifier="block", max_new_tokens=1, temperature=0.9, seed=9),
        Options(verifier="exact", max_new_tokens=20),  # a ninth, which waits for a slot
    ]
    prompts = [("the sky is blue " * (1 + 5 * i)).strip() for i in range(len(options))]
    batch = pair.generate(prompts, options)
    for prompt, option, result in zip(prompts, options, batch, strict=True):
        single = pair.generate(prompt, option)
        assert single.tokens == result.tokens and single.text == result.text
        assert single.stats.histogram == result.stats.histogram
    assert pair.target.free == 8 and pair.draft is not None and pair.draft.free == 8


def test_exact_equals_none_at_any_temperature(pair: semspec.Pair):
    for seed in range(4):
        common = {"temperature": 0.8, "top_p": 0.95, "seed": seed, "max_new_tokens": 60, "ignore_eos": True}
        assert (
            pair.generate(PROMPT, verifier="exact", **common).tokens
            == pair.generate(PROMPT, verifier="none", **common).tokens
        )


def test_a_seed_repeats_an_answer_and_a_fresh_one_is_reported(pair: semspec.Pair):
    first = pair.generate(PROMPT, verifier="sampling", temperature=1.0, max_new_tokens=40)
    again = pair.generate(PROMPT, verifier="sampling", temperature=1.0, max_new_tokens=40, seed=first.seed)
    other = pair.generate(PROMPT, verifier="sampling", temperature=1.0, max_new_tokens=40)
    assert first.tokens == again.tokens and first.seed != other.seed


def test_a_stream_gives_the_same_text_as_generate(pair: semspec.Pair):
    options = Options(verifier="sampling", temperature=1.0, seed=2, max_new_tokens=60, logprobs=1)
    stream = pair.stream(PROMPT, options)
    events = list(stream)
    whole = pair.generate(PROMPT, options)
    assert "".join(e.text for e in events) == whole.text == stream.result().text
    assert [lp.token for e in events for lp in e.logprobs] == whole.tokens
    assert events[-1].finish_reason in ("stop", "length") and all(e.finish_reason is None for e in events[:-1])


def test_streams_that_are_open_together_do_not_mix(pair: semspec.Pair):
    one, two = (pair.stream(p, max_new_tokens=30, ignore_eos=True) for p in ("the lazy", "one two three"))
    texts = ["", ""]
    for n in (1, 3, 1, 2, 40, 40):  # each is read at its own speed, while its ticks move the other too
        for i, stream in enumerate((one, two)):
            texts[i] += "".join(event.text for event in islice(stream, n + 2 * i))
    for text, prompt in zip(texts, ("the lazy", "one two three"), strict=True):
        assert text == pair.generate(prompt, max_new_tokens=30, ignore_eos=True).text


@pytest.mark.parametrize("leave", ["close", "delete", "with"])
def test_leaving_a_stream_frees_its_slots(pair: semspec.Pair, leave: str):
    stream = pair.stream(PROMPT, max_new_tokens=200, ignore_eos=True)
    next(stream)
    assert pair.target.free == 7
    if leave == "close":
        stream.close()
    elif leave == "with":
        with stream:
            pass
    else:
        del stream
    assert pair.target.free == 8 and pair.draft is not None and pair.draft.free == 8


def test_an_interrupt_leaves_the_pair_usable(pair: semspec.Pair, monkeypatch: pytest.MonkeyPatch):
    before = pair.generate(PROMPT, max_new_tokens=20).tokens
    ticks = 0
    tick = pair.executor.tick

    def interrupted() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 4:
            raise KeyboardInterrupt
        tick()

    with monkeypatch.context() as patch:
        patch.setattr(pair.executor, "tick", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.generate([PROMPT, PROMPT], max_new_tokens=60, ignore_eos=True)
    assert pair.target.free == 8
    assert pair.generate(PROMPT, max_new_tokens=20).tokens == before


def test_stop_strings_and_stop_ids_end_the_answer(pair: semspec.Pair):
    free = pair.generate(PROMPT, max_new_tokens=80, ignore_eos=True)
    at = len(free.text) // 2
    needle = free.text[at : at + 3]
    cut = free.text.index(needle)
    for verifier in ("none", "exact"):
        stopped = pair.generate(PROMPT, verifier=verifier, max_new_tokens=80, ignore_eos=True, stop=needle)
        assert stopped.text == free.text[:cut] and stopped.finish_reason == "stop"
        assert stopped.stats.tokens == len(stopped.tokens) < 80
        assert stopped.tokens == free.tokens[: len(stopped.tokens)]
        by_id = pair.generate(PROMPT, verifier=verifier, max_new_tokens=80, ignore_eos=True, stop_ids=[free.tokens[5]])
        first = free.tokens.index(free.tokens[5])
        assert by_id.tokens == free.tokens[: first + 1] and by_id.finish_reason == "stop"


def test_chat_messages_go_through_the_template(pair: semspec.Pair):
    messages = [{"role": "user", "content": "why is the sky blue"}]
    chat = pair.generate(messages, max_new_tokens=10)
    text = pair.generate("user: why is the sky blue\nassistant: ", max_new_tokens=10)
    assert chat.tokens == text.tokens
    assert pair.generate([messages, messages], max_new_tokens=10)[1].tokens == chat.tokens


def test_models_that_pad_their_vocabulary_differently_work_together(target_folder: Path, tmp_path: Path):
    padded = save(make_model("llama3.1", seed=4, vocab_size=384), tmp_path / "padded")
    pair = semspec.load(target_folder, padded, device="cpu")
    for verifier in ("exact", "sampling", "block"):
        result = pair.generate(PROMPT, verifier=verifier, temperature=1.0, seed=0, max_new_tokens=30, ignore_eos=True)
        assert len(result.tokens) == 30
    reverse = semspec.load(padded, target_folder, device="cpu")
    assert max(reverse.generate(PROMPT, temperature=2.0, max_new_tokens=60, ignore_eos=True, seed=0).tokens) < 320


def test_a_draft_that_is_the_target_is_on_its_weights_whatever_the_device_is_called(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pair = semspec.load(target_folder, target_folder, device="auto", draft_device="cpu")
    assert pair.draft is not None
    target, draft = unwrap(pair.target), unwrap(pair.draft)
    assert target.transformer is draft.transformer  # type: ignore[attr-defined]


def test_a_draft_device_is_honoured(target_folder: Path, draft_folder: Path):
    pair = semspec.load(target_folder, draft_folder, device="cpu", draft_device="cpu:0")
    assert pair.draft is not None
    assert pair.draft.device == torch.device("cpu:0")
    assert pair.generate(PROMPT, max_new_tokens=10).tokens


@dataclass(frozen=True)
class Anything(Exact):
    name = "anything"
    lossless = False


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (PROMPT, {"num_draft_tokens": 0}, "num_draft_tokens is 0; give 1 or more"),
        (
            PROMPT,
            {"num_draft_tokens": "some"},
            "num_draft_tokens is 'some'; give a whole number, auto",
        ),
        (PROMPT, {"draft_min_p": 1.5}, "draft_min_p is 1.5; give a probability from 0 (off) to 1"),
        (PROMPT, {"draft_min_p": None}, "draft_min_p is None; give a number"),
        (PROMPT, {"draft_max_entropy": -1}, "draft_max_entropy is -1; give a number of nats"),
        (PROMPT, {"draft_max_entropy": 1.0, "drafter": "ngram"}, "a lookup is never unsure"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens is 0; give 1 or more"),
        (PROMPT, {"max_new_tokens": 1020}, "more than the context of 1024; ask for at most"),
        ("the " * 2000, {}, "shorten the prompt or load the model with a larger context"),
        ("", {}, "the prompt is empty"),
        (PROMPT, {"temperature": -1.0}, "temperature is -1.0; give 0 (greedy) or a positive number"),
        (PROMPT, {"top_p": 0.0}, "top_p is 0.0; give a number above 0 and at most 1"),
        (PROMPT, {"top_k": -2}, "top_k is -2; give 0 (off) or a positive number"),
        (PROMPT, {"min_p": 1.5}, "min_p is 1.5; give a number from 0 (off) to 1"),
        (PROMPT, {"seed": 2**70}, "give a whole number of at most 64 bits"),
        (
            PROMPT,
            {"verifier": "magic"},
            "there is no verifier 'magic'; the verifiers are: accept-all, accept-all-steps",
        ),
        (PROMPT, {"verifier": "exact:depth=3"}, "verifier 'exact' has no option 'depth'; its options are: couple"),
        (
            PROMPT,
            {"verifier": Anything(), "allow_lossy": False},
            "'anything' may change what the target would have written",
        ),
        (
            PROMPT,
            {"drafter": "magic"},
            "there is no drafter 'magic'; the drafters are: auto, cascade, dflash, eagle, model, mtp, ngram",
        ),
        (PROMPT, {"seed": 1.5}, "seed is 1.5; give a whole number"),
        (PROMPT, {"top_k": 10**30}, "give 0 (off) or a positive number of tokens, of at most 31 bits"),
        (PROMPT, {"temperature": True}, "temperature is True; give a number"),
        (PROMPT, {"max_draft_tokens": 10**12, "num_draft_tokens": "auto"}, "give 1 to 512"),
        (
            PROMPT,
            {"verifier": "fly:window=999999", "num_draft_tokens": "auto"},
            "give num_draft_tokens as a number",
        ),
        (PROMPT, {"top_k": 2.5}, "top_k is 2.5; give a whole number"),
        (PROMPT, {"logprobs": True}, "logprobs is True; give a whole number"),
        (PROMPT, {"temperature": "warm"}, "temperature is 'warm'; give a number"),
        (PROMPT, {"stop": None}, "stop is None; give a text or a list of texts"),
        (PROMPT, {"stop_ids": 5}, "stop_ids is 5; give a list of token ids"),
        ([[]], {}, "the chat has no messages"),
        (PROMPT, {"relax_span": "some"}, "relax_span is 'some'; give all or thinking"),
        (PROMPT, {"relax_span": "thinking"}, "needs a model that thinks between markers"),
        (PROMPT, {"loop_repeats": 1}, "loop_repeats is 1; give 0 (off) or the copies that make a loop, 2 or more"),
        (PROMPT, {"loop_repeats": None}, "loop_repeats is None; give a whole number"),
        (PROMPT, {"loop_period": 0}, "loop_period is 0; give the longest block to find, 1 to 1024 tokens"),
        (PROMPT, {"logprobs": 50}, "logprobs is 50; give 0 to 20"),
        (PROMPT, {"stop": ["x", ""]}, "a stop string is empty"),
        (PROMPT, {"colour": "red"}, "there is no option 'colour'; the options are: allow_lossy"),
        ([{"role": "user"}], {}, "a chat message needs a role and a content"),
        (7, {}, "a prompt is text, a list of chat messages, or a list of such prompts"),
        ([], {}, "a prompt is text, a list of chat messages, or a list of such prompts"),
        ([PROMPT], {"options": [Options(), Options()]}, "there are 1 prompts but 2 options"),
    ],
)
def test_bad_requests_say_what_to_do_and_start_nothing(pair: semspec.Pair, prompt, options, message: str):
    with pytest.raises(BadRequest) as refusal:
        pair.generate(prompt, **options)
    assert message in str(refusal.value)
    assert pair.target.free == 8 and not pair.executor.tasks


def test_a_stream_takes_one_prompt(pair: semspec.Pair):
    with pytest.raises(BadRequest, match="a stream answers one prompt"):
        pair.stream([PROMPT, PROMPT])
    with pytest.raises(BadRequest, match="a prompt is text"):
        pair.stream(7)  # type: ignore[arg-type]


def test_tokens_the_model_does_not_have_are_refused(tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<new{i}>" for i in range(40)])
    pair = semspec.load(save(make_model("llama3"), tmp_path / "grown", tokenizer), device="cpu")
    with pytest.raises(BadRequest, match="the model knows ids below 320"):
        pair.generate("the <new39>")
    assert pair.generate("the quick", max_new_tokens=3).tokens


def test_a_rule_that_cannot_be_compared_is_refused(pair: semspec.Pair):
    @dataclass
    class Loose(Rule):
        name = "unfrozen"
        lossless = True

        def verify(self, drafts):
            return Exact().verify(drafts)

    with pytest.raises(BadRequest, match="make it a dataclass"):
        pair.generate(PROMPT, verifier=Loose())


def test_a_stream_that_failed_raises_after_its_last_event(pair: semspec.Pair, monkeypatch: pytest.MonkeyPatch):
    stream = pair.stream(PROMPT, max_new_tokens=60, ignore_eos=True)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(pair.target, "score", lambda requests: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(MemoryError):
            pair.generate("one two", max_new_tokens=5)
    with pytest.raises(MemoryError):
        list(stream)
    assert stream.result().finish_reason == "cancelled" and pair.target.free == 8


@dataclass(frozen=True)
class Broken(Exact):
    name = "broken"

    def verify(self, drafts):
        raise RuntimeError("out of order")


def test_a_failure_in_a_batch_keeps_the_other_answers(pair: semspec.Pair):
    options = [
        Options(max_new_tokens=20),
        Options(verifier=Broken(), num_draft_tokens=4, max_new_tokens=20),
        Options(max_new_tokens=20),
    ]
    with pytest.raises(semspec.BatchFailed, match="1 of 3 prompts failed, the first with RuntimeError") as failure:
        pair.generate([PROMPT, PROMPT, "one two"], options)
    first, second, third = failure.value.results
    assert first.tokens == pair.generate(PROMPT, max_new_tokens=20).tokens and isinstance(second, RuntimeError)
    assert third.tokens == pair.generate("one two", max_new_tokens=20).tokens
    with pytest.raises(RuntimeError, match="out of order"):
        pair.generate(PROMPT, verifier=Broken(), num_draft_tokens=4)


def test_a_closed_stream_keeps_what_was_committed(pair: semspec.Pair):
    stream = pair.stream(PROMPT, max_new_tokens=60, ignore_eos=True)
    next(stream)
    assert stream.result().finish_reason is None
    pair.executor.tick()
    pair.executor.tick()
    stream.close()
    result = stream.result()
    assert len(result.tokens) == result.stats.tokens and result.finish_reason == "cancelled"


def test_a_bad_prompt_in_a_batch_starts_none_of_it(pair: semspec.Pair):
    with pytest.raises(BadRequest, match="shorten the prompt"):
        pair.generate([PROMPT, "the " * 2000])
    assert not pair.executor.tasks


def test_a_loose_rule_reports_what_it_relaxed(pair: semspec.Pair):
    strict = pair.generate(PROMPT, max_new_tokens=80, ignore_eos=True)
    never = pair.generate(PROMPT, verifier="fly:theta=9", max_new_tokens=80, ignore_eos=True)
    assert never.tokens == strict.tokens and never.stats.relaxed == 0 and not never.lossless
    loose = pair.generate(PROMPT, verifier="margin:ratio=0.2", max_new_tokens=80, ignore_eos=True)
    origins = [o for e in loose.events for o in e.origins]
    assert loose.stats.relaxed == origins.count("relaxed") > 0
    assert loose.stats.tau > strict.stats.tau and loose.tokens != strict.tokens


@pytest.mark.parametrize(
    ("loose", "strict"),
    [
        ("fly:theta=99", "exact"),
        ("topk:top=1,delta=0", "exact"),
        ("margin:ratio=1", "exact"),
        ("random:rate=0", "exact"),
        ("fly:window=0,theta=0", "accept-all"),
        ("random:rate=1", "accept-all"),
        ("threshold:single=1", "exact"),
        ("ensemble:weight=1", "exact"),
        ("cascade-rule:defer=token,alpha=0", "exact"),
        ("cascade-rule:defer=chow,alpha=1", "accept-all"),
        ("adaptive:scale=0", "exact"),
        ("reflective:alpha=0", "exact"),
    ],
)
def test_a_rule_at_its_limit_is_another_rule(pair: semspec.Pair, loose: str, strict: str):
    common = {"max_new_tokens": 60, "ignore_eos": True, "num_draft_tokens": 8}  # fly's default is longer
    assert (
        pair.generate(PROMPT, verifier=loose, **common).tokens
        == pair.generate(PROMPT, verifier=strict, **common).tokens
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_for_every_rule_a_batch_equals_single_runs_and_events_have_all_tokens(pair: semspec.Pair, temperature: float):
    names = sorted(set(semspec.verifiers.REGISTRY) - {"semantic", "semantic+", "specreason"})  # no probes, no digits
    common: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 30, "referee": lambda so_far, step: True}
    options = [Options(verifier=n, seed=i, **common) for i, n in enumerate(names)]
    prompts = [("the lazy dog " * (1 + i % 4)).strip() for i in range(len(names))]
    for prompt, option, result in zip(prompts, options, pair.generate(prompts, options), strict=True):
        assert pair.generate(prompt, option).tokens == result.tokens
        origins = [o for e in result.events for o in e.origins]
        assert len(origins) == len(result.tokens) == result.stats.tokens
        counts = (result.stats.accepted, result.stats.relaxed, result.stats.bonus)
        assert counts == (len(origins) - origins.count("target"), origins.count("relaxed"), origins.count("target"))
        assert result.lossless is (origins.count("relaxed") == 0) or not result.lossless
    assert pair.target.free == 8


@pytest.mark.parametrize("verifier", ["exact", "fly", "sampling"])
def test_a_cascade_drafts_what_its_model_drafts(pair: semspec.Pair, verifier: str):
    prompt = "one two three four one two three four one two"
    common = {"verifier": verifier, "max_new_tokens": 60, "ignore_eos": True, "num_draft_tokens": 10}
    plain, cascade = (pair.generate(prompt, drafter=d, **common) for d in ("model", "cascade"))
    assert plain.tokens == cascade.tokens and plain.stats.histogram == cascade.stats.histogram


def test_a_lossy_rule_is_labelled(pair: semspec.Pair):
    assert pair.generate(PROMPT, verifier=Anything(), max_new_tokens=5).lossless is False


def test_a_model_drafter_needs_a_draft_model(target_folder: Path):
    pair = semspec.load(target_folder, device="cpu")
    with pytest.raises(BadRequest, match="needs a draft model; load the pair with draft="):
        pair.generate(PROMPT, drafter="model")
    assert pair.generate(PROMPT, max_new_tokens=10).tokens, "without one, the drafter is ngram"


def test_a_model_without_a_chat_template_says_so(tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    pair = semspec.load(save(make_model("llama3"), tmp_path / "plain", tokenizer), device="cpu")
    with pytest.raises(BadRequest, match="no chat template; give the prompt as text"):
        pair.generate([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "rwkv"}, "'rwkv' takes no cache of transformers, so that a rejected draft cannot be undone"),
        ({"model_type": "vit"}, "'vit' is no causal language model that transformers knows"),
    ],
)
def test_checkpoints_we_cannot_run_are_refused_by_name(tmp_path: Path, changes: dict, message: str):
    folder = save(make_model("llama3"), tmp_path / "odd")
    edit_config(folder, **changes)
    with pytest.raises(ModelError) as refusal:
        semspec.load(folder, device="cpu")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots is 0; give 1 or more"),
        ({"context": 5000}, "context is 5000; this checkpoint takes 2 to 1024 tokens"),
        ({"dtype": "int3"}, "dtype 'int3' is not known; give auto, float32"),
        ({"device": "abacus"}, "device 'abacus' is not known to torch"),
    ],
)
def test_bad_load_options_say_what_to_do(target_folder: Path, options: dict, message: str):
    with pytest.raises(BadRequest) as refusal:
        semspec.load(target_folder, **({"device": "cpu"} | options))
    assert message in str(refusal.value)


@pytest.mark.parametrize("named", ['"abc"', "[[1]]", "{}", "1.5", "[true]", '{"a":' * 100_000])
def test_ends_of_text_that_are_no_tokens_are_refused(named: str, target_folder: Path, tmp_path: Path):
    folder = shutil.copytree(target_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {named}}}')
    with pytest.raises(ModelError, match=r"generation_config\.json (cannot be read|names an eos_token_id)"):
        semspec.load(folder, device="cpu")
    (folder / "generation_config.json").write_text('{"eos_token_id": -1}')
    assert -1 not in semspec.load(folder, device="cpu").eos


def test_submitted_prompts_are_accepted_all_or_none_and_may_be_tokens(pair: semspec.Pair):
    tokens = pair.tokenizer.encode(PROMPT)
    options = Options(max_new_tokens=8, ignore_eos=True)
    with pytest.raises(BadRequest, match="knows ids below"):
        pair.submit([(tokens, options), ([10**6], options)])
    assert not pair.executor.tasks
    tickets = pair.submit([(tokens, options), (PROMPT, options)])
    pair.executor.run()
    for ticket in tickets:
        events = ticket.collect()
        assert ticket.result().tokens == pair.generate(PROMPT, options).tokens
        assert sum(len(event.span_tokens) for event in events) == sum(len(event.spans) for event in events)


def test_adaptive_draft_lengths_are_kept_for_the_latest_rules(pair: semspec.Pair):
    for theta in range(100):
        pair.generate(PROMPT, verifier=f"fly:theta={theta}", num_draft_tokens="auto", max_new_tokens=1)
    known = [rule for rule, *_ in pair._preparer.lengths]
    assert len(known) == 64 and known[-1] == semspec.verify.make("fly:theta=99")


def test_a_rule_has_a_default_draft_length(pair: semspec.Pair):
    for given, longest in [({"verifier": "block"}, 8), ({"verifier": "fly"}, 15), ({"verifier": "fly:window=20"}, 21)]:
        result = pair.generate(PROMPT, max_new_tokens=60, ignore_eos=True, **given)
        assert max(e.drafted for e in result.events) == longest
    assert max(e.drafted for e in pair.generate(PROMPT, verifier="fly", num_draft_tokens=5).events) == 5


def test_a_pair_loaded_lossless_refuses_lossy_requests(target_folder: Path, draft_folder: Path, pair: semspec.Pair):
    strict = semspec.load(target_folder, draft_folder, device="cpu", slots=2, allow_lossy=False)
    lossy = [name for name, rule in semspec.verifiers.REGISTRY.items() if not rule.lossless and name != "oracle"]
    assert len(lossy) > 10
    for verifier in [*lossy, Anything()]:
        with pytest.raises(BadRequest, match="may change what the target would have written, and this pair was loaded"):
            strict.generate(PROMPT, verifier=verifier, allow_lossy=True)
        with pytest.raises(BadRequest, match="loaded with allow_lossy off"):
            strict.stream(PROMPT, verifier=verifier)
    assert strict.target.free == 2 and not strict.executor.tasks
    for verifier in ("none", "exact", "sampling", "block"):
        assert strict.generate(PROMPT, verifier=verifier, max_new_tokens=3).lossless


def test_threads_may_share_a_pair(pair: semspec.Pair) -> None:
    prompts = [f"{PROMPT} {n}" for n in ["one", "two", "three", "four", "five", "six"]]
    options = {"max_new_tokens": 40, "ignore_eos": True, "verifier": "sampling", "temperature": 0.8, "seed": 3}
    expected = [pair.generate(prompt, **options).text for prompt in prompts]

    def answer(prompt: str) -> str:
        if prompt.endswith("two"):  # a stream among them
            return "".join(event.text for event in pair.stream(prompt, **options))
        return pair.generate(prompt, **options).text

    with ThreadPoolExecutor(6) as threads:
        for _ in range(3):
            assert list(threads.map(answer, prompts)) == expected
    assert pair.target.free == 8 and not pair.executor.tasks


def test_a_stream_that_is_forgotten_in_the_middle_of_a_pass_harms_nobody(pair: semspec.Pair, monkeypatch) -> None:
    """Garbage is collected wherever Python likes, such as while another sequence's tokens are being read."""
    streams = [pair.stream(PROMPT, max_new_tokens=60, ignore_eos=True)]
    next(streams[0])
    expected, score = pair.generate(PROMPT, max_new_tokens=20, ignore_eos=True), pair.target.score

    def forgetful(requests: Any) -> Any:
        streams.clear()
        gc.collect()
        return score(requests)

    monkeypatch.setattr(pair.target, "score", forgetful)
    assert pair.generate(PROMPT, max_new_tokens=20, ignore_eos=True).tokens == expected.tokens
    monkeypatch.undo()
    pair.generate(PROMPT, max_new_tokens=1)
    assert pair.target.free == 8 and not pair.executor.tasks


def test_a_rule_that_cannot_be_hashed_is_refused(pair: semspec.Pair) -> None:
    @dataclass(frozen=True)
    class Listed(Exact):
        words: Any = None

    with pytest.raises(BadRequest, match="cannot be hashed"):
        pair.generate(PROMPT, verifier=Listed(words=["a"]))


def test_text_held_back_for_a_stop_string_is_not_lost_by_stopping(pair: semspec.Pair) -> None:
    whole = pair.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    held = whole.text + "never comes"
    stream = pair.stream(PROMPT, max_new_tokens=60, ignore_eos=True, stop=held)
    while stream.stats.tokens < 12:
        pair.executor.tick()
    stream.stop()
    shown = "".join(event.text for event in stream)
    result = stream.result()
    assert result.finish_reason == "cancelled" and result.text.endswith(shown) and shown
    assert result.text == pair.tokenizer.decode(whole.tokens[: len(result.tokens)], skip_special_tokens=True)


@pytest.mark.parametrize("temperature", [1e-46, 1e-40, 1e-9])
def test_the_smallest_temperatures_are_greedy(pair: semspec.Pair, temperature: float) -> None:
    options = {"max_new_tokens": 20, "ignore_eos": True}
    for rule in ("exact", "none", "sampling"):
        cold = pair.generate(PROMPT, verifier=rule, temperature=temperature, **options)
        assert cold.tokens == pair.generate(PROMPT, verifier=rule, **options).tokens


def test_the_default_length_is_automatic_where_the_text_is_the_same_with_any():
    for name in verify.REGISTRY:
        if name != "oracle":
            length = Options(verifier=name).draft_length()
            assert length == "auto" if name == "exact" else isinstance(length, int)
    assert Options(num_draft_tokens=3).draft_length() == 3


def test_a_pair_describes_itself(pair: semspec.Pair):
    assert repr(pair).startswith(
        "<Pair: target of 3 layers on cpu, a draft model of 3 layers, 320 tokens, context 1024"
    )


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": 3, "content": "x"}, {"role": "user"}])
def test_a_message_without_a_text_is_refused(pair: semspec.Pair, message: dict):
    with pytest.raises(semspec.BadRequest, match="a chat message needs a role and a content, both text"):
        pair.generate([message])
