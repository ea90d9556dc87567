"""--cache: the same pixels from the second epoch on, and nothing half-built is ever used."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import making
import numpy as np
import pytest
import torch

from vitkit.data import BadFiles, Loader, Source, cached, open_data, preset
from vitkit.data import cache as caching
from vitkit.model.config import Preprocessing

PRE = Preprocessing((32, 32), 0.875, "crop", "bicubic")
RESIZED = preset("light", crop="resized")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    making.write_folder(tmp_path / "set", {"a": 8, "b": 8}, size=(120, 90))
    (tmp_path / "set" / "a" / "002.jpg").write_bytes(b"damaged")
    return open_data(tmp_path / "set").split("all")


def load(source: Source, augment=None, **options) -> tuple[torch.Tensor, list[str]]:
    record = BadFiles(total=16, max_bad=1.0)
    with Loader(source, PRE, 8, augment, bad_files=record, **options) as loader:
        return torch.cat([b.images for b in loader]), [b.reason for b in record]


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_from_the_cache_is_exact(source: Source, tmp_path: Path, workers: int) -> None:
    kept = cached(source, PRE, workers=workers, folder=tmp_path / "cache")
    direct, reasons = load(source)
    again, same_reasons = load(kept, workers=workers)
    assert torch.equal(direct, again)
    assert reasons == same_reasons
    assert len(reasons) == 1


def test_padded_crops_from_the_cache_are_exact(source: Source, tmp_path: Path) -> None:
    augment = preset("medium", crop="pad")
    kept = cached(source, PRE, augment, folder=tmp_path / "cache")
    assert torch.equal(load(source, augment)[0], load(kept, augment)[0])


def test_random_crops_from_the_cache_are_close(tmp_path: Path) -> None:
    making.write_folder(tmp_path / "set", {"a": 8}, size=(400, 300))
    source = open_data(tmp_path / "set").split("all")
    kept = cached(source, PRE, RESIZED, folder=tmp_path / "cache")
    assert kept.image(0).size == (49, 37)
    a, b = (load(s, RESIZED)[0].float() for s in (source, kept))
    assert (a - b).abs().mean() < 12


def test_it_is_built_once_and_again_when_a_file_changes(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    build = caching._build
    monkeypatch.setattr(caching, "_build", lambda *a: (built.append(1), build(*a)))
    for _ in range(2):
        cached(source, PRE, folder=tmp_path / "cache")
    assert len(built) == 1
    Path(source.where(0)).write_bytes(making.encode(making.photo(99)))
    cached(source, PRE, folder=tmp_path / "cache")
    cached(source, Preprocessing((16, 16)), folder=tmp_path / "cache")
    assert len(built) == 3


def test_sets_in_memory_need_no_cache() -> None:
    digits = open_data("digits").split()
    assert cached(digits, PRE) is digits


def _build_slowly(source: Source, folder: Path) -> None:
    keep = caching._Keep.__call__

    def slowly(self, index):  # type: ignore[no-untyped-def]
        time.sleep(0.05)
        return keep(self, index)

    caching._Keep.__call__ = slowly  # type: ignore[method-assign]
    cached(source, PRE, folder=folder)


def test_a_kill_while_it_is_built_leaves_nothing_wrong(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    builder = multiprocessing.get_context("fork").Process(target=_build_slowly, args=(source, folder))
    builder.start()
    deadline = time.monotonic() + 30
    while not list(folder.glob(".*.part")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(30)
    assert builder.exitcode == -signal.SIGKILL
    assert not [p for p in folder.glob("*/index.npy") if p.parent.suffix != ".part"]
    kept = cached(source, PRE, folder=folder)
    assert torch.equal(load(source)[0], load(kept)[0])
    assert not list(folder.glob(".*.part"))


def test_many_processes_build_it_once(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    builders = [
        multiprocessing.get_context("fork").Process(target=_build_slowly, args=(source, folder)) for _ in range(3)
    ]
    for b in builders:
        b.start()
    for b in builders:
        b.join(60)
        assert b.exitcode == 0
    assert np.load(next(folder.glob("*/index.npy"))).shape == (16, 4)
