"""API keys. Everything but the state of health needs one, if the server has any."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from semspec.serve.http_errors import HttpError

OPEN = frozenset({"/health", "/live", "/ready"})


class Keys:
    """Passes on requests that carry a key: as a bearer token, in X-Api-Key, or as the password a browser asks for."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self.knows(_presented(scope)):
            return await self.app(scope, receive, send)
        error = HttpError(
            401, "this server needs an API key; send it as 'Authorization: Bearer KEY'", "invalid_api_key"
        )
        await error.response(scope, receive, send)

    def knows(self, key: bytes) -> bool:
        """Takes the same time whatever was presented: digests are compared, and all of them."""
        presented, found = _digest(key), False
        for digest in self.digests:
            found |= hmac.compare_digest(presented, digest)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _presented(scope: Scope) -> bytes:
    headers = dict(scope["headers"])
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return bytes(value.strip())
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return bytes(headers.get(b"x-api-key", b""))
