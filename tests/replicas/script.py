"""A replica for tests: starts in a moment, writes numbered words, and says who it is. Run: script.py --port PORT.

A request with `hold`, a file's name, is answered up to its fifth word, or not at all, until there is such a file."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS, HELD_AT = 20, 4
reloads = 0


def reload(*_: object) -> None:
    global reloads
    reloads += 1


def held(body: dict[str, Any]) -> None:
    while "hold" in body and not os.path.exists(body["hold"]):
        time.sleep(0.01)


class Handle(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(307)
            self.send_header("location", f"http://{self.headers['host']}/there?a=%26")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        told = self.headers.get_all("x-semspec-client", [])
        known = [client.partition(" ")[0] == os.environ["SEMSPEC_INGRESS_SECRET"] for client in told]
        self.answer({"pid": os.getpid(), "path": self.path, "clients": told, "known": known, "reloads": reloads})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        if body.get("poison"):
            os._exit(1)
        if not body.get("stream"):
            held(body)
            self.answer({"pid": os.getpid(), "key": self.headers.get("authorization"), "reloads": reloads})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for i in range(WORDS):
            self.chunk(f"data: {json.dumps({'word': i, 'pid': os.getpid(), 'parent': os.getppid()})}\n\n")
            if i == HELD_AT:
                held(body)
        self.chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def answer(self, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, reload)
    ThreadingHTTPServer.request_queue_size = 64
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handle, bind_and_activate=False)
    server.socket = socket.socket(fileno=int(os.environ["SEMSPEC_INGRESS_SOCKET"]))
    server.server_activate()
    server.serve_forever()
