"""Near duplicates: what the views, the registration and the choice of candidates promise, each on its own."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFont
from skimage import data as images

from vitkit.curation import build_index, duplicates, letters
from vitkit.curation.alignment import agreement
from vitkit.curation.looks import KIND, SIDE, Looks
from vitkit.curation.verification import COPY, verified
from vitkit.curation.views import PLACES, VIEWS, Signatures
from vitkit.data import Source

NAMES = ("astronaut", "coffee", "cat", "rocket", "camera", "coins")


def photograph(name: str) -> Image.Image:
    return Image.fromarray(getattr(images, name)()).convert("RGB")


def looks_of(shown: list[Image.Image], folder: Path, side: int = 256) -> Looks:
    """Looks at images, all of which are brought to one size."""
    pixels = np.stack([np.asarray(image.resize((side, side), Image.Resampling.BOX)) for image in shown])
    source = Source("shown", labels=np.zeros(len(shown), np.int64), pixels=torch.from_numpy(pixels).permute(0, 3, 1, 2))
    records = np.zeros(len(shown), KIND)
    records["width"] = records["height"] = side
    records["digest"] = [f"{i}".encode() for i in range(len(shown))]
    records["thumbnail"] = [np.asarray(t.resize((SIDE, SIDE), Image.Resampling.BOX)) for t in shown]
    np.save(folder / "looks.npy", records)
    return Looks([(folder / "looks.npy", len(records))], source)


def cut(image: Image.Image, view: int) -> Image.Image:
    """The window of a view, by Pillow."""
    (a, b, c), (d, e, f) = PLACES[view]
    w, h = image.size
    inverse = (a, b * w / h, w / 2 * (1 + c - a - b), d * h / w, e, h / 2 * (1 + f - d - e))
    return image.transform(image.size, Image.Transform.AFFINE, inverse, Image.Resampling.BICUBIC)


def test_a_view_sees_what_its_window_shows(tmp_path: Path) -> None:
    """The signature of a window of an image is that of the window cut out, for every view, and no other image's."""
    photographs, count = [photograph(name) for name in NAMES], len(NAMES)
    windows = [cut(photo, view) for view in range(len(VIEWS)) for photo in photographs]
    found = Signatures(looks_of([*photographs, *windows], tmp_path), count + len(windows))
    pixels = found.pixels(np.arange(count))
    for view in range(len(VIEWS)):
        low = count * (1 + view)
        scores = (found.of(pixels, view) @ found.whole[low : low + count].mT).numpy()
        assert scores.diagonal().min() > 0.9, VIEWS[view]
        assert (scores - 2 * np.eye(count)).max() < 0.5, VIEWS[view]


@pytest.mark.parametrize("angle", [-8, -3, 4, 8])
def test_a_turned_copy_is_registered(angle: int) -> None:
    thumbnails = [p.resize((SIDE, SIDE)) for p in map(photograph, NAMES)]
    turned = [t.rotate(angle, Image.Resampling.BICUBIC) for t in thumbnails]
    start = np.tile(np.eye(2, 3), (len(NAMES), 1, 1))
    same, _ = agreement(np.stack(thumbnails), np.stack(turned), start)
    other, _ = agreement(np.stack(thumbnails), np.stack(turned[1:] + turned[:1]), start)
    assert same.min() > 0.6
    assert other.max() < 0.3
    assert agreement(np.stack(thumbnails)[:0], np.stack(turned)[:0], start[:0])[0].shape == (0,)


def framed(image: Image.Image, share: float) -> Image.Image:
    canvas = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(canvas).rectangle((12, 12, 243, 243), outline="black", width=10)
    side = round(256 * share)
    canvas.paste(image.resize((side, side)), ((256 - side) // 2, (256 - side) // 2))
    return canvas.resize((SIDE, SIDE), Image.Resampling.BOX)


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.7])
def test_the_same_frame_does_not_make_the_same_image(share: float) -> None:
    """Different photographs in one frame, on white: what is in it counts. A brighter copy of each is one still."""
    thumbnails = [framed(photograph(name), share) for name in NAMES]
    brighter = [ImageEnhance.Brightness(t).enhance(0.8) for t in thumbnails]
    start = np.tile(np.eye(2, 3), (len(NAMES), 1, 1))
    assert agreement(np.stack(thumbnails), np.stack(thumbnails[1:] + thumbnails[:1]), start)[0].max() < 0.45
    assert agreement(np.stack(thumbnails), np.stack(brighter), start)[0].min() > 0.9


