"""Commands in the docs are valid: every option is one that the command has, every rule and task exists."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

import pytest
import typer

import semspec
from semspec import tasks, verify
from semspec.bench.ablate import ablation
from semspec.bench.arms import Arm, parse_arm
from semspec.cli import main as cli
from semspec.draft import REGISTRY as DRAFTERS
from semspec.pocket import answer_of
from semspec.probe_fit import cluster
from semspec.registry import parse_options
from tests.test_imports import RANK

ROOT = Path(__file__).parent.parent
PAPERS = ROOT / "docs" / "reproduce-papers.md"
ENVIRONMENT = re.compile(r"^(?:\w+=\S+ )+")  # before a command
SETTINGS = re.compile(r"\w+=\S+(?: \w+=\S+)*")


def commands(text: str, program: str = "semspec") -> list[str]:
    """The lines of a document's sh blocks that call a program, continued lines joined and shell variables filled in."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [" ".join(line.split()) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    settings = [dict(word.split("=", 1) for word in line.split()) for line in lines if SETTINGS.fullmatch(line)]
    variables = {name: value for setting in settings for name, value in setting.items()}
    calls = [ENVIRONMENT.sub("", line) for line in lines]
    return [Template(line).substitute(variables) for line in calls if line.startswith(f"{program} ")]


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
            tasks.make(task, ROOT)  # refuses what a run would: code that is not allowed to run, too
        if clusters := given.get("clusters"):
            name, _, options = clusters.partition(":")
            parse_options(f"clusterer {name!r}", cluster.registry()[name], options, hidden=("source",))
        if rule := given.get("rule"):
            assert ablation(rule, False)


def check_python(line: str) -> None:
    """A program of this repository, and options that it has."""
    words = shlex.split(line, comments=True)[1:]
    path = ROOT / (f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0])
    if not path.is_file() and words[0] == "-m":
        path = path.with_suffix("") / "__main__.py"
    assert path.is_file(), f"there is no program {path.relative_to(ROOT)}"
    known = set(re.findall(r'"(--?[a-z][\w-]*)"', path.read_text()))
    given = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)} - {"-m"}
    if "semspec" not in words[1]:  # the harness has its own options
        assert given <= known, f"{path.name} has no option {given - known}"


