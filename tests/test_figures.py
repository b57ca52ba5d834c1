"""Tables of the docs have the figures and verdicts of the files that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The table whose heading begins like this, or the first below such a line: first cell -> the others."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(heading))
    if not heading.startswith("|"):
        at = next(i for i, line in enumerate(lines) if i > at and line.startswith("|"))
    found = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        found[first] = others
    return found


def test_correlations_of_measures() -> None:
    names = {"`number`": "number", "`meaning`, words in common": "words in common (no encoder)",
             "`meaning`, MiniLM": "meaning", "`least likely token`": "least likely token",
             "`likelihood`": "likelihood"}  # fmt: skip
    found, told = result("trust-2026-11-18.json")["correlation"], rows("trust.md", "| measure | correlation |")
    assert set(told) == set(names)
    for label, name in names.items():
        one = found[name]
        assert told[label][0] == f"{one['spearman']:.2f} [{one['low']:.2f}, {one['high']:.2f}]", label


def test_damage_that_was_planted_is_found_or_said_to_be_too_little() -> None:
    """One digit swapped in 2 % of the answers: a measure that misses it has said that it shows only larger losses."""
    found, told = result("trust-2026-11-18.json"), rows("trust.md", "| measure | correlation |")
    own = found["accuracy"]["none"] - found["accuracy"]["one digit swapped"]
    assert found["problems"] == 240 and round(240 * own) == 5
    damage = found["damage"]
    assert all(one["found"] or one["visible_from"] > -one["difference"] > 0 for one in damage.values())
    least = {name: one["visible_from"] for name, one in damage.items()}
    assert told["`number`"][1] == f"{100 * least['number']:.1f} points"
    assert told["`meaning`, MiniLM"][1] == f"{least['meaning']:.4f} of cosine"
    assert told["`least likely token`"][1] == f"{least['least likely token']:.2f} nats"
    assert told["`likelihood`"][1] == f"{least['likelihood']:.4f} nats"


def test_broken_bounds_of_calibrations() -> None:
    found = result("trust-b-2026-11-18.json")["calibration"]
    names = {"3 %, with answers": "with answers, 0.03", "4.2 %": "with answers, 0.0416", "5 %": "with answers, 0.05",
             "9.2 %": "with answers, 0.0925", "10 %": "with answers, 0.1", "12.6 %": "with answers, 0.1264",
             "25 % of the distance to the draft, without": "without, 0.25", "50 %": "without, 0.5"}  # fmt: skip
    told = rows("trust.md", "| bound | broken, `random` |")
    assert set(told) == set(names) and set(names.values()) == set(found["random"])
    for label, name in names.items():
        coin = found["random"][name]
        assert [cell.removesuffix(" of 200") for cell in told[label][:2]] == [
            str(coin["broken"]), str(coin["careless_broken"]),
        ]  # fmt: skip
        rules = [rule for rule in ("fly", "typical", "topk", "semantic+") if name in found[rule]]
        others = [found[rule][name]["broken"] for rule in rules]
        assert told[label][2] in (", ".join(map(str, others)), "" if any(others) or not others else "0")
    every = [one for rule in found.values() for one in rule.values()]
    assert all(one["splits"] == 200 and one["broken"] <= 0.05 * 200 for one in every)
    text = " ".join((ROOT / "docs" / "trust.md").read_text().split())
    surely, few = sum(one["broken_surely"] for one in every), found["fly"]["with answers, 0.03"]
    assert surely == 3 and f"three choices of the {200 * len(every):,} broke their bound" in text
    most = found["semantic+"]["with answers, 0.03"]
    shown = [200 - one["none_safe"] for one in (few, most)]
    assert f"is shown for `fly` in {shown[0]} of 200 splits, for `semantic+` in {shown[1]}" in text


def test_judges_held_against_accuracy() -> None:
    found, told = result("trust-judge-2026-11-19.json"), rows("trust.md", "| judge | correlation |")
    for label, name in (("planted", "planted"), ("SmolLM2-135M-Instruct", "smollm2")):
        rank, habits = found["correlation"][f"judge: {name}"], found["judges"][name]
        spearman = "none"
        if rank["spearman"] is not None:
            spearman = f"{rank['spearman']:.2f} [{rank['low']:.2f}, {rank['high']:.2f}]"
        replies, pairs = habits["replies"], habits["of_right_and_wrong"]
        shares = [f"{100 * replies[what]:.0f}" for what in ("took the first", "took the second", "unreadable")]
        assert told[label] == [
            spearman, f"{', '.join(shares)} %",
            f"right {100 * pairs['right']:.0f} %, wrong {100 * pairs['wrong']:.0f} % of {pairs['of']}",
        ]  # fmt: skip
        assert found["tells"][f"judge: {name}"]["separates_random"] == (name == "planted")
    assert found["problems"] == 320 and all(found["judges"][name]["requests"] == 520 for name in found["judges"])


def test_verdicts_on_real_text() -> None:
    runs = [*result("real-text-b-2026-11-18.json")["runs"], *result("real-text-2026-11-19.json")["runs"]]
    headings = ("Greedy:", "Sampled at 0.7 (", "Greedy, a draft that fits:", "Sampled at 0.7, a draft")
    for run, heading in zip(runs, headings, strict=True):
        told = rows("results-rules.md", heading)
        verdicts = {name.strip("`"): cells[-1] for name, cells in told.items() if name.startswith("`")}
        taus = {name.strip("`"): float(cells[0]) for name, cells in told.items() if name.startswith("`")}
        arms = {re.sub(r"[:,]k=3$", "", name): arm for name, arm in run["arms"].items() if arm["role"] == "method"}
        assert verdicts == {name: arm["quality"] for name, arm in arms.items()}
        assert taus == {name: round(arm["tau_pooled"], 2) for name, arm in arms.items()}
        again = next(cells for name, cells in told.items() if name.startswith("the target again"))
        assert again[-1] == run["arms"]["resampled"]["quality"].replace("spread", "")


def test_step_rules_on_real_text() -> None:
    runs = [*result("real-text-steps-b-2026-11-19.json")["runs"], *result("real-text-steps-2026-11-19.json")["runs"]]
    for run, heading in zip(runs, ("Greedy steps:", "Steps at 0.7:", "Longer greedy answers:"), strict=True):
        told = {name.strip("`"): cells for name, cells in rows("results-rules.md", heading).items() if name[0] == "`"}
        arms = {name: arm for name, arm in run["arms"].items() if arm["role"] != "target" and name in told}
        assert set(told) == set(arms) and len(arms) == (8 if heading.startswith("Longer") else 10)
        for name, arm in arms.items():
            lowest = arm["measures"]["least likely token"]["difference"]["value"]
            assert told[name][-1] == arm["quality"] and float(told[name][0]) == round(arm["tau_pooled"], 2), name
            assert float(told[name][3].split()[0]) == round(lowest, 3), name


def test_bounds_of_calibrations_lie_below_what_random_loses() -> None:
    right = result("trust-2026-11-18.json")["accuracy"]
    losses = [1 - right[f"random:k=15,rate={rate}"] / right["none"] for rate in ("0.1", "0.25", "0.5", "0.75")]
    calibrated = result("trust-b-2026-11-18.json")["calibration"]["random"]
    bounds = sorted(float(name.rpartition(" ")[2]) for name in calibrated if "with answers" in name)
    text = " ".join((ROOT / "docs" / "trust.md").read_text().split())
    words = ", ".join(f"{100 * loss:.1f}" for loss in losses[:-1]) + f" and {100 * losses[-1]:.1f}"
    told = (
        f"settings that lose {words} % of the target's right answers; bounds were also set half a point below the last"
    )
    assert told in text
    own = [bound for bound in bounds if bound not in (0.03, 0.05, 0.1)]
    assert [round(loss - 0.005, 4) for loss in losses[1:]] == own


def test_advice_and_what_a_benchmark_measured() -> None:
    pairs = result("advise-b-2026-11-19.json")["pairs"]
    found = []
    for pair in pairs:
        for one in pair["methods"]:
            low, value, high = (one["predicted"][key] for key in ("low", "value", "high"))
            assert one["inside"] and low <= one["measured"] <= high
            name = {"pocket": "pocket", "twin": "twin"}.get(pair["pair"], "SmolLM2")
            method = one["method"].replace(",drafter=model", "")
            found.append(f"| {name} | `{method}` | {value:.2f} [{low:.2f}, {high:.2f}] | {one['measured']:.2f} |")
    told = (ROOT / "docs" / "reproduce.md").read_text()
    assert len(found) == 9 and all(line in told for line in found)
    assert [pair["pays"] for pair in pairs] == ["yes", "yes", "no"]


def test_draws_of_problems_to_advise_from() -> None:
    found = result("advise-draws-2026-11-19.json")
    (pair,) = found["pairs"]
    shares = [share for by_method in pair["inside"].values() for share in by_method.values()]
    told = " ".join((ROOT / "docs" / "reproduce.md").read_text().split())
    low, high = (100 * end for end in (min(shares), max(shares)))
    assert f"random draws of {', '.join(list(pair['inside'])[:2])} or 24 of {found['problems']} pocket problems" in told
    assert f"as many others to measure, {low:.0f} to {high:.0f} % are" in told and pair["splits"] == 200


def test_newer_rules_on_1000_problems() -> None:
    found = result("rules-newer-steps-1000-2026-11-18.json")["runs"][0]["arms"]
    told = rows("results-steps.md", "## Newer rules, on 1,000 problems")
    step_rules_are_told(told, found)
    lines = (ROOT / "docs" / "methods.md").read_text().splitlines()
    for name, arm in found.items():
        if arm["role"] == "method":
            (line,) = (line for line in lines if line.startswith(f"| `{name.split(':')[0]}` |"))
            assert f"| {100 * arm['retention']['value']:.1f} ¹ |" in line


def test_newer_step_rules_beside_chance() -> None:
    arms = result("rules-newer-steps-1000-2026-11-18.json")["runs"][0]["arms"]
    controls = result("control-newer-steps-1000-2026-11-19.json")["runs"][0]["arms"]
    assert arms["none"]["accuracy"] == controls["none"]["accuracy"], "the same problems and seeds"
    chance = {name: arm for name, arm in controls.items() if arm["role"] == "method"}
    step_rules_are_told(rows("results-steps.md", "| control | correct of 1,000 |"), chance)
    likely, asked = (
        arms[rule]["accuracy"]["hits"] - chance[f"random-step:rate={rate}"]["accuracy"]["hits"]
        for rule, rate in (("likely-step", 0.78), ("confspec", 0.32))
    )
    page = (ROOT / "docs" / "results-steps.md").read_text()
    assert f"`likely-step` has {likely} answers more than chance; `confspec` has {-asked} fewer" in page


def step_rules_are_told(told: dict[str, list[str]], found: dict[str, Any]) -> None:
    names = {"target only": "none", "draft only": "draft"}
    assert {names.get(label, label.strip("`")) for label in told} == set(found)
    for label, cells in told.items():
        arm = found[name := names.get(label, label.strip("`"))]
        points = {key: f"{100 * value:+.1f}" for key, value in arm["accuracy_difference"].items()}
        assert cells[0] == f"{arm['accuracy']['hits']}" and arm["accuracy"]["total"] == 1000
        against = f"{arm['quality']}: {points['value']} [{points['low']}, {points['high']}]"
        assert cells[1] == ("" if name == "none" else against)
        for cell, share in zip(cells[4:], (arm.get("steps_accepted"), arm.get("invalid_refused")), strict=True):
            counts = share and f"{100 * share['hits'] / share['total']:.0f} ({share['hits']:,} of {share['total']:,})"
            assert cell == (counts or "–")


def test_perplexities_of_rounded_weights() -> None:
    told = rows("reproduce.md", "| weights | perplexity |")
    arms = result("perplexity-smollm2-2026-11-18.json")["arms"]
    figures = {
        name: [f"{arm['perplexity']:.2f}", f"{arm['kl_nats']:.4f}", f"{100 * arm['same_best_token']:.1f}"]
        for name, arm in arms.items()
    }
    assert told == figures
    loss = arms["fp8 keys and values"]["kl_nats"]
    assert f"For SmolLM2 it costs {loss:.3f} nats" in (ROOT / "docs" / "usage.md").read_text()


def test_quality_of_quantised_pairs() -> None:
    found = result("quantised-quality-2026-11-19.json")
    figures = {
        name: [
            pair["right"],
            f"{pair['tau']:.3f}",
            f"{pair.get('kl_nats', 0):.4f}",
            f"{100 * pair.get('same_best_token', 1):.1f}",
        ]
        for name, pair in found["pairs"].items()
    }
    assert rows("reproduce.md", "| both models | right |") == figures and found["n"] == 1000
    fp8, int4 = (found["drafts"][f"float32 with {kind} draft"] for kind in ("fp8", "int4"))
    assert fp8["equal_texts"] == int4["equal_texts"] == found["pairs"]["float32"]["equal_texts"] == 1000
    page = (ROOT / "docs" / "reproduce.md").read_text()
    assert f"a tau of {fp8['tau']:.3f} in fp8 and {int4['tau']:.3f} in int4, and all 1,000 texts" in page
