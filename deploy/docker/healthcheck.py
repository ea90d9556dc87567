"""Exit code 0 while the container does its work: a server must say that it lives, anything else only has to run."""

import sys
import urllib.request
from pathlib import Path


def port_of(words: list[str]) -> int:
    """The port of `vitkit serve ...`; 0 for another command."""
    if "serve" not in words:
        return 0
    given = [w.split("=", 1)[1] for w in words if w.startswith("--port=")]
    given += words[words.index("--port") + 1 :][:1] if "--port" in words else []
    return int(given[0]) if given else 8000


def main() -> int:
    port = port_of(Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0"))
    if not port:
        return 0
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=4) as answer:
            return 0 if answer.status == 200 else 1
    except OSError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
