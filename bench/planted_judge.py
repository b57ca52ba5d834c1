"""A planted judge, which is no model: an OpenAI-compatible server that knows the right answers. It prefers the answer
whose final number is right with probability 0.8, and else tosses a coin; also where both are right or both wrong. So a
table beside a real judge's shows what a useful one would look like, and that the instrument sees it.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from semspec.bench.examples import asked
from semspec.tasks import Problem
from semspec.tasks.answers import same_number

NAME, SKILL = "planted", 0.8
ASKED = re.compile(
    r"<question>\n(.*)\n</question>\n\n<answer A>\n(.*)\n</answer A>\n\n<answer B>\n(.*)\n</answer B>", re.DOTALL
)


def reply_to(prompt: str, problems: Mapping[str, Problem]) -> str:
    """A or B; the same prompt has the same reply, as at temperature 0."""
    found = ASKED.search(prompt)
    if found is None or found[1] not in problems:
        return "I do not know this question."
    a, b = (same_number(answer, problems[found[1]].answer) for answer in (found[2], found[3]))
    chance = random.Random(prompt)
    knows = a != b and chance.random() < SKILL
    return ("A" if a else "B") if knows else chance.choice("AB")


@contextmanager
def planted_judge(problems: Sequence[Problem]) -> Iterator[str]:
    """Its address, while it runs in this process. It reports no tokens, as there are none."""
    known = {asked(problem)["question"]: problem for problem in problems}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = reply_to(body["messages"][-1]["content"], known)
            reply = {"model": NAME, "choices": [{"message": {"role": "assistant", "content": said}}]}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # as many may call at a time

    with Server(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/v1"
        finally:
            http.shutdown()
