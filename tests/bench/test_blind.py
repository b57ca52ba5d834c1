"""Where data cannot show a loss nothing is certified, nothing is called equivalent, and the reason is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import semspec
from semspec import pocket as pocket_world
from semspec.bench.calibrate import calibrate, choose
from semspec.bench.folder import load_run
from semspec.bench.run import Bench, Config
from semspec.bench.summary import summarise
from semspec.bench.table import notes
from semspec.bench.verdict import Margin
from semspec.errors import BadRequest
from tests.bench import test_measures
from tests.bench.test_measures import made_up, same, swapped
from tests.bench.test_summary import arm, many, run_of

Special = Callable[[int], dict[str, Any]]
RULE = "typical:epsilon=0.01"


def with_draft(*methods: str) -> dict[str, Any]:
    run = run_of(*methods)
    run["arms"].insert(1, arm("draft", "draft"))
    return run


def right(share: float, off: int = 0, **more: Any) -> Special:
    """Right on that share of problems, evenly spread; each arm with tokens of its own."""
    return lambda i: {
        "correct": int((i + 1) * share) > int(i * share) and (off == 0 or i % off != 0), "tokens": [i, off], **more,
    }  # fmt: skip


# -- calibration


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (right(0.0, finish_reason="length"), right(0.0, finish_reason="length"), "100 % of the target's answers were"),
        (right(0.0), right(0.0), r"right on 0.0 % of 300 answers.*match="),
        (right(0.01), right(0.0), r"right on 1.0 % of 300 answers"),
        (right(0.8), right(0.8, 200), "the draft alone cannot be told from the target"),
    ],
)
def test_nothing_is_certified_where_answers_cannot_show_a_loss(target: Special, draft: Special, message: str) -> None:
    samples = many(300, **{"none": target, "draft": draft, RULE: draft})
    with pytest.raises(BadRequest, match=f"nothing can be certified: .*{message}"):
        choose(with_draft(RULE), samples, [RULE], 0.05, 0.95, {})


def test_answers_that_are_right_though_cut_off_show_a_loss() -> None:
    cut = {"finish_reason": "length"}
    samples = many(300, **{"none": right(1, **cut), "draft": right(1, 4, **cut), RULE: right(1, 250, **cut)})
    assert choose(with_draft(RULE), samples, [RULE], 0.05, 0.95, {}).method == RULE


def spoilt(i: int) -> str:
    return f"zzz {i} qqq {10 * i}"


def test_calibration_decides_by_the_measure_that_bench_would_decide_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the number cannot tell `random` from the target, so words decide, and they see what the rule spoils."""
    monkeypatch.setattr(test_measures, "N", 300)
    run, samples = made_up(**{RULE: spoilt, "random:rate=0.5": spoilt, "draft": lambda i: f"{spoilt(i + 1)} sss"})
    summary = summarise(run, samples)
    assert summary["deciding_measure"] == "meaning" and summary["arms"][RULE]["quality"] == "worse"
    with pytest.raises(BadRequest, match=r"do not show .* distance to the draft in meaning .*\d or more, if it loses"):
        choose(run, samples, [RULE], 0.25, 0.95, {})
    run, samples = made_up(**{RULE: same, "random:rate=0.5": swapped(3), "draft": swapped(2)})
    found = choose(run, samples, [RULE], 0.25, 0.95, {})
    assert found.measure == summarise(run, samples)["deciding_measure"] == "number" and found.losses[RULE] == 0
    assert found.own_samples is not None and 0 <= found.own_samples < 0.2, "of the distance to the draft"


@pytest.mark.parametrize("blind", ["random", "draft", "cut"])
def test_nothing_is_certified_by_a_measure_that_cannot_tell_a_control(
    blind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_measures, "N", 300)
    own = lambda i: f"There are {10 * i} apples."  # noqa: E731
    coin, draft = (own if blind == "random" else swapped(3)), (own if blind == "draft" else swapped(2))
    run, samples = made_up(**{RULE: own, "random:rate=0.5": coin, "draft": draft})
    for sample in samples:
        sample["finish_reason"] = "length" if blind == "cut" else "stop"
    message = {"random": r"random \(random:rate=0.5\) cannot", "draft": "the draft alone cannot", "cut": "cut off"}
    with pytest.raises(BadRequest, match=f"nothing can be certified: .*{message[blind]}"):
        choose(run, samples, [RULE], 0.25, 0.95, {})


