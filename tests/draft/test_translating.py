"""Drafts of a model with another tokenizer: what it has cached, what it proposes, and that nothing of it shows."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from semspec import verify
from semspec.draft import CascadeDrafter, ModelDrafter, NgramDrafter, TranslatingDrafter
from semspec.draft import translating as module
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.model.restricted import RestrictedRunner
from semspec.text.exchange import Exchange, Side
from semspec.types import GREEDY, Draft, Sampling
from tests.chi import chi_square
from tests.fakes import FakeRunner, Logits, chain, greedy

LETTERS = "abc. "


def toy(*entries: str) -> PreTrainedTokenizerFast:
    """A token for each letter and for these longer ones, in this order, and the end."""
    names = [*entries, *LETTERS]
    spelled = [name.replace(" ", "Ġ") for name in names]
    merges = [(name[:-1], name[-1]) for name in spelled if len(name) > 1]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(spelled)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([f"<end of {len(entries)}>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"<end of {len(entries)}>")


def side(tokenizer: PreTrainedTokenizerFast) -> Side:
    return Side(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))


OURS, THEIRS = toy("ab", "abc", " c"), toy("bc", "ca")
EXCHANGE = Exchange(side(OURS), side(THEIRS))
V, D = len(OURS), len(THEIRS)
PROMPT = OURS.encode("ab c.", add_special_tokens=False)
OWN_PROMPT = THEIRS.encode("ab c.", add_special_tokens=False)
TARGET = chain(V, seed=5, memory=2)


def like_target(context: list[int]) -> list[float]:
    """A draft that knows the target: letter by letter it continues with what the target would write."""
    text = EXCHANGE.draft_speller.spelled(context).decode()
    written = greedy(TARGET, OURS.encode(text, add_special_tokens=False), 1)
    token = THEIRS.eos_token_id if written == [OURS.eos_token_id] else THEIRS.encode(OURS.decode(written))[0]
    return [5.0 * (i == token) for i in range(D)]


def drafter_of(draft: FakeRunner, kind: str = "model") -> TranslatingDrafter:
    inner = ModelDrafter(draft) if kind == "model" else CascadeDrafter(draft, NgramDrafter())
    shared = ModelDrafter(RestrictedRunner(draft, EXCHANGE.shared[1]))
    return TranslatingDrafter(inner, EXCHANGE, OWN_PROMPT, len(PROMPT), shared)


def run(
    rule: str, language: Logits, n: int = 60, kind: str = "model", sampling: Sampling = GREEDY
) -> tuple[list[int], Stats]:
    target, draft, executor, stats = FakeRunner(TARGET, V), FakeRunner(language, D), Executor(), Stats()
    job = Job(PROMPT, verify.make(rule), 4, n, sampling, draft_prompt=OWN_PROMPT)
    task = executor.submit(Decoder(job, target, drafter_of(draft, kind), stats).decode(), stats)
    executor.run()
    assert task.error is None, task.error
    assert not draft.held and not target.held
    return [t for event in task.events for t in event.tokens], stats


@pytest.mark.parametrize("kind", ["model", "cascade"])
@pytest.mark.parametrize("language", [like_target, chain(D, seed=1), chain(D, seed=2, memory=1)])
@pytest.mark.parametrize("rule", ["exact", "sampling", "block"])
def test_greedy_text_is_the_targets(rule: str, language: Logits, kind: str) -> None:
    tokens, stats = run(rule, language, kind=kind)
    assert tokens == greedy(TARGET, PROMPT, 60)
    if language is like_target and rule == "exact":
        assert stats.tau > 1.5


def test_at_any_temperature_exact_gives_the_targets_text() -> None:
    for seed in range(5):
        warm = Sampling(0.9, seed=seed)
        assert run("exact", chain(D, seed=1), sampling=warm)[0] == run("none", chain(D, seed=1), sampling=warm)[0]


def answered(drafter: TranslatingDrafter, context: list[int], rule: str, n: int, round: int) -> Draft:
    asking = drafter.propose(context, verify.make(rule).request(n, Sampling(), round))
    try:
        request = next(asking)
        while True:
            request = asking.send(request.runner.decode([request])[0])  # type: ignore[union-attr]
    except StopIteration as done:
        draft: Draft = done.value
        return draft


def anew(language: Logits, drafter: TranslatingDrafter, context: list[int], n: int) -> list[int]:
    """What the draft proposes by the definition: it reads the whole text, writes as much, and its text is spelled."""
    parts = OURS.decode(context).split(OURS.eos_token)
    own = [THEIRS.encode(part, add_special_tokens=False) for part in parts]
    read = [token for part in own for token in [*part, THEIRS.eos_token_id]][:-1]
    assert drafter._reader.ids == read
    return EXCHANGE.translate(greedy(language, read, len(drafted(drafter))))[0][:n]


def drafted(drafter: TranslatingDrafter) -> list[int]:
    return drafter._cached[len(drafter._reader.ids) - drafter._firm :]


@pytest.mark.parametrize("seed", range(12))
def test_proposals_are_those_of_a_draft_that_reads_everything_anew(seed: int) -> None:
    """Whatever was accepted, rejected, added by the target, or proposed on top of an earlier proposal."""
    rng, language = Random(seed), chain(D, seed=seed, memory=3)
    draft = FakeRunner(language, D)
    drafter = drafter_of(draft)
    drafter.begin([draft.acquire()])
    context = list(PROMPT)
    plain = [i for i in range(V) if i != OURS.eos_token_id]
    for round in range(25):
        n = rng.randint(1, 5)
        proposed = answered(drafter, context, "exact", n, round).tokens
        assert proposed == anew(language, drafter, context, n) and len(proposed) <= n
        assert draft.held[0] == [*drafter._reader.ids, *drafted(drafter)][:-1]
        whole = context + proposed
        if rng.random() < 0.4 and proposed:  # a further part of the same draft, as of a step
            more = answered(drafter, whole, "exact", n, round).tokens
            assert more == anew(language, drafter, whole, n)
            whole += more
        kept = rng.randint(len(context), len(whole))
        drafter.accept(kept)
        context = [*whole[:kept], *rng.choices(plain, k=rng.randint(1, 2))]


def test_the_cost_of_a_round_does_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in pieces that are tokenized and tokens that are fed, over a long text."""
    draft = FakeRunner(chain(D, seed=1, memory=2), D, max_seq_len=10**6)
    drafter = drafter_of(draft)
    drafter.begin([draft.acquire()])
    spelled = EXCHANGE.draft_speller.tokens
    counts: list[int] = []
    monkeypatch.setattr(EXCHANGE.draft_speller, "tokens", lambda text: counts.append(len(text)) or spelled(text))
    context, work = list(PROMPT), []
    for round in range(400):
        counts.clear()
        before = len(draft.held[0])
        drafter.accept(len(context) - 1)
        answered(drafter, context, "exact", 3, round)
        work.append((sum(counts), len(draft.held[0]) - before))
        context += PROMPT[round % 5 :] + PROMPT
    early, late = work[5:55], work[-50:]
    assert max(late)[0] <= max(early)[0] + 1 and max(fed for _, fed in late) <= max(fed for _, fed in early) + 1


