"""A server that speaks OpenAI's protocol over a real socket, with a scripted model behind it: plain Python, no torch.

The model answers a question with the steps of its script. It goes on with the step it is in, wherever a text stops, so
it can finish what another began. A token that its script has next is likely, any other is not.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = re.compile(r"\n\n| ?[^\s]+|\s")
LIKELY, UNLIKELY = math.log(0.9), math.log(0.02)
ANSWER, ASKED = "\nA:\n", "<asked>"
Handler = Callable[[dict[str, Any]], tuple[int, Any]]


def tokens(text: str) -> list[str]:
    return TOKEN.findall(text)


class Listener(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A client that has left is no news."""


@dataclass
class Fake:
    """Set `faults` to what the next completions answer instead; `dialect` to what the server can do."""

    script: dict[str, list[str]]
    mark: Callable[[str], str] | None = None  # the digit that it answers a question about a step with
    dialect: frozenset[str] = frozenset({"echo", "keeps_stop", "tokenize"})
    name: str = "fake"
    key: str | None = None
    delay: float = 0.0
    most: int | None = None  # so many completions are answered, and the others when `go` is set
    faults: list[Handler] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies of completions

    def __post_init__(self) -> None:
        self.go = threading.Event()
        self.open: set[socket.socket] = set()
        self.server = Listener(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=lambda: self.server.serve_forever(0.01), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def kill(self) -> None:
        self.go.set()
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # -- the model

    def next(self, context: str) -> str | None:
        """The token after a text; None: the end."""
        reasoning, asked, _ = re.sub("\n*(Q: |How good[^,]*, )from 0 .useless.*", ASKED, context, flags=re.S).partition(
            ASKED
        )
        if self.mark and asked:
            return self.mark(reasoning.rpartition(ANSWER)[2].strip().split("\n\n")[-1])
        question, found, answer = context.rpartition(ANSWER)
        if not found:
            return " and"
        steps = self.script.get(question.rpartition("Q: ")[2], ["I do not know."])
        done = answer.count("\n\n")
        if done >= len(steps):
            return None
        begun, step = answer.rpartition("\n\n")[2], steps[done]
        rest = step[len(begun) :] if step.startswith(begun) else "".join(tokens(step)[len(tokens(begun)) :])
        return next(iter(tokens(rest)), "\n\n" if done + 1 < len(steps) else None)

    def logprobs(self, context: str, written: list[str], k: int) -> tuple[list[float], list[dict[str, float]]]:
        own, top = [], []
        for token in written:
            choice = self.next(context)
            own.append(LIKELY if token == choice else UNLIKELY)
            top.append({choice or "<end>": LIKELY} | ({token: UNLIKELY} if token != choice and k > 1 else {}))
            context += token
        return own, top

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt, stops, k = body["prompt"], body.get("stop", []), body.get("logprobs", 0)
        refused = {"echo": "echo", "prompt_logprobs": "prompt_logprobs", "include_stop_str_in_output": "keeps_stop"}
        for name, ability in refused.items():
            if body.get(name) and ability not in self.dialect and "ignores" not in self.dialect:
                return 400, {"error": {"message": f"there is no {name} here"}}
        written, text, finish, met = list[str](), "", "length", None
        while len(written) < body["max_tokens"]:
            token = self.next(prompt + text)
            if token is None:
                finish = "stop"
                written += ["<end>"] if "shows_end" in self.dialect else []
                break
            written.append(token)
            text += token
            if met := next((stop for stop in stops if stop in text), None):
                kept = body.get("include_stop_str_in_output") and "keeps_stop" in self.dialect
                finish, text = "stop", text[: text.index(met) + (len(met) if kept else 0)]
                break
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if "names_stop" in self.dialect:
            choice["stop_reason"] = met
        read = tokens(prompt) if body.get("echo") and "echo" in self.dialect else []
        own, top = self.logprobs("", read + written, k) if read else self.logprobs(prompt, written, k)
        if read:
            own, top = [None, *own[1:]], [None, *top[1:]]  # type: ignore[list-item]
        cut = max(0, len(read) - body.get("prompt_logprobs_last", len(read))) if "last" in self.dialect else 0
        read, own, top = read[cut:], own[cut:], top[cut:]
        if k:
            choice["logprobs"] = {"tokens": read + written, "token_logprobs": own, "top_logprobs": top}
        both = "drops" in self.dialect and body.get("echo")
        if (body.get("prompt_logprobs") and "prompt_logprobs" in self.dialect) or both:
            read_own, read_top = self.logprobs("", tokens(prompt), k)
            rows = []
            for token, p, best in zip(tokens(prompt), read_own, read_top, strict=True):
                named = {token: p} | best
                rows.append({str(i): {"logprob": q, "decoded_token": t} for i, (t, q) in enumerate(named.items())})
            choice["prompt_logprobs"] = [None, *rows[1:]]
            if "last" in self.dialect and (kept := body.get("prompt_logprobs_last")):
                choice["prompt_logprobs"] = choice["prompt_logprobs"][-kept:]
        echoed = prompt.replace("Q: ", "") if "drops" in self.dialect else prompt
        choice["text"] = (echoed if read else "") + text
        usage = {"prompt_tokens": len(tokens(prompt)), "completion_tokens": len(written)}
        return 200, {"choices": [choice], "usage": usage}

    # -- the routes

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": self.name, "max_model_len": 4096}]}
        if path == "/v1/completions":
            self.asked.append(body)
            if self.delay:
                time.sleep(self.delay)
            if self.most is not None and len(self.asked) > self.most:
                self.go.wait()
            return self.faults.pop(0)(body) if self.faults else self.complete(body)
        if "tokenize" in self.dialect and path == "/tokenize":
            turns = [(turn["role"], turn["content"]) for turn in body.get("messages", ())]
            chat = "".join(f"Q: {said}{ANSWER}" if role == "user" else f"{said}\n" for role, said in turns)
            text = body.get("prompt") or chat
            return 200, {"tokens": [ord(letter) for letter in text]}
        if "tokenize" in self.dialect and path == "/detokenize":
            return 200, {"prompt": "".join(map(chr, body["tokens"]))}
        return 404, {"error": {"message": "no such path"}}


def _handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handle(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            fake.open.add(self.request)
            super().setup()

        def finish(self) -> None:
            fake.open.discard(self.request)
            super().finish()

        def do_POST(self) -> None:
            self.send(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def do_GET(self) -> None:
            self.send({})

        def send(self, body: dict[str, Any]) -> None:
            if fake.key and self.headers.get("authorization") != f"Bearer {fake.key}":
                status, found = 401, {"error": {"message": f"wrong key: {self.headers.get('authorization')}"}}
            else:
                status, found = fake.answer(self.path, body)
            if callable(found):  # it answers by itself
                self.close_connection = True
                with contextlib.suppress(OSError):
                    found(self)
                return
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handle
