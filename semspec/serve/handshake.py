"""TLS before a connection is one: whoever is still shaking hands holds a place, and not for long.

asyncio's own TLS servers tell nobody of a client before its handshake is done, so that those who never finish it would
be held by no limit.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from semspec.serve.connection import Connection, address_of

GOODBYE_SECONDS = 5.0  # for which a client that does not say goodbye keeps its place


class Handshake(asyncio.Protocol):
    """Of one client; then its connection takes over."""

    def __init__(self, make: Callable[[], Connection], context: ssl.SSLContext, seconds: float) -> None:
        self._make, self._context, self._seconds = make, context, seconds
        self._early: list[bytes] = []  # a request may come with the handshake's last part

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        connection, address = self._make(), address_of(transport)
        if connection.enter(address) is not None:
            connection.leave(address)
            transport.abort()  # to tell why would take a handshake
        else:
            self._task = asyncio.get_running_loop().create_task(self._shake(transport, connection, address))

    async def _shake(self, transport: asyncio.Transport, connection: Connection, address: str) -> None:
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport, self, self._context, server_side=True, ssl_handshake_timeout=self._seconds,
                ssl_shutdown_timeout=min(self._seconds, GOODBYE_SECONDS),
            )  # fmt: skip
        except OSError:  # too late, not TLS, or gone
            return
        finally:
            connection.leave(address)
        if secure is None or secure.is_closing():  # gone with the last part
            return
        secure.set_protocol(connection)
        connection.connection_made(secure)
        for data in self._early:
            connection.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)
