"""One reader: the same image gives the same tensor, whatever it was kept in; what cannot be read says why."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import making
import numpy as np
import pytest
import torch

from vitkit.data import BadFiles, BadImage, ImageBatches, Loader, Source, cached, open_data, read_image
from vitkit.data.source import Names
from vitkit.model.config import Preprocessing, ViTConfig

COUNT = 5


def everywhere(root: Path, grey: bool) -> dict[str, Source]:
    """The same images as files, arrays, Parquet and shards."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    photos = [making.photo(i, (40, 30)).convert("L" if grey else "RGB") for i in range(COUNT)]
    encoded = [making.encode(photo, "PNG") for photo in photos]
    (root / "folder" / "a").mkdir(parents=True)
    for i, data in enumerate(encoded):
        (root / "folder" / "a" / f"{i}.png").write_bytes(data)
    np.savez(root / "a.npz", images=np.stack([np.asarray(p) for p in photos]), labels=np.zeros(COUNT, int))
    rows = [{"image": data, "label": "a"} for data in encoded]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), root / "a.parquet")
    with tarfile.open(root / "a.tar", "w") as tar:
        for i, data in enumerate(encoded):
            for suffix, content in (("png", data), ("cls", b"a")):
                info = tarfile.TarInfo(f"{i}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    sets = {"folder": "folder", "arrays": "a.npz", "parquet": "a.parquet", "shards": "a.tar"}
    return {name: open_data(root / path).samples for name, path in sets.items()}


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "pre",
    [
        Preprocessing(size=(16, 16), crop=0.875, fit="crop", interpolation="bicubic"),
        Preprocessing(size=(16, 24), fit="squash", interpolation="bilinear"),
        Preprocessing(size=(30, 40)),
    ],
)
def test_one_image_gives_one_tensor(tmp_path: Path, grey: bool, channels: int, pre: Preprocessing) -> None:
    sources = everywhere(tmp_path, grey)
    files = sorted((tmp_path / "folder" / "a").iterdir())
    expected = torch.stack([read_image(path, pre, channels) for path in files])
    assert expected.shape == (COUNT, channels, *pre.size)
    assert torch.equal(expected, torch.stack([read_image(p.read_bytes(), pre, channels) for p in files]))
    sources["cache"] = cached(sources["folder"], pre, channels=channels, folder=tmp_path / "cache")
    for name, source in sources.items():
        read = torch.stack([source.pixels_of(i, pre, channels) for i in range(COUNT)])
        assert torch.equal(expected, read), name
        (batch,) = Loader(source, pre, COUNT, channels=channels)
        assert torch.equal(expected, batch.images), name


def test_colour_becomes_grey_before_it_is_resized(tmp_path: Path) -> None:
    stripes = np.zeros((8, 8, 3), dtype=np.uint8)
    stripes[:, ::2, 0] = stripes[:, 1::2, 2] = 255  # red and blue columns: luma 76 and 29
    path = tmp_path / "x.png"
    path.write_bytes(making.encode(making.Image.fromarray(stripes), "PNG"))
    read = read_image(path, Preprocessing(size=(8, 8)), 1)
    assert read[0, 0].tolist() == [76, 29] * 4


def test_batches_of_images_come_in_order_with_reasons(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"a": 30})
    (tmp_path / "a" / "007.jpg").write_bytes(b"")
    source = Source("x", names=Names(sorted(map(str, (tmp_path / "a").iterdir()))), labels=np.zeros(30, int))
    config = ViTConfig(image_size=16, patch_size=8, width=8, depth=1, heads=1, mlp_width=8, classes=2)
    batches = list(ImageBatches(source, config, threads=3).batches([range(8), [20, 3], []]))
    assert [b.indices for b in batches] == [[0, 1, 2, 3, 4, 5, 6], [20, 3], []]
    assert batches[0].bad == {7: "the file is empty (0 bytes)"}
    assert batches[0].images.dtype == torch.uint8
    assert torch.equal(batches[1].images[1], source.pixels_of(3, config.preprocessing, 3))
    assert batches[2].images.shape == (0, 3, 16, 16)


def test_unreadable_images_are_left_out_when_asked(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"a": 4})
    (tmp_path / "a" / "001.jpg").write_bytes(b"damaged")
    source = open_data(tmp_path).samples
    (batch,) = Loader(
        source, Preprocessing(size=(16, 16)), 4, replace_bad=False, bad_files=BadFiles(total=4, max_bad=1)
    )
    assert batch.indices.tolist() == [0, 2, 3]
    assert len(batch.images) == len(batch.labels) == len(batch.keys) == 3
    assert [Path(b.path).name for b in batch.bad] == ["001.jpg"]


def test_reasons(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="vanished"):
        read_image(tmp_path / "nowhere.png", Preprocessing(size=(8, 8)), 3)