def changed(image: Image.Image) -> dict[str, Image.Image]:
    """What people do to an image."""
    w, h = image.size
    file, pale = io.BytesIO(), ImageEnhance.Contrast(image).enhance(0.7)
    image.save(file, "JPEG", quality=30)
    return {
        "encoded": Image.open(file),
        "smaller": image.resize((w // 3, h // 3)),
        "cropped": image.crop((w // 10, 0, w, h - h // 8)),
        "turned": image.rotate(4, Image.Resampling.BICUBIC),
        "brighter": ImageEnhance.Brightness(image).enhance(1.5),
        "grey": image.convert("L"),
        "pale": pale,
    }


def shirt(cloth: tuple[int, int, int], folds: int) -> Image.Image:
    """A thing of one outline on one floor, of another cloth and with other folds."""
    canvas = Image.new("RGB", (384, 384), (190, 170, 150))
    draw, random = ImageDraw.Draw(canvas), np.random.default_rng(folds)
    for x in range(0, 384, 48):  # the boards of the floor
        draw.line((x, 0, x, 384), fill=(120, 100, 80), width=3)
    left = [(90, 60), (20, 150), (70, 180), (95, 140), (95, 350)]
    draw.polygon(left + [(384 - x, y) for x, y in reversed(left)], fill=cloth)
    for x, y in random.integers(110, 270, (folds, 2)).tolist():
        draw.line((x, y, x + 12, y + 60), fill=tuple(c + 18 for c in cloth), width=2)
    return canvas


def scores(images: list[Image.Image], others: list[Image.Image]) -> np.ndarray:
    """As `near_pairs` verifies them: thumbnails first, then the images."""
    a, b = (
        [
            np.stack([np.asarray(x.convert("RGB").resize((n, n), Image.Resampling.BILINEAR)) for x in y])
            for n in (64, 128)
        ]
        for y in (images, others)
    )
    share, maps = agreement(a[0], b[0], np.tile(np.eye(2, 3), (len(images), 1, 1)))
    return np.where(share >= duplicates._OUTLINE, verified(a[1], b[1], maps), 0)


def test_changed_copies_are_verified_and_things_of_one_outline_are_not() -> None:
    cloths = [(30, 40, 90), (20, 20, 20), (90, 20, 30), (60, 110, 60)]
    shirts = [shirt(cloth, 4 + n) for n, cloth in enumerate(cloths)]
    for image in [*map(photograph, NAMES), *shirts]:
        copies = changed(image)
        found = dict(zip(copies, scores([image] * len(copies), list(copies.values())).tolist(), strict=True))
        assert min(found.values()) >= COPY, found
    pairs = [(a, b) for a in shirts for b in shirts if a is not b]
    outline = agreement(
        *(np.stack([np.asarray(p[k].resize((SIDE, SIDE))) for p in pairs]) for k in (0, 1)),
        np.tile(np.eye(2, 3), (len(pairs), 1, 1)),
    )[0]
    assert outline.max() >= duplicates._OUTLINE  # they do look alike
    assert scores([a for a, _ in pairs], [b for _, b in pairs]).max() < COPY


def test_a_weak_pair_does_not_chain_groups() -> None:
    def rows(*pairs: tuple[int, int, float]) -> list[list[int]]:
        found = [duplicates.Pair(*pair) for pair in pairs]
        return [group.rows for group in duplicates.grouped(found, ["train"] * 9, np.arange(9).astype("S1"))]

    assert rows((0, 1, 0.6)) == [[0, 1]]
    assert rows((0, 1, 0.9), (1, 2, 0.9), (2, 3, 0.9)) == [[0, 1, 2, 3]]  # strong ones do
    assert rows((0, 1, 0.9), (2, 3, 0.9), (1, 2, 0.6)) == [[0, 1], [2, 3]]
    assert rows((0, 1, 0.9), (2, 3, 0.9), (1, 2, 0.6), (0, 3, 0.6)) == [[0, 1, 2, 3]]  # two agree
    assert rows((0, 1, 0.9), (1, 2, 0.9), (2, 3, 0.6)) == [[0, 1, 2]]


def test_few_pairs_are_registered_where_all_images_look_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """300 images of one scene with noise: the work grows with the images, not with the pairs."""
    random, scene = np.random.default_rng(0), np.asarray(photograph("cat").resize((SIDE, SIDE))).astype(int)
    noisy = [
        Image.fromarray(np.clip(scene + random.normal(0, 25, scene.shape), 0, 255).astype(np.uint8)) for _ in range(300)
    ]
    asked: list[int] = []

    def counted(first: np.ndarray, second: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        asked.append(len(start))
        return np.zeros(len(start), np.float32), start

    monkeypatch.setattr(duplicates, "agreement", counted)
    duplicates.near_pairs(random.random((300, 8), dtype=np.float32), looks_of(noisy, tmp_path))
    assert 300 <= sum(asked) <= 300 * 6


def test_unlike_images_are_hardly_registered(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    shown = [
        Image.fromarray(random.integers(0, 255, (6, 6, 3), dtype=np.uint8)).resize(
            (SIDE, SIDE), Image.Resampling.BICUBIC
        )
        for _ in range(200)
    ]
    found = duplicates.candidates(random.random((200, 8), dtype=np.float32), looks_of(shown, tmp_path))
    assert sum(len(rows) for rows, _, _ in found) < 4 * 200


def test_tiny_images_are_the_same_or_not(tmp_path: Path) -> None:
    """In 8 x 8 pixels strokes can always be registered onto each other: only nearly equal pixels count."""
    strokes = []
    for i in range(36):
        pixels = np.zeros((8, 8, 3), np.uint8)
        pixels[1:7, 1 + i % 6] = 200
        pixels[1 + i // 6, 1:7] = 200
        strokes.append(Image.fromarray(pixels))
    brighter = Image.fromarray((np.asarray(strokes[7]) * 1.2).astype(np.uint8))
    features = np.random.default_rng(0).random((37, 8), dtype=np.float32)
    pairs = duplicates.near_pairs(features, looks_of([*strokes, brighter], tmp_path, side=8))
    assert [(p.first, p.second) for p in pairs] == [(7, 36)]


@pytest.mark.slow
def test_digits_have_no_crowd_of_duplicates(tmp_path: Path) -> None:
    groups = build_index("digits", out=tmp_path / "i").duplicates()
    assert len(groups) < 20


def receipt(prices: list[str]) -> Image.Image:
    """A page of a till: the same words around other numbers."""
    page = Image.new("L", (900, 1200), 245)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=26)
    draw.text((250, 60), "THE SAME SHOP, 12 STATION ROAD", fill=10, font=font)
    for row, price in enumerate(prices):
        draw.text((80, 160 + 60 * row), f"{row + 1} x article of this shop", fill=10, font=font)
        draw.text((640, 160 + 60 * row), price, fill=10, font=font)
    draw.text((200, 1120), "thank you for your visit, come again", fill=10, font=font)
    return page.convert("RGB")


def test_receipts_of_one_till_are_no_copies_and_copies_of_one_are() -> None:
    random = np.random.default_rng(0)
    first, second = (receipt([f"{n:.2f}" for n in random.uniform(10, 99, 15)]) for _ in range(2))
    file = io.BytesIO()
    first.save(file, "JPEG", quality=30)
    copies = [Image.open(file).convert("RGB"), first.resize((360, 480)), first.crop((20, 30, 880, 1180))]

    def as_read(image: Image.Image, side: int = letters.SIDE) -> np.ndarray:
        return np.array(image.resize((side, side), Image.Resampling.BOX))

    def same(other: Image.Image) -> bool:
        start = agreement(as_read(first, SIDE)[None], as_read(other, SIDE)[None], PLACES[:1])[1][0]
        return letters.say_the_same(as_read(first), as_read(other), start)

    assert letters.are_paper(np.stack([as_read(first), as_read(copies[1])])).all()
    assert not letters.are_paper(np.array(photograph("astronaut"))[None])[0]
    assert not same(second)
    assert all(map(same, copies))
