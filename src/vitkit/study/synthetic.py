"""Sets whose answer is known by construction, for `vitkit study NAME --data SET`: grey images of 16 pixels.

`places`    the class is which of nine places is bright: without positions it cannot be told
`objects`   the class is which of four small shapes is there, anywhere: places say nothing
`textures`  the class is the shape, large and anywhere; its texture belongs to the class in nine of ten training images,
            and to any class when testing
`pairs`     two marks in opposite corners: are they of one kind? Each by itself says nothing
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SIDE, NOISE = 16, 60
Images = np.ndarray  # uint8, N H W
SHAPES = np.array(  # 4 x 4 pixels each: a ring, a cross, two bars, a slope
    [
        [[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]],
        [[0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]],
        [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    ],
    dtype=np.uint8,
)


def places(chance: np.random.Generator, images: Images, test: bool) -> np.ndarray:
    labels = chance.integers(0, 9, len(images))
    for image, label in zip(images, labels, strict=True):
        row, column = (4 + 4 * (n - 1) for n in divmod(int(label), 3))
        image[row : row + 4, column : column + 4] += 180
    return labels


def objects(chance: np.random.Generator, images: Images, test: bool) -> np.ndarray:
    labels = chance.integers(0, 4, len(images))
    for image, label, (y, x) in zip(images, labels, chance.integers(0, SIDE - 3, (len(images), 2)), strict=True):
        image[y : y + 4, x : x + 4] += 180 * SHAPES[label]
    return labels


def textures(chance: np.random.Generator, images: Images, test: bool) -> np.ndarray:
    labels, count = chance.integers(0, 4, len(images)), len(images)
    other = chance.random(count) < (1.0 if test else 0.1)
    kinds = np.where(other, chance.integers(0, 4, count), labels)
    rows, columns = np.indices((12, 12))
    grains = np.stack([rows % 2, columns % 2, (rows + columns) % 2, (rows // 2 + columns // 2) % 2])
    for image, label, kind, (y, x) in zip(images, labels, kinds, chance.integers(0, 5, (count, 2)), strict=True):
        large = SHAPES[label].repeat(3, axis=0).repeat(3, axis=1)
        image[y : y + 12, x : x + 12] += (large * (90 + 90 * grains[kind])).astype(np.uint8)
    return labels


def pairs(chance: np.random.Generator, images: Images, test: bool) -> np.ndarray:
    kinds = chance.integers(0, 4, (2, len(images)))
    kinds[1] = np.where(chance.random(len(images)) < 0.5, kinds[0], kinds[1])
    for image, first, second in zip(images, *kinds, strict=True):
        image[:4, :4] += 180 * SHAPES[first]
        image[-4:, -4:] += 180 * SHAPES[second]
    labels: np.ndarray = (kinds[0] == kinds[1]).astype(np.int64)
    return labels


SYNTHETIC: dict[str, Callable[[np.random.Generator, Images, bool], np.ndarray]]
SYNTHETIC = {"places": places, "objects": objects, "textures": textures, "pairs": pairs}
SIZES = {"train": 8_000, "val": 1_000, "test": 2_000}


def made(name: str) -> dict[str, tuple[Images, np.ndarray]]:
    """Images and labels of each split; the same every time."""
    found = {}
    for number, (split, count) in enumerate(SIZES.items()):
        chance = np.random.default_rng([number, *name.encode()])
        images = chance.integers(0, NOISE, (count, SIDE, SIDE), dtype=np.uint8)
        labels = SYNTHETIC[name](chance, images, split == "test")
        found[split] = images, labels
    return found
