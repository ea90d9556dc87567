"""What fails is repeated, what is short is never accepted, and what will not pass is told in words."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from vitkit.errors import MissingPackage, NotThere, StorageError
from vitkit.storage import remote
from vitkit.storage.remote import Stat, fetch, read, repeated, stat

CONTENT = bytes(range(256)) * 40


class Flaky:
    """A file behind a URL whose requests go wrong as a script says: an exception, or a number of bytes to keep."""

    def __init__(self, *script: Exception | int, ranges: bool = True) -> None:
        self.script, self.ranges, self.requests = list(script), ranges, 0

    def info(self, path: str) -> dict[str, object]:
        return {"size": len(CONTENT), "ETag": '"1"', "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self.requests += 1
        step = self.script.pop(0) if self.script else len(CONTENT)
        if isinstance(step, Exception):
            raise step
        return (CONTENT[start:end] if self.ranges else CONTENT)[:step]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Flaky], Flaky]:
    def use(store: Flaky) -> Flaky:
        monkeypatch.setattr(remote, "filesystem", lambda url: store)
        monkeypatch.setattr(remote, "RANGE", 1000)
        return store

    return use


def coded(code: str, kind: type[Exception] = OSError) -> Exception:
    """As s3fs raises what S3 answered."""
    error = kind(code)
    error.__cause__ = type("ClientError", (Exception,), {"response": {"Error": {"Code": code}}})()
    return error


def test_what_may_pass_is_repeated(serve: Callable[[Flaky], Flaky]) -> None:
    store = serve(Flaky(coded("500"), TimeoutError(), ConnectionResetError(), coded("SlowDown"), 17))
    assert read("s3://b/x", whole=len(CONTENT)) == CONTENT
    assert store.requests == 6


def test_a_short_answer_is_never_accepted(serve: Callable[[Flaky], Flaky]) -> None:
    serve(Flaky(*[100] * 50))
    with pytest.raises(StorageError, match=r"100 of 10240 bytes arrived\); check the network"):
        read("s3://b/x", whole=len(CONTENT))
    with pytest.raises(StorageError, match=r"could not be read in 8 attempts"):
        read("s3://b/x", 0, 200)


@pytest.mark.parametrize("ranges", [True, False])
def test_ranges_are_put_together(serve: Callable[[Flaky], Flaky], tmp_path: Path, ranges: bool) -> None:
    store = serve(Flaky(5000, coded("500"), 3, ranges=ranges))
    with open(tmp_path / "x", "w+b") as file:
        fetch("s3://b/x", stat("s3://b/x"), file.fileno())
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert store.requests >= (11 if ranges else 2)


def test_a_file_that_changes_while_it_is_read_is_refused(serve: Callable[[Flaky], Flaky], tmp_path: Path) -> None:
    serve(Flaky())
    with open(tmp_path / "x", "w+b") as file, pytest.raises(StorageError, match="was changed while it was read"):
        fetch("s3://b/x", Stat(len(CONTENT), "0"), file.fileno())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (coded("NoSuchBucket", FileNotFoundError), "there is no bucket s3://b; check its name"),
        (coded("RequestTimeTooSkewed", PermissionError), "refuses the clock of this machine .*; set the clock"),
        (coded("InvalidAccessKeyId", PermissionError), "did not accept the credentials .*AWS_ACCESS_KEY_ID"),
        (coded("ExpiredToken", PermissionError), "did not accept the credentials"),
        (type("NoCredentialsError", (Exception,), {})("none"), "did not accept the credentials"),
        (coded("AccessDenied", PermissionError), "permission to read s3://b/x was denied; ask for the right"),
        (coded("NoSuchKey", FileNotFoundError), "there is no file s3://b/x; check the address"),
        (coded("400"), "was refused with 400"),
    ],
)
def test_what_will_not_pass_is_told_at_once(serve: Callable[[Flaky], Flaky], error: Exception, words: str) -> None:
    store = serve(Flaky(error))
    with pytest.raises(StorageError, match=words):
        read("s3://b/x")
    assert store.requests == 1


def test_a_place_that_is_not_there_cannot_be_written_to() -> None:
    """So answer Azure and Google, where S3 says NoSuchBucket: it is the container that is missing, not the file."""

    def put() -> None:
        raise FileNotFoundError("az://b/x")

    with pytest.raises(StorageError, match="there is no bucket or container az://b to write to; check its name"):
        repeated("az://b/x", put, "write")


def test_an_answer_of_many_lines_becomes_one(serve: Callable[[Flaky], Flaky]) -> None:
    error = coded("400")
    error.args = ("first\n  <Message>\nlast",)
    serve(Flaky(error))
    with pytest.raises(StorageError) as caught:
        read("s3://b/x")
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_also_an_os_error(serve: Callable[[Flaky], Flaky]) -> None:
    serve(Flaky(FileNotFoundError()))
    with pytest.raises(FileNotFoundError) as caught:
        read("s3://b/x")
    assert isinstance(caught.value, NotThere)


@pytest.mark.parametrize(
    ("url", "missing", "words"),
    [
        ("s3://b/x", "s3fs", r"reading s3:// needs the package 's3fs': pip install 'vitkit\[remote\]'"),
        ("s3://b/x", "fsspec", r"pip install 'vitkit\[remote\]'"),
        ("gs://b/x", "gcsfs", "reading gs:// needs the package 'gcsfs': pip install gcsfs"),
        ("az://b/x", "adlfs", "pip install adlfs"),
        ("hf://datasets/a/b", "huggingface_hub", r"pip install 'vitkit\[hub\]'"),
        ("https://h/x", "aiohttp", r"pip install 'vitkit\[remote\]'"),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, url: str, missing: str, words: str) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else there(name))
    with pytest.raises(MissingPackage, match=words):
        stat(url)


def test_an_unknown_scheme_is_told_in_words() -> None:
    with pytest.raises(StorageError, match=r"ftp:// is not read; copy it to this machine, or give one of s3://"):
        stat("ftp://host/x.csv")


def test_the_web_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    for write in (lambda url: remote.put(tmp_path / "x", url), lambda url: remote.create(b"x", url)):
        with pytest.raises(StorageError, match="cannot be written: web servers are read; choose s3://"):
            write("http://127.0.0.1:9/x")
