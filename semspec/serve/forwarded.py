"""A client's own address, told by the process in front: believed only with the secret that it started this one with."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

SECRET = "SEMSPEC_INGRESS_SECRET"  # in the environment of a replica
PARENT = "SEMSPEC_INGRESS_PID"  # the same: the process that started it
HEADER = "x-semspec-client"


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
