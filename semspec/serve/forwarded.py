"""What the process in front hands over: the socket to listen on, and each client's own address, which is believed only
with the secret that it started this one with."""

from __future__ import annotations

import hmac
import os
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from semspec.errors import BadRequest

SECRET = "SEMSPEC_INGRESS_SECRET"  # in the environment of a replica
PARENT = "SEMSPEC_INGRESS_PID"  # the same: the process that started it
LISTENER = "SEMSPEC_INGRESS_SOCKET"  # the same: a socket, bound so that nobody else can be at its port meanwhile
HEADER = "x-semspec-client"


def inherited() -> socket.socket | None:
    """The socket that this process was started with, which is nobody else's."""
    given = os.environ.pop(LISTENER, None)
    if given is None:
        return None
    try:
        listener = socket.socket(fileno=int(given))
    except (ValueError, OverflowError, OSError):
        raise _not_handed_over(LISTENER, given, "socket") from None
    listener.set_inheritable(False)
    return listener


def starter() -> int:
    """The process that started this replica."""
    given = os.environ.get(PARENT, str(os.getppid()))
    try:
        return int(given)
    except ValueError:
        raise _not_handed_over(PARENT, given, "process") from None


def _not_handed_over(name: str, given: str, what: str) -> BadRequest:
    return BadRequest(
        f"{name} is {given!r:.80}, which is no {what} of this server's; it is set by --replicas alone: unset it"
    )


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
