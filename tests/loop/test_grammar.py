"""Grammars through the whole loop, with five tokens and a real matcher: every rule stays inside, lossless ones keep the
constrained distribution, forced tokens cost no pass, a draft that is rejected is rolled back."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from semspec import verify
from semspec.draft import CascadeDrafter, ModelDrafter, NgramDrafter, NoDrafter
from semspec.draft.model import NO_EARLY_EXIT
from semspec.errors import BadRequest
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.thinking import Thinking
from semspec.sampling.processors import LogitsProcessor, OnlyTokens, Processors
from semspec.text.grammar import GrammarProcessor
from semspec.types import Sampling
from tests.chi import chi_square
from tests.fakes import FakeRunner
from tests.loop.test_processors import DRAFT, STOP, TARGET, TOKEN_RULES, TREE, VOCAB

SPELLED = [b"a", b"b", b"ab", b"c", b"</s>"]
PROMPT = [1, 2, 1]


class Words:
    """A tokenizer of four words and an end."""

    eos_token_id, bos_token_id, tokens, special_token_ids = STOP, None, SPELLED, [STOP]

    def __call__(self, text: str) -> list[int]:
        return [SPELLED.index(bytes([byte])) for byte in text.encode()]


TOKENIZER = LLTokenizer(TokenizerWrapper(Words()))


def grammar(pattern: str, stop: frozenset[int] = frozenset({STOP}), **more: Any) -> GrammarProcessor:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_regex(pattern), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return GrammarProcessor(matcher, VOCAB, [STOP], stop, **more)


def spelled(tokens: list[int]) -> str:
    return b"".join(SPELLED[t] for t in tokens if t != STOP).decode()


def run(
    verifier: str, pattern: str, drafter: str = "model", draws: int = 1, length: int = 40, temperature: float = 1.0,
    others: tuple[LogitsProcessor, ...] = (), logprobs: int | None = None, stop: frozenset[int] = frozenset({STOP}),
) -> tuple[list[Any], FakeRunner]:  # fmt: skip
    executor, rule = Executor(), verify.make(verifier)
    target, draft = FakeRunner(TARGET, VOCAB, slots=500), FakeRunner(DRAFT, VOCAB, slots=500)
    kinds: dict[str, Any] = {
        "model": lambda: ModelDrafter(draft),
        "ngram": NgramDrafter,
        "cascade": lambda: CascadeDrafter(draft, NgramDrafter(), 3, NO_EARLY_EXIT),
        "tree": lambda: ModelDrafter(draft, tree=TREE),
    }
    tasks = []
    for seed in range(draws):
        each = Processors(len(PROMPT), [*others, grammar(pattern, stop)])
        job = Job(
            PROMPT, rule, 3, length, Sampling(temperature, seed=seed), stop, processors=each, logprobs=logprobs
        )  # fmt: skip
        stats, one = Stats(), NoDrafter() if verifier == "none" else kinds[drafter]()
        tasks.append(executor.submit(Decoder(job, target, one, stats).decode(), stats))
    executor.run()
    for task in tasks:
        if task.error is not None:
            raise task.error
    return [task.events for task in tasks], target


def written(*given: Any, **more: Any) -> list[list[int]]:
    return [[t for event in events for t in event.tokens] for events in run(*given, **more)[0]]


PATTERN = "(ab|c){3,6}a(bc)?"


@pytest.mark.parametrize("drafter", ["model", "ngram", "cascade", "tree"])
def test_exact_writes_what_none_writes_inside_a_grammar(drafter: str):
    for temperature in (0.0, 1.0):
        alone = written("none", PATTERN, draws=10, temperature=temperature)
        assert written("exact", PATTERN, drafter, draws=10, temperature=temperature) == alone
        assert all(re.fullmatch(PATTERN, spelled(tokens)) for tokens in alone)


@pytest.mark.parametrize("rule", TOKEN_RULES)
def test_no_rule_leaves_the_grammar(rule: str):
    drafters = ("model", "ngram", *(["tree"] if verify.make(rule).supports_trees else []))
    for drafter, temperature in product(drafters, (0.0, 1.0)):
        texts = [spelled(tokens) for tokens in written(rule, PATTERN, drafter, draws=6, temperature=temperature)]
        assert all(re.fullmatch(PATTERN, text) for text in texts), texts


# -- the constrained distribution

SHORT = "(a|b|ab|c){2}c?"
LENGTH = 4


def expected() -> dict[tuple[int, ...], float]:
    """Every text of the grammar with its probability: what is not allowed is left out, the rest renormalised. In plain
    Python, with `re` for the grammar."""
    found: dict[tuple[int, ...], float] = {}

    def grow(tokens: tuple[int, ...], p: float) -> None:
        logits = torch.tensor(TARGET(PROMPT + list(tokens))).double()
        texts = [spelled([*tokens, t]) for t in range(STOP)]
        fits = [any(re.fullmatch(SHORT, text + rest) for rest in RESTS) for text in texts]
        ends = bool(re.fullmatch(SHORT, spelled(list(tokens))))
        logits[torch.tensor([not fit for fit in [*fits, ends]])] = -torch.inf
        for token, q in enumerate(logits.softmax(-1).tolist()):
            if q == 0:
                continue
            new = (*tokens, token)
            text = spelled(list(new))
            over = re.fullmatch(SHORT, text) and not any(re.fullmatch(SHORT, text + rest) for rest in RESTS if rest)
            if token == STOP or over:
                found[new] = p * q
            else:
                grow(new, p * q)

    grow((), 1.0)
    return found


RESTS = ["".join(part) for n in range(5) for part in product("abc", repeat=n)]


def p_value(verifier: str, drafter: str = "model", draws: int = 600) -> float:
    wanted = expected()
    assert sum(wanted.values()) == pytest.approx(1.0, abs=1e-6)
    counts = dict.fromkeys(wanted, 0)
    for tokens in written(verifier, SHORT, drafter, draws):
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    probs = [wanted.get(tokens, 0.0) for tokens in counts]
    return chi_square(torch.tensor(list(counts.values())), torch.tensor(probs))


@pytest.mark.parametrize("verifier", ["sampling", "block"])
def test_lossless_rules_keep_the_constrained_distribution(verifier: str):
    assert p_value(verifier) > 1e-4


def test_a_mask_that_comes_after_the_draw_would_be_caught(monkeypatch: pytest.MonkeyPatch):
    """Forced text that is chosen by the grammar where several tokens spell it is no draw of the target's."""

    def greedy_tokens(self: GrammarProcessor, tokens: list[int], most: int) -> list[int]:
        self._follow(tokens, len(tokens))
        mask = self._masks[len(tokens)]
        if mask is None or not mask[0] & 1 or len(tokens) % 2:
            return []
        return [0]  # `a`, although `ab` might follow as well

    monkeypatch.setattr(GrammarProcessor, "forced", greedy_tokens)
    assert p_value("sampling", draws=400) < 1e-6


