"""`semspec chat` with a real (tiny) model: turns, commands, interrupts, and a terminal at the other end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from semspec.model import ModelRunner

TURNS = "the quick brown\none two three\n"


@pytest.fixture
def chat(semspec, target_folder: Path):
    """Chat with the tiny target, piped in or typed."""
    return lambda *arguments, **given: semspec(
        "chat", target_folder, "--device", "cpu", "-n", 12, "--context", 256, *arguments, **given
    )


def test_one_turn_per_line_of_a_pipe(chat, semspec, target_folder: Path):
    done = chat("--json", stdin=f"\n{TURNS}")
    first, second = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0 and done.stderr == ""
    alone = semspec("generate", target_folder, "--chat", "the quick brown", "-n", 12, "--device", "cpu", "--json")
    assert json.loads(alone.stdout)["tokens"] == first["tokens"]
    assert first["reused_tokens"] == 0 and second["prompt_tokens"] > first["prompt_tokens"]
    assert second["reused_tokens"] >= first["prompt_tokens"], "the first prompt is not read again"
    plain = chat("--quiet", stdin=TURNS)
    assert plain.stdout == f"{first['text']}\n{second['text']}\n" and plain.stderr == ""


def test_commands(chat, tmp_path: Path):
    notes = tmp_path / "notes.md"
    done = chat(
        "--system", "be brief",
        typed=f"the quick\n/method none\none two\n/stats\n/save {tmp_path}/a.json\n/save {notes}\n/save {notes}\n/new\n"
        f"/verifier exact:k=3,drafter=ngram\n/verifier\n/help\n//x\n/save {tmp_path}/b.json\n/quit\nnever read\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "a.json").read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [turn["verifier"] for turn in saved["turns"]] == ["exact", "none"]
    assert [turn["text"] for turn in saved["turns"]] == [m["content"] for m in saved["messages"][2::2]]
    assert notes.read_text().startswith("## system\n\nbe brief\n\n## user\n\nthe quick\n\n## assistant\n")
    after = json.loads((tmp_path / "b.json").read_text())
    assert [m["content"] for m in after["messages"][:2]] == ["be brief", "/x"] and len(after["turns"]) == 1
    assert max(map(int, after["turns"][0]["stats"]["drafts"])) <= 3
    for said in (
        "turns            2",
        "/method is now /verifier",
        "none, draft length 8, drafter auto",
        "a new chat",
        "exact, draft length 3, drafter ngram",
    ):
        assert said in done.stderr
    assert "exact             A draft token is accepted if " in done.stderr and "/save FILE" in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sing", "there is no command '/sing'; the commands are: /verifier, /stats,"),
        ("/verifier magic", "there is no verifier 'magic'"),
        ("/verifier exact:k=0", "k is '0'"),
        ("/verifier oracle", "asks a referee"),
        ("/save", "/save FILE"),
        ("/save .", ". exists; give another name"),
        ("/save ./nowhere/x", "nowhere/x cannot be written: No such file"),
        ("many words " * 200, "begin a new one, or load the model with a larger context (/new begins a new chat)"),
    ],
)
def test_a_mistake_ends_a_pipe_but_not_a_conversation(chat, line: str, message: str):
    if not line.startswith("/"):
        piped = chat(stdin=f"one\n{line}\ntwo\n")
        assert piped.returncode == 2 and message in piped.stderr and len(piped.stdout.split("\n")) >= 2
    typed = chat("--json", typed=f"one\n{line}\ntwo\n")
    assert typed.returncode == 0 and message in typed.stderr
    first, second = map(json.loads, typed.stdout.splitlines())
    assert second["reused_tokens"] >= first["prompt_tokens"]


def test_a_pipe_gives_no_commands(chat, tmp_path: Path):
    done = chat("--json", stdin=f"/usr/bin is a path?\n/save {tmp_path}/a.json\n/quit\n//x\n")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_stops_the_answer_and_not_the_chat(chat, monkeypatch: pytest.MonkeyPatch, times: int):
    """Once, it ends between two passes and the cache is kept; twice, in the middle of one, and the cache is lost."""
    real, passes = ModelRunner.score, []

    def score(self: ModelRunner, requests):
        passes.append(len(requests))
        for _ in range(times if len(passes) == 5 else 0):
            signal.raise_signal(signal.SIGINT)
        return real(self, requests)

    monkeypatch.setattr("semspec.pair.loading.row_cost", lambda runner: None)  # makes passes, too
    monkeypatch.setattr(ModelRunner, "score", score)
    before = signal.getsignal(signal.SIGINT)
    done = chat("--json", "-k", 1, typed=f"{TURNS}/stats\n")
    assert done.returncode == 0, done.stderr
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert signal.getsignal(signal.SIGINT) is before
    if times == 1:
        stopped, second = documents
        assert stopped["finish_reason"] == "cancelled" and 0 < len(stopped["tokens"]) < 12
        assert second["reused_tokens"] >= stopped["prompt_tokens"]
    else:
        (second,) = documents
        assert "stopped" in done.stderr and second["reused_tokens"] == 0 and "turns            2" in done.stderr
    assert second["finish_reason"] in ("stop", "length")
    piped = len(passes)
    monkeypatch.setattr(ModelRunner, "score", lambda *_: signal.raise_signal(signal.SIGINT))
    assert chat(stdin=TURNS).returncode == 130 and len(passes) == piped, "a script's interrupt ends the script"


def test_a_model_without_a_chat_template_is_refused(semspec, target_folder: Path, tmp_path: Path):
    for file in target_folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    done = semspec("chat", tmp_path, "--device", "cpu")
    assert (
        done.returncode == 2
        and f"has no chat template; it can go on with a text: semspec generate {tmp_path}" in done.stderr
    )


def test_in_a_terminal(target_folder: Path):
    """Keys in, a screen of 50 columns out: an answer stopped by Ctrl-C, a command completed by a tab, Ctrl-D."""
    terminal = Terminal("chat", str(target_folder), "--device", "cpu", "--context", "1024", "-t", "0.9", "--seed", "1")
    try:
        terminal.expect("Ctrl-D leaves", "> ")
        terminal.type("the quick brown fox\n")
        terminal.expect(" tokens · ")
        terminal.type("\x03")
        assert "^C" not in terminal.expect("stopped · "), "an echo would move the cursor that rows are redrawn from"
        terminal.expect("> ")
        terminal.type("/verifier no\t\n")
        terminal.expect("none, draft length 8", "> ")
        terminal.type("half a line")
        terminal.expect("half a line")
        terminal.press("\x03", "Ctrl-D leaves")
        terminal.expect("> ")
        terminal.type("\x04")  # on an empty line, the half one is gone
        assert terminal.child.wait(timeout=300) == 0
    finally:
        terminal.close()


SLOWLY = """
import time
from semspec.cli.main import run
from semspec.loop.executor import Executor
tick = Executor.tick
Executor.tick = lambda self: (time.sleep(0.1), tick(self))[1]
run()
"""  # so that there is time to press a key before a thousand tokens are written


class Terminal:
    """The command with a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.keys, screen = pty.openpty()
        self.seen = ""
        env = os.environ | {"TERM": "xterm", "COLUMNS": "50", "LINES": "20", "OMP_NUM_THREADS": "1"}
        self.child = subprocess.Popen(
            [sys.executable, "-c", SLOWLY, *arguments], stdin=screen, stdout=screen, stderr=screen, env=env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )  # fmt: skip
        os.close(screen)

    def type(self, keys: str) -> None:
        os.write(self.keys, keys.encode())

    def press(self, key: str, text: str) -> None:
        """Press a key until it has an effect: Python's own line editor can miss a signal while it begins to wait."""
        for _ in range(20):
            self.type(key)
            if select.select([self.keys], [], [], 3)[0]:
                break
        self.expect(text)

    def expect(self, *texts: str) -> str:
        """Wait until these have been shown, one after another; returns what was shown before the last."""
        end, before = time.monotonic() + 300, ""
        for text in texts:
            while text not in self.seen:
                assert select.select([self.keys], [], [], max(0, end - time.monotonic()))[0], (text, self.seen)
                self.seen += os.read(self.keys, 65536).decode(errors="replace")
            before, _, self.seen = self.seen.partition(text)
        return before

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self.keys)
