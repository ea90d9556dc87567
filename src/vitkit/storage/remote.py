"""Requests to object stores and web servers: what fails is repeated, what is short is never accepted.

A request that fails for a reason that may pass (5xx, 429, a lost connection, silence, fewer bytes than there are) is
repeated up to ATTEMPTS times, after random pauses whose limit doubles. What will not pass (no such bucket, wrong
credentials, a wrong clock) is told at once, in a sentence that ends with the next action.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

from vitkit.errors import Denied, MissingPackage, NotThere, StorageError, reason_of
from vitkit.io import sha256, write_at
from vitkit.storage.address import scheme_of, split

T = TypeVar("T")
ATTEMPTS = 8
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 20.0  # seconds
AT_ONCE = 8  # requests for the ranges of one file
RANGE = 8 << 20  # bytes of one of them
_PART = 50 << 20  # bytes of a part of a large upload
# scheme -> the package that fsspec needs, and how to get it
SCHEMES = {
    "s3": ("s3fs", "pip install 'vitkit[remote]'"),
    "gs": ("gcsfs", "pip install gcsfs"),
    "az": ("adlfs", "pip install adlfs"),
    "hf": ("huggingface_hub", "pip install 'vitkit[hub]'"),
    "http": ("aiohttp", "pip install 'vitkit[remote]'"),
    "https": ("aiohttp", "pip install 'vitkit[remote]'"),
}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run gcloud auth application-default login",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "run hf auth login",
}


class FileSystem(Protocol):
    """What is used of fsspec."""

    def info(self, path: str) -> dict[str, object]: ...
    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, object]]: ...
    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None: ...
    def put_file(self, lpath: str, rpath: str) -> None: ...
    def rm_file(self, path: str) -> None: ...
    def exists(self, path: str) -> bool: ...


class Short(Exception):
    """Fewer bytes than there are, or others: a reason to ask again."""


@dataclass(frozen=True)
class Stat:
    """What a server says about a file before it is read."""

    size: int  # -1: it does not say
    version: str  # its ETag, or when it was written to; "" when it does not say


def not_there(url: str) -> NotThere:
    return NotThere(errno.ENOENT, f"there is no file {url}; check the address, capitals count")


def patience() -> float:
    """Seconds of silence until a request is given up and repeated: VITKIT_TIMEOUT, or 30."""
    try:
        return max(0.1, float(os.environ.get("VITKIT_TIMEOUT", "30")))
    except ValueError:
        return 30.0


def filesystem(url: str) -> FileSystem:
    """Of this process: fsspec gives the same one until the process forks."""
    scheme = url.split("://", 1)[0]  # as written: fsspec knows no S3://
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise StorageError(f"{url[:200]!r}: {scheme}:// is not read; copy it to this machine, or give one of {known}")
    package, install = SCHEMES[scheme]
    for needed in ("fsspec", package):
        if needed and importlib.util.find_spec(needed) is None:
            raise MissingPackage(needed, f"reading {scheme}://", "remote", install)
    import fsspec

    opened = fsspec.filesystem(scheme, **_options(scheme))
    if scheme == "s3":
        opened.retries = 1  # repeating is done here, and not on top of each other
    return cast(FileSystem, opened)


def _options(scheme: str) -> dict[str, object]:
    seconds = patience()
    if scheme == "s3":
        waits = {"connect_timeout": seconds, "read_timeout": seconds, "retries": {"max_attempts": 0}}
        waits["max_pool_connections"] = 64
        return {"config_kwargs": waits, "use_listings_cache": False, "default_block_size": _PART}
    if scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
        return {"client_kwargs": {"timeout": timeout, "headers": {"User-Agent": "vitkit"}}, "use_listings_cache": False}
    return {"use_listings_cache": False} if scheme in ("gs", "az", "hf") else {}


# --- asking until it answers -------------------------------------------------------------------------


def repeated(url: str, work: Callable[[], T], doing: str = "read") -> T:
    """The result of `work`, which is called again while what it raises may pass."""
    last: BaseException = Short("nothing was tried")
    for attempt in range(ATTEMPTS):
        try:
            return work()
        except (StorageError, MissingPackage):
            raise
        except Exception as e:  # every backend has exceptions of its own
            if (final := _final(url, e, doing)) is not None:
                raise final from e
            last = e
        if attempt + 1 < ATTEMPTS:
            time.sleep(random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt)))
    why = reason_of(last)[:300]
    action = "check the network and the server, then repeat the command; with --resume nothing that is done is lost"
    raise StorageError(f"{url} could not be {_DONE[doing]} in {ATTEMPTS} attempts ({why}); {action}") from last


_DONE = {"read": "read", "write": "written"}


def _final(url: str, error: Exception, doing: str) -> Exception | None:
    """What to tell the user when asking again is no use; None when it is."""
    code, place = _code(error), split(url)[0]
    login = _CREDENTIALS.get(scheme_of(url), "a signed address ends after a time; get a new one")
    if code == "RequestTimeTooSkewed":
        return StorageError(f"{place} refuses the clock of this machine ({code}); set the clock (NTP), then repeat")
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return StorageError(f"there is no bucket {place}; check its name and AWS_ENDPOINT_URL, or create it")
    if code in _REFUSED or type(error).__name__ in _NO_CREDENTIALS:
        return StorageError(f"{place} did not accept the credentials ({code or error}); {login}")
    if isinstance(error, PermissionError) or code in ("403", "401", "AccessDenied"):
        right = f"ask for the right to {doing} it, or check the credentials: {login}"
        return Denied(f"permission to {doing} {url} was denied; {right}")
    if isinstance(error, FileNotFoundError) or code in ("404", "NoSuchKey"):
        missing = StorageError(f"there is no bucket or container {place} to write to; check its name, or create it")
        return missing if doing == "write" else not_there(url)
    if isinstance(error, NotImplementedError):
        return StorageError(f"{scheme_of(url)}:// cannot {doing} {url}; choose s3://, gs:// or az://, or a local path")
    if code.isdecimal() and 400 <= int(code) < 500 and code not in ("408", "409", "416", "425", "429"):
        return StorageError(f"{url} was refused with {code} ({reason_of(error)[:300]}); check the address")
    return None


_REFUSED = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "TokenRefreshRequired")
_NO_CREDENTIALS = ["NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"]
_NO_CREDENTIALS += ["DefaultCredentialsError", "ClientAuthenticationError"]


def _code(error: BaseException | None) -> str:
    """The code of a server's answer: S3's own word, or the number of HTTP; "" when there was no answer."""
    while error is not None:
        answer = getattr(error, "response", None)
        if isinstance(answer, dict):
            return str(answer.get("Error", {}).get("Code", ""))
        status = getattr(error, "status", None) or getattr(error, "status_code", None)
        if isinstance(status, int):
            return str(status)
        error = error.__cause__ or error.__context__
    return ""


# --- reading -----------------------------------------------------------------------------------------


def stat_of(info: dict[str, object]) -> Stat:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    size = info.get("size")
    return Stat(size if isinstance(size, int) else -1, version.strip('"'))


_VERSIONS = ["ETag", "etag", "md5Hash", "oid", "blob_id", "Last-Modified", "LastModified", "last_modified"]
_VERSIONS += ["mtime", "created"]


def stat(url: str) -> Stat:
    """Size and version; FileNotFoundError where there is no file."""

    def ask() -> Stat:
        info = filesystem(url).info(url)
        if info.get("type") == "directory":
            raise not_there(url)
        return stat_of(info)

    return repeated(url, ask)


def read(url: str, start: int | None = None, end: int | None = None, whole: int = -1) -> bytes:
    """A range of a file, or the file, of which `whole` bytes must arrive where that is known."""
    wanted = end - start if start is not None and end is not None else whole

    def ask() -> bytes:
        content = filesystem(url).cat_file(url, start, end)
        if len(content) != wanted >= 0:
            raise Short(f"{len(content)} of {wanted} bytes arrived")
        return content

    return repeated(url, ask)


def read_current(url: str) -> bytes:
    """A small file that others may replace at any moment: its size is asked for again with each attempt."""

    def ask() -> bytes:
        files = filesystem(url)
        size, content = stat_of(files.info(url)).size, files.cat_file(url)
        if len(content) != size:
            raise Short(f"{len(content)} of {size} bytes arrived")
        return bytes(content)

    return repeated(url, ask)


def fetch(url: str, known: Stat, file: int) -> None:
    """All of a file into an open one, in ranges that are asked for at once."""
    if known.size <= RANGE:
        write_at(file, 0, read(url, whole=known.size))
        return
    if len(read_any(url, 0, 2)) > 2:  # a server without ranges sends everything
        write_at(file, 0, read(url, whole=known.size))
        return
    starts = range(0, known.size, RANGE)

    def get(start: int) -> None:
        write_at(file, start, read(url, start, min(start + RANGE, known.size)))

    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for done in [pool.submit(get, start) for start in starts]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
    if (now := stat(url)) != known:
        raise StorageError(f"{url} was changed while it was read (from {known} to {now}); repeat the command")


def read_any(url: str, start: int, end: int) -> bytes:
    """A range as the server gives it, which may be more."""

    def ask() -> bytes:
        content = filesystem(url).cat_file(url, start, end)
        if len(content) < end - start:
            raise Short(f"{len(content)} of {end - start} bytes arrived")
        return content

    return repeated(url, ask)


def find(url: str) -> dict[str, Stat]:
    """Every file below a URL, by its path from there."""

    def ask() -> dict[str, dict[str, object]]:
        return filesystem(url).find(url, detail=True)

    root = split(url)[1]
    named = ((_path_in(url, name), info) for name, info in repeated(url, ask).items())
    return {path.removeprefix(f"{root}/" if root else ""): stat_of(info) for path, info in named if path != root}


def _path_in(url: str, name: str) -> str:
    """fsspec gives "bucket/a/b" for objects, "/a/b" in memory and whole addresses for http."""
    place = split(url)[0]
    return name.removeprefix(place).strip("/").removeprefix(f"{place.split('://')[1]}/")


# --- writing -----------------------------------------------------------------------------------------


def _writable(url: str) -> FileSystem:
    if scheme_of(url) in ("http", "https"):
        raise StorageError(f"{url} cannot be written: web servers are read; choose s3://, gs://, az:// or a local path")
    return filesystem(url)


def put(path: Path, url: str) -> None:
    """A file of this machine to a URL; returns when what is there was compared with it."""

    def work() -> None:
        _writable(url).put_file(str(path), url)
        _verify(url, path.stat().st_size, lambda: _etags(path), lambda: sha256(path))

    repeated(url, work, "write")


def is_copy(path: Path, url: str) -> bool:
    """Whether a URL holds this very file, by size and ETag where it is an MD5."""
    known = stat(url)
    return known.size == path.stat().st_size and known.version in _etags(path)


def put_bytes(content: bytes, url: str) -> None:
    def work() -> None:
        _writable(url).pipe_file(url, content)
        if filesystem(url).cat_file(url) != content:
            raise Short("what is there is not what was written")

    repeated(url, work, "write")


_THERE = ("PreconditionFailed", "412", "ConditionalRequestConflict")


def create(content: bytes, url: str) -> bool:
    """As `put_bytes`, but False where something is there already, as far as the store can tell."""

    def work() -> bool:
        try:
            _writable(url).pipe_file(url, content, mode="create")
        except OSError as e:
            if isinstance(e, FileExistsError) or _code(e) in _THERE:
                return filesystem(url).cat_file(url) == content  # ours, when an answer was lost
            raise
        except TypeError:  # a store that knows no such condition
            if filesystem(url).exists(url):
                return filesystem(url).cat_file(url) == content
            filesystem(url).pipe_file(url, content)
        return True

    return repeated(url, work, "write")


def remove(url: str) -> None:
    with suppress(FileNotFoundError):
        repeated(url, lambda: filesystem(url).rm_file(url), "write")


def _verify(url: str, size: int, etags: Callable[[], set[str]], digest: Callable[[], str]) -> None:
    """By size and ETag where it is an MD5, as S3 makes it; else all of it is read again."""
    now = stat_of(filesystem(url).info(url))
    if now.size != size:
        raise Short(f"{now.size} of {size} bytes were stored")
    if now.version in etags():
        return
    found = hashlib.sha256()
    for start in range(0, size, RANGE):
        found.update(filesystem(url).cat_file(url, start, min(start + RANGE, size)))
    if found.hexdigest() != digest():
        raise Short("other bytes were stored")


def _etags(path: Path) -> set[str]:
    """What S3 calls a file, sent whole or in parts."""
    whole, parts = hashlib.md5(usedforsecurity=False), list[bytes]()
    with path.open("rb") as file:
        while part := file.read(_PART):
            whole.update(part)
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
    joined = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return {whole.hexdigest(), f"{joined}-{len(parts)}"}
