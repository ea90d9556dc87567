"""Who is connected: how many may be, who has to go when there is no room, and what is written to the log about it.

A connection that waits for its client - silent, half a request, an answer that nobody reads - holds nothing that others
need except its place. When all places are taken, the one that has waited longest makes room for whoever comes; without
need, it is closed after `idle` seconds. A connection whose request is being answered is never closed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from vitkit.web.settings import ServeSettings

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

ACCEPTED_AT_ONCE = 32  # connections, in one turn of the event loop
OTHER_FILES = 64  # that the process has open: the model, the decoders, the log
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Cycle(Protocol):
    """Uvicorn's request that is being answered, or was last."""

    response_complete: bool
    more_body: bool


class Connection(Protocol):
    """What we know of uvicorn's protocols, whatever parses HTTP."""

    client: tuple[str, int] | None
    cycle: Cycle | None
    transport: asyncio.Transport


@dataclass
class Seen:
    """Of one connection."""

    address: str
    since: float  # when it was opened, or last answered
    unread: int = 0  # bytes of answers that it has not taken yet


class Connections:
    """All of them, the one that was answered longest ago first."""

    def __init__(self, settings: ServeSettings) -> None:
        self.most, self.most_per_address, self.idle = (
            most_connections(settings),
            settings.max_per_address,
            settings.idle,
        )
        self.seen: dict[Connection, Seen] = {}  # by uvicorn's protocol
        self.by_address: defaultdict[str, dict[Connection, None]] = defaultdict(dict)
        self.closed = 0  # to make room, or because they were idle
        self.refused = 0

    def opened(self, connection: Connection) -> None:
        address = connection.client[0] if connection.client else ""
        for those, most in ((self.by_address[address], self.most_per_address), (self.seen, self.most)):
            if len(those) >= most and not self._make_room(those):
                self.refused += 1
                connection.transport.write(FULL)
                connection.transport.close()
                return
        self.seen[connection] = Seen(address, time.monotonic())
        self.by_address[address][connection] = None

    def answered(self, connection: Connection) -> None:
        """It goes to the end of both lines."""
        if connection in self.seen:
            seen = self.seen[connection] = self.seen.pop(connection)
            seen.since, seen.unread = time.monotonic(), connection.transport.get_write_buffer_size()
            same = self.by_address[seen.address]
            same[connection] = same.pop(connection)

    def lost(self, connection: Connection) -> None:
        if seen := self.seen.pop(connection, None):
            del self.by_address[seen.address][connection]
            if not self.by_address[seen.address]:
                del self.by_address[seen.address]

    def _make_room(self, those: Iterable[Connection]) -> bool:
        for connection in those:
            if _waits(connection, uploads=True):
                self._close(connection)
                return True
        return False

    def close_idle(self) -> None:
        now = time.monotonic()
        for connection, seen in list(self.seen.items()):
            unread = connection.transport.get_write_buffer_size()
            if unread < seen.unread:  # it reads, slowly
                seen.since = now
            seen.unread = unread
            if now - seen.since > self.idle and _waits(connection):
                self._close(connection)

    def _close(self, connection: Connection) -> None:
        self.closed += 1
        self.lost(connection)
        connection.transport.abort()


def _waits(connection: Connection, uploads: bool = False) -> bool:
    """Whether the next step is the client's. Uploads have a time limit of their own."""
    cycle = connection.cycle
    if cycle is None or cycle.response_complete or connection.transport.get_write_buffer_size():
        return True
    return uploads and bool(cycle.more_body)


def most_connections(settings: ServeSettings) -> int:
    """As many as were asked for, but some files stay free: for those accepted at once, too."""
    if resource is None:
        return settings.max_connections
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(1, min(settings.max_connections, files - OTHER_FILES - 4 * ACCEPTED_AT_ONCE))


def protocol_for(connections: Connections) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP with our eyes on every connection."""

    class Watched(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            connections.opened(self)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            connections.answered(self)

        def connection_lost(self, error: Exception | None) -> None:
            connections.lost(self)
            super().connection_lost(error)

    return Watched


class QuietLog(logging.Handler):
    """The standard error output, but no more than `lines` records a minute: whoever makes errors cannot fill a disk."""

    def __init__(self, lines: int = 20) -> None:
        super().__init__(logging.WARNING)
        self.lines, self.minute, self.written, self.left_out = lines, -1, 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a full disk
            self._emit(record)

    def _emit(self, record: logging.LogRecord) -> None:
        minute = int(time.monotonic() // 60)
        if minute != self.minute:
            if self.left_out:
                print(f"{self.left_out:,} more lines were left out", file=sys.stderr)
            self.minute, self.written, self.left_out = minute, 0, 0
        if self.written < self.lines:
            self.written += 1
            print(self.format(record), file=sys.stderr)
        else:
            self.left_out += 1

    @classmethod
    def install(cls) -> None:
        """For everything that a client can cause to be logged."""
        handler = cls()
        for name in ("asyncio", "uvicorn.error", "vitkit.web"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [handler], False
