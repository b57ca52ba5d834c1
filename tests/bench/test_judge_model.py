"""Another model as a judge: what it is asked, what its replies say, and servers that are busy, slow or broken."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest

from semspec.bench import judge_model
from semspec.bench.judge_model import JudgeModel, judged, verdict_of
from semspec.bench.outside import outside_measures
from semspec.bench.summary import summarise
from semspec.bench.table import notes
from semspec.errors import BadRequest
from tests.bench.test_measures import made_up

BROKEN = {
    "page": "<html>welcome</html>", "list": "[]", "null": "null", "empty": "", "none": '{"choices": []}',
    "usage": '{"choices": [{"message": {"content": "A"}}], "usage": {"prompt_tokens": "many", "completion_tokens": 1}}',
}  # fmt: skip


class Fake(BaseHTTPRequestHandler):
    """Likes answers with an even number of apples; a "first" model likes whatever comes first."""

    asked: list[str] = []  # noqa: RUF012
    busy = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        Fake.asked.append(prompt)
        a, b = ("even" in part for part in prompt.split("<answer B>"))
        wanted, _, what = body["model"].partition("/")
        if wanted in BROKEN:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BROKEN[wanted].encode())
            return
        if wanted == "busy":
            Fake.busy += 1
            if Fake.busy <= int(what):
                self.send_response(429)
                self.send_header("Retry-After", "0")
                self.end_headers()
                return
        if wanted == "hangs up":
            Fake.busy += 1
            if Fake.busy <= int(what):
                self.close_connection = True
                return
        said = {"first": "A", "mute": "I cannot say."}.get(body["model"], "tie" if a == b else "A" if a else "**B**")
        reply = {"choices": [{"message": {"content": said}}], "usage": {"prompt_tokens": 50, "completion_tokens": 1}}
        status = 404 if body["model"] == "gone" else 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: object) -> None: ...


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # judges are asked many things at a time


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with Server(("127.0.0.1", 0), Fake) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/v1"
        http.shutdown()


def test_a_judge_is_asked_in_both_orders_and_never_twice(server: str, tmp_path: Path) -> None:
    run, samples = made_up(fly=lambda i: "even" if i % 2 else "odd")
    roles = {a["name"]: a["role"] for a in run["arms"]}
    judge = JudgeModel(server, "fair", problems=6)
    values = judged(tmp_path, samples, roles, judge)
    assert values["fly", "p/1", 0] == 1.0 and values["fly", "p/2", 0] == 0.5 == values["none", "p/2", 0]
    assert ("fly", "p/6", 0) not in values and judge.requests == judge.tokens["completion_tokens"]
    assert f"{judge.requests} requests" in judge.cost() and "How many? 1" in "".join(Fake.asked)
    again = JudgeModel(server, "fair", problems=6)
    assert judged(tmp_path, samples, roles, again) == values and again.requests == 0
    assert judged(tmp_path, samples, roles, None) == values, "what was asked once is shown without a server"
    assert summarise(run, samples, extra={"judge": values})["arms"]["fly"]["measures"]["judge"]["problems"] == 6
    biased = JudgeModel(server, "first", problems=4)
    assert set(judged(tmp_path, samples, roles, biased).values()) == {0.5}, "a judge of places has no preference"
    mute = JudgeModel(server, "mute", problems=1)
    assert judged(tmp_path, samples, roles, mute) == {}, "who says nothing has called no tie"
    assert mute.unread == mute.requests > 0 and "could not be read" in mute.cost()
    again = JudgeModel(server, "mute", problems=1)
    assert judged(tmp_path, samples, roles, again) == {} and again.requests == 0


def test_answers_that_were_made_again_are_judged_again(server: str, tmp_path: Path) -> None:
    run, samples = made_up(fly=lambda i: "even" if i % 2 else "odd")
    roles = {a["name"]: a["role"] for a in run["arms"]}
    before = judged(tmp_path, samples, roles, JudgeModel(server, "fair", problems=6))
    assert before["fly", "p/1", 0] == 1.0
    changed = next(s for s in samples if (s["arm"], s["problem"]) == ("fly", "p/1"))
    changed["text"] = next(s["text"] for s in samples if (s["arm"], s["problem"]) == ("none", "p/1"))
    assert ("fly", "p/1", 0) not in judged(tmp_path, samples, roles, None), "a verdict on another text"
    assert judged(tmp_path, samples, roles, JudgeModel(server, "fair", problems=6))["fly", "p/1", 0] == 0.5
    file = tmp_path / "judged.jsonl"  # as earlier versions wrote it
    file.write_text("".join(json.dumps(json.loads(line)[:5]) + "\n" for line in file.read_text().splitlines()))
    assert judged(tmp_path, samples, roles, None)["fly", "p/2", 0] == before["fly", "p/2", 0]


def test_two_judges_are_two_measures_and_the_table_names_the_one_that_it_shows(server: str, tmp_path: Path) -> None:
    """A second model that was asked about fewer problems was shown together with the first, as one judge."""
    run, samples = made_up(fly=lambda i: "even" if i % 2 else "odd")
    roles = {a["name"]: a["role"] for a in run["arms"]}
    fair = judged(tmp_path, samples, roles, JudgeModel(server, "fair", problems=6))
    biased = judged(tmp_path, samples, roles, JudgeModel(server, "first", problems=2))
    assert judged(tmp_path, samples, roles, None) == biased != fair, "the last that was asked"
    assert judged(tmp_path, samples, roles, JudgeModel(server, "fair", problems=6)) == fair
    values, by = outside_measures(tmp_path, run, samples, "none", JudgeModel(server, "first", problems=2))
    summary = summarise(run, samples, extra=values, by=by)
    assert summary["measures"]["judge"]["problems"] == 2, "not all that the target has answered"
    assert "judge is by first, of 6 pairs of answers, asked in both orders where they differ." in notes(summary)


def test_the_targets_other_samples_are_judged_once(server: str, tmp_path: Path) -> None:
    """Of several only the first has a row in tables; verdicts on the others would be paid for and never shown."""
    run, samples = made_up(fly=lambda i: "even" if i % 2 else "odd")
    judge = JudgeModel(server, "fair", problems=3)
    values, _ = outside_measures(tmp_path, run, samples, "none", judge)
    arms = {arm for arm, _, _ in values["judge"]}
    assert arms == {"none", "resampled", "draft", "fly"} and len(values["judge"]) == 12
    assert judge.requests <= 2 * 9


def test_a_judge_that_cannot_be_asked_is_told(server: str) -> None:
    with pytest.raises(BadRequest, match="status 404"):
        JudgeModel(server, "gone").prefer("q", "a", "b")
    with pytest.raises(BadRequest, match="cannot be asked"):
        JudgeModel("http://127.0.0.1:1/v1", "m").prefer("q", "a", "b")
    with pytest.raises(BadRequest, match="address"):
        JudgeModel("file:///etc/passwd", "m")


@pytest.mark.parametrize("what", ["page", "list", "null", "empty", "none"])
def test_what_is_no_chat_completion_is_told(server: str, what: str) -> None:
    with pytest.raises(BadRequest, match=r"cannot be asked: no chat completion .*the same command goes on"):
        JudgeModel(server, what).prefer("q", "a", "b")


def test_a_server_that_does_not_count_costs_no_verdict(server: str) -> None:
    judge = JudgeModel(server, "usage")
    assert judge.prefer("q", "a", "b") == 0.5 and judge.tokens == {"prompt_tokens": 0, "completion_tokens": 2}


def test_a_busy_server_is_asked_again_and_not_for_ever(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(self: JudgeModel, seconds: float) -> bool:
        waited.append(seconds)
        return True

    monkeypatch.setattr(JudgeModel, "_waited", wait)
    Fake.busy = 0
    assert JudgeModel(server, "busy/3").prefer("q", "even", "odd") == 1.0 and waited == [0.0] * 3
    Fake.busy = 0
    with pytest.raises(BadRequest, match="status 429"):
        JudgeModel(server, "busy/99").prefer("q", "even", "odd")
    assert Fake.busy == judge_model.TRIES


def test_a_server_that_hangs_up_is_asked_again(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_model, "WAIT", 0.0)
    Fake.busy = 0
    assert JudgeModel(server, "hangs up/3").prefer("q", "even", "odd") == 1.0
    Fake.busy = 0
    with pytest.raises(BadRequest, match="cannot be asked"):
        JudgeModel(server, "hangs up/99").prefer("q", "even", "odd")


def thought(final: str, before: str = "Let me see.") -> str:
    return f"<think>{before}</think>\n\n{final}"


def test_nobody_pays_for_answers_that_look_the_same(server: str, tmp_path: Path) -> None:
    """A judge sees no thinking. Answers that differ in it alone were asked about, and one other answer of two methods
    twice: 416 requests for 20 methods on 10 problems, of which 16 had something to tell."""
    run, samples = made_up(
        fly=lambda i: thought(f"There are {10 * i} apples.", "Other words."), topk=lambda i: thought("odd", "One way."),
        typical=lambda i: thought("odd", "Another way."),
    )  # fmt: skip
    samples = [s for s in samples if s["arm"] in ("none", "fly", "topk", "typical")]
    roles = {a["name"]: a["role"] for a in run["arms"]}
    judge = JudgeModel(server, "first", problems=5)
    values = judged(tmp_path, samples, roles, judge)
    assert len(values) == 20 and judge.requests == 2 * 5
    lines = list(judge_model.kept(tmp_path))
    opinions = [line.opinion for line in lines if line.opinion]
    assert len(lines) == 15 and [o.replies for o in opinions] == [(1.0, 1.0)] * 5, "the place is kept, too"
    assert sum(o.tokens[0] for o in opinions) == judge.tokens["prompt_tokens"] == 50 * judge.requests
    left = [line for line in (tmp_path / "judged.jsonl").read_text().splitlines(True) if "typical" not in line]
    (tmp_path / "judged.jsonl").write_text("".join(left))
    again = JudgeModel(server, "first", problems=5)
    assert judged(tmp_path, samples, roles, again) == values and again.requests == 0, "known from another method"


def test_many_are_asked_at_a_time_and_a_failure_costs_none_of_them(server: str, tmp_path: Path) -> None:
    class Judge(JudgeModel):
        together = threading.Barrier(4, timeout=20)  # passed by four at a time only

        def opinion(self, question: str, ours: str, theirs: str) -> judge_model.Opinion:
            self.together.wait()
            if "? 2" in question:
                raise BadRequest("it fell over")
            return super().opinion(question, ours, theirs)

    run, samples = made_up(fly=lambda i: f"even {i}")
    samples = [s for s in samples if s["arm"] in ("none", "fly") and s["index"] < 4]
    roles = {a["name"]: a["role"] for a in run["arms"]}
    with pytest.raises(BadRequest, match="it fell over"):
        judged(tmp_path, samples, roles, Judge(server, "fair", parallel=4))
    assert sum(line.value is not None for line in judge_model.kept(tmp_path)) == 3
    rest = JudgeModel(server, "fair", parallel=4)
    assert len(judged(tmp_path, samples, roles, rest)) == 8 and rest.requests == 2
    with pytest.raises(BadRequest, match="1 or more"):
        JudgeModel(server, "fair", parallel=0)


def test_after_a_failure_nothing_more_is_asked(tmp_path: Path) -> None:
    run, samples = made_up(fly=lambda i: f"even {i}")
    roles = {a["name"]: a["role"] for a in run["arms"]}
    asked: list[str] = []

    class Judge(JudgeModel):
        def opinion(self, question: str, ours: str, theirs: str) -> judge_model.Opinion:
            asked.append(question)
            time.sleep(0.05)  # by then all are in the queue
            raise BadRequest("it fell over")

    with pytest.raises(BadRequest, match="it fell over"):
        judged(tmp_path, samples, roles, Judge("http://127.0.0.1:1/v1", "fair", parallel=2))
    assert len(asked) < 40


def test_what_is_under_way_at_an_interrupt_is_kept(tmp_path: Path) -> None:
    """It will have been paid for; but nobody waits for a busy server then."""
    run, samples = made_up(fly=lambda i: f"even {i}")
    roles = {a["name"]: a["role"] for a in run["arms"]}
    interrupted = threading.Event()

    class Judge(JudgeModel):
        def opinion(self, question: str, ours: str, theirs: str) -> judge_model.Opinion:
            assert interrupted.wait(20)
            return judge_model.Opinion((1.0, 1.0), (50, 1))

    def progress(done: int, total: int) -> None:
        threading.Timer(0.2, interrupted.set).start()
        raise KeyboardInterrupt

    judge = Judge("http://127.0.0.1:1/v1", "fair", parallel=3)
    with pytest.raises(KeyboardInterrupt):
        judged(tmp_path, samples, roles, judge, progress)
    assert sum(line.opinion is not None for line in judge_model.kept(tmp_path)) == 3
    began = time.monotonic()
    assert not judge._waited(20) and time.monotonic() - began < 10


def test_a_verdict_after_a_broken_line_is_kept(server: str, tmp_path: Path) -> None:
    """It was written into the line that a kill had cut, so it was lost and paid for again."""
    run, samples = made_up(fly=lambda i: f"even {i}")
    roles = {a["name"]: a["role"] for a in run["arms"]}
    (tmp_path / "judged.jsonl").write_text('["fair", "fly", "p/')
    values = judged(tmp_path, samples, roles, JudgeModel(server, "fair", problems=1))
    assert values and judged(tmp_path, samples, roles, None) == values


def test_a_server_that_takes_one_after_the_other_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As servers on one's own machine do: of 16 requests at a time the last would be answered too late."""
    monkeypatch.setattr(judge_model, "SECONDS", 0.25)
    turn = threading.Lock()

    class OneByOne(Fake):
        def do_POST(self) -> None:
            with turn, suppress(ConnectionError):  # whoever asked may have gone
                time.sleep(0.06)
                super().do_POST()

    run, samples = made_up(fly=lambda i: f"even {i}")
    roles = {a["name"]: a["role"] for a in run["arms"]}
    with Server(("127.0.0.1", 0), OneByOne) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        judge = JudgeModel(f"http://127.0.0.1:{http.server_port}/v1", "fair", problems=3, parallel=8)
        values = judged(tmp_path, samples, roles, judge)
        http.shutdown()
    assert len(values) == 3 * 5


