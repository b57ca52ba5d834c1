"""Stats, on samples small enough to be counted by hand."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engines import joined
from semspec.loop.stats import SECONDS, Stats, current_outcomes

rounds = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()).map(lambda s: (s[0], min(s[0], s[1]), s[2])),
    max_size=20,
)


def observed(*rounds: tuple[int, int]) -> Stats:
    stats = Stats()
    for drafted, accepted in rounds:
        stats.observe(drafted, accepted)
    return stats


def test_derived_figures_of_three_rounds() -> None:
    stats = observed((4, 4), (4, 0), (3, 2))
    assert stats.rounds == 3
    assert stats.drafted == 4 + 4 + 3
    assert stats.accepted == 4 + 0 + 2
    assert stats.bonus == 3
    assert stats.tokens == 5 + 1 + 3
    assert stats.tau == 1 + 6 / 3
    assert stats.acceptance_rate == 6 / 11
    assert stats.histogram == Counter({4: 1, 0: 1, 2: 1})
    assert stats.accepted_per_position == [2, 2, 1, 1]
    assert stats.drafted_per_position == [3, 3, 3, 2]


def test_positions_of_a_tree_are_those_of_its_paths() -> None:
    stats = observed((4, 1))
    stats.observe(16, 2, longest=3)
    stats = Stats.pooled([stats, observed((1, 1))])
    assert stats.drafted == 21 and stats.drafts == Counter({4: 1, 16: 1, 1: 1})
    assert (stats.drafted_per_position, stats.accepted_per_position) == ([3, 2, 2, 1], [3, 1])
    assert stats.acceptance_per_position == [1.0, 0.5, 0.0, 0.0]
    assert stats.acceptance_rate == 4 / (4 + 3 + 1), "a path of 3 tokens could be accepted, not a tree of 16"


def test_nothing_observed() -> None:
    stats = Stats()
    assert (stats.rounds, stats.drafted, stats.accepted, stats.tokens) == (0, 0, 0, 0)
    assert stats.tau == 1.0 and stats.acceptance_rate == 0.0
    assert stats.accepted_per_position == [] and stats.drafted_per_position == []


def test_without_drafts_a_round_is_one_token() -> None:
    stats = observed((0, 0), (0, 0))
    assert stats.tokens == 2 and stats.tau == 1.0 and stats.acceptance_rate == 0.0


def test_a_last_round_without_bonus_counts_committed_tokens_only() -> None:
    stats = Stats()
    stats.observe(drafted=5, accepted=3, bonus=0)
    assert stats.tokens == 3 and stats.bonus == 0 and stats.rounds == 1


def test_relaxed_tokens_are_among_the_accepted() -> None:
    stats = Stats()
    stats.observe(drafted=5, accepted=3, relaxed=2)
    assert stats.relaxed == 2 and stats.accepted == 3 and stats.tokens == 4


@given(rounds)
def test_tokens_are_accepted_plus_bonus_and_positions_add_up(rounds: list[tuple[int, int, bool]]) -> None:
    stats = Stats()
    for drafted, accepted, bonus in rounds:
        stats.observe(drafted, accepted, bonus=int(bonus))
    assert stats.accepted == sum(accepted for _, accepted, _ in rounds)
    assert stats.tokens == stats.accepted + stats.bonus == sum(accepted + bonus for _, accepted, bonus in rounds)
    assert sum(stats.accepted_per_position) == stats.accepted
    assert sum(stats.drafted_per_position) == stats.drafted == sum(drafted for drafted, _, _ in rounds)
    assert stats.histogram.total() == stats.drafts.total() == len(rounds)


@given(st.lists(rounds, max_size=5))
def test_pooled_stats_are_those_of_all_rounds_together(sequences: list[list[tuple[int, int, bool]]]) -> None:
    each, together = [], Stats()
    for sequence in sequences:
        stats = Stats()
        for drafted, accepted, bonus in sequence:
            stats.observe(drafted, accepted, relaxed=accepted // 2, bonus=int(bonus))
            together.observe(drafted, accepted, relaxed=accepted // 2, bonus=int(bonus))
        each.append(stats)
    assert Stats.pooled(each) == together


def test_pooled_tau_weighs_rounds_not_sequences() -> None:
    long, short = observed(*[(4, 0)] * 9), observed((4, 4))
    assert Stats.pooled([long, short]).tau == 1 + 4 / 10
    assert (long.tau + short.tau) / 2 == 3.0


def test_pooling_adds_passes_and_seconds_and_does_not_change_the_parts() -> None:
    one, two = observed((1, 1)), observed((2, 0))
    one.target_passes, two.target_passes = 3, 4
    one.seconds["draft"], two.seconds["draft"], two.seconds["host"] = 0.5, 0.25, 1.0
    total = one + two
    assert total.target_passes == 7
    assert total.seconds == {"draft": 0.75, "score": 0.0, "verify": 0.0, "host": 1.0, "capture": 0.0}
    total.observe(3, 3)
    assert (one.rounds, two.rounds, total.rounds) == (1, 1, 3)


def test_two_accumulators_share_nothing() -> None:
    one, two = Stats(), Stats()
    one.observe(1, 1)
    one.seconds["score"] = 1.0
    assert two == Stats() and set(two.seconds) == set(SECONDS)


def test_as_a_dictionary_it_is_json_with_every_figure() -> None:
    stats = observed((4, 4), (4, 0), (3, 2), (12, 10))
    found = json.loads(json.dumps(stats.to_dict()))
    assert list(found["histogram"]) == ["0", "2", "4", "10"], "in the order of numbers, not of text"
    assert found["rounds"] == stats.rounds == found["steps"], "the latter is the former name"
    for name in ("drafted", "accepted", "relaxed", "bonus", "tokens", "target_passes"):
        assert found[name] == getattr(stats, name)
    assert found["tau"] == pytest.approx(stats.tau)
    assert found["acceptance_rate"] == pytest.approx(16 / 23)
    assert found["accepted_per_position"] == stats.accepted_per_position
    assert found["drafted_per_position"] == stats.drafted_per_position
    assert found["seconds"] == dict.fromkeys(SECONDS, 0.0)


def test_steps_are_found_under_their_former_names_for_a_release() -> None:
    """Records that were written before, and programs that read those of today."""
    stats = Stats(step_outcomes=Counter(accepted=3, rejected=2, target=1))
    found = stats.to_dict()
    assert found["fates"] == {"accepted": 3, "refused": 2, "target": 1}
    assert current_outcomes(found["fates"]) == current_outcomes(found["step_outcomes"]) == stats.step_outcomes
    assert current_outcomes({"refused": 1, "rejected": 2}) == {"rejected": 3}


def test_parts_of_an_older_file_keep_their_rejected_steps() -> None:
    part = {"right": [True], "seconds": 1.0, "tokens": 10, "calls": {"draft": 6, "target": 6}, "finish": {"stop": 1},
            "load": 0.0, "texts": [""]}  # fmt: skip
    steps = {"accepted": 3, "target": 1}
    old, new = (joined([part | {"steps": steps | {name: 3}}]) for name in ("refused", "rejected"))
    assert old == new and new["draft_calls_per_drafted_step"] == 1.0
