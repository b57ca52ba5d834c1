"""What the process in front hands over: the socket to listen on, and each client's own address, which is believed only
with the secret that it started this one with."""

from __future__ import annotations

import hmac
import os
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

SECRET = "SEMSPEC_INGRESS_SECRET"  # in the environment of a replica
PARENT = "SEMSPEC_INGRESS_PID"  # the same: the process that started it
LISTENER = "SEMSPEC_INGRESS_SOCKET"  # the same: a socket, bound so that nobody else can be at its port meanwhile
HEADER = "x-semspec-client"


def inherited() -> socket.socket | None:
    """The socket that this process was started with, which is nobody else's."""
    number = os.environ.pop(LISTENER, None)
    if number is None:
        return None
    listener = socket.socket(fileno=int(number))
    listener.set_inheritable(False)
    return listener


def introduced(secret: str, address: str) -> tuple[bytes, bytes]:
    """The header that tells whose request it is."""
    return HEADER.encode(), f"{secret} {address}".encode()


class ForwardedClient:
    """Without it, all clients of a replica would be one, and share its limits."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self.app, self.secret = app, secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            secret, _, address = dict(scope["headers"]).get(HEADER.encode(), b"").partition(b" ")
            if hmac.compare_digest(secret, self.secret):
                scope["client"] = (address.decode("latin-1"), 0)
        await self.app(scope, receive, send)
