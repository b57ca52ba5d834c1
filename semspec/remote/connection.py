"""HTTP to one server: limits, retries, and errors that say which server it was and never the key."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from semspec.errors import BadRequest, RemoteError

if TYPE_CHECKING:  # else imported when a server is first asked: models in this process work without it
    import httpx

CONNECT_SECONDS = 5.0
MAX_BODY = 64 << 20  # bytes of one answer: log-probabilities of a prompt of 32k tokens are about 30 MB
MAX_WAIT = 20.0  # seconds between two tries, whatever the server asks for
FIRST_WAIT = 0.25
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
QUOTE = 300  # characters of a server's own message
logging.getLogger("httpx").setLevel(logging.WARNING)  # it would write every address into our log


class Refused(RemoteError):
    """The server says that the request is wrong, so asking again is no use."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """Calls to one server. Every call asks for the same thing however often it is sent, so it is safe to try again."""

    def __init__(
        self,
        url: str,
        who: str,
        key: str | None = None,
        seconds: float = 120.0,
        tries: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        import httpx

        self.url, self.root = _addresses(url)
        self.who, self.seconds, self.tries = who, seconds, tries
        self._key = key
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
            trust_env=False,
        )

    def __repr__(self) -> str:
        return f"<the {self.who}'s server at {self.url}>"

    async def get(self, path: str) -> Any:
        return await self._send("GET", f"{self.url}{path}", None)

    async def post(self, path: str, body: dict[str, Any], root: bool = False) -> Any:
        """`root`: a path beside /v1, not below it."""
        return await self._send("POST", f"{self.root if root else self.url}{path}", body)

    async def _send(self, method: str, url: str, body: dict[str, Any] | None) -> Any:
        """Tries again, after longer and longer waits, what may go well the next time."""
        import httpx

        wait = FIRST_WAIT
        for left in range(self.tries - 1, -1, -1):
            try:
                async with asyncio.timeout(self.seconds + CONNECT_SECONDS):  # a byte now and then is no answer
                    status, after, content = await self._once(method, url, body)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError, httpx.ReadError) as error:
                if not left:
                    self._fail(f"cannot be reached ({type(error).__name__})")
            except (httpx.TimeoutException, TimeoutError):  # it is busy: asking again would make it busier
                self._fail(f"did not answer within {self.seconds:g} seconds")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                self._fail(f"cannot be asked: {error}")
            else:
                if status == 200:
                    return self._parsed(content)
                if status not in AGAIN:
                    raise Refused(self._words(f"refuses this with status {status}: {_said(content)}"), status)
                if not left:
                    self._fail(f"answered with status {status} {self.tries} times: {_said(content)}")
                wait = max(wait, after)
            await asyncio.sleep(min(wait, MAX_WAIT))
            wait *= 2
        raise AssertionError("a last try that fails raises")

    async def _once(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[int, float, bytes]:
        async with self._client.stream(method, url, json=body) as response:
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MAX_BODY:
                    self._fail(f"sends more than {MAX_BODY >> 20} MiB in one answer")
            after = response.headers.get("retry-after", "")
            return response.status_code, float(after) if after.isdecimal() else 0.0, bytes(content)

    def _parsed(self, content: bytes) -> dict[str, Any]:
        try:
            found = json.loads(content, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            self._fail(f"sends no valid JSON ({str(error)[:QUOTE]})")
        if not isinstance(found, dict):
            self._fail("sends JSON that is no object")
        return found

    def fail(self, what: str) -> NoReturn:
        """About an answer that came."""
        self._fail(what)

    def _fail(self, what: str) -> NoReturn:
        raise RemoteError(self._words(what))

    def _words(self, what: str) -> str:
        what = f"the {self.who}'s server at {self.url} {what}"
        return what.replace(self._key, "***") if self._key else what  # a server may quote what it was sent

    async def close(self) -> None:
        await self._client.aclose()


def _addresses(url: str) -> tuple[str, str]:
    """Where the OpenAI paths begin, and where the server does."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"{url!r} is no address: {error}; give one such as http://host:8001/v1") from None
    if parts.username or parts.password:
        raise BadRequest("the server's address has a name or a password in it; give a key in the environment instead")
    if not parts.hostname or parts.query or parts.fragment:
        raise BadRequest(f"{url!r} is no server's address; give one such as http://host:8001/v1")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    root = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path.rstrip('/').removesuffix('/v1')}"
    return f"{root}/v1", root


def _said(content: bytes) -> str:
    """A server's own words about a failure."""
    try:
        found = json.loads(content)
        error = found.get("error", found)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        text = content[:QUOTE].decode(errors="replace")
    return " ".join(str(text).split())[:QUOTE]


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
