"""Copies on this machine's disk: fetched once, bounded, never taken from under a reader."""

import errno
import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from vitkit.errors import ConfigError, StorageError
from vitkit.storage import cache, local, open_regular, remote


def put(url: str, content: bytes) -> None:
    remote.put_bytes(content, url)


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()
    fetch = cache.fetch

    def counting(url: str, known: remote.Stat, file: int) -> None:
        counted[url] += 1
        fetch(url, known, file)

    monkeypatch.setattr(cache, "fetch", counting)
    return counted


def test_a_file_is_fetched_once_until_it_changes(memory: str, reads: Counter[str]) -> None:
    url = f"{memory}/a.bin"
    put(url, b"one")
    for _ in range(3):
        file = open_regular(url)
        assert os.read(file, 9) == b"one"
        os.close(file)
    assert local(url).read_bytes() == b"one"
    assert reads[url] == 1
    put(url, b"other")
    cache._known.clear()
    assert local(url).read_bytes() == b"other"


def test_a_damaged_entry_is_fetched_again(memory: str, reads: Counter[str]) -> None:
    url = f"{memory}/a.bin"
    put(url, b"content")
    os.close(open_regular(url))
    entry = cache.entry(url, remote.stat(url))
    entry.write_bytes(b"cut")
    file = open_regular(url)
    assert os.read(file, 99) == b"content"
    os.close(file)
    assert reads[url] == 2


def test_the_longest_unused_goes_first_and_what_is_in_use_stays(memory: str) -> None:
    entries = []
    for number in range(6):
        put(url := f"{memory}/{number}.bin", bytes(1000))
        os.close(open_regular(url))
        entries.append(cache.entry(url, remote.stat(url)))
        age(entries[-1], 100 * (6 - number))
    held = open_regular(f"{memory}/0.bin")  # the oldest, used now
    age(entries[0], 1000)
    assert cache.make_room(3000) == 3000
    assert [entry.exists() for entry in entries] == [True, False, False, False, True, True]
    assert cache.make_room(0) == 1000, "what somebody reads is never removed"
    assert os.read(held, 2000) == bytes(1000)
    os.close(held)
    assert cache.make_room(0) == 0


def test_room_is_made_while_files_arrive(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE_SIZE", "10kB")
    for number in range(40):
        put(url := f"{memory}/{number}.bin", bytes(1000))
        os.close(open_regular(url))
    assert cache.make_room(10**9) <= 11_000


@pytest.mark.parametrize(("text", "size"), [("10kB", 10_000), ("2.5 GB", 2_500_000_000), ("7", 7), ("1TiB", 10**12)])
def test_sizes(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("VITKIT_CACHE_SIZE", text)
    assert cache.limit() == size


def test_a_size_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE_SIZE", "much")
    with pytest.raises(ConfigError, match=r"VITKIT_CACHE_SIZE.*write 1GB, 500MB"):
        cache.limit()


def _hold(path: str, held: "multiprocessing.synchronize.Event", over: "multiprocessing.synchronize.Event") -> None:
    file = cache._locked(Path(path))
    held.set()
    over.wait(60)
    os.close(file)


def test_what_another_process_reads_stays(memory: str) -> None:
    put(f"{memory}/a.bin", b"abc")
    os.close(open_regular(f"{memory}/a.bin"))
    entry = cache.entry(f"{memory}/a.bin", remote.stat(f"{memory}/a.bin"))
    context = multiprocessing.get_context("fork")
    held, over = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(entry), held, over))
    other.start()
    assert held.wait(60)
    assert cache.make_room(0) == 3
    over.set()
    other.join()
    assert cache.make_room(0) == 0


def test_half_of_a_fetch_leaves_nothing(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{memory}/a.bin"
    put(url, b"abc")

    def breaks(url: str, known: remote.Stat, file: int) -> None:
        os.write(file, b"a")
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "fetch", breaks)
    with pytest.raises(KeyboardInterrupt):
        open_regular(url)
    assert not cache.entry(url, remote.stat(url)).exists()


def test_a_write_that_takes_less_than_all_is_continued(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2 GB in one call are, and what a disk takes that becomes full."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, start: write(file, content[:100], start))
    content = bytes(range(250)) * 4
    put(f"{memory}/a.bin", content)
    monkeypatch.setattr(remote, "RANGE", 300)
    assert cache.local(f"{memory}/a.bin").read_bytes() == content


def test_a_full_disk_is_made_room_on(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache on a disk smaller than its limit, with room for three files."""
    write, room = os.pwrite, 3000

    def limited(file: int, content: bytes, start: int) -> int:
        if cache.make_room(10**9) + len(content) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content, start)

    monkeypatch.setattr(os, "pwrite", limited)
    for number in range(10):
        put(url := f"{memory}/{number}.bin", bytes([number]) * 1000)
        file = open_regular(url)
        assert os.read(file, 2000) == bytes([number]) * 1000
        os.close(file)
    room = 500
    put(f"{memory}/x.bin", bytes(1000))
    with pytest.raises(StorageError, match="is full; free some space"):
        open_regular(f"{memory}/x.bin")
