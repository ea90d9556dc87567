"""A digest at the end of an exported file, where every reader of the format skips it; compared when it is opened.

In .onnx it is one more metadata property, in .xml a comment; there it is also about the weights in the .bin file.
Files of version 0.1, and those of others, have none.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from vitkit.errors import ConfigError

# Field 14 of ModelProto, 74 bytes long: an entry with the key "sha256" and a value of 64 characters.
_MARKS = {".onnx": (b"\x72\x4a\x0a\x06sha256\x12\x40", b""), ".xml": (b"<!-- sha256 ", b" -->\n")}


def seal(path: Path, *others: Path) -> None:
    """Put the digest of a file, and of those that belong to it, at its end."""
    before, after = _MARKS[path.suffix]
    content = path.read_bytes()
    path.write_bytes(content + before + _digest(content, *map(Path.read_bytes, others)) + after)


def checked(path: Path, *others: Path) -> list[bytes]:
    """The content of a file and of those that belong to it; an error when it is not what was written."""
    before, after = _MARKS[path.suffix]
    try:
        contents = [file.read_bytes() for file in (path, *others)]
    except OSError as e:
        raise ConfigError(f"{e.filename or path} cannot be read ({e.strerror}); export the model again") from e
    found = re.search(re.escape(before) + rb"([0-9a-f]{64})" + re.escape(after) + rb"\Z", contents[0])
    if found and found[1] != _digest(contents[0][: found.start()], *contents[1:]):
        names = " or ".join(str(file) for file in (path, *others))
        raise ConfigError(f"{names} is not what was exported: it was damaged or replaced; export the model again")
    return contents


def _digest(*contents: bytes) -> bytes:
    found = hashlib.sha256()
    for content in contents:
        found.update(content)
    return found.hexdigest().encode()
