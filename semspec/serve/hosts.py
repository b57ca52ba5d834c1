"""Which host names a server answers to, and which sites' pages may use it.

A page of any site can make its own name point to 127.0.0.1 (DNS rebinding) and then talk to a server on the visitor's
machine as if it were the same site. Its requests carry that site's name as Host, so other names are refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from semspec.errors import BadRequest
from semspec.serve.http_errors import HttpError

BROWSERS = frozenset({b"origin", b"referer", b"sec-fetch-site"})  # headers that tell one
AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?")


def parse_host(authority: str) -> tuple[str, int | None]:
    """Name or address and port of a Host header, in one spelling. ValueError if it is malformed."""
    found = AUTHORITY.fullmatch(authority.lower())
    if found is None:
        raise ValueError(f"{authority!r} is not a host")
    bracketed, name, port = found.groups()
    try:
        address = ipaddress.IPv6Address(bracketed) if bracketed else ipaddress.ip_address(name)
        name = str(getattr(address, "ipv4_mapped", None) or address)
    except ValueError:
        if bracketed:
            raise
    return name.removesuffix("."), None if port is None else int(port)


def own_name(name: str) -> bool:
    """Whether it can only mean this machine."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_names(given: Iterable[str]) -> tuple[str, ...]:
    """Names from the command line, in one spelling; addresses that mean every address are none."""
    names = []
    for host in given:
        try:
            name, port = parse_host(f"[{host}]" if host.count(":") > 1 and "[" not in host else host)
        except ValueError:
            name, port = "", None
        if not name or port is not None:
            raise BadRequest(f"the allowed host is {host!r}; give a name or an address, without a port")
        if name not in ("0.0.0.0", "::"):
            names.append(name)
    return tuple(names)


class HostCheck:
    """Refuses requests for other hosts, and those of pages that other hosts have sent."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self.app, self.hosts, self.origins = app, frozenset(hosts), frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(scope) if scope["type"] == "http" else None
        await (self.app if refusal is None else refusal.response_at(scope["path"]))(scope, receive, send)

    def refusal(self, scope: Scope) -> HttpError | None:
        headers = dict(scope["headers"])
        try:
            host = parse_host(headers.get(b"host", b"").decode("latin-1"))
        except ValueError:
            return HttpError(403, "the Host header is missing or malformed", "bad_host")
        connected_to = (scope.get("server") or ("",))[0]  # an address cannot be made to point elsewhere
        if not own_name(host[0]) and host[0] not in (*self.hosts, connected_to):
            return HttpError(403, "this server does not have that host name; start it with --allowed-host", "bad_host")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if b"origin" in headers and not {origin, "*"} & self.origins and not same_site(origin, host):
            return HttpError(403, "pages of this origin may not use this server; start it with --cors", "bad_origin")
        return None


class UntypedBodies:
    """Ollama's clients and the commands of its manual do not say that a body is JSON: for its paths it is taken for it.
    A page could send such a body without asking first (HostCheck knows it by its origin), so what comes from a browser
    has to say it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/api/"):
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            if not {name for name, _ in others} & BROWSERS:
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        await self.app(scope, receive, send)


def same_site(origin: str, host: tuple[str, int | None]) -> bool:
    """Whether a page came from this server; with or without TLS, which a proxy may add."""
    scheme, _, authority = origin.partition("://")
    try:
        return scheme in ("http", "https") and parse_host(authority) == host
    except ValueError:
        return False
