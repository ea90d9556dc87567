"""Maps over images: the same colours as on the page, and scales that outliers do not spoil."""

import json
from importlib.resources import files

import numpy as np

from vitkit.figures.overlay import MAGMA, levels, overlay
from vitkit.figures.panels import image_rows
from vitkit.figures.style import wrapped


def test_the_page_has_the_same_colours() -> None:
    stops = json.loads((files("vitkit.web") / "static" / "colours.json").read_text())["magma"]
    assert [list(stop) for stop in MAGMA] == stops


def test_levels_go_from_the_least_to_the_quantile() -> None:
    values = np.arange(200.0).reshape(10, 20)
    assert levels(values).max() == 1
    values[0, 0] = 1e6  # one outlier
    assert levels(values, 1.0).mean() < 0.01
    assert levels(values).mean() > 0.45
    values = np.full((7, 7), 0.01)
    values[3, 2:5], values[0, 0] = 0.05, 1.0  # an object, and an outlier patch on the background
    assert (levels(values)[3, 2:5] > 0.4).all()
    assert (levels(values, 1.0)[3, 2:5] < 0.05).all()
    alone = np.zeros((20, 20))
    alone[4, 4] = 1  # nothing but one patch: it is the finding
    assert levels(alone)[4, 4] == 1
    assert not levels(np.full((3, 3), 0.25)).any()  # what is alike everywhere is no finding


def test_an_overlay_shows_the_image_and_the_map() -> None:
    image = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    values = np.zeros((2, 2))
    values[0, 1] = 1
    shown = overlay(image, values, strength=0.0)
    np.testing.assert_array_equal(shown[::28, ::28], image)
    shown = overlay(np.zeros_like(image), values, strength=1.0)
    assert shown[:50, -50:].mean() > 3 * shown[-50:, :50].mean()


def test_names_of_files_are_never_cut() -> None:
    name = "IMG_20260714_183042_holiday-in-the-mountains-of-norway (final copy).jpeg"
    lines = wrapped(name, 16).split("\n")
    assert "".join(lines) == name
    assert max(map(len, lines)) <= 16
    assert wrapped("cat.jpg", 16) == "cat.jpg"
    image = np.zeros((16, 16, 3), np.uint8)
    figure = image_rows([[image] * 4], ["image", "a", "b", "c"], [[name]])
    assert figure.axes[0].get_xlabel().replace("\n", "") == name
