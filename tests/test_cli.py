"""The command line as a person or a script meets it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from semspec import __version__, cli


@pytest.fixture
def semspec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command in this process; importing torch anew for every test would take most of their time."""

    def command(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["semspec", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as end:
            cli.run()
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess([], end.value.code or 0, out, err)

    return command


def test_json_is_one_document_on_the_last_line(semspec, target_folder: Path, draft_folder: Path):
    done = semspec(
        "generate", target_folder, "the quick", "--draft", draft_folder, "-n", 20, "--json", "--device", "cpu"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["lossless"] is True and document["verifier"] == "exact"
    assert len(document["tokens"]) == document["stats"]["tokens"] == len(document["origins"]) <= 20
    assert document["stats"]["tau"] >= 1.0


def test_every_relaxed_token_can_be_asked_for_its_reason(semspec, target_folder: Path, draft_folder: Path):
    command = ["generate", target_folder, "the quick", "--draft", draft_folder, "-n", 40, "--device", "cpu"]
    loose = semspec(*command, "--verifier", "margin:ratio=0.2", "--json")
    document = json.loads(loose.stdout.splitlines()[-1])
    relaxed = document["relaxed"]
    assert [r["at"] for r in relaxed] == [i for i, o in enumerate(document["origins"]) if o == "relaxed"] != []
    assert all("at least 0.2 of the best's" in r["why"] and r["instead"] is not None for r in relaxed)
    listed = semspec(*command, "--verifier", "margin:ratio=0.2", "--why")
    lines = [line for line in listed.stderr.splitlines() if "of the best's" in line]
    assert len(lines) == len(relaxed) and lines[0].strip().startswith(f"{relaxed[0]['at']}  {relaxed[0]['text']!r} for")
    assert "nothing was relaxed" in semspec(*command, "--why", "--quiet").stderr


def test_text_goes_to_stdout_and_the_summary_to_stderr(semspec, target_folder: Path):
    plain = semspec("generate", target_folder, "-", "-n", 20, "--device", "cpu", stdin="the quick")
    quoted = semspec(
        "generate", target_folder, "the quick", "-n", 20, "--device", "cpu", "--quiet", "--verifier", "none"
    )
    assert plain.returncode == quoted.returncode == 0
    assert plain.stdout == quoted.stdout != ""
    assert "tau" in plain.stderr and "lossless" in plain.stderr and quoted.stderr == ""
    assert "\x1b[" not in plain.stdout, "no colour codes in a pipe"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--num-draft-tokens", 0], 2, "num_draft_tokens is 0; give 1 or more"),
        (["-k", "many"], 2, "num_draft_tokens is 'many'; give a whole number, or auto"),
        (["--draft-min-p", 0.5], 2, "need a draft model"),
        (["--verifier", "magic"], 2, "there is no verifier 'magic'"),
        (["--top-p", 0, "--draft", "./nowhere"], 2, "top_p is 0.0; give"),
        (["--draft", "./nowhere"], 3, "./nowhere is no folder and no .gguf file"),
        (["--temperature", "warm"], 2, "--temperature"),
    ],
)
def test_refusals_are_one_line_and_an_exit_code(semspec, target_folder: Path, arguments: list, code: int, message: str):
    done = semspec("generate", target_folder, "the quick", "--device", "cpu", *arguments)
    assert done.returncode == code
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_help_and_version_do_not_wait_for_torch():
    show = "import sys; sys.argv = ['semspec', '--help']; from semspec import cli\n"
    show += "try: cli.run()\nfinally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "generate" in done.stdout, done.stderr


def test_python_dash_m_works():
    done = subprocess.run([sys.executable, "-m", "semspec", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == __version__