def options(command: Any) -> dict[str, str]:
    """Every option of a command and of its commands, -t too, and the name of what it sets."""
    found = {flag: one.name for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    for other in getattr(command, "commands", {}).values():
        found |= options(other)
    return found


def fields(kinds: Iterable[type]) -> set[str]:
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


OPTIONS = options(typer.main.get_command(cli.app))
RULES = {name: verify.REGISTRY[name] for name in verify.REGISTRY}
SETTINGS_OF = fields([Arm, *RULES.values(), *(tasks.REGISTRY[name] for name in tasks.REGISTRY)]) | {"k"}
SPEC = re.compile(r"([a-z0-9][\w+-]*):((?:[\w-]+=[^\s,]+)(?:,[\w-]+=[^\s,]+)*)")
SETTING = re.compile(r"([a-z_]+)=[^\s,]+(?:,[a-z_]+=[^\s,]+)*")


def check_inline(code: str) -> bool:
    """Whether a piece of code in a sentence is part of a command; then it must be a valid part."""
    if code.startswith("semspec "):
        check(code)
    elif code.startswith("python "):
        check_python(code)
    elif code.startswith("-"):
        words = shlex.split(code)
        for flag, value in zip(words, [*words[1:], ""], strict=True):
            if flag.startswith("-"):
                assert flag in OPTIONS, f"no command has the option {flag}"
                if OPTIONS[flag] == "task" and value:
                    tasks.make(value, ROOT)
                if OPTIONS[flag] == "method" and value:
                    parse_arm(value)
    elif spec := SPEC.fullmatch(code):
        kinds = [found for found in (tasks.REGISTRY, RULES, DRAFTERS, cluster.registry()) if spec[1] in found]
        assert kinds, f"there is neither a task nor a rule, drafter or clusterer {spec[1]}"
        if kinds[0] is tasks.REGISTRY:
            tasks.make(code, ROOT)
        elif kinds[0] is RULES:
            parse_arm(code)
        else:
            parse_options(spec[1], kinds[0][spec[1]], code.partition(":")[2], hidden=("source",))
    elif SETTING.fullmatch(code):
        names = [item.split("=")[0] for item in code.split(",")]
        assert set(names) <= SETTINGS_OF, f"nothing has the options {set(names) - SETTINGS_OF}"
    else:
        return False
    return True


def inline(text: str) -> list[str]:
    """Code in the sentences of a page."""
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [" ".join(span.split()) for span in spans]


def test_commands_in_the_papers_sentences_are_valid() -> None:
    checked = [code for code in inline(PAPERS.read_text()) if check_inline(code)]
    assert len(checked) >= 20, checked


@pytest.mark.parametrize(
    "wrong",
    [
        "--colour 3",
        "--task humaneval",
        "fly:colour=3",
        "poems:n=3",
        "colour=red",
        "semspec paint x",
        "--method fly:x=1",
        "python -m bench.paint",
        "python bench/gpu.py --colour red",
    ],
)
def test_a_wrong_piece_of_a_command_is_found(wrong: str) -> None:
    with pytest.raises(
        Exception, match=r"(?i)no such|no option|no command|neither|nothing has|execute=true|no program"
    ):
        check_inline(wrong)
    assert not any(check_inline(code) for code in ("gsm8k/test.jsonl", "cot_type", "data.zip", "R1"))


EVERY = [(path, line) for path in sorted((ROOT / "docs").glob("*.md")) for line in commands(path.read_text())]


@pytest.mark.parametrize(("path", "line"), EVERY, ids=lambda x: x.stem if isinstance(x, Path) else x[:60])
def test_a_command_can_be_given(path: Path, line: str) -> None:
    check(line)


PROGRAMS = [
    (path, line) for path in sorted((ROOT / "docs").glob("*.md")) for line in commands(path.read_text(), "python")
]


@pytest.mark.parametrize(("path", "line"), PROGRAMS, ids=lambda x: x.stem if isinstance(x, Path) else x[:60])
def test_a_program_can_be_called(path: Path, line: str) -> None:
    check_python(line)


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
        "semspec bench --out x --task humaneval",
        "semspec bench --out x --k 3 ablate fly",
        "semspec probe label x --clusters nli:colour=3",
        "semspec probe paint x",
        "semspec bench replay x",
    ],
)
def test_a_wrong_command_is_found(wrong: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|requires|no option|missing|execute=true"):
        check(wrong)


def test_lines_are_joined_and_other_languages_left_alone() -> None:
    text = "```sh\nls\nD=d E=e\nsemspec a \\\n  --b c $D\nN=1 semspec f\n```\n```python\nsemspec x\n```\n"
    assert commands(text) == ["semspec a --b c d", "semspec f"]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> list[str]:
    found = []
    for path, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        target = (page.parent / path) if path else page
        if "://" not in path and (not target.exists() or (anchor and anchor not in anchors(target.read_text()))):
            found.append(f"{path}#{anchor}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page, page.read_text())


def test_a_dead_link_is_found() -> None:
    text = "[a](methods.md#no-such-heading) [b](nowhere.md) [c](methods.md) [d](https://example.org/x)"
    assert dead_links(ROOT / "docs" / "x.md", text) == ["methods.md#no-such-heading", "nowhere.md#"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_whole(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(widths) == 1 and re.match(r"\|[-| ]+\|$", table.splitlines()[1]), table[:200]


def test_architecture_describes_every_package() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().split("## Packages")[1].split("\n## ")[0]
    assert set(RANK) <= set(re.findall(r"`(\w+)`", table))


def test_the_example_of_a_rule_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 1


def mechanisms(text: str) -> list[tuple[str, list[str], list[str]]]:
    """Of each row of the tables that name tests: its name, the code in it, and its tests ("same": of the row above)."""
    found, before = [], list[str]()
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = table.splitlines()
        if not re.search(r"\| (test|ours in it) \|$", head):
            continue
        for row in rows:
            tests = re.findall(r"`(\w+/test_\w+\.py)`", row)
            tests += before if re.search(r"\(same test|\| same(,| \|$)", row.split("|", 2)[2]) else []
            code = [span for span in re.findall(r"`([^`]+)`", row) if not span.endswith(".py")]
            found.append((row.split("|")[1].strip(), code, tests))
            before = tests
    return found


MECHANISMS = mechanisms((ROOT / "docs" / "papers.md").read_text())


@pytest.mark.parametrize(("name", "code", "tests"), MECHANISMS, ids=[row[0] for row in MECHANISMS])
def test_a_mechanism_of_the_papers_has_a_test_that_knows_its_options(
    name: str, code: list[str], tests: list[str]
) -> None:
    assert tests and all((ROOT / "tests" / test).is_file() for test in tests), "every row has a test that is there"
    words = {word.removeprefix("no-") for span in code for word in re.findall(r"--([a-z][\w-]*)", span)}
    words |= {
        word for span in code for word in re.findall(r"(?:(?<=[:,;])|^)[a-z][\w-]*(?==)|^[a-z][a-z-]+(?=:|$)", span)
    }
    text = " ".join((ROOT / "tests" / test).read_text() for test in tests)
    unknown = {word for word in words if not re.search(rf"\b{re.sub('[-_]', '[-_]', word)}\b", text)}
    assert not unknown, f"{tests} know nothing of {sorted(unknown)}"


def test_the_tables_of_the_papers_are_found() -> None:
    assert len(MECHANISMS) > 45
    table = "| a | b | test |\n|---|---|---|\n| x | `one=2` | `verify/test_fly.py` |\n| y | `--two` | same |\n"
    assert mechanisms(table) == [
        ("x", ["one=2"], ["verify/test_fly.py"]), ("y", ["--two"], ["verify/test_fly.py"]),
    ]  # fmt: skip


ASKED = [page for page in PAGES if page != PAPERS]  # the papers' page asks the papers' models
QUESTIONS = {q for page in ASKED for q in re.findall(r'"([A-Z][^"]*\d[^"]*\?)"', page.read_text())}


def test_the_pocket_pair_answers_the_questions_of_the_docs() -> None:
    pair = semspec.load("pocket", device="cpu", slots=4, context=512)
    assert QUESTIONS
    for result in pair.generate([[{"role": "user", "content": question}] for question in sorted(QUESTIONS)]):
        assert result.finish_reason == "stop" and answer_of(result.text) is not None, result.text
