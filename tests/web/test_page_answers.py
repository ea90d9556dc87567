"""What the page shows belongs to the question on screen, and to the photograph that was given; models can be switched.

The server's own numbers are the truth: a small map is right when it is brightest where the API's map is largest.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from serving import image, live, small_model

page_tests = pytest.importorskip("test_page")  # skips where there is no Chromium
browser, Visit, expect, page_of = page_tests.browser, page_tests.Visit, page_tests.playwright.expect, page_tests.page_of
GRID = 32  # so large that the attention of all patches is fetched head by head


@pytest.fixture(scope="module")
def large() -> Iterator[str]:
    models = [small_model("large", classes=3, image_size=8 * GRID), small_model("other", classes=3, seed=2)]
    with live(models) as (where, _):
        yield where


@pytest.fixture
def visit(browser: Any, large: str) -> Iterator[Any]:
    one = Visit(browser, large)
    yield one
    one.close()


def brightest(visit: Any, strip: str) -> list[list[list[int]] | None]:
    """Rows and columns of the brightest pixels of each small map, a few of a hundred; None: nothing is drawn."""
    script = """(canvases) => canvases.map((c) => {
      if (c.width < 2) return null;
      const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', { willReadFrequently: true });
      copy.drawImage(c, 0, 0);
      const { data } = copy.getImageData(0, 0, c.width, c.height);
      const light = (i) => data[4 * i] + data[4 * i + 1] + data[4 * i + 2];
      const all = Array.from({ length: data.length / 4 }, (_, i) => i);
      const most = Math.max(...all.map(light));
      return all.filter((i) => light(i) === most).map((i) => [Math.floor(i / c.width), i % c.width]);
    })"""
    return list(visit.page.locator(f"#{strip} canvas").evaluate_all(script))


def strongest(address: str, data: bytes, **fields: str) -> list[list[int]]:
    """The same, by the API."""
    answer = httpx.post(f"{address}/api/v1/explain", params={**fields, "format": "npy"}, content=data, timeout=60)
    maps = np.load(io.BytesIO(answer.content))
    return [list(map(int, np.unravel_index(one.argmax(), one.shape))) for one in maps]


def shows(drawn: list[Any], wanted: list[list[int]]) -> bool:
    assert all(places and len(places) < 0.05 * GRID**2 for places in drawn)
    return len(drawn) == len(wanted) and all(place in places for place, places in zip(wanted, drawn, strict=True))


class Held:
    """Answers to `explain` that are kept back until `release`."""

    def __init__(self, page: Any) -> None:
        self.routes: list[Any] | None = []
        page.route("**/api/v1/explain*", self._hold)

    def _hold(self, route: Any) -> None:
        route.continue_() if self.routes is None else self.routes.append(route)

    def release(self) -> None:
        routes, self.routes = self.routes or [], None
        for route in routes:
            route.continue_()


def test_nothing_of_the_previous_image_stays_beside_a_new_one(visit: Any, tmp_path: Path) -> None:
    page = visit.open().page
    assert None not in brightest(visit, "layer-strip")
    held = Held(page)
    data = image((256, 256), seed=5)
    (tmp_path / "new.png").write_bytes(data)
    page.set_input_files("#file", tmp_path / "new.png")
    expect(page.locator(".stage figcaption")).to_contain_text("new.png")
    visit.hover(0.3, 0.6)
    page.mouse.down()
    page.mouse.up()
    expect(page.locator(".readout")).to_contain_text("One moment")
    for strip in ("layer-strip", "head-strip"):
        assert set(map(str, brightest(visit, strip))) == {"None"}, "small maps of the image before"
    page.mouse.move(5, 5)
    held.release()
    visit.until_reads("Patch 9,19")
    visit.settle()
    wanted = strongest(visit.address, data, layer="all", query="9,19")
    assert shows(brightest(visit, "layer-strip"), wanted)


@pytest.mark.parametrize("method", ["attention", "rollout"])
def test_all_small_maps_are_those_of_the_chosen_patch(visit: Any, method: str, tmp_path: Path) -> None:
    data = image((256, 256), seed=6)
    (tmp_path / "one.png").write_bytes(data)
    page = visit.open(f"#method={method}&layer=1").page
    page.set_input_files("#file", tmp_path / "one.png")
    expect(page.locator(".stage figcaption")).to_contain_text("one.png")
    page.locator(".frame canvas").focus()
    page.keyboard.press("ArrowDown")
    visit.until_reads("Patch 17,16")
    visit.settle()
    expect(page.locator("#strip-from")).to_have_text("seen from patch 17,16")
    fields = {"method": method, "query": "17,16"}
    assert shows(brightest(visit, "layer-strip"), strongest(visit.address, data, **fields, layer="all"))
    if method == "attention":
        mean, *heads = brightest(visit, "head-strip")
        assert shows(heads, strongest(visit.address, data, **fields, layer="1", head="all"))
        assert mean == brightest(visit, "layer-strip")[1]


def test_a_late_answer_about_an_earlier_image_is_not_shown(visit: Any, tmp_path: Path) -> None:
    page = visit.open("#tab=distance").page
    page.wait_for_selector(".dot")
    dots = "(dots) => dots.map((dot) => dot.getAttribute('cy'))"
    before = page.locator(".dot").evaluate_all(dots)
    (tmp_path / "new.png").write_bytes(image((256, 256), seed=7))
    page.set_input_files("#file", tmp_path / "new.png")
    visit.until(lambda: page.locator(".dot").evaluate_all(dots) not in ([], before), "distances of the new image")


def test_models_are_switched_and_compared(visit: Any) -> None:
    page = visit.open().page
    chip = page.locator("#chips").get_by_role("button")
    expect(chip).to_have_count(3)
    chip.nth(1).click()
    expect(chip.nth(1)).to_have_attribute("aria-pressed", "true")
    expect(chip.nth(0)).to_have_attribute("aria-pressed", "false")
    expect(page.locator(".rank-model")).to_have_text(["other"])
    expect(page.locator(".frame canvas")).to_have_attribute("aria-label", page_tests.re.compile("4 rows and 4 columns"))
    assert "model=other" in page.url
    chip.nth(2).click()  # compare
    expect(page.locator(".stage figcaption b")).to_have_text(["other", "large"])
    expect(page.locator(".rank-model")).to_have_text(["other", "large"])
    names = page.locator(".stage figcaption span").all_inner_texts()
    assert names == ["a cat", "a cat"], "both are of the same image"
    chip.nth(0).click()
    expect(page.locator(".stage figcaption b")).to_have_text(["large", "other"])
    page.reload()
    page.wait_for_selector("html[data-ready]")
    expect(page.locator(".stage figcaption b")).to_have_text(["large", "other"])
    chip.nth(2).click()
    expect(page.locator(".stage")).to_have_count(1)


def test_the_photograph_is_shown_at_its_own_resolution(page_of: Callable[[Any], Any], tmp_path: Path) -> None:
    """Compared with what the model sees: the same part of the image, with the detail that 32 x 32 pixels lack."""
    served = small_model(preprocessing=replace(small_model().model.config.preprocessing, fit="crop", crop=0.875))
    y, x = np.mgrid[:600, :900]
    fine = 60 * ((x // 2 + y // 2) % 2)[..., None] + np.stack([x / 6, y / 6, (x + y) / 12], axis=-1)
    Image.fromarray(fine.astype(np.uint8)).save(tmp_path / "a photograph.png")
    visit = page_of(served)
    page = visit.page
    page.set_input_files("#file", tmp_path / "a photograph.png")
    caption = page.locator(".stage figcaption")
    expect(caption).to_contain_text("a photograph.png")
    expect(caption).to_contain_text("900 × 600 pixels, seen at 32 × 32")
    page.get_by_label("Overlay").fill("0")
    page.get_by_label("Patch grid").uncheck()
    visit.settle()
    own = visit.pixels()
    assert np.abs(np.diff(own, axis=1)).mean() > 5, "the fine pattern is not there"
    page.get_by_label("Model's pixels").check()
    visit.until_differs(own, least=1)
    seen = visit.pixels()
    assert np.abs(np.diff(seen, axis=1)).mean() < 2
    both = [
        np.asarray(Image.fromarray(p.astype(np.uint8)).resize((16, 16), Image.Resampling.BOX), float)
        for p in (own, seen)
    ]
    assert np.abs(both[0] - both[1]).mean() < 4, "another part of the image is shown than the model sees"


def test_what_a_browser_cannot_read_is_shown_as_the_model_sees_it(visit: Any, tmp_path: Path) -> None:
    Image.open(io.BytesIO(image((256, 256), seed=8))).save(tmp_path / "scan.tif")
    page = visit.open().page
    page.set_input_files("#file", tmp_path / "scan.tif")
    expect(page.locator(".stage figcaption")).to_contain_text("scan.tif")
    expect(page.locator(".stage figcaption")).to_contain_text("seen at 256 × 256 pixels")
    assert visit.pixels().std() > 5


def test_nothing_about_classes_without_a_classifier(page_of: Callable[[Any], Any]) -> None:
    visit = page_of(small_model("bare", classes=0))
    visit.open("#method=relevance&versus=class")
    visit.page.reload()
    visit.page.wait_for_selector("html[data-ready]")
    visit.until_reads("The class token")
    visit.page.get_by_role("tab", name="API").click()
    expect(visit.page.locator("#panel-api pre")).to_have_count(1)
    visit.page.get_by_role("tab", name="Image").click()
    text = visit.page.locator("body").inner_text().lower()
    assert "click a class" not in text
    assert "two classes" not in text
    assert visit.page.locator("#versus-field").is_hidden()


def test_filters_of_trained_weights_are_not_called_noise(page_of: Callable[[Any], Any]) -> None:
    fresh, trained = small_model("fresh"), small_model("trained")
    fresh.model.pretrained, trained.model.pretrained = False, True
    for served, noise in ((fresh, True), (trained, False)):
        page = page_of(served).page
        page.get_by_role("tab", name="Filters").click()
        page.wait_for_selector(".tiles canvas")
        assert ("noise" in page.locator("#panel-filters").inner_text()) == noise


def test_the_first_image_waits_for_its_map(browser: Any, large: str) -> None:
    """Ready means that the image is there; the map is on its way until it is drawn, and the page says so."""
    visit = Visit(browser, large)
    held = Held(visit.page)
    visit.page.goto(large)
    visit.page.wait_for_selector("html[data-ready]")
    assert visit.page.locator(".frame.waiting").count() == 1
    held.release()
    visit.settle()
    visit.until_reads("The class token")
    visit.close()
