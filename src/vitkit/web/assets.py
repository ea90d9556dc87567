"""The page's files, read once into a table. A client's path is only ever looked up in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "webp": "image/webp",
}


@dataclass(frozen=True)
class Asset:
    data: bytes
    kind: str
    tag: str  # changes when the file does


def _read() -> dict[str, Asset]:
    found = {}
    for file in (files("vitkit.web") / "static").iterdir():
        suffix = file.name.rsplit(".", 1)[-1]
        if suffix in KINDS:
            data = file.read_bytes()
            found[file.name] = Asset(data, KINDS[suffix], f'"{hashlib.sha256(data).hexdigest()[:16]}"')
    return found


ASSETS = _read()


def page(name: str, message: str = "") -> str:
    """One of our pages, with a sentence of ours in the place left for it."""
    return ASSETS[name].data.decode().replace("<!-- message -->", message)