def test_a_run_of_beginnings_certifies_nothing(pocket: semspec.Pair, tmp_path: Path) -> None:
    config = Config(
        task="pocket:steps=3,split=probe", methods=["random:rate=1"], n=80, batch=4, max_new_tokens=4, device="cpu",
        context=512, entropy=True,
    )  # fmt: skip
    with pytest.raises(BadRequest, match=r"100 % of the target's answers were cut off .* --max-new-tokens"):
        calibrate(Bench(config, pocket), tmp_path, 0.1, 0.9, lambda done, total: None)


def test_too_few_prompts_without_answers_are_refused_before_they_are_run(pocket: semspec.Pair, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"Ann has {i} cats and 2 dogs. How many pets?" for i in range(18)))
    config = Config(task=f"jsonl:path={prompts}", methods=["random:rate=1"], device="cpu", context=512, entropy=True)
    with pytest.raises(BadRequest, match=r"18 problems cannot show a loss under 25 %.* give 19 or more"):
        calibrate(Bench(config, pocket), tmp_path / "run", 0.25, 0.95, lambda done, total: None)


# -- the verdict


def verdicts(samples: list[dict[str, Any]], margin: str | None = None) -> tuple[dict[str, Any], str]:
    run = with_draft("fly", "exact")
    next(a for a in run["arms"] if a["name"] == "exact")["lossless"] = True
    summary = summarise(run, samples, Margin.parse(margin))
    json.dumps(summary, allow_nan=False)
    return summary["arms"], " ".join(notes(summary))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_nothing_is_equivalent_where_all_right_answers_fit_in_the_margin(share: float) -> None:
    cut = {"finish_reason": "length"} if not share else {}
    none, wrong = right(share, **cut), right(0.0, 1, **cut)
    samples = many(600, none=none, draft=wrong, fly=wrong, exact=none)
    arms, said = verdicts(samples)
    for name in ("draft", "fly"):
        assert arms[name]["quality"] == ("worse" if share > 0.01 else "unclear")
        assert arms[name]["quality"] == "worse" or arms[name]["speedup"] is None
    assert arms["exact"]["quality"] == "equivalent" and arms["exact"]["speedup"] is not None, "token for token"
    if arms["fly"]["quality"] == "unclear":
        assert "too few for a margin of 3 points" in arms["fly"]["speedup_refused"] and "No speedup" in said
    assert ("--max-new-tokens" in said and "quality is of beginnings" in said) == (not share)


@pytest.mark.parametrize(("cut", "n"), [(True, 200), (False, 200), (False, 60)])
def test_the_same_beginnings_do_not_make_a_lossy_rule_equivalent(cut: bool, n: int) -> None:
    """Nor do a few answers that are the same: of 60, a share of 3 % that are changed is missed in one run of six."""
    none = right(0.0, finish_reason="length" if cut else "stop")
    arms, _ = verdicts(many(n, none=none, draft=right(0.0, 1), fly=none, exact=none))
    assert arms["exact"]["quality"] == "equivalent" and arms["exact"]["speedup"] is not None
    unclear = cut or n < 100
    assert arms["fly"]["quality"] == ("unclear" if unclear else "equivalent")
    assert (arms["fly"]["speedup"] is None) == unclear


def test_nothing_is_equivalent_where_the_draft_alone_would_be() -> None:
    samples = many(600, none=right(0.9), draft=right(0.9, 300), fly=right(0.9, 200), exact=right(0.9, 500))
    arms, said = verdicts(samples)
    assert [arms[name]["quality"] for name in ("draft", "fly", "exact")] == ["unclear"] * 3
    assert arms["fly"]["speedup"] is None and "the draft alone is within the margin" in said
    assert arms["exact"]["speedup"] is not None, "what is lossless is so by its rule"
    seen, _ = verdicts(many(600, none=right(0.9), draft=right(0.9, 5), fly=right(0.9, 200), exact=right(0.9)))
    assert seen["fly"]["quality"] == "equivalent" and seen["draft"]["quality"] == "worse"
    tight, _ = verdicts(samples, "0.2")
    assert tight["fly"]["speedup_refused"] is None, "a margin within which the draft is not"


