"""API keys. Everything but the state of health needs one, if the server has any."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from semspec.errors import BadRequest
from semspec.serve.http_errors import HttpError

log = logging.getLogger("semspec.serve")
OPEN = frozenset({"/health", "/live", "/ready"})
LOOK_SECONDS = 1.0  # between two looks at the file
NAME = " # "  # in the file, what follows a key is its name


class KeyStore:
    """The keys there are, by names for logs: those in a file are read again when it changes."""

    def __init__(
        self, fixed: Sequence[str], file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fixed, self._file, self._clock = [(name_of(key), key) for key in fixed], file, clock
        self._looked, self._stamp = clock(), _stamp(file)
        self._expired = False
        self._set([] if file is None else read_key_file(file))

    def _set(self, in_file: list[tuple[str, str]]) -> None:
        named = [*self._fixed, *in_file]
        self._digests = [(name, _digest(key.encode("utf-8", "surrogateescape"))) for name, key in named]

    def refresh(self) -> None:
        """Look whether the file has changed, now and then."""
        if self._file is None or not (self._expired or self._clock() - self._looked >= LOOK_SECONDS):
            return
        expired, self._expired = self._expired, False
        self._looked, stamp = self._clock(), _stamp(self._file)
        if expired or stamp != self._stamp:
            self._stamp = stamp
            self.reload()

    def expire(self) -> None:
        """Have the file read again before the next request. For signal handlers, which may do little."""
        self._expired = True

    def reload(self) -> None:
        """Read the file again. One that cannot be read changes nothing; one without keys takes all of its keys away."""
        if self._file is None:
            return
        try:
            in_file = read_key_file(self._file, min_keys=0)
        except BadRequest as error:
            log.error("the API keys known before still count: %s", error)
            return
        self._set(in_file)
        log.info("keys", extra={"fields": {"keys": len(self._digests)}})
        if not in_file:
            log.warning("the file with API keys has no key in it any more: all that it had are refused")

    def owner(self, key: bytes) -> str | None:
        """The name of a key. Takes the same time whatever was presented: digests are compared, and all of them."""
        presented, found = _digest(key), None
        for name, digest in self._digests:
            if hmac.compare_digest(presented, digest):
                found = name
        return found


class Keys:
    """Passes on requests that carry a key: as a bearer token, in X-Api-Key, or as the password a browser asks for."""

    def __init__(self, app: ASGIApp, store: KeyStore) -> None:
        self.app, self.store = app, store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            return await self.app(scope, receive, send)
        self.store.refresh()
        owner = self.store.owner(_presented(scope))
        if owner is None:
            told = "this server needs an API key; send it as 'Authorization: Bearer KEY'"
            await HttpError(401, told, "invalid_api_key").response_at(scope["path"])(scope, receive, send)
            return
        scope["key"] = scope.setdefault("journal", {})["key"] = owner
        await self.app(scope, receive, send)


def name_of(key: str) -> str:
    """What a key without a name is called: it does not tell the key."""
    return _digest(key.encode("utf-8", "surrogateescape")).hex()[:8]


def read_key_file(file: Path, min_keys: int = 1) -> list[tuple[str, str]]:
    """Names and keys: one key a line, perhaps with ` # name` after it; lines that begin with # are comments."""
    try:
        lines = [line.strip() for line in file.read_text("utf-8-sig").splitlines()]
    except OSError as error:
        raise BadRequest(f"the file with API keys cannot be read: {error}") from error
    except UnicodeDecodeError:
        raise BadRequest(f"{file} is not a text file; write one key a line, in UTF-8") from None
    found = [line.partition(NAME) for line in lines if line and not line.startswith("#")]
    keys = [(name.strip()[:64] or name_of(key.strip()), key.strip()) for key, _, name in found]
    if len(keys) < min_keys or not all(key and key.isprintable() for _, key in keys):
        raise BadRequest(f"{file} has no key in it, or one that cannot be sent; write one a line, in plain text")
    return keys


def _stamp(file: Path | None) -> tuple[int, int] | None:
    try:
        return None if file is None else (file.stat().st_mtime_ns, file.stat().st_size)
    except OSError:
        return None


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