# -- forced tokens, ends, errors


@pytest.mark.parametrize("verifier", ["none", "exact"])
def test_what_is_forced_is_written_without_a_pass(verifier: str):
    (events,), target = run(verifier, "c{20}(a|b)")
    tokens = [t for event in events for t in event.tokens]
    assert spelled(tokens) in ("c" * 20 + "a", "c" * 20 + "b")
    passes = sum(1 for entry in target.diary)
    assert passes == 1, "one pass, for the one choice there is"


def test_logprobs_are_the_targets_own_for_forced_tokens_too():
    (events,), _ = run("exact", "c{5}(a|b)", logprobs=1, temperature=0.0)
    tokens = [t for event in events for t in event.tokens]
    told = [lp for event in events for lp in event.logprobs]
    context = list(PROMPT)
    for token, lp in zip(tokens, told, strict=True):
        row = torch.tensor(TARGET(context)).log_softmax(-1)
        assert lp.token == token and lp.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert lp.rank == 1 + int((row > row[token]).sum())
        context.append(token)


@pytest.mark.parametrize("verifier", ["none", "exact", "sampling", "block", "accept-all"])
def test_a_complete_text_ends_the_answer_with_or_without_an_end_token(verifier: str):
    for stop in (frozenset({STOP}), frozenset[int]()):
        events, _ = run(verifier, "(a|b)(a|b)c", draws=5, stop=stop)
        for sequence in events:
            assert sequence[-1].finish_reason == "stop"
            assert len(spelled([t for event in sequence for t in event.tokens])) == 3
    events, _ = run(verifier, "(a|b)+", draws=5, stop=frozenset(), length=9)
    assert all(sequence[-1].finish_reason == "length" for sequence in events), "ignore_eos: it goes on while it may"


