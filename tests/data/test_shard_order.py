"""The order of an epoch over shards: the same batches on any number of ranks, each shard read by one of them."""

from __future__ import annotations

import io
import tarfile
from collections import Counter, defaultdict
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import encode, photo

from vitkit.data import Augment, Loader, open_data
from vitkit.data.order import Lanes, epoch_order, order_version
from vitkit.data.source import Runs, Source
from vitkit.data.sources import shards
from vitkit.errors import DataError
from vitkit.model.config import Preprocessing

PRE = Preprocessing(size=(8, 8))


def lanes(sizes: list[int], epoch: int = 0) -> Lanes:
    return Lanes(Runs.of(np.repeat(np.arange(len(sizes)), sizes)), seed=3, epoch=epoch)


def batch(order: Lanes, step: int, size: int, world: int) -> list[list[int]]:
    return [order.part(step, size, rank, world).indices.tolist() for rank in range(world)]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from([12, 24, 36]),
    st.lists(st.integers(0, 40), min_size=2, max_size=2),
)
def test_ranks_may_change_between_stop_and_resume(sizes: list[int], size: int, stops: list[int]) -> None:
    """4 -> 2 -> 3 ranks: every sample of the epoch once, and the same batches as on one rank."""
    size = min(size, sum(sizes) // 12 * 12)
    if not size:
        return
    steps = sum(sizes) // size
    for epoch in range(2):
        first, second = sorted(min(stop, steps) for stop in stops)
        worlds = [4] * first + [2] * (second - first) + [3] * (steps - second)
        seen, alone = [], []
        for step, world in enumerate(worlds):  # every process makes its own order, from two integers
            seen.append([*chain(*batch(lanes(sizes, epoch), step, size, world))])
            alone.append(batch(lanes(sizes, epoch), step, size, 1)[0])
        assert seen == alone
        counts = Counter(chain(*seen))
        assert set(counts.values()) == {1}
        assert len(counts) == steps * size  # all but those of the last, incomplete batch
        assert set(counts) <= set(range(sum(sizes)))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 5))
