"""Our rules in vLLM's loop give, token for token, the text of our own loop; vLLM's sampler sees nothing but logits."""

from __future__ import annotations

import pytest
import torch

from semspec.draft import ModelDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.draft_length import FixedLength
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.thinking import Thinking
from semspec.types import Sampling
from semspec.verify import REGISTRY, Rule, make
from semspec.vllm.monitor import EVERY
from tests.fakes import FakeRunner, chain, greedy, script
from tests.vllm.fake_vllm import FakeVllm, Request, choice_of, resources

VOCAB, K, N = 11, 5, 40
PROTECTED = {0, 7}
OPTIONS = {"fly": "fly:window=1", "threshold": "threshold:single=0.05"}
RULES = [
    make(OPTIONS.get(name, name))
    for name, rule in REGISTRY.items()
    if rule.unit == "token" and not rule.lossless and not rule.needs_draft_logits and rule.layout is Rule.layout
] + [make("fly:window=2,carry=2,theta=0.1")]
RELAXING = {"fly", "topk", "typical", "margin", "threshold", "accept-all", "random"}
TARGET = chain(VOCAB, seed=1)
NOISE = chain(VOCAB, seed=9)


def near(context: list[int]) -> list[float]:
    return [a + b for a, b in zip(TARGET(context), NOISE(context), strict=True)]


def ours(request: Request, rule: Rule, k: int) -> tuple[list[int], int]:
    """Our loop, from where vLLM's begins: its first token is the target's own, without a draft. It is asked for more
    than vLLM, since the last drafts of a text are shorter."""
    start = [*request.prompt, *greedy(TARGET, request.prompt, 1)]
    protected = torch.tensor([v in PROTECTED for v in range(VOCAB)])
    job = Job(start, rule, FixedLength(k), len(request.tokens) + 2 * k, request.sampling, protected=protected)
    target, draft, executor = FakeRunner(TARGET, VOCAB), FakeRunner(near, VOCAB), Executor()
    decoder = Decoder(job, target, ModelDrafter(draft), Stats())
    task = executor.submit(decoder.decode(), decoder.stats)
    while not task.done:
        executor.tick()
    assert task.error is None
    return decoder.context[: len(request.tokens)], decoder.stats.relaxed


@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_gives_the_text_of_our_loop(rule: Rule, heat: float) -> None:
    fake = FakeVllm(TARGET, near, VOCAB, K, resources(VOCAB, PROTECTED))
    request = Request([3, 4, 5], choice_of(rule), Sampling(heat, seed=7), N)
    fake.run([request])
    expected, relaxed = ours(request, rule, K)
    assert request.tokens == expected
    assert relaxed or rule.name not in RELAXING, "the test has something to relax"
    assert bool(fake.rounds.stats()["relaxed_tokens"]) == bool(relaxed)


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_strict_and_loose_requests_in_one_batch(heat: float) -> None:
    fake = FakeVllm(TARGET, near, VOCAB, K, resources(VOCAB, PROTECTED))
    loose = [Request([1 + i % 9], choice_of(rule), Sampling(heat, seed=i), N + i) for i, rule in enumerate(RULES)]
    strict = [Request([1 + i, 2], None, Sampling(seed=1), N) for i in range(3)]
    fake.run([*loose[:4], *strict, *loose[4:]])
    assert fake.untouched
    for i, (request, rule) in enumerate(zip(loose, RULES, strict=True)):
        length = K - (i if i < 4 else i + 3) % 2  # as long as nobody before it has finished
        expected, _ = ours(request, rule, length)
        same = len(request.prompt) + N // 2
        assert request.tokens[:same] == expected[:same]
    for request in strict:
        assert request.tokens == [*request.prompt, *greedy(TARGET, request.prompt, len(request.tokens) - 2)]


@pytest.mark.parametrize("gap", [0, 9])
@pytest.mark.parametrize("prompt", [[3, 2], [3, 4], [2, 3, 7, 5], [2, 6]])
def test_only_the_thinking_is_relaxed(prompt: list[int], gap: int) -> None:
    begin, end = 2, 7
    fake = FakeVllm(TARGET, near, VOCAB, K, resources(VOCAB, PROTECTED, (begin, end)), gap)
    request = Request(prompt, choice_of(make("accept-all"), thinking_only=True), Sampling(), 400 if gap else 120)
    fake.run([request])
    thinking, inside = Thinking(begin, end, prompt[-1] == begin), 0
    for at in range(len(prompt), len(request.tokens)):
        own, token = greedy(TARGET, request.tokens[:at], 1)[0], request.tokens[at]
        assert token == own or (thinking.open and not {own, token} & PROTECTED)
        inside += token != own
        thinking.feed([token])
    assert inside, "and it is relaxed there"


