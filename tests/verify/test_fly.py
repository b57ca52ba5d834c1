"""`fly` against the chain of its released code, against the paper's formula and against vLLM's conditions, each written
out in plain Python for one draft at a time; and our own switches."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from random import Random

import pytest
import torch

from semspec.bench.arms import parse_arm
from semspec.errors import BadRequest
from semspec.options import Options
from semspec.sampling.noise import SECOND, TARGET, stream
from semspec.types import Sampling
from semspec.verify import make
from semspec.verify.fly import Fly
from tests.race import key, race
from tests.verify.build import One, build, decide, hot

HOT = Sampling(temperature=0.6)
Outcome = tuple[int, int]  # accepted, and the token that follows


def drafts(n: int, sampling: Sampling, longest: int = 25, vocab: int = 5) -> list[One]:
    """Drafts of 1 to `longest` tokens that mostly are the target's own, where it is sure, torn or at a loss."""
    found = []
    for seed in range(n):
        rng = Random(seed)
        k = 1 + seed % longest
        rows = [[rng.gauss(0, 1) * rng.choice((0.3, 1.0, 4.0)) for _ in range(vocab)] for _ in range(k + 1)]
        one = One(rows, [0] * k, sampling=replace(sampling, seed=seed), position=seed % 40, round=seed % 5)
        own = [draw(one, j, TARGET) for j in range(k)]
        found.append(replace(one, ids=[t if rng.random() < 0.85 else rng.randrange(vocab) for t in own]))
    return found


def softmax(row: list[float], heat: float = 1.0) -> list[float]:
    best = max(row)
    powers = [math.exp((x - best) / heat) for x in row]
    total = sum(powers)
    return [x / total for x in powers]


def beliefs(one: One) -> list[list[float]]:
    return [softmax(row, one.sampling.temperature or 1.0) for row in one.target]


def draw(one: One, row: int, purpose: int) -> int:
    """The target's own token at a row: its argmax, or a draw with the noise of that purpose."""
    logits = one.target[row]
    if one.sampling.greedy:
        return logits.index(max(logits))
    number = purpose if purpose == TARGET else stream(purpose, one.round)
    return race(softmax(logits, one.sampling.temperature), key(one.sampling.seed, one.position + row, number))


def top3(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in sorted(p)[-3:] if x > 0)


def emit(one: One, final: list[bool], recovered: list[int]) -> Outcome:
    for j, yes in enumerate(final):
        if not yes:
            return j, recovered[j]
    return len(final), draw(one, len(final), TARGET)


def released(one: One, win_len: int = 6, theta: float = 0.3) -> Outcome:
    """Masks over one draft, as the released code makes them."""
    k = len(one.ids)
    draws = [[draw(one, j, TARGET) for j in range(k)]]
    if not one.sampling.greedy:
        draws.append([draw(one, j, SECOND) for j in range(k)])
    accepted = [any(drawn[j] == one.ids[j] for drawn in draws) for j in range(k)]
    entropy = [top3(softmax(one.target[j])) for j in range(k)]  # of plain logits
    kept_by_gate = [not (entropy[j] < theta and not accepted[j]) for j in range(k)]
    if win_len:
        updated = list(accepted)
        if k >= win_len:
            for j in range(k - win_len + 1):  # a mismatch, then matches to the end of the window
                if not accepted[j] and all(accepted[j + 1 : j + win_len]):
                    updated[j] = True
            for j in range(k - win_len, k):  # the last places stay as they were
                updated[j] = updated[j] and accepted[j]
        final = [a and b for a, b in zip(updated, kept_by_gate, strict=True)]
    else:  # the ablation without a window
        final = kept_by_gate
    return emit(one, final, draws[0])


