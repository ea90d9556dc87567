"""The same seed gives the same samples and pixels, whatever loads them and however often it is interrupted."""

from __future__ import annotations

import hashlib
from pathlib import Path

import making
import numpy as np
import pytest
import torch

from vitkit.data import BadFiles, Loader, Source, normalise, open_data, preset
from vitkit.data.augment import Augment, mix
from vitkit.data.keys import permutation, sample_keys, uniforms
from vitkit.data.order import epoch_order
from vitkit.data.samples import Batch
from vitkit.errors import ConfigError
from vitkit.model.config import Preprocessing

PRE = Preprocessing(size=(24, 24))
STRONG = preset("strong", crop="resized", policy="trivial")
EPOCHS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = making.write_folder(tmp_path_factory.mktemp("set"), {"a": 14, "b": 9, "c": 7})
    (root / "a" / "003.jpg").write_bytes(b"damaged")
    return root


@pytest.fixture(scope="module")
def source(folder: Path) -> Source:
    return open_data(folder).split("all")


def loader(source: Source, **options: object) -> Loader:
    chosen: dict = {"batch_size": 8, "augment": STRONG, "seed": 5, "bad_files": BadFiles(total=30, max_bad=1.0)}
    return Loader(source, PRE, **{**chosen, **options})


def digest(batches: list[Batch]) -> list[str]:
    """One hash per batch over samples, labels and pixels."""
    return [
        hashlib.sha256(
            b.indices.numpy().tobytes() + b.labels.numpy().tobytes() + b.images.contiguous().numpy().tobytes()
        ).hexdigest()
        for b in batches
    ]


def epochs(chosen: Loader, count: int = EPOCHS) -> list[str]:
    with chosen:
        return digest([batch for _ in range(count) for batch in chosen])


@pytest.fixture(scope="module")
def expected(source: Source) -> list[str]:
    return epochs(loader(source))


def test_epochs_differ(expected: list[str]) -> None:
    assert len(expected) == EPOCHS * 3
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(source: Source, expected: list[str], workers: int) -> None:
    assert epochs(loader(source, workers=workers)) == expected


def joined(parts: list[Batch]) -> Batch:
    return Batch(
        torch.cat([p.images for p in parts]),
        torch.cat([p.labels for p in parts]),
        torch.cat([p.indices for p in parts]),
        np.concatenate([p.keys for p in parts]),
    )


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (2, 1), (4, 0)])
def test_ranks_load_parts_of_the_same_batches(source: Source, expected: list[str], world: int, workers: int) -> None:
    ranks = [loader(source, rank=r, world_size=world, workers=workers) for r in range(world)]
    together = []
    for _ in range(EPOCHS):
        together += [joined(list(parts)) for parts in zip(*ranks, strict=True)]
    for r in ranks:
        r.close()
    assert digest(together) == expected