def test_what_was_cached_wrongly_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: everything cached is taken to be right."""

    def trusting(self: TranslatingDrafter) -> None:
        self.inner.accept(len(self._reader.ids) - 1)

    monkeypatch.setattr(module.TranslatingDrafter, "_drop_cached", trusting)
    with pytest.raises(AssertionError):
        test_proposals_are_those_of_a_draft_that_reads_everything_anew(1)


# -- the whole path, sampled: a mistake of the loop would show


def likelihood(tokens: tuple[int, ...]) -> float:
    context, p = list(PROMPT), 1.0
    for token in tokens:
        p *= torch.tensor(TARGET(context)).softmax(-1)[token].item()
        context.append(token)
    return p


def p_value(rule: str, draws: int = 2500, length: int = 2) -> float:
    executor, tasks = Executor(), []
    cached: dict[tuple[int, ...], list[float]] = {}

    def language(context: list[int]) -> list[float]:
        key = tuple(context[-4:])
        if key not in cached:
            cached[key] = chain(D, seed=3, memory=2, sharpness=1.0)(context)
        return cached[key]

    target, draft = FakeRunner(TARGET, V, slots=500), FakeRunner(language, D, slots=500)
    shared = RestrictedRunner(draft, EXCHANGE.shared[1])
    for seed in range(draws):
        stats, warm = Stats(), Sampling(1.0, seed=seed)
        job = Job(PROMPT, verify.make(rule), 2, length, warm, draft_prompt=OWN_PROMPT)
        drafter = TranslatingDrafter(ModelDrafter(draft), EXCHANGE, OWN_PROMPT, len(PROMPT), ModelDrafter(shared))
        tasks.append(executor.submit(Decoder(job, target, drafter, stats).decode(), stats))
    executor.run()
    counts = torch.zeros(V**length)
    for task in tasks:
        tokens = [t for event in task.events for t in event.tokens]
        counts[sum(w * V ** (length - 1 - i) for i, w in enumerate(tokens))] += 1
    return chi_square(counts, torch.tensor([likelihood(tokens) for tokens in product(range(V), repeat=length)]))


@pytest.mark.parametrize("rule", ["sampling", "block"])
def test_sampled_text_has_the_targets_distribution(rule: str) -> None:
    assert p_value(rule) > 1e-4


def test_a_draft_that_may_write_tokens_that_the_target_lacks_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: such tokens are proposed as some other token, as a mapping to an unknown token would."""
    monkeypatch.setattr(RestrictedRunner, "score", lambda self, requests: self.inner.score(requests))
    monkeypatch.setattr(RestrictedRunner, "decode", lambda self, requests: self.inner.decode(requests))
    monkeypatch.setattr(EXCHANGE, "shared_target", {d: EXCHANGE.shared_target.get(d, 0) for d in range(D)})
    assert p_value("sampling") < 1e-6
