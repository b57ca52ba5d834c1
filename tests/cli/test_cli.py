"""The command line as a person or a script meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from semspec import __version__
from semspec.model import ModelRunner
from semspec.pocket.chat import CHAT_TEMPLATE, outside
from semspec.pocket.world import problem


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
    command = ["generate", target_folder, "the quick", "--raw", "--draft", draft_folder, "-n", 40, "--device", "cpu"]
    loose = semspec(*command, "--verifier", "margin:ratio=0.2", "--json")
    document = json.loads(loose.stdout.splitlines()[-1])
    relaxed = document["relaxed"]
    assert [r["at"] for r in relaxed] == [i for i, o in enumerate(document["origins"]) if o == "relaxed"] != []
    assert all("at least 0.2 of the best's" in r["why"] and r["instead"] is not None for r in relaxed)
    listed = semspec(*command, "--verifier", "margin:ratio=0.2", "--why")
    lines = [line for line in listed.stderr.splitlines() if "of the best's" in line]
    first = f"token {relaxed[0]['at']}: {relaxed[0]['text']!r} instead of {relaxed[0]['instead']!r} ("
    assert len(lines) == len(relaxed) and lines[0].startswith(first)
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


def test_a_prompt_is_an_argument_a_file_or_standard_input(semspec, target_folder: Path, tmp_path: Path):
    (tmp_path / "prompt.txt").write_text("the quick\n")
    common = ["-n", 12, "--device", "cpu", "--quiet"]
    told = semspec("generate", target_folder, "the quick", *common).stdout
    assert told == semspec("generate", target_folder, *common, stdin="the quick\n").stdout
    assert told == semspec("generate", target_folder, "--file", tmp_path / "prompt.txt", *common).stdout
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfthe quick\r\n")
    assert told == semspec("generate", target_folder, "--file", tmp_path / "windows.txt", *common).stdout
    assert told == semspec("generate", target_folder, *common, stdin="\ufeffthe quick\n").stdout
    both = semspec("generate", target_folder, "the quick", "--file", tmp_path / "prompt.txt")
    assert both.returncode == 2 and "there is a prompt and a --file; give one of them" in both.stderr
    none = semspec("generate", target_folder, "--file", tmp_path / "nothing.txt")
    assert none.returncode == 2 and "nothing.txt: " in none.stderr
    nobody = semspec("generate", target_folder, stdin=None)
    assert nobody.returncode == 2 and "there is no prompt" in nobody.stderr


def test_an_empty_prompt_is_refused(semspec, target_folder: Path):
    for words in (["--chat"], ["--raw"], [""], []):
        done = semspec("generate", target_folder, *words, "--device", "cpu", stdin="\n")
        assert done.returncode == 2 and "the prompt is empty" in done.stderr and done.stdout == ""


def test_a_chat_model_is_sent_a_message_unless_told_otherwise(semspec, target_folder: Path, tmp_path: Path):
    command = ["generate", target_folder, "the quick", "-n", 12, "--device", "cpu"]
    chat, raw, default = (semspec(*command, *words, "--json") for words in (["--chat"], ["--raw"], []))
    tokens = [json.loads(done.stdout)["prompt_tokens"] for done in (chat, raw, default)]
    assert tokens[0] == tokens[2] > tokens[1] and json.loads(default.stdout)["chat"] is True
    line = "sent as a chat message; --raw sends the text as it is"
    assert semspec(*command).stderr.count(line) == 1 and line not in semspec(*command, "--chat").stderr
    for file in target_folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    plain = semspec("generate", tmp_path, "the quick", "-n", 12, "--device", "cpu", "--json")
    assert json.loads(plain.stdout)["tokens"] == json.loads(raw.stdout)["tokens"]


def test_pocket_says_what_it_knows_when_asked_for_something_else(semspec):
    note = "pocket knows word problems of one small world only"
    for words, told in (("What is the capital of France?", True), ("Mia has 2 pens. How many pens has Mia?", False)):
        done = semspec("generate", "pocket", words, "-n", 4, "--device", "cpu")
        assert (note in done.stderr) == told and note not in done.stdout
        talk = semspec("chat", "pocket", "-n", 4, "--device", "cpu", stdin=f"{words}\n{words}\n")
        assert talk.stderr.count(note) == told, "once, and only where it helps"
    assert note not in semspec("generate", "pocket", "Why?", "-n", 4, "--device", "cpu", "--quiet").stderr
    assert all(not outside(CHAT_TEMPLATE, problem(i, 3 + i % 6, "test").text) for i in range(200))
    assert outside(CHAT_TEMPLATE, "Why?") and not outside("another template", "Why?")


def test_with_a_target_in_the_environment_the_only_argument_is_the_prompt(
    semspec, target_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    common = ["-n", 6, "--device", "cpu", "--quiet"]
    told = semspec("generate", target_folder, "the quick", *common).stdout
    monkeypatch.setenv("SEMSPEC_TARGET", "nowhere")
    assert semspec("generate", target_folder, "the quick", *common).stdout == told, "two arguments are both"
    assert semspec("generate", target_folder, "-", *common, stdin="the quick").stdout == told
    monkeypatch.setenv("SEMSPEC_TARGET", str(target_folder))
    assert semspec("generate", "the quick", *common).stdout == told
    assert semspec("generate", *common, stdin="the quick").stdout == told
    monkeypatch.delenv("SEMSPEC_TARGET")
    (tmp_path / "c.toml").write_text(f'target = "{target_folder}"')
    assert semspec("--config", tmp_path / "c.toml", "generate", "the quick", *common).stdout == told


def test_a_name_with_a_typo_is_answered_with_the_right_one(semspec, target_folder: Path):
    done = semspec("info", "pocke")
    assert done.returncode == 3 and done.stderr.endswith("semspec: there is no model pocke; did you mean pocket?\n")
    typo = str(target_folder)[:-1] + "x"
    assert f"did you mean {target_folder.name}" in semspec("generate", typo, "x").stderr


def test_an_interrupt_says_what_is_kept(semspec, target_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    real, passes = ModelRunner.score, []

    def score(self: ModelRunner, requests):
        passes.append(len(requests))
        if len(passes) == 12:
            raise KeyboardInterrupt
        return real(self, requests)

    monkeypatch.setattr("semspec.pair.loading.row_cost", lambda runner: None)  # makes passes, too
    monkeypatch.setattr(ModelRunner, "score", score)
    one = semspec("generate", target_folder, "the quick", "--device", "cpu", "-k", 1, "--ignore-eos")
    assert one.returncode == 130 and "semspec: interrupted; the " in one.stderr and "tokens above" in one.stderr
    assert one.stdout.strip()
    passes.clear()
    bench = ["bench", "--task", "pocket", "--problems", 2, "--out", tmp_path, "--max-new-tokens", 4, "--device", "cpu"]
    some = semspec(*bench)
    assert some.returncode == 130 and "of 6 parts are kept in" in some.stderr
    assert "Traceback" not in some.stderr + one.stderr
    told = semspec("compare", tmp_path)
    assert f"{tmp_path} is unfinished, " in told.stderr.replace("\n", "")
    monkeypatch.setattr(ModelRunner, "score", real)
    assert semspec(*bench).returncode == 0 and "unfinished" not in semspec("compare", tmp_path).stderr


def test_a_terminal_gets_the_table_and_a_pipe_the_document(semspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench = ["bench", "--task", "pocket", "--problems", 1, "--out", tmp_path / "[x]", "--max-new-tokens", 4, "-q"]
    monkeypatch.setattr("semspec.cli.bench.find_spec", lambda name: None)
    done = semspec(*bench)
    assert json.loads(done.stdout)["runs"] and "pip install 'semspec[bench]'" in done.stderr
    assert f"report: {tmp_path}/[x]/" in done.stderr, "brackets are no markup"
    monkeypatch.setattr("semspec.cli.bench.to_terminal", lambda: True)
    assert semspec("compare", tmp_path / "[x]").stdout == ""
    assert json.loads(semspec("compare", tmp_path / "[x]", "--json").stdout)["runs"]


def test_several_answers_are_those_of_their_seeds(semspec, target_folder: Path):
    command = ["generate", target_folder, "the quick", "-n", 12, "-t", 0.9, "--device", "cpu", "--ignore-eos", "--json"]
    answers = json.loads(semspec(*command, "--answers", 3, "--seed", 5).stdout)["answers"]
    for i, answer in enumerate(answers):
        assert answer["tokens"] == json.loads(semspec(*command, "--seed", 5 + i).stdout)["tokens"]
        assert answer["seed"] == 5 + i
    assert len({tuple(answer["tokens"]) for answer in answers}) == 3
    command.remove("--json")
    listed = semspec(*command, "--answers", 3, "--seed", 5)
    assert listed.stdout == "\n".join(answer["text"] + "\n" for answer in answers)
    assert [line[:6] for line in listed.stderr.splitlines()[-3:]] == ["1 of 3", "2 of 3", "3 of 3"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--num-draft-tokens", 0], 2, "num_draft_tokens is 0; give 1 or more"),
        (["-k", "many"], 2, "num_draft_tokens is 'many'; give a whole number, auto or auto-repeatable"),
        (["--draft-min-p", 0.5], 2, "need a draft model"),
        (["--verifier", "magic"], 2, "there is no verifier 'magic'"),
        (["--drafter", "egale:pocket"], 2, "did you mean eagle?"),
        (["--top-p", 0, "--draft", "./nowhere"], 2, "top_p is 0.0; give"),
        (["--draft", "./nowhere"], 3, "./nowhere is no folder and no .gguf file"),
        (["--temperature", "warm"], 2, "--temperature"),
        (["--answers", 0, "-t", 1], 2, "--answers is 0; give 1 or more"),
        (["--answers", 2], 2, "at temperature 0 all 2 answers would be the same"),
    ],
)
def test_refusals_are_one_line_and_an_exit_code(semspec, target_folder: Path, arguments: list, code: int, message: str):
    done = semspec("generate", target_folder, "the quick", "--device", "cpu", *arguments)
    assert done.returncode == code
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_schema_that_is_no_json_is_told_where_it_breaks(semspec, target_folder: Path, tmp_path: Path):
    (tmp_path / "schema.json").write_text('{"type": ')
    done = semspec("generate", target_folder, "the quick", "--json-schema", tmp_path / "schema.json")
    assert done.returncode == 2 and "the JSON schema is not JSON: Expecting value: line 1 column 10" in done.stderr


def test_without_a_network_a_name_that_is_nowhere_is_refused_in_one_line(semspec, monkeypatch: pytest.MonkeyPatch):
    def nobody(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("Got: ConnectError\nAn error happened\nPlease check your internet connection")

    monkeypatch.setattr("semspec.model.weights.snapshot_download", nobody)
    done = semspec("generate", "nobody/nothing", "hello")
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert "nobody/nothing is no folder here, and the hub cannot be asked for it: no network" in done.stderr


@pytest.mark.parametrize("where", ["file/run", "/proc/run"])
def test_a_run_that_cannot_be_kept_is_refused_before_models_are_loaded(
    semspec, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("semspec.bench.run.Bench", lambda *_, **__: pytest.fail("models were loaded"))
    done = semspec("bench", "--problems", 2, "--out", tmp_path / where)
    assert done.returncode == 2 and f"{where}: " in done.stderr and "may it be written?" in done.stderr


def test_a_full_context_is_not_called_a_limit_that_was_not_set(semspec):
    done = semspec("generate", "pocket", "--context", 12, "--device", "cpu", "What is 3 * 4?")
    assert done.returncode == 0 and "still thinking when -n or --context was reached: no answer" in done.stderr


def test_help_and_version_do_not_wait_for_torch():
    show = "import sys; sys.argv = ['semspec', '--help']; from semspec.cli import main as cli\n"
    show += "try: cli.run()\nfinally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "generate" in done.stdout, done.stderr


def test_an_interrupt_while_libraries_are_imported_is_no_crash(semspec, monkeypatch: pytest.MonkeyPatch):
    def imported(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:  # as transformers does
            raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from error

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("semspec.pair.loading.load", imported)
    done = semspec("generate", "pocket", "hello")
    assert done.returncode == 130 and done.stderr == "" and signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr("semspec.pair.loading.load", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a crash is one where nobody interrupted
        semspec("generate", "pocket", "hello")


@pytest.mark.parametrize("module", ["semspec", "semspec.cli"])
def test_an_interrupt_while_commands_are_imported_is_no_crash(module: str):
    slow = "class Slow:\n  def find_spec(self, name, *_):\n    if name == 'semspec.cli.main': raise KeyboardInterrupt\n"
    slow += f"import runpy, sys; sys.meta_path.insert(0, Slow()); runpy.run_module({module!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", slow], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("module", ["semspec", "semspec.cli"])
def test_python_dash_m_works(module: str):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert run("--version").stdout.strip() == __version__
    missing = run("serve")
    assert missing.returncode == 2 and "target" in missing.stderr.lower()


BAD = b"caf\xe9".decode("utf-8", "surrogateescape")  # as Python decodes arguments


def test_bytes_that_are_not_utf8_are_refused_in_one_line(semspec, target_folder: Path, tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    (tmp_path / "lone.jsonl").write_text('{"prompt": "the quick"}\n{"prompt": "\\ud800"}\n')
    bench = ["bench", "--target", target_folder, "--out", tmp_path / "run", "-q", "--task"]
    cases = [
        (["generate", target_folder, BAD], "the prompt is not valid UTF-8 (at character 4)"),
        (["generate", target_folder, "--file", tmp_path / "latin.txt"], "latin.txt is not valid UTF-8"),
        (["generate", target_folder, "the quick", "--stop", BAD], "--stop is not valid UTF-8"),
        (["chat", target_folder, "--system", BAD], "--system is not valid UTF-8"),
        ([*bench, f"jsonl:path={tmp_path}/latin.jsonl"], "latin.jsonl cannot be read as JSON"),
        ([*bench, f"jsonl:path={tmp_path}/lone.jsonl"], "row 2 of"),
    ]
    for arguments, message in cases:
        done = semspec(*arguments)
        assert done.returncode == 2 and message in done.stderr and done.stdout == "", (arguments, done)
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_pipe_that_is_not_utf8_is_refused_in_one_line(command: str, target_folder: Path):
    done = subprocess.run(
        [sys.executable, "-m", "semspec", command, str(target_folder), "--device", "cpu", "-q"],
        input=b"caf\xe9\n", capture_output=True, timeout=120, env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip
    assert done.returncode == 2 and b"is not valid UTF-8" in done.stderr and b"Traceback" not in done.stderr


def test_a_place_that_cannot_be_written_is_said_in_one_line(semspec, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    done = semspec("bench", "--task", "pocket", "--problems", 1, "--method", "exact", "--out", tmp_path / "file", "-q")
    assert done.returncode == 2 and "file: File exists; is the path right" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_help_lists_every_command_in_the_order_of_use():
    import typer

    from semspec.cli.main import ORDER, app

    command = typer.main.get_command(app)
    listed = [name for names in ORDER.values() for name in names]
    assert sorted(listed) == sorted(command.commands)  # type: ignore[attr-defined]
    assert command.list_commands(None)[:4] == ["demo", "generate", "chat", "serve"]  # type: ignore[attr-defined]