@pytest.mark.parametrize("stop", [1, 3, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_interrupted_and_resumed(source: Source, expected: list[str], stop: int, workers: int) -> None:
    seen, state = [], {}
    with loader(source, workers=workers) as first:
        while len(seen) < stop:
            for batch in first:
                seen.append(batch)
                state = first.state_dict()
                if len(seen) == stop:
                    break
    assert set(state) == {"epoch", "step", "order"}
    with loader(source, workers=0 if workers else 1) as second:
        second.load_state_dict(state)
        while len(seen) < len(expected):
            seen += list(second)
    assert digest(seen) == expected


def test_breaking_off_and_going_on_in_the_same_loader(source: Source, expected: list[str]) -> None:
    seen = []
    with loader(source, workers=2) as chosen:
        for batch in chosen:
            seen.append(batch)
            break
        seen += list(chosen)
        seen += list(chosen)
    assert digest(seen) == expected


def test_small_shared_memory_is_gone_round(
    source: Source, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitkit.data.loader._fits_shared_memory", lambda size: False)
    assert epochs(loader(source, workers=2)) == expected


@pytest.mark.parametrize("preset_name", ["light", "medium", "strong"])
def test_a_sample_does_not_depend_on_its_batch(preset_name: str) -> None:
    digits = open_data("digits").split()
    by_size = []
    for size in (7, 64):
        chosen = Loader(
            digits, Preprocessing(size=(8, 8)), size, preset(preset_name, policy="trivial", jitter=0.3), seed=1
        )
        images = {}
        for batch in chosen:
            images.update(zip(batch.indices.tolist(), batch.images.numpy(), strict=True))
        by_size.append(images)
    same = set(by_size[0]) & set(by_size[1])
    assert len(same) > 1000
    assert all(np.array_equal(by_size[0][i], by_size[1][i]) for i in same)


def test_threads_change_nothing() -> None:
    seen = []
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        chosen = Loader(open_data("digits").split(), Preprocessing(size=(8, 8)), 64, preset("strong"))
        seen.append(digest(list(chosen)))
        assert torch.get_num_threads() == count
    torch.set_num_threads(threads)
    assert seen[0] == seen[1]


def test_mixing_does_not_depend_on_ranks(source: Source) -> None:
    def mixed(batch: Batch) -> torch.Tensor:
        images, targets = mix(normalise(batch.images, PRE), batch.labels, batch.keys, STRONG, 3)
        return torch.cat([images.flatten(1), targets], dim=1)

    whole = next(iter(loader(source)))
    parts = [next(iter(loader(source, rank=r, world_size=2))) for r in range(2)]
    assert torch.equal(mixed(whole), torch.cat([mixed(p) for p in parts]))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_evaluation_gives_every_sample_once(source: Source, world: int) -> None:
    seen, lengths = [], set()
    for rank in range(world):
        batches = list(loader(source, augment=None, rank=rank, world_size=world))
        lengths.add(len(batches))
        seen += [i for b in batches for i in b.indices.tolist()]
    assert sorted(seen) == list(range(30))
    assert lengths == {4}


def test_a_seed_matters(source: Source, expected: list[str]) -> None:
    assert not set(epochs(loader(source, seed=6))) & set(expected)


def test_a_tiny_set_gives_one_batch(source: Source) -> None:
    chosen = loader(source, batch_size=100)
    assert [len(b) for b in chosen] == [30]


def test_balanced_order_is_even_and_repeats_differ(source: Source) -> None:
    order = epoch_order(source, 0, 0, shuffle=True, balanced=True)
    assert np.bincount(source.labels[order.indices]).tolist() == [10, 10, 10]
    assert order.repeats.max() == 1
    keys = sample_keys(0, 0, order.indices, order.repeats)
    assert len(set(keys.tolist())) == 30


def test_wrong_divisions_are_refused(source: Source) -> None:
    with pytest.raises(ConfigError, match="batch_size=9 counts all 2 ranks"):
        loader(source, batch_size=9, world_size=2)
    with pytest.raises(ConfigError, match="rank=2"):
        loader(source, rank=2, world_size=2)
    with pytest.raises(ConfigError, match="batch_size=0"):
        loader(source, batch_size=0)


def test_numbers_never_change() -> None:
    """Runs of older versions stay reproducible: these values are part of the format of a checkpoint."""
    assert permutation(0, 0, 8).tolist() == [3, 7, 1, 2, 4, 0, 5, 6]
    assert [hex(k) for k in sample_keys(1, 2, [3, 4]).tolist()] == ["0xd0734750fde362b3", "0xc313915189c4ec21"]
    drawn = uniforms(sample_keys(0, 0, np.arange(20000)), "crop", 2)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.abs(drawn.mean(axis=0) - 0.5).max() < 0.01
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.02


@pytest.mark.parametrize("augment", [None, preset("light", crop="pad")], ids=["evaluation", "training"])
def test_images_enlarged_at_once_or_batch_by_batch_are_the_same(
    augment: Augment | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, pre = open_data("digits").split("val"), Preprocessing(size=(20, 20))
    whole = [batch.images for batch in Loader(source, pre, 32, augment, channels=3)]
    monkeypatch.setattr("vitkit.data.samples._PREPARED", 0)
    late = Loader(source, pre, 32, augment, channels=3)
    assert late.samples.pixels is not None
    assert late.samples.pixels.shape[-1] == 8, "nothing is enlarged yet"
    for before, batch in zip(whole, late, strict=True):
        assert torch.equal(before, batch.images)
