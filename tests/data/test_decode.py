"""Bytes become upright 8-bit images, whatever they were; what cannot be read says why."""

from __future__ import annotations

import io
import os
from pathlib import Path

import making
import numpy as np
import pytest
from PIL import Image

from vitkit.data import decode as decoding
from vitkit.data.decode import BadImage, decode, to_8_bits, upright


@pytest.mark.parametrize("name", list(making.good_files()))
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_and_format_is_read(name: str, channels: int) -> None:
    image = decode(making.good_files()[name], channels)
    assert image.mode == {1: "L", 3: "RGB"}[channels]


@pytest.mark.parametrize("name", list(making.damaged_files()))
def test_every_kind_of_damage_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(BadImage) as caught:
        decode(making.damaged_files()[name])
    assert len(caught.value.reason) > 10
    assert "\n" not in caught.value.reason


def test_there_are_fifty_kinds_of_damage() -> None:
    assert len(making.damaged_files()) >= 50


@pytest.mark.parametrize("name", ["16 bit.png", "16 bit.tif", "32 bit.tif", "float.tif"])
def test_deep_images_are_scaled_not_clipped(name: str) -> None:
    expected = np.asarray(making.photo(0).convert("L")).astype(int)
    got = np.asarray(decode(making.good_files(0)[name], 1)).astype(int)
    assert np.abs(got - expected).max() <= 1


def test_values_that_fit_in_a_byte_are_kept() -> None:
    assert to_8_bits(np.array([[0, 128, 255]], dtype=np.int32)).tolist() == [[0, 128, 255]]
    assert to_8_bits(np.array([[0.0, 0.5, 1.0]])).tolist() == [[0, 128, 255]]
    assert to_8_bits(np.array([[True, False]])).tolist() == [[255, 0]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    """An image is stored turned in the way the tag undoes."""
    upright = making.photo(0, (60, 40))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the inverse of each turn, as Pillow numbers them
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    got = decode(making.encode(stored, "PNG", exif=exif))
    assert np.array_equal(np.asarray(got), np.asarray(upright))
    drafted = decode(making.encode(stored, "JPEG", exif=exif, quality=95), needed=lambda w, h: (w // 2, h // 2))
    assert drafted.size == (30, 20)


def test_first_frame_of_an_animation() -> None:
    first, second = making.photo(1), making.photo(2)
    data = making.encode(first, "PNG", save_all=True, append_images=[second])
    assert np.array_equal(np.asarray(decode(data)), np.asarray(first))


def test_draft_never_goes_below_what_is_needed() -> None:
    data = making.encode(making.photo(0, (800, 600)))
    for wanted in ((800, 600), (399, 299), (400, 300), (401, 301), (100, 75), (1, 1)):
        got = decode(data, needed=lambda w, h, wanted=wanted: wanted).size
        assert all(g >= w for g, w in zip(got, wanted, strict=True)), wanted
    assert decode(data, needed=lambda w, h: (1, 1)).size == (100, 75)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_a_jpeg_is_exactly_what_pillow_makes_of_it(subsampling: int) -> None:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", quality=90, subsampling=subsampling)
    ours = decode(file.getvalue())
    assert (np.asarray(ours) == np.asarray(Image.open(file))).all()
    assert ours.tobytes("raw", "RGBX")[3::4] == Image.open(file).tobytes("raw", "RGBX")[3::4]


def test_draft_is_close_to_an_exact_decode() -> None:
    """The tolerance that docs/data.md states for training crops of large photographs."""
    data = making.encode(making.photo(0, (1600, 1200)), quality=92)
    exact = decode(data).resize((200, 150), Image.Resampling.BILINEAR)
    quick = decode(data, needed=lambda w, h: (200, 150)).resize((200, 150), Image.Resampling.BILINEAR)
    difference = np.abs(np.asarray(exact).astype(int) - np.asarray(quick).astype(int))
    assert difference.mean() < 2.0
    assert np.percentile(difference, 99) < 10


def test_files_that_vanish_or_may_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="vanished"):
        decode(tmp_path / "gone.jpg")
    with pytest.raises(BadImage, match="cannot be read"):
        decode(tmp_path)
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(making.encode(making.photo()))
    secret.chmod(0)
    if os.geteuid() == 0:
        pytest.skip("the superuser may read everything")
    with pytest.raises(BadImage, match="permission"):
        decode(secret)


def test_permission_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(decoding, "read_bytes", refuse)
    with pytest.raises(BadImage, match="permission denied"):
        decode("secret.jpg")


def test_too_many_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_PIXELS", 100)
    with pytest.raises(BadImage, match="beyond the limit"):
        decode(making.encode(making.photo()))


def test_a_broken_exif_block_does_not_make_a_image_unreadable() -> None:
    data = making.encode(making.photo(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + bytes(30))
    assert decode(data).size == (64, 48)


def test_a_file_that_lacks_the_channels_of_a_model_is_not_called_damaged() -> None:
    whole = next(iter(making.good_files().values()))
    for read in (decode, lambda data, channels: upright(Image.open(io.BytesIO(data)), channels)):
        with pytest.raises(BadImage, match=r"^files are read with 1 or 3 channels, not 5; put other data"):
            read(whole, 5)
