"""Commands in the docs are valid: every option is one that the command has, every rule and task exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from semspec import tasks
from semspec.bench.ablate import ablation
from semspec.bench.arms import parse_arm
from semspec.cli import main as cli
from semspec.probe_fit import cluster
from semspec.registry import parse_options

ROOT = Path(__file__).parent.parent
PAPERS = ROOT / "docs" / "reproduce-papers.md"


def commands(text: str) -> list[str]:
    """The lines of a document's sh blocks that call semspec, with what a backslash continues."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [" ".join(line.split()) for line in lines if line.startswith("semspec ")]


def parse(line: str) -> list[dict[str, Any]]:
    """The parsed arguments of each level of a command; refuses what the command line would refuse."""
    command: Any = typer.main.get_command(cli.app)
    context, words, found = None, shlex.split(line, comments=True)[1:], []
    while command is not None:
        context = command.make_context(command.name, words, parent=context)
        found.append(context.params)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        _, command, words = command.resolve_command(context, rest) if rest else (None, None, [])
    return found


def check(line: str) -> None:
    for given in parse(line):
        for method in given.get("method") or ():
            parse_arm(method)
        if task := given.get("task"):
            name, _, options = task.partition(":")
            parse_options(f"task {name!r}", tasks.REGISTRY[name], options, hidden=("data",))
        if clusters := given.get("clusters"):
            name, _, options = clusters.partition(":")
            parse_options(f"clusterer {name!r}", cluster.registry()[name], options, hidden=("source",))
        if rule := given.get("rule"):
            assert ablation(rule, False)


EVERY = [(path, line) for path in sorted((ROOT / "docs").glob("*.md")) for line in commands(path.read_text())]


@pytest.mark.parametrize(("path", "line"), EVERY, ids=lambda x: x.stem if isinstance(x, Path) else x[:60])
def test_a_command_can_be_given(path: Path, line: str) -> None:
    check(line)


def test_the_papers_have_their_commands() -> None:
    words = " ".join(commands(PAPERS.read_text()))
    for needed in ("probe fit", "probe calibrate", "--method semantic:", "--method fly:", "ablate fly", "bench replay"):
        assert needed in words


@pytest.mark.parametrize(
    "wrong",
    [
        "semspec probe fit a b --out x --colour 3",
        "semspec probe train x --labels",
        "semspec bench --out x --method fly:colour=3",
        "semspec bench --out x --task jsonl:file=3",
        "semspec bench --out x --k 3 ablate fly",
        "semspec probe label x --clusters nli:colour=3",
        "semspec probe paint x",
        "semspec bench replay x",
    ],
)
def test_a_wrong_command_is_found(wrong: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|requires|no option|missing"):
        check(wrong)


def test_lines_are_joined_and_other_languages_ignored() -> None:
    text = "```sh\nls\nsemspec a \\\n  --b c\n```\n```python\nsemspec x\n```\n"
    assert commands(text) == ["semspec a --b c"]