def test_a_slow_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_model, "SECONDS", 0.05)
    silent = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # it takes calls and never answers
    with silent, pytest.raises(BadRequest, match=r"cannot be asked: .*timed out"):
        JudgeModel(f"http://127.0.0.1:{silent.server_port}/v1", "m").prefer("q", "a", "b")


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("A", 1.0), ("b", 0.0), ("**B**", 0.0), ("Tie.", 0.5), ("[[B]]", 0.0), ("<think>A? B?</think>\nB", 0.0),
        ("B is a better answer.", 0.0), ("A is a better answer.", 1.0), ("The better answer is: b", 0.0),
        ("Answer A says more than answer B.\n\nB", 0.0), ("Both are good; it is a tie.", 0.5),
        ("Answer A is better than answer B", None), ("This is a nice question.", None), ("", None),
        ("<think>Answer A says", None),
    ],
)  # fmt: skip
def test_what_a_reply_says(reply: str, score: float | None) -> None:
    assert verdict_of(reply) == score


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("A tie.", 0.5), ("It's a tie", 0.5), ("Answer A is worse.\nI choose B.", 0.0),
        ("A is good. B is bad.\n\\boxed{A}", 1.0), ("B is a better answer", 0.0), ("A or B", None),
        ("A\n\nBecause B is wrong.", 1.0), ("**B**.\nAnswer A is wrong.", 0.0),
        ("Answer A\nGood.\nAnswer B\nBad.", None),
        ("The better answer is not B.", None), ("I would not choose B", None), ("It does not matter; I choose B", 0.0),
        ("B. It is not close", 0.0), ("It is not close: A", 1.0), ("A does not add up. The better is B", 0.0),
    ],
)  # fmt: skip
def test_plain_words_are_read(reply: str, value: float | None) -> None:
    assert verdict_of(reply) == value