def paper(one: One, window: int, theta: float, full: bool = False) -> Outcome:
    """h_j >= theta, no mismatch among the next W, and j + W <= K, with one sample of the target; or the released
    entropy in place of the printed one."""
    k, own = len(one.ids), [draw(one, j, TARGET) for j in range(len(one.ids))]
    wrong = [a != b for a, b in zip(one.ids, own, strict=True)]
    final = []
    for j, p in enumerate(beliefs(one)[:k], start=1):  # places count from 1
        h = -sum(x * math.log(x) for x in p if x > 0) / math.log(len(p)) if full else top3(p)
        final.append(not wrong[j - 1] or (h >= theta and sum(wrong[j : j + window]) == 0 and j + window <= k))
    return emit(one, final, own)


def vllm(one: One, configured: int, theta: float = 0.3) -> Outcome:
    """The four conditions under which vLLM overrides a rejection, its window from the configured draft length."""
    window, n = min(6, configured - 1), len(one.ids)
    own = [draw(one, j, TARGET) for j in range(n)]
    native = [a == b for a, b in zip(one.ids, own, strict=True)]
    final = []
    for i, token in enumerate(one.ids):
        p = beliefs(one)[i]
        kept = top3(p) >= theta and i + window < n and all(native[i + 1 : i + 1 + window]) and p[token] > 0
        final.append(native[i] or kept)
    return emit(one, final, own)


STRICT = "gate=raw,draws=2,protect=false"


@pytest.mark.parametrize(
    ("sampling", "options", "win_len", "theta"),
    [
        (Sampling(), "", 6, 0.3),
        (HOT, "", 6, 0.3),
        (Sampling(), ",window=3,theta=0.6", 3, 0.6),
        (HOT, ",window=0", 0, 0.3),
    ],
    ids=["greedy", "T 0.6", "other settings", "no window"],
)
def test_released_is_the_released_chain_on_4000_drafts(
    sampling: Sampling, options: str, win_len: int, theta: float
) -> None:
    ones = drafts(4000 if not options else 1000, sampling)
    found = decide(make(f"fly:reading=released,{STRICT}{options}"), ones, protected=frozenset({0}))
    assert [outcome[:2] for outcome in found] == [released(one, win_len, theta) for one in ones]
    relaxed = {len(one.ids) for one, (*_, marks) in zip(ones, found, strict=True) if marks}
    assert relaxed, "there is something to relax"
    if sampling.greedy and win_len:
        assert min(relaxed) == win_len + 1, "the shortest draft in which a mismatch has a whole window"


@pytest.mark.parametrize(("full", "theta"), [(False, 0.3), (True, 0.5)])
@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "T 0.6"])
def test_paper_is_the_papers_formula(sampling: Sampling, full: bool, theta: float) -> None:
    ones = drafts(1000, sampling)
    entropy = "full" if full else "partial"
    rule = make(f"fly:reading=paper,draws=1,protect=false,entropy={entropy},theta={theta}")
    found = decide(rule, ones)
    assert [outcome[:2] for outcome in found] == [paper(one, 6, theta, full) for one in ones]
    assert any(marks for *_, marks in found)


@pytest.mark.parametrize("configured", [2, 4, 7, 15])
def test_vllm_shrinks_the_window_with_the_configured_length_only(configured: int) -> None:
    ones = drafts(600, Sampling(), longest=configured)
    rule = make("fly:reading=vllm,draws=1").for_draft_length(configured)
    found = decide(rule, ones)
    assert [outcome[:2] for outcome in found] == [vllm(one, configured) for one in ones]
    assert any(marks for *_, marks in found)
    assert all(
        not marks for one, (*_, marks) in zip(ones, found, strict=True) if len(one.ids) <= min(6, configured - 1)
    )


def test_vllm_needs_a_window_and_other_readings_keep_theirs() -> None:
    with pytest.raises(BadRequest, match="2 tokens or more"):
        Options(verifier="fly:reading=vllm", num_draft_tokens=1)
    for reading in ("paper", "released"):
        assert make(f"fly:reading={reading}").for_draft_length(3) == make(f"fly:reading={reading}")


def test_drafts_have_15_tokens_unless_another_number_is_given() -> None:
    assert make("fly").default_draft_tokens() == 15
    assert (parse_arm("fly").num_draft_tokens, parse_arm("fly:k=25").num_draft_tokens) == (None, 25)


