"""Clients that are silent, slow or many: they are closed, others are served, and the log stays short."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from serving import image, live, small_model

from vitkit.web import body as body_module
from vitkit.web import connections
from vitkit.web.connections import QuietLog, most_connections
from vitkit.web.settings import ServeSettings

HEAD = b"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"


def connect(address: str, sent: bytes = b"") -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(sent)
    return connection


def closed(connection: socket.socket) -> bool:
    """Whether the server ends it, within the socket's time."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def until(true: Callable[[], Any]) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: "])
def test_silence_and_half_a_header_are_closed(sent: bytes) -> None:
    with live([small_model()], idle=0.3) as (address, server):
        assert closed(connect(address, sent))
        slow = connect(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        slow.recv(10)
        for _ in range(400):  # a byte now and then does not keep it open
            try:
                slow.sendall(b"G")
            except OSError:
                break
            time.sleep(0.01)
        assert closed(slow)
        assert httpx.get(f"{address}/healthz", timeout=60).status_code == 200
        assert not server.connections.seen or server.connections.closed


def test_an_answer_that_nobody_reads_is_closed() -> None:
    with live([small_model()], idle=0.3) as (address, server):
        greedy = connect(address)
        greedy.settimeout(0.2)
        with pytest.raises(OSError):  # noqa: PT012 - until the server reads no more, or has closed
            while True:
                greedy.sendall(b"GET /static/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        until(lambda: not server.connections.seen)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n", HEAD])
def test_who_waits_longest_makes_room(sent: bytes) -> None:
    """More silent connections than there is room for: a new client is served at once, one in use is kept."""
    with (
        live([small_model()], max_connections=8, timeout=600) as (address, server),
        httpx.Client(base_url=address) as honest,
    ):
        honest.timeout = 600
        assert honest.get("/healthz").status_code == 200
        silent = []
        for _ in range(30):
            silent.append(connect(address, sent))
            assert honest.get("/healthz").status_code == 200
        assert httpx.post(f"{address}/api/predict", content=image(), timeout=600).status_code == 200
        assert len(server.connections.seen) <= 8
        assert server.connections.closed >= 20
        assert closed(silent[0])
        for one in silent:
            one.close()


def test_one_address_cannot_take_every_place() -> None:
    with live([small_model()], max_connections=100, max_per_address=4) as (address, server):
        silent = [connect(address) for _ in range(12)]
        until(lambda: server.connections.closed == 8)
        assert len(server.connections.seen) == 4
        assert httpx.get(f"{address}/healthz", timeout=60).status_code == 200
        for one in silent:
            one.close()
        until(lambda: not server.connections.seen)
        assert not server.connections.by_address


def test_nobody_who_is_being_answered_makes_room() -> None:
    """With every place in use a new client is told so."""
    with live([small_model()], max_connections=1) as (address, server):
        busy = connect(address)
        until(lambda: server.connections.seen)
        (connection,) = server.connections.seen
        connection.cycle = type("Cycle", (), {"response_complete": False, "more_body": False, "disconnected": False})()
        refused = connect(address)
        assert refused.recv(100).startswith(b"HTTP/1.1 503")
        connection.cycle = None
        busy.close()
        refused.close()


def test_some_files_stay_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: (1024, 4096))
    assert most_connections(ServeSettings()) == 832
    assert most_connections(ServeSettings(max_connections=10)) == 10
    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: (connections.resource.RLIM_INFINITY,) * 2)
    assert most_connections(ServeSettings()) == 1000


def test_the_log_is_bounded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    handler = QuietLog(lines=20)
    for minute in range(3):
        now[0] = 60.0 * minute
        for i in range(1000):
            handler.emit(logging.makeLogRecord({"msg": f"bad request {i}", "levelno": logging.WARNING}))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 * 20 + 2
    assert lines[20] == "980 more lines were left out"


def test_a_log_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(connections.sys, "stderr", Full())
    QuietLog().emit(logging.makeLogRecord({"msg": "bad request", "levelno": logging.WARNING}))


def test_half_a_token_is_given_up() -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    with live([small_model()], token="a-long-secret", timeout=0.3) as (address, _):
        half = connect(address, head + b"Content-Length: 100\r\n\r\ntoken=a-long")
        assert half.recv(100).startswith(b"HTTP/1.1 408")
        half.close()


def test_uploads_that_stand_still_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room for bodies is full of halves: the oldest is given up, and a whole one is served."""
    monkeypatch.setattr(body_module, "FRESH", 0.0)
    body = image((200, 200))
    head = f"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) + 9}\r\n\r\n".encode()
    with live([small_model()], max_buffered=3 * len(body)) as (address, server):
        intake = server.config.app.state.service.intake  # type: ignore[union-attr]
        halves = []
        for number in range(3):
            halves.append(connect(address, head + body))
            until(lambda n=number: intake.buffered == (n + 1) * len(body))
        assert httpx.post(f"{address}/api/predict", content=body, timeout=60).status_code == 200
        assert halves[0].recv(100).startswith(b"HTTP/1.1 503")
        for one in halves:
            one.close()
        until(lambda: intake.buffered == 0)