def test_what_accepts_everything_is_the_control_where_no_model_drafts() -> None:
    run = run_of("fly", "accept-all:k=4")
    samples = many(600, **{"none": right(0.9), "fly": right(0.9, 200), "accept-all:k=4": right(0.9, 300)})
    found = summarise(run, samples)["arms"]
    assert found["fly"]["quality"] == "unclear" and "accept-all:k=4, which checks nothing" in str(
        found["fly"]["speedup_refused"]
    )


def test_without_a_draft_model_what_the_lookups_write_unchecked_is_a_control(
    pocket: semspec.Pair, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"question": pocket_world.problem(i, 3, "probe").text} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = semspec.Pair(pocket.target, pocket.tokenizer, eos=pocket.eos)
    config = Config(
        task=f"jsonl:path={path}", methods=["margin:ratio=0.1"], max_new_tokens=12, device="cpu", context=512, batch=3,
        resamples=2, drafter="ngram",
    )  # fmt: skip
    bench = Bench(config, alone)
    summary = bench.run(tmp_path / "run")
    (control,) = [a for a in bench.arms if a.name.startswith("accept-all")]
    assert control.control and control.drafter == "ngram" and summary["arms"][control.name]["control"]
    assert summary["measures"]["meaning"]["separates_draft"] is not None, "there is a control below"
    run, samples = load_run(tmp_path / "run")
    assert {s["arm"] for s in samples} == {a["name"] for a in run["arms"]}
    again = Bench(config, alone)
    again.run(tmp_path / "run")
    assert [a.name for a in again.arms] == [a.name for a in bench.arms], "a run that goes on keeps its controls"
    lossless = Bench(Config(**vars(config) | {"methods": ["exact:k=4"]}), alone)
    lossless.run(tmp_path / "exact")
    assert not any(a.name.startswith("accept-all") for a in lossless.arms)


# -- what a loss is a share of


def test_a_loss_is_a_share_of_the_targets_right_answers() -> None:
    """The target is right on 40 %; 3 points less are 7.5 % of its right answers, and that is no loss under 5 %."""
    losing = lambda lost: lambda i: {"correct": i % 10 < 4 and i % 200 not in lost, "tokens": [i, len(lost)]}  # noqa: E731
    rule = "fly:theta=0.1"
    run = with_draft(rule)
    samples = many(4000, **{"none": losing(()), "draft": losing(range(100)), rule: losing((0, 1, 2, 3, 100, 101))})
    with pytest.raises(BadRequest, match=r"less than 5 % of the target's correct answers .*it lost 7\.5 % of it here"):
        choose(run, samples, [rule], 0.05, 0.95, {})
    found = choose(run, samples, [rule], 0.1, 0.95, {})
    assert found.losses[rule] == pytest.approx(0.075) and found.p[rule] < 0.05


def test_a_table_says_what_damage_it_could_not_have_shown() -> None:
    """5 of 240 answers damaged are not told from chance by one method, so the table says from how many they are."""
    for lost, found in ((5, "unclear"), (6, "worse")):
        run = run_of("fly")
        samples = many(240, none=right(1), fly=lambda i, lost=lost: {"correct": i >= lost, "tokens": [i, 1]})
        summary = summarise(run, samples, Margin.parse("1"))
        said = " ".join(notes(summary))
        assert summary["arms"]["fly"]["quality"] == found, lost
        assert "Of 240 answers 6 lost and none gained (2.5 %) are the fewest that show; with fewer than 299" in said


def test_a_table_without_right_answers_says_what_it_could_not_have_shown() -> None:
    """One digit swapped in 2 % of the answers is neither found nor called equivalent, and the note says why: intervals
    are of one arm, and seven are tested."""
    digit = lambda i: f"Counted: {10 * i + 3 * (i % 50 == 25)} apples."  # noqa: E731
    arms = {"fly": same, "random:rate=0.5": swapped(5), "typical": digit, **{f"topk:k={k}": same for k in (1, 2, 3)}}
    run, samples = made_up(**arms)
    summary = summarise(run, samples)
    damaged = summary["arms"]["typical"]
    assert summary["deciding_measure"] == "number" and damaged["quality"] == "unclear"
    (note,) = (note for note in notes(summary) if note.startswith("By number a difference of about 0."))
    least = float(note.split()[6])
    assert least > 0.02 and note.endswith("with fewer than 102 problems no lossy rule can be called equivalent.")
    gap = summary["arms"]["random:rate=0.5"]["measures"]["number"]["difference"]
    assert least > 1.3 * (gap["high"] - gap["low"]) / 2, "one of seven"
