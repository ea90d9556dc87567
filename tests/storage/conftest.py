"""URLs without a network: fsspec's memory, and moto's S3 server on loopback."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitkit.storage import cache, publish, remote


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_known", {})
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(publish, "BEAT", 0.2)
    monkeypatch.setattr(publish, "PATIENCE", 1.0)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket in the memory of this process."""
    import fsspec

    monkeypatch.setitem(remote.SCHEMES, "memory", ("fsspec", ""))
    yield "memory://bucket"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def s3(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of moto's server, empty."""
    import boto3
    import fsspec

    for name, value in s3_environment(moto_port).items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()
    store = boto3.resource("s3").Bucket("bucket")
    store.create()
    yield "s3://bucket"
    store.objects.all().delete()
    store.delete()
    fsspec.filesystem("s3").clear_instance_cache()


def s3_environment(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "VITKIT_TIMEOUT": "20",
    }
