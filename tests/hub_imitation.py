"""A hub on loopback: just the addresses that huggingface_hub's client asks for to create, upload and download."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_" + "a" * 34
COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}  # repository -> file -> content
        self.objects: dict[str, bytes] = {}  # large files by digest
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        pass

    def answer(self, body: object = b"", status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def known(self) -> bool:
        """Whether the token is right; a wrong one is answered."""
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.answer({"error": "Invalid credentials"}, 401)
        return False

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self) -> None:
        self.server.asked.append(f"POST {self.path}")
        body = self.body()
        if not self.known():
            return None
        if self.path == "/api/validate-yaml":  # of a card
            return self.answer({"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            about = json.loads(body)
            repo = f"{about['organization']}/{about['name']}"
            if about["organization"] == "others":
                return self.answer({"error": "You don't have the rights"}, 403)
            status = 409 if repo in self.server.repos else 200
            self.server.repos.setdefault(repo, {})
            return self.answer({"url": f"{self.server.address}/{repo}", "error": "exists"}, status)
        if found := re.fullmatch(r"/api/models/(.+)/preupload/main", self.path):
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "shouldIgnore": False, "uploadMode": mode(f["path"])} for f in files]
            return self.answer({"files": modes})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            made = [{**o, "actions": {"upload": {"href": f"{self.server.address}/lfs/{o['oid']}"}}} for o in objects]
            return self.answer({"transfer": "basic", "objects": made})
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            self.commit(found[1], body)
            url = f"{self.server.address}/{found[1]}/commit/{COMMIT}"
            return self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})
        return self.answer({"error": "unknown"}, 404)

    def commit(self, repo: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.server.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.repos[repo][value["path"]] = self.server.objects[value["oid"]]

    def do_PUT(self) -> None:
        content = self.body()
        digest = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == digest
        self.server.objects[digest] = content
        self.answer(b"", ETag=f'"{digest}"')

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        found = re.fullmatch(r"/(.+?)/resolve/(?:main|c{40})/(.+)", self.path.split("?")[0])
        if not found or found[1] not in self.server.repos:
            return self.answer({"error": "none"}, 404, X_Error_Code="RepoNotFound", X_Repo_Commit=COMMIT)
        content = self.server.repos[found[1]].get(found[2])
        if content is None:
            return self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        digest = hashlib.sha256(content).hexdigest()
        return self.answer(content, ETag=f'"{digest}"', X_Repo_Commit=COMMIT)


def mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".png")) else "regular"


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