def test_the_gates_see_other_probabilities_when_sampling() -> None:
    one = One([[2.0, 1.2, 0.4, -9.0, -9.0], hot(0, 5)], [0], sampling=HOT)
    entropy = {gate: make(f"fly:gate={gate}")._entropy(build(one)).item() for gate in ("raw", "tempered")}  # type: ignore[attr-defined]
    assert entropy["raw"] == pytest.approx(top3(softmax(one.target[0])), abs=1e-5)
    assert entropy["tempered"] == pytest.approx(top3(softmax(one.target[0], 0.6)), abs=1e-5)
    assert entropy["raw"] > entropy["tempered"] + 0.1
    cold = replace(one, sampling=Sampling())
    assert len({make(f"fly:gate={gate}")._entropy(build(cold)).item() for gate in ("raw", "tempered")}) == 1  # type: ignore[attr-defined]


UNDECIDED = [0.0, 1.0, 1.1, 0.0, 0.0, 0.0]


def round_of(
    rule: Fly, rows: list[list[float]], ids: list[int], state: torch.Tensor | None
) -> tuple[int, torch.Tensor]:
    batch = build(One(rows, ids))
    batch.state = state
    decisions = rule.verify(batch)
    assert decisions.state is not None
    return int(decisions.accepted), decisions.state


def test_carry_lets_a_window_end_in_the_next_round() -> None:
    rows, ids = [hot(3)] * 4 + [UNDECIDED] + [hot(3)] * 3, [3, 3, 3, 3, 1, 3, 3]  # a mismatch, two matches, the end
    assert decide(make("fly:window=4"), [One(rows, ids)])[0][0] == 4
    assert round_of(Fly(window=4, carry=1), rows, ids, None)[0] == 4, "two matches are missing, one may be"
    accepted, state = round_of(Fly(window=4, carry=2), rows, ids, None)
    assert accepted == 7 and state.tolist() == [[1]], "of the two, the target's own token is one"
    again = [UNDECIDED] + [hot(3)] * 5
    assert round_of(Fly(window=4, carry=2), again, [1, 3, 3, 3, 3], state)[0] == 0, "the window is still open"
    accepted, state = round_of(Fly(window=4, carry=2), [hot(3), *again], [3, 1, 3, 3, 3, 3], state)
    assert accepted == 6 and state.tolist() == [[0]], "it has ended, and another mismatch has its own window"


def test_without_carry_nothing_is_remembered() -> None:
    assert make("fly").verify(build(One([UNDECIDED, hot(3)], [3]))).state is None


def test_a_window_that_adapts_is_shorter_where_the_target_is_torn() -> None:
    torn = [1.0, 1.0, 1.0, -9.0, -9.0, -9.0]  # log 3 nats: W theta / E is 1.6
    leaning = [2.2, 0.0, -9.0, -9.0, -9.0, -9.0]  # 0.33 nats: 5.5
    for row, window in ((torn, 2), (leaning, 6)):
        for follow in range(1, 8):
            one = One([row, *[hot(3)] * (follow + 1)], [1, *[3] * follow])
            assert (decide(make("fly:adapt=true"), [one])[0][0] > 0) == (follow >= window)


def test_special_tokens_are_protected_unless_the_released_behaviour_is_asked_for() -> None:
    one = One([UNDECIDED, *[hot(3)] * 7], [1, *[3] * 6])
    assert decide(make("fly"), [one], protected=frozenset({1})) == [(0, 2, [])]
    assert decide(make("fly:protect=false"), [one], protected=frozenset({1})) == [(7, 3, [0])]


def test_the_former_name_of_a_reading_is_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="now called released"):
        assert make("fly:reading=code") == make("fly:reading=released")


def test_the_former_name_of_what_lossy_rules_share_is_taken_with_a_warning() -> None:
    sys.modules.pop("semspec.verify.loose", None)
    with pytest.warns(DeprecationWarning, match=r"now semspec\.verify\.lossy"):
        loose = importlib.import_module("semspec.verify.loose")
    assert loose.conclude is importlib.import_module("semspec.verify.lossy").conclude
