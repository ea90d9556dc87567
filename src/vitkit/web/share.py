"""The page of a data set as one file for sharing: it needs no server and no network.

It has the same modules as the served page, each as a `data:` address in an import map, so that there is no build step;
what the server would answer lies in the file as JSON. A browser lets it fetch nothing and run these scripts only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vitkit.curation.view import View
from vitkit.io import json_text, replacing
from vitkit.web.assets import ASSETS, KINDS

_IMPORT = re.compile(r'from "\./([\w-]+\.js)"')
_ENTRY = "data.js"


def write_page(view: View, path: Path) -> int:
    """Bytes of the file. Sheets of thumbnails go into it one by one."""
    with replacing(path) as file:
        head, body = _page().split("<!-- data -->")
        file.write(head.encode())
        _write_data(file, view)
        file.write(body.encode())
        return file.tell()


def _write_data(file: BinaryIO, view: View) -> None:
    near = np.ascontiguousarray(view.map.neighbours, dtype="<i4").tobytes()
    held = {"about": view.about(), "names": view.index.paths, "issues": view.issue_table()}
    held |= {"points": _base64(view.points_file()), "neighbours": _base64(near)}
    file.write(_inside_script(json_text(held))[:-1].encode() + b', "sheets": [')
    for number in range(view.map.sheets):
        comma = "," if number else ""
        file.write(f'{comma}"{_base64(view.map.sheet(number).read_bytes())}"'.encode())
    file.write(b"]}")


def _page() -> str:
    """data.html with all that it refers to inside it, and a place for the data."""
    imports = json.dumps({"imports": {f"vitkit/{name}": _as_address(name) for name in modules()}})
    scripts = {"": _text("theme.js"), ' type="importmap"': imports, ' type="module"': f'import "vitkit/{_ENTRY}";'}
    digests = " ".join(f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'" for text in scripts.values())
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src blob: data:; script-src {digests} data:"
    rules = f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">"
    html = re.sub(r"\s*<script .*?</script>", "", _text("data.html"))
    html = re.sub(r'<link rel="stylesheet" href="/static/([\w.-]+)">', lambda m: f"<style>{_text(m[1])}</style>", html)
    html = html.replace("/static/icon.svg", _as_address("icon.svg"))
    code = "".join(f"<script{kind}>{_inside_script(text)}</script>\n" for kind, text in scripts.items())
    data = '<script type="application/json" id="embedded"><!-- data --></script>\n'
    html = html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n    {rules}', 1)
    return html.replace("</head>", f"{code}</head>", 1).replace("</body>", f"{data}</body>", 1)


def modules(entry: str = _ENTRY) -> list[str]:
    """A module of the page and those that it imports, also by way of others."""
    found, todo = [entry], [entry]
    while todo:
        new = [name for name in _IMPORT.findall(_text(todo.pop())) if name not in found]
        found += new
        todo += new
    return found


def _as_address(name: str) -> str:
    content = _IMPORT.sub(r'from "vitkit/\1"', _text(name)) if name.endswith(".js") else _text(name)
    return f"data:{KINDS[name.rpartition('.')[2]]};base64,{_base64(content.encode())}"


def _inside_script(text: str) -> str:
    """Text that cannot end the element it stands in, and the same JSON; our own scripts hold none of it."""
    return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")


def _text(name: str) -> str:
    return ASSETS[name].decode()


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
