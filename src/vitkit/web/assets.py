"""The files of the pages, read once: a client's path is only ever looked up among them."""

from importlib.resources import files

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}  # mimetypes asks the machine, and varies
KINDS |= {"json": "application/json", "svg": "image/svg+xml", "webp": "image/webp"}
STATIC = [file for file in (files("vitkit.web") / "static").iterdir() if file.name.rpartition(".")[2] in KINDS]
ASSETS = {file.name: file.read_bytes() for file in STATIC}
