"""One method against another, paired: what overlapping intervals cannot say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from semspec.bench.compare_to import compare_to
from semspec.bench.markdown import write_tables
from semspec.bench.summary import Sample, summarise
from semspec.cli.main import app
from semspec.errors import BadRequest
from tests.bench.test_summary import many, run_of


def made() -> tuple[dict[str, Any], list[Sample]]:
    """`fly` is right where `random` is, and on six problems more; it loses one."""
    samples = many(
        20,
        none=lambda i: {"correct": True},
        fly=lambda i: {"correct": i != 19, "seconds": 0.5},
        random=lambda i: {"correct": i >= 6, "seconds": 1.0},
    )
    return run_of("fly", "random"), samples


def test_gains_and_losses_are_counted_by_problem() -> None:
    found = compare_to(*made(), "random")
    assert set(found) == {arm["name"] for arm in made()[0]["arms"]} - {"random"}
    fly = found["fly"]
    assert (fly["gained"], fly["lost"], fly["problems_in_common"]) == (6, 1, 20)
    assert fly["accuracy_difference"]["value"] == pytest.approx(5 / 20)
    # Sign test of six against one by hand: 2 * (1 + 7) / 2^7.
    assert fly["mcnemar_p"] == pytest.approx(2 * (1 + 7) / 2**7)
    assert fly["mcnemar_p_holm"] == pytest.approx(fly["mcnemar_p"]), "the larger of two"
    assert found["none"]["mcnemar_p_holm"] == pytest.approx(2 * found["none"]["mcnemar_p"]), "the smaller of two"
    assert fly["time_ratio"]["value"] == pytest.approx(2.0)


def test_the_other_way_round_is_the_mirror() -> None:
    run, samples = made()
    here, there = compare_to(run, samples, "random")["fly"], compare_to(run, samples, "fly")["random"]
    assert (here["gained"], here["lost"]) == (there["lost"], there["gained"])
    assert here["accuracy_difference"]["value"] == -there["accuracy_difference"]["value"]
    assert here["time_ratio"]["value"] == pytest.approx(1 / there["time_ratio"]["value"])


def test_a_rival_that_is_not_there_is_named() -> None:
    with pytest.raises(BadRequest, match=r"no arm 'topk'.*fly.*random"):
        compare_to(*made(), "topk")


def test_markdown_holds_every_arm_and_keeps_its_columns() -> None:
    run, samples = made()
    text = write_tables([summarise(run, samples)], [compare_to(run, samples, "random")], "random")
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 2
    for lines in tables:
        assert len({line.count("|") for line in lines}) == 1, "a row has another number of cells than its head"
    assert any(line.startswith("| fly") and "95.0 [" in line for line in tables[0])
    assert any(line.startswith("| fly") and "6 : 1" in line for line in tables[1])


def test_the_command_writes_both(tmp_path: Path) -> None:
    run, samples = made()
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    done = CliRunner().invoke(
        app, ["compare", str(tmp_path), "--against", "random", "--markdown", str(tmp_path / "tables.md")]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout.strip().splitlines()[-1])
    assert document["against"] == "random" and document["comparisons"][0]["fly"]["gained"] == 6
    assert "Against `random`:" in (tmp_path / "tables.md").read_text()
