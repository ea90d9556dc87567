"""Servers on loopback for tests about URLs: moto's S3, nginx, and a proxy between them and us that misbehaves."""

from __future__ import annotations

import http.client
import random
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FAULTS = ("500", "silence", "short")


class FaultyProxy:
    """Hands requests on, but answers a share of them with 500, with silence, or with half of the body."""

    def __init__(self, port: int, share: float = 0.05, seed: int = 0, silence: float = 60.0) -> None:
        self.target, self.share, self.silence = port, share, silence
        self.counts: Counter[str] = Counter()
        self.random, self.guard = random.Random(seed), threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                proxy.serve(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.ending = threading.Event()
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def fault(self) -> str:
        with self.guard:
            chosen = self.random.choice(FAULTS) if self.random.random() < self.share else "none"
            self.counts[chosen] += 1
            return chosen

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        fault = self.fault()
        if fault == "silence":
            self.ending.wait(self.silence)
            request.close_connection = True
            return
        if fault == "500":
            request.send_response(500)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.target, timeout=120)
        upstream.request(request.command, request.path, body, dict(request.headers.items()))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                request.send_header(name, value)
        length = answer.getheader("Content-Length") if request.command == "HEAD" else str(len(content))
        request.send_header("Content-Length", length or "0")
        request.end_headers()
        if request.command == "HEAD":
            return
        if fault == "short" and content:
            request.wfile.write(content[: len(content) // 2])
            request.close_connection = True
            return
        request.wfile.write(content)

    def close(self) -> None:
        self.ending.set()
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def faulty(port: int, **how: float) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(port, **how)  # type: ignore[arg-type]
    try:
        yield proxy
    finally:
        proxy.close()


@contextmanager
def nginx(folder: Path, work: Path, ranges: bool = True) -> Iterator[int]:
    """nginx with the files of a folder; the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    work.mkdir(parents=True, exist_ok=True)
    temp = "".join(
        f"{kind}_temp_path {work}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (work / "nginx.conf").write_text(
        f"""daemon off; master_process off; pid {work}/pid; error_log {work}/error.log;
        events {{ worker_connections 256; }}
        http {{ access_log {work}/access.log; {temp}
          server {{ listen 127.0.0.1:{port}; root {folder}; max_ranges {int(ranges)}; }} }}"""
    )
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    process = subprocess.Popen([program, "-p", str(work), "-c", str(work / "nginx.conf")], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (work / "error.log").read_text()
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


SIGNATURE = "X-Amz-Credential=key/20260101/region/s3&X-Amz-Signature=0a1b"


@contextmanager
def signed(folder: Path) -> Iterator[str]:
    """The files of a folder behind signed addresses, as stores have them: GET alone, and 403 otherwise; no ranges."""

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if SIGNATURE not in self.path:
                return self.send_error(403)
            return super().do_GET()

        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def has_nginx() -> bool:
    return bool(shutil.which("nginx") or Path("/usr/sbin/nginx").exists())
