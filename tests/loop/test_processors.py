"""Options that change logits, through the whole loop: every rule and both models obey, and lossless stays lossless."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from semspec import tree, verify
from semspec.draft import CascadeDrafter, EarlyExit, ModelDrafter, NgramDrafter, NoDrafter
from semspec.draft.model import NO_EARLY_EXIT
from semspec.draft.tree import TreeOptions
from semspec.errors import BadRequest
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.sampling.logit_options import LogitOptions
from semspec.sampling.processors import History, Processors
from semspec.types import Drafter, DraftRequest, Sampling
from tests.chi import chi_square
from tests.draft.test_tree import draft_of
from tests.fakes import FakeRunner, Logits, chain

VOCAB, STOP, PROMPT = 5, 4, [1, 2, 1]
TOKEN_RULES = sorted(
    name
    for name, rule in verify.REGISTRY.items()
    if rule.unit == "token" and rule.speculates and not (verify.make(name).layers or verify.make(name).draft_layers)
)
EVERYTHING = LogitOptions(
    presence_penalty=0.8,
    frequency_penalty=0.3,
    repetition_penalty=1.4,
    logit_bias={0: 1.5, 3: -1.0},
    min_tokens=6,
    bad_words=("ba",),
    allowed_token_ids=(0, 1, 2, 4),
)
TREE = TreeOptions(size=7, top=3)
SPELLING = {"ba": [2, 0], " ba": [0, 2, 0]}


def remembered(language: Logits) -> Logits:
    cached = cache(lambda context: language(list(context)))
    return lambda context: cached(tuple(context[-4:]))


TARGET = remembered(chain(VOCAB, seed=1, memory=2, sharpness=1.5))
DRAFT = remembered(chain(VOCAB, seed=9, memory=2, sharpness=1.5))


def written(verifier: str, o: LogitOptions, *how: Any, **more: Any) -> list[list[int]]:
    return [[t for event in task.events for t in event.tokens] for task in ran(verifier, o, *how, **more)]


def ran(
    verifier: str, o: LogitOptions, drafter: str = "model", draws: int = 1, length: int = 30, temperature: float = 1.0,
    stop: int = STOP,
) -> list[Task]:  # fmt: skip
    executor, rule = Executor(), verify.make(verifier)
    target, draft = FakeRunner(TARGET, VOCAB, slots=500), FakeRunner(DRAFT, VOCAB, slots=500)
    kinds: dict[str, Any] = {
        "model": lambda: ModelDrafter(draft),
        "exiting": lambda: ModelDrafter(draft, EarlyExit(min_p=0.5)),
        "ngram": NgramDrafter,
        "cascade": lambda: CascadeDrafter(draft, NgramDrafter(), 3, NO_EARLY_EXIT),
        "tree": lambda: ModelDrafter(draft, tree=TREE),
        "ngram tree": lambda: NgramDrafter(tree=TREE),
    }
    tasks = []
    for seed in range(draws):
        each = o.processors(PROMPT, VOCAB, frozenset({stop}), lambda text: SPELLING[text])
        job = Job(
            PROMPT, rule, 3, length, Sampling(temperature, seed=seed), frozenset({stop}),
            processors=Processors(len(PROMPT), each),
        )  # fmt: skip
        stats, one = Stats(), NoDrafter() if verifier == "none" else kinds[drafter]()
        tasks.append(executor.submit(Decoder(job, target, one, stats).decode(), stats))
    executor.run()
    for task in tasks:
        if task.error is not None:
            raise task.error
    return tasks


def allowed(tokens: list[int]) -> bool:
    """By the definitions, in plain Python."""
    bad = any(tokens[i : i + 2] == [2, 0] for i in range(len(tokens)))
    return 3 not in tokens and not bad and (STOP not in tokens[:6])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["model", "exiting", "ngram", "cascade", "tree", "ngram tree"])
def test_exact_writes_what_none_writes_with_every_option(drafter: str, temperature: float):
    o = EVERYTHING
    alone = written("none", o, draws=12, temperature=temperature)
    assert written("exact", o, drafter, draws=12, temperature=temperature) == alone
    assert written("exact:couple=true", o, drafter, draws=12, temperature=temperature) == alone
    free = written("none", LogitOptions(presence_penalty=1e-9), draws=12, temperature=temperature)
    assert free != alone and not all(map(allowed, free)), "the options change something"


@pytest.mark.parametrize("rule", TOKEN_RULES)
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_no_rule_accepts_what_is_not_allowed(rule: str, drafter: str):
    for temperature in (0.0, 1.0):
        assert all(map(allowed, written(rule, EVERYTHING, drafter, draws=8, temperature=temperature)))
        if verify.make(rule).supports_trees:
            drafts = "tree" if drafter == "model" else "ngram tree"
            assert all(map(allowed, written(rule, EVERYTHING, drafts, draws=4, temperature=temperature)))


# -- distributions

LENGTH = 3
SHAPED = LogitOptions(
    presence_penalty=0.6,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    logit_bias={0: 0.7},
    min_tokens=2,
    bad_words=("ba",),
)
RESTRICTED = LogitOptions(allowed_token_ids=(0, 1, STOP))


def likelihood(o: LogitOptions, tokens: tuple[int, ...]) -> float:
    """Of a text of the processed target."""
    each = o.processors(PROMPT, VOCAB, frozenset({STOP}), lambda text: SPELLING[text])
    history, p = Processors(len(PROMPT), each), 1.0
    for i, token in enumerate(tokens):
        context = PROMPT + list(tokens[:i])
        row = history.after(context).apply(torch.tensor([TARGET(context)]))[0]
        p *= row.softmax(-1)[token].item()
    return p


def outcomes() -> list[tuple[int, ...]]:
    every = [tokens for n in range(1, LENGTH + 1) for tokens in product(range(VOCAB), repeat=n)]
    return [t for t in every if STOP not in t[:-1] and (t[-1] == STOP or len(t) == LENGTH)]


def p_value(verifier: str, o: LogitOptions = SHAPED, drafter: str = "model", draws: int = 800) -> float:
    expected = {tokens: likelihood(o, tokens) for tokens in outcomes()}
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-4)
    counts = dict.fromkeys(expected, 0)
    for tokens in written(verifier, o, drafter, draws, LENGTH):
        counts[tuple(tokens)] += 1
    return chi_square(torch.tensor(list(counts.values())), torch.tensor(list(expected.values())))


KINDS = [("sampling", "model"), ("block", "model"), ("sampling", "ngram"), ("sampling", "tree"), ("traversal", "tree")]


@pytest.mark.parametrize(("verifier", "drafter"), KINDS)
def test_lossless_rules_keep_the_processed_distribution(verifier: str, drafter: str):
    assert p_value(verifier, drafter=drafter) > 1e-4


def test_a_draft_that_is_drawn_from_other_logits_than_the_rule_divides_by_is_caught(monkeypatch: pytest.MonkeyPatch):
    """Tokens drawn without the penalties, while the rule is given processed logits: they come too often."""

    class Wrong(ModelDrafter):
        def propose(self, context, request):
            draft = yield from super().propose(context, request)
            if draft.logits is not None and request.processors is not None:
                draft.logits = request.processors.after(context).apply(draft.logits, draft.tokens)
            return draft

    monkeypatch.setattr(History, "apply", _only_target(History.apply))
    monkeypatch.setitem(globals(), "ModelDrafter", Wrong)
    assert p_value("sampling") < 1e-6


def test_drafts_cut_because_of_what_was_drawn_would_be_caught(monkeypatch: pytest.MonkeyPatch):
    """Why a rule that divides by draft probabilities is left to reject what is not allowed."""
    monkeypatch.setattr(History, "apply", _only_target(History.apply))
    assert p_value("sampling", RESTRICTED) > 1e-4, "unprocessed drafts with their own probabilities are no bias"

    def cutting(self: Decoder, draft, rule):
        legal = self.job.processors.legal(self.context, draft.tokens)
        draft = draft.first(legal)
        return draft, draft.tokens

    monkeypatch.setattr(Decoder, "fit", cutting)
    assert p_value("sampling", RESTRICTED, draws=2500) < 1e-4


def _only_target(apply: Any) -> Any:
    return lambda self, logits, draft=(), drafting=False: logits.float() if drafting else apply(self, logits, draft)


# -- trees


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_is_grown_from_processed_rows(temperature: float):
    """Each node's row, after the node's own path; where the rule needs them, they come with the draft."""
    each = EVERYTHING.processors(PROMPT, VOCAB, frozenset({STOP}), lambda text: SPELLING[text])
    processors, context = Processors(len(PROMPT), each), [*PROMPT, 1, 2]
    drafter = ModelDrafter(FakeRunner(DRAFT, VOCAB), tree=TreeOptions(12, 0, 3))
    asked = DraftRequest(4, Sampling(temperature, seed=3), processors=processors, keep_logits=temperature > 0)
    draft = draft_of(drafter, context, asked)
    assert draft.parents and 8 <= len(draft.tokens) <= 12, "fewer where less than three may follow"
    alone = draft_of(drafter, context, replace(asked, processors=None))
    assert 3 in alone.tokens, "the options change something"
    for i, token in enumerate(draft.tokens):
        path = [draft.tokens[j] for j in tree.path(draft.parents, i)]
        row = processors.after(context + path[:-1]).apply(torch.tensor([DRAFT(context + path[:-1])]))[0]
        assert row[token] > -torch.inf, path
        if draft.logits is not None:
            torch.testing.assert_close(draft.logits[i].softmax(-1), row.softmax(-1))
    best, at = list[int](), -1
    while not temperature and (under := [i for i, parent in enumerate(draft.parents) if parent == at]):
        row = processors.after(context + best).apply(torch.tensor([DRAFT(context + best)]))[0]
        assert draft.tokens[under[0]] == int(row.argmax()), "the likeliest is first"
        best, at = [*best, draft.tokens[under[0]]], under[0]
    assert temperature or len(best) >= 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_as_good_as_its_target_is_accepted_with_every_option(temperature: float, monkeypatch):
    monkeypatch.setitem(globals(), "DRAFT", TARGET)
    tasks = ran("exact:couple=true", EVERYTHING, "tree", draws=8, length=24, temperature=temperature)
    assert all(task.stats.tokens / task.stats.rounds >= 3 for task in tasks), "three tokens of a draft, and one more"


# -- the rest of the loop


def test_where_nothing_is_allowed_the_answer_fails_in_words():
    for verifier, temperature in product(("none", "exact", "sampling"), (0.0, 1.0)):
        with pytest.raises(BadRequest, match="no token may follow"):
            written(verifier, LogitOptions(allowed_token_ids=(STOP,), min_tokens=3), temperature=temperature)


def test_a_sequence_without_options_shares_passes_with_others_and_is_not_touched():
    def texts(penalty: float, count: int) -> list[list[int]]:
        executor, target = Executor(), FakeRunner(TARGET, VOCAB)
        tasks = []
        for i in range(count):
            each = LogitOptions(presence_penalty=penalty).processors(PROMPT, VOCAB, frozenset(), lambda text: [])
            job = Job(
                PROMPT, verify.make("none"), 1, 12, Sampling(0.7, seed=3), processors=Processors(3, each) if i else None
            )
            stats = Stats()
            drafter: Drafter = NoDrafter()
            tasks.append(executor.submit(Decoder(job, target, drafter, stats).decode(), stats))
        executor.run()
        return [[t for event in task.events for t in event.tokens] for task in tasks]

    alone, together = texts(2.0, 1), texts(2.0, 3)
    assert together[0] == alone[0] != together[1] == together[2]
