"""The real process: what it says, that it ends well under load, and that a client that hangs up is noticed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import image, live, small_model

import vitkit
from vitkit.errors import ConfigError
from vitkit.web.server import serve
from vitkit.web.settings import ServeSettings


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    served = small_model()
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    vitkit.save(served.model, path, class_names=tuple(served.names))
    return path


@contextmanager
def process(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str], list[str]]]:
    """`vitkit serve ...` on a free port: its address, the process, and the lines it has said."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vitkit", "serve", *arguments, "--port", "0"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert started.stderr is not None
    lines: list[str] = []
    try:
        for line in started.stderr:
            lines.append(line)
            if found := re.search(r"serving on (http://\S+?)/ ", line):
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=lambda: lines.extend(started.stderr or ()), daemon=True)
        reader.start()
        yield found[1], started, lines
    finally:
        started.kill()
        started.wait()


def until(true: Callable[[], Any]) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to that")


def test_sigterm_under_load_answers_everything_that_was_accepted(checkpoint: Path) -> None:
    """Eight clients ask until they are refused a connection. What the server has accepted it answers.

    A client may find its last connection reset: one that stood in the kernel's queue when the door was closed, which
    the server never saw. On a connection that has been answered before, nothing is ever lost.
    """
    statuses: Counter[int] = Counter()
    lost: list[str] = []
    body = image()
    with process(str(checkpoint)) as (address, server, lines):

        def client() -> None:
            while True:
                told = 0
                try:
                    with httpx.Client(base_url=address, timeout=60) as session:
                        for _ in range(50):
                            answer = session.post("/api/predict", content=body)
                            statuses[answer.status_code] += 1
                            told += 1
                            if answer.headers.get("connection") == "close":
                                break
                except httpx.ConnectError:
                    return  # the door is closed
                except httpx.HTTPError as e:
                    if told or not isinstance(e, httpx.ReadError | httpx.RemoteProtocolError | httpx.WriteError):
                        lost.append(repr(e))
                    return

        clients = [threading.Thread(target=client, daemon=True) for _ in range(8)]
        for one in clients:
            one.start()
        until(lambda: sum(statuses.values()) > 60)
        server.send_signal(signal.SIGTERM)
        assert server.wait(90) == 0
        for one in clients:
            one.join(10)
        until(lambda: any("every accepted request was answered" in line for line in lines))
    assert not lost
    assert set(statuses) <= {200, 503}
    assert statuses[200] > 60


def test_a_client_that_hangs_up_is_not_computed_for() -> None:
    served = small_model()
    gate, sizes = threading.Event(), []
    real = served.runtime

    class Gated:
        name, device = "gated", torch.device("cpu")

        def run(self, images: Any) -> Any:
            sizes.append(len(images))
            assert gate.wait(20)
            return real.run(images)

    object.__setattr__(served, "runtime", Gated())
    with live([served], max_batch=1) as (address, server):
        service = server.config.app.state.service  # type: ignore[union-attr]
        host, port = address.removeprefix("http://").split(":")
        body = image()
        head = f"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()

        def begin() -> socket.socket:
            connection = socket.create_connection((host, int(port)))
            connection.sendall(head + body)
            return connection

        first = begin()
        until(lambda: sizes)
        others = [begin() for _ in range(5)]
        until(lambda: len(service._predict["small"]._queue) == 5)
        for connection in others[:4]:
            connection.close()
        until(lambda: service._predict["small"].taken == 2)
        gate.set()
        for connection in (first, others[4]):
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.close()
        assert sizes == [1, 1], "those of the clients that went away were computed"
        metrics = httpx.get(f"{address}/metrics", timeout=60).text
        assert 'vitkit_dropped_total{model="small",worker="predict"} 4.0' in metrics
        assert 'status="499"} 4.0' in metrics


def test_it_says_what_a_user_must_know(checkpoint: Path) -> None:
    with process(str(checkpoint), "vit-ti/16", "--host", "0.0.0.0") as (address, _, lines):
        text = "".join(lines)
        assert "give --token" in text
        assert "not trained" in text
        assert address.startswith("http://127.0.0.1:")
        assert httpx.get(f"{address}/api/model", timeout=60).json()["models"] == ["tiny", "vit-ti/16"]


def test_a_taken_port_and_too_many_models_are_errors(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServeSettings(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="choose another --port"):
            serve([str(checkpoint)], settings, False)
    with pytest.raises(ConfigError, match="one model, or two"):
        serve(["a", "b", "c"], ServeSettings(), False)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"token": "short"}, "at least 8"),
        ({"cors": ("example.org",)}, "not an origin"),
        ({"max_batch": 0}, "at least 1"),
        ({"timeout": 0}, "above 0"),
        ({"port": 70000}, "65535"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeSettings(**wrong)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_which_addresses_are_this_machine(host: str, loopback: bool) -> None:
    assert ServeSettings(host=host).loopback is loopback