def test_a_loop_ends_the_relaxing() -> None:
    """A draft that repeats three tokens for ever is accepted by accept-all, until somebody looks."""
    stuck = script([3, 4, 5], VOCAB, prompt=2)
    fake = FakeVllm(TARGET, stuck, VOCAB, K, resources(VOCAB, set()))
    guarded = Request([1, 2], choice_of(make("accept-all"), repeats=4), length=400)
    free = Request([1, 2], choice_of(make("accept-all")), length=400)
    fake.run([guarded, free])
    assert fake.rounds.stats()["loops"] == 1
    late = 3 * EVERY * (K + 1)  # two looks and the tokens that make a loop
    assert guarded.tokens[late:] != free.tokens[late : len(guarded.tokens)]
    assert guarded.tokens[late:] == greedy(TARGET, guarded.tokens[:late], len(guarded.tokens) - late), (
        "the target's own"
    )


@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("slot", [0, 5])
@pytest.mark.parametrize("taken", [False, True])
def test_a_request_that_is_resumed_goes_on_with_its_budget(heat: float, slot: int, taken: bool) -> None:
    """vLLM lets requests go when memory runs out, and begins them again in any slot, with what they have written."""
    rule = make("regret:budget=1.5,slope=2,mismatches=9")
    whole, cut = (Request([3, 4, 5], choice_of(rule), Sampling(heat, seed=7), N) for _ in range(2))
    fake = FakeVllm(TARGET, near, VOCAB, K, resources(VOCAB, PROTECTED))
    fake.run([whole])
    fake = FakeVllm(TARGET, near, VOCAB, K, resources(VOCAB, PROTECTED))
    twin = Request([3, 4, 6], choice_of(rule), Sampling(heat, seed=8), N)
    fake.begin(cut, 0)
    fake.begin(twin, 2)
    for _ in range(3):
        fake.step([cut, twin], [0, 2])
    assert fake.rounds.requests[0].state is not None and float(fake.rounds.requests[0].state) > 0, "something is spent"
    before, rounds = fake.rounds.requests[0], fake.rounds.requests
    if taken:
        fake.begin(Request([1], choice_of(make("accept-all"))), 0)
    if taken and slot == 0:
        fake.begin(cut, 0, resumed=True)  # in the same step: its text is not there yet when it enters
    else:
        fake.begin(cut, slot, resumed=True)
    assert rounds[slot].state is None
    while len(cut.tokens) < len(whole.tokens):
        fake.step([cut], [slot])
    assert rounds[slot].round > before.round and cut.tokens == whole.tokens
    fake.begin(Request([3, 4, 5], choice_of(rule)), slot)
    fake.step([Request([3, 4, 5], choice_of(rule), tokens=[3, 4, 5, 1])], [slot])
    assert rounds[slot].round == 1, "one that has written nothing is another"


def test_a_request_that_is_resumed_is_not_taken_for_its_twin() -> None:
    """The same prompt and rule, and one the beginning of the other: what was asked for tells them apart."""
    rule = make("regret:budget=9,slope=2,mismatches=9")
    fake = FakeVllm(TARGET, near, VOCAB, K, resources(VOCAB, PROTECTED))
    long = Request([3, 4, 5], choice_of(rule), Sampling(0.9, seed=1), N)
    short = Request([3, 4, 5], choice_of(rule), Sampling(0.2, top_k=3, seed=2), N)
    fake.begin(long, 0)
    for _ in range(4):
        fake.step([long], [0])
    fake.begin(short, 2)
    short.tokens = long.tokens[:4]  # both wrote the same at first
    fake.step([Request(short.prompt, short.choice, short.sampling, N, tokens=list(short.tokens))], [2])
    fake.begin(Request([1], choice_of(make("accept-all"))), 2)
    fake.begin(Request([1], choice_of(make("accept-all"))), 0)  # the longer one leaves last
    fake.begin(short, 1, resumed=True)
    fake.step([short], [1])
    assert fake.rounds.requests[1].sampling == short.sampling, "its own temperature and seed, not its twin's"
    assert fake.rounds.requests[1].round == 2


def test_few_requests_are_remembered() -> None:
    fake = FakeVllm(TARGET, near, VOCAB, K, resources(VOCAB, PROTECTED))
    for i in range(100):
        request = Request([3], choice_of(make("accept-all")))
        fake.begin(request, i % 16)
        fake.step([request], [i % 16])
    assert len(fake.rounds._left) == 16


def test_a_slot_forgets_its_last_request() -> None:
    fake = FakeVllm(TARGET, near, VOCAB, K, resources(VOCAB, PROTECTED))
    fake.run([Request([3], choice_of(make("fly:window=2,carry=2,theta=0.1")))])
    second = Request([3, 4, 5], None)
    fake.run([second])
    assert fake.untouched and not fake.rounds.requests
    assert second.tokens == [3, 4, 5, *greedy(TARGET, [3, 4, 5], len(second.tokens) - 3)]


def test_rules_that_compare_distributions_get_the_drafts() -> None:
    """One step with the draft's logits; without them such a request stays vLLM's."""
    fake = FakeVllm(TARGET, near, VOCAB, K, resources(VOCAB, PROTECTED))
    request = Request([3, 4, 5], choice_of(make("ensemble:weight=0.5")), length=1)
    fake.run([request])
    assert request.tokens[3:] == greedy(TARGET, [3, 4, 5], len(request.tokens) - 3), "strict: no probabilities"