def test_options_that_contradict_the_grammar_fail_in_words_and_alone():
    with pytest.raises(BadRequest, match="no token may follow"):
        run("exact", "c+a", others=(OnlyTokens([1], VOCAB),))
    # A dead end that only the draft runs into is no failure: the target goes another way.
    texts = written("exact", "(ac)|b{3}", draws=8, others=(OnlyTokens([1, 2, 3, STOP], VOCAB),))
    assert all(spelled(tokens) == "bbb" for tokens in texts)


# -- thinking


def test_thinking_is_left_free_and_the_grammar_begins_after_it():
    begin, end = 0, 3  # `a` opens, `c` closes
    for is_open, verifier in product((True, False), ("none", "exact", "sampling")):
        executor, target = Executor(), FakeRunner(TARGET, VOCAB, slots=50)
        tasks = []
        for seed in range(10):
            each = Processors(3, [grammar("b{4}", thinking=(begin, end), is_open=is_open)])
            job = Job(
                PROMPT, verify.make(verifier), 3, 30, Sampling(1.0, seed=seed), frozenset({STOP}), processors=each,
                thinking=Thinking(begin, end, is_open, limit=6),
            )  # fmt: skip
            stats, draft = Stats(), NoDrafter() if verifier == "none" else ModelDrafter(FakeRunner(DRAFT, VOCAB))
            tasks.append(executor.submit(Decoder(job, target, draft, stats).decode(), stats))
        executor.run()
        texts = [[t for event in task.events for t in event.tokens] for task in tasks]
        for tokens in texts:
            if STOP in tokens:
                continue  # it ended its thinking with the text, which is its own affair
            if is_open or tokens[0] == begin:
                assert tokens.index(end) <= 7
                tokens = tokens[tokens.index(end) + 1 :]
            assert spelled(tokens) == "bbbb"
        assert is_open or {tokens[0] for tokens in texts} == {begin, 1}, "it may think first, or answer at once"


# -- the processor by itself


def test_masks_do_not_depend_on_what_was_drafted_before():
    """A processor that has followed many drafts says what a fresh one says."""
    used = grammar(PATTERN)
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        tokens = torch.randint(0, VOCAB, (int(torch.randint(0, 5, (), generator=generator)),), generator=generator)
        draft = torch.randint(0, VOCAB, (3,), generator=generator).tolist()
        fresh, history = grammar(PATTERN), tokens.tolist()
        rows, again = torch.zeros(4, VOCAB), torch.zeros(4, VOCAB)
        used.process(rows, history, draft)
        fresh.process(again, history, draft)
        assert torch.equal(rows, again)
        assert used.legal(history, draft) == grammar(PATTERN).legal(history, draft)
        assert used.forced(history, 5) == grammar(PATTERN).forced(history, 5)


def test_a_processor_that_is_not_rolled_back_would_be_caught(monkeypatch: pytest.MonkeyPatch):
    def forget(self: GrammarProcessor, count: int) -> None:
        del self._tokens[count:], self._fed[count:], self._states[count + 1 :]

    monkeypatch.setattr(GrammarProcessor, "_go_back", forget)
    with pytest.raises(AssertionError):
        test_masks_do_not_depend_on_what_was_drafted_before()
