"""URLs as names of files and folders: `scheme://place/path`. The place is a bucket, a container or a host."""

from __future__ import annotations

import posixpath
import re
from urllib.parse import quote

from vitkit.errors import DataError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # two letters at least: c:// is a disk of Windows


def is_url(where: object) -> bool:
    return isinstance(where, str) and _URL.match(where) is not None


def scheme_of(url: str) -> str:
    return url.split("://", 1)[0].lower()


def is_web(url: str) -> bool:
    return scheme_of(url) in ("http", "https")


def split(url: str) -> tuple[str, str]:
    """ "s3://bucket/a/b.tar" -> "s3://bucket" and "a/b.tar"; what follows a ? stays out of the path."""
    scheme, _, rest = url.partition("://")
    place, _, path = rest.partition("/")
    path = path.split("?")[0] if is_web(url) else path
    return f"{scheme}://{place}", path.strip("/")


def plain(where: str) -> str:
    """A path as it is; an address of the web without the signature, or whatever else follows its ?."""
    return "/".join(split(where)) if is_url(where) else where


def last_name(url: str) -> str:
    place, path = split(url)
    return path.rsplit("/", 1)[-1] or place.split("://")[1]


def suffix(where: str) -> str:
    """ ".npz" of a path or of a URL, also of one with a signature behind a ?."""
    return posixpath.splitext(last_name(where) if is_url(where) else where)[1].lower()


def above(url: str) -> str:
    place, path = split(url)
    return f"{place}/{posixpath.dirname(path)}".rstrip("/")


def join(folder: str, *names: str) -> str:
    return "/".join([folder.rstrip("/"), *(name.strip("/") for name in names)])


def named_in(remote_list: str, row: str) -> str:
    """What a list (or an index) behind a URL names: something beside it, in its own bucket or on its own host.

    A list that came from elsewhere must not make this machine read its own files, or ask other hosts.
    """
    place, path = split(remote_list)
    if is_url(row):
        same = split(row)[0] == place
        target = split(row)[1]
    else:
        row = quote(row) if is_web(remote_list) else row  # it is a path: a # or % in it is part of a name
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), row.replace("\\", "/")))
        same = not row.startswith(("/", "~")) and target != ".." and not target.startswith("../")
    if not same:
        why = (
            f"{remote_list} names {row[:200]!r}, which is not in {place}; what comes from there may not lead elsewhere"
        )
        raise DataError(f"{why}. If you trust it, copy it to this machine and name the copy")
    return row if is_url(row) else f"{place}/{target}"
