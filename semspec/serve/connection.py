"""One client's connection: uvicorn's, with limits in time and number, and with answers for half-closed sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from semspec.serve.http_errors import HttpError
from semspec.serve.limits import Limits

MAX_DISCARDED = 1 << 18  # bytes of a refused body that are read on, so that the client finds its answer
PROBES = (0.02, 0.1, 0.5, 2.0, 5.0)  # seconds after which a half-closed connection is looked at


def connections(limits: Limits) -> type[Connection]:
    """The class of one server's connections, which are counted together."""
    return type("Connection", (Connection,), {"limits": limits, "clients": Counter()})


def address_of(transport: asyncio.BaseTransport) -> str:
    return str((transport.get_extra_info("peername") or ("",))[0])


class Connection(H11Protocol):
    limits: Limits
    clients: Counter[str]  # open connections by address
    _request_timer: asyncio.TimerHandle | None = None  # a request has to arrive
    _delivery_timer: asyncio.TimerHandle | None = None  # what was written has to be read
    _idle = False  # between two requests
    _half_closed = False  # the client has sent its last byte and may still read
    _discarded = 0
    _address = ""

    @classmethod
    def enter(cls, address: str) -> str | None:
        """Count a connection; the reason, if it is one too many."""
        cls.clients[address] += 1
        if cls.clients[address] > cls.limits.client_connections:
            return f"there are {cls.limits.client_connections} connections from your address already"
        if cls.clients.total() > cls.limits.connections:
            return f"there are {cls.limits.connections} connections already"
        return None

    @classmethod
    def leave(cls, address: str) -> None:
        cls.clients[address] -= 1
        if not cls.clients[address]:
            del cls.clients[address]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = address_of(transport)
        refusal = self.enter(self._address)
        # So that pause_writing and resume_writing tell of every unread byte; TLS would never resume from a limit of 0.
        transport.set_write_buffer_limits(0 if transport.get_extra_info("sslcontext") is None else 1)
        if refusal is not None:
            self._refuse(refusal)
        else:
            self._request_within(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_timer, self._delivery_timer):
            if timer is not None:
                timer.cancel()
        if self._answering:  # writing to it goes on without an error
            cast(dict[str, Any], self.scope)["gone"] = True
        self.leave(self._address)
        super().connection_lost(exc)

    # -- from the client

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._answering and self.conn.their_state is h11.SEND_BODY:  # refused before its body was there
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED:
                self.transport.close()
                return
        elif self._idle:
            self._idle = False
            self._request_within(self.limits.header_seconds)
        super().data_received(data)
        self._request_arrived()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has closed its side may still be reading. One that is gone answers a probe with a reset."""
        self._half_closed = self._answering and self.conn.their_state is not h11.SEND_BODY
        if self._half_closed:
            self._probe()
            self._look_again(list(PROBES))
        return self._half_closed and self.transport.get_extra_info("sslcontext") is None  # TLS has no half-closing

    def _probe(self) -> None:
        """Write something that clients ignore."""
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] != "1.0":
            self._write(h11.InformationalResponse(status_code=100, headers=[], reason="Continue"))
        elif self.conn.our_state is h11.SEND_BODY and cast(dict[str, Any], self.scope).get("takes_comments"):
            self._write(h11.Data(data=b":\n\n"))  # only event streams have them

    def _look_again(self, delays: list[float]) -> None:
        if self.transport.is_closing():
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif delays:
            self.loop.call_later(delays[0], self._look_again, delays[1:])

    # -- to the client

    def on_response_complete(self) -> None:
        self._discarded = 0
        self._idle = True
        self._request_within(self.limits.idle_seconds)
        super().on_response_complete()
        self._request_arrived()
        if self._half_closed:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._delivery_timer = self.loop.call_later(self.limits.delivery_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._delivery_timer is not None:
            self._delivery_timer.cancel()

    def _refuse(self, why: str) -> None:
        body = json.dumps(HttpError(503, f"{why}; close some, or try again later", "connections").body).encode()
        head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"retry-after: 5\r\nconnection: close\r\n\r\n" + body)
        self.transport.close()

    def _write(self, event: Any) -> None:
        self.transport.write(self.conn.send(event))

    # -- both

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _request_within(self, seconds: float) -> None:
        """Close the connection unless a whole header arrives in time."""
        if self._request_timer is not None:
            self._request_timer.cancel()
        self._request_timer = self.loop.call_later(seconds, self.transport.close)

    def _request_arrived(self) -> None:
        if self._answering and self._request_timer is not None:
            self._request_timer.cancel()