def test_ranks_read_shards_of_their_own(sizes: list[int], world: int, each: int) -> None:
    shard_of, size = np.repeat(np.arange(len(sizes)), sizes), world * each
    order, readers = lanes(sizes), defaultdict(set)
    for step in range(sum(sizes) // size):
        for rank, part in enumerate(batch(order, step, size, world)):
            assert len(part) == each
            for shard in shard_of[part]:
                readers[int(shard)].add(rank)
    assert sum(len(ranks) - 1 for ranks in readers.values()) <= world - 1  # those across the border of two ranks


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [8, 24, 40])
def test_equal_shards_are_read_by_one_rank(world: int, size: int) -> None:
    """16 shards of 50: also where the batches leave something over."""
    order, readers = lanes([50] * 16), defaultdict(set)
    for step in range(800 // size):
        for rank, part in enumerate(batch(order, step, size, world)):
            for sample in part:
                readers[sample // 50].add(rank)
    assert [len(readers[shard]) for shard in range(16)] == [1] * 16


def test_epochs_differ_and_what_is_left_out_too() -> None:
    found = []
    for epoch in range(3):
        order = lanes([50] * 7, epoch)
        found.append([i for step in range(350 // 24) for i in batch(order, step, 24, 1)[0]])
    left_out = [set(range(350)) - set(samples) for samples in found]
    assert [len(left) for left in left_out] == [350 % 24] * 3
    assert len({tuple(samples) for samples in found}) == 3
    assert left_out[0] != left_out[1]


def test_neighbours_are_shuffled_and_batches_hold_many_shards() -> None:
    order = lanes([3000] * 4)
    one = [i for step in range(3000) for i in order.part(step, 4, 0, 4).indices.tolist()]
    assert len({i // 3000 for i in one}) == 1
    assert sorted(one) != one
    windows = [{i % 3000 // 1024 for i in one[low : low + 1024]} for low in range(0, 3000, 1024)]
    assert windows == [{0}, {1}, {2}]  # a window of a shard is read before the next
    assert {i // 3000 for i in batch(order, 0, 12, 1)[0]} == {0, 1, 2, 3}


def test_samples_of_a_shard_that_are_no_neighbours() -> None:
    """train+val of a set that is split by content."""
    files = np.array([0, 0, 1, 1, 2, 0, 1, 2, 2])
    order = Lanes(Runs.of(files), 0, 0)
    found = [order.part(step, 1, 0, 1).indices[0] for step in range(9)]
    assert sorted(found) == list(range(9))
    assert len([1 for a, b in pairwise(found) if files[a] != files[b]]) == 2


def write_shards(folder: Path, count: int, each: int) -> Path:
    for shard in range(count):
        with tarfile.open(folder / f"train-{shard:02}.tar", "w") as tar:
            for i in range(each):
                for suffix, data in (("png", encode(photo(i, (8, 8)), "PNG")), ("cls", b"01"[i % 2 : i % 2 + 1])):
                    info = tarfile.TarInfo(f"{shard}-{i}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    (folder / "val-00.tar").write_bytes((folder / "train-00.tar").read_bytes())
    return folder


def test_files_that_a_rank_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_data(write_shards(tmp_path, 8, 9)).split()
    opened: dict[str, set[int]] = defaultdict(set)
    read, now = shards.read_range, 0

    def counted(path: str, start: int, size: int) -> bytes:
        opened[path].add(now)
        return read(path, start, size)

    monkeypatch.setattr(shards, "read_range", counted)
    for epoch in range(2):
        opened.clear()
        for now in range(4):  # `counted` looks at it
            loader = Loader(source, PRE, 8, Augment(), rank=now, world_size=4)
            loader.load_state_dict({"epoch": epoch, "step": 0})
            assert [len(b) for b in loader] == [2] * 9
        assert [len(ranks) for ranks in opened.values()] == [1] * 8


# --- the version of an order -------------------------------------------------------------------------


class _Sharded(Source):
    runs = Runs.of(np.repeat(np.arange(3), 8))  # type: ignore[assignment]


LABELS = np.arange(24) % 2
KINDS = {
    "shards": (_Sharded("a", labels=LABELS, classes=("x", "y")), False),
    "shards, balanced": (_Sharded("a", labels=LABELS, classes=("x", "y")), True),
    "row groups": (Source("a", labels=LABELS, classes=("x", "y"), blocks=np.repeat(np.arange(6), 4)), False),
    "files": (Source("a", labels=LABELS, classes=("x", "y")), False),
}
# Whoever changes an order gives it another version: a run that was stopped in the middle of an epoch is then refused.
PINNED = {
    "shards": (2, [8, 14, 17, 20, 2, 1]),
    "shards, balanced": (1, [22, 15, 7, 3, 2, 6]),
    "row groups": (1, [22, 23, 11, 12, 20, 4]),
    "files": (1, [1, 19, 4, 22, 17, 16]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_that_changes_has_another_version(kind: str) -> None:
    source, balanced = KINDS[kind]
    part = epoch_order(source, 7, 1, shuffle=True, balanced=balanced).part(1, 6, 0, 1)
    assert (order_version(source, balanced), part.indices.tolist()) == PINNED[kind]


def test_the_middle_of_an_epoch_in_another_order_is_refused(tmp_path: Path) -> None:
    source = open_data(write_shards(tmp_path, 4, 6)).split()
    loader = Loader(source, PRE, 4, Augment())
    next(iter(loader))
    assert loader.state_dict() == {"epoch": 0, "step": 1, "order": 2}
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match=r"in the middle of epoch 1.*order 1, here 2.*--accept-changed-data"):
        loader.load_state_dict({"epoch": 0, "step": 3})  # as written before orders had versions
    assert loader.step == 1
    loader.load_state_dict({"epoch": 0, "step": 3}, accept_order=True)
    assert loader.step == 3
    loader.load_state_dict({"epoch": 5, "step": 0})  # an epoch that is still to come is whole in any order
    with pytest.raises(DataError, match="order 3, here 2"):
        loader.load_state_dict({"epoch": 0, "step": 1, "order": 3})
