"""The page in a real browser: Debian's Chromium, driven by Playwright.

Tests wait for what must become true (`until_...`), never for a time: a busy machine is slow, not wrong.
Where there is no Chromium the tests are skipped; with VITKIT_NEED_CHROMIUM=1 they fail instead.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from serving import image, live, resnet_model, small_model, values_model

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None and not os.environ.get("VITKIT_NEED_CHROMIUM"):
    pytest.skip("no Chromium: apt-get install chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert CHROMIUM is not None, "VITKIT_NEED_CHROMIUM is set and there is no Chromium: apt-get install chromium"
    with playwright.sync_playwright() as p:
        started = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    models = [small_model("first", classes=6), small_model("second", classes=6, seed=3, image_size=48, patch_size=8)]
    with live(models, max_bytes=2_000_000) as (where, _):
        yield where


PATIENCE = 60  # seconds until what must become true is given up
playwright.expect.set_options(timeout=1000 * PATIENCE)


class Visit:
    """One page, what it logged, and how to look at its image."""

    def __init__(self, browser: Any, address: str, width: int = 1200, height: int = 900, **more: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height}, **more)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.complaints: list[str] = []
        self.address = address
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))

    def open(self, hash_: str = "") -> Visit:
        self.page.goto(f"{self.address}/{hash_}")
        self.page.wait_for_selector("html[data-ready]")
        self.settle()
        return self

    def until(self, true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, f"never true: {what}"
            self.page.wait_for_timeout(30)

    def wait(self, expression: str) -> None:
        """Playwright's own wait evaluates strings inside the page, which its security policy forbids."""
        self.until(lambda: bool(self.page.evaluate(expression)), expression)

    def settle(self) -> None:
        """No map or panel is on its way any more, and what has come is drawn."""
        self.wait("!document.querySelector('.frame.waiting, [aria-busy=true]')")
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def until_differs(self, *others: np.ndarray, least: float = 0.3, index: int = 0) -> np.ndarray:
        """What is drawn, once it differs from each of the others."""
        self.until(lambda: all(differ(self.pixels(index), o) > least for o in others), "the canvas shows another map")
        return self.pixels(index)

    def until_same(self, other: np.ndarray, most: float = 0.0) -> None:
        self.until(lambda: differ(self.pixels(), other) <= most, "the canvas shows the same map")

    def until_reads(self, *words: str, index: int = 0) -> None:
        """The line below the image has these words; it changes together with the map above it."""
        readout = self.page.locator(".readout").nth(index)
        for word in words:
            playwright.expect(readout).to_contain_text(word)

    def pixels(self, index: int = 0) -> np.ndarray:
        """What is drawn on the canvas of a stage, without what lies around it."""
        self.settle()
        script = "(c) => c.toDataURL('image/png').split(',')[1]"
        data = base64.b64decode(self.page.locator(".frame canvas").nth(index).evaluate(script))
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(float)

    def hover(self, row: float, column: float, index: int = 0) -> None:
        box = self.page.locator(".frame canvas").nth(index).bounding_box()
        self.page.mouse.move(box["x"] + box["width"] * column, box["y"] + box["height"] * row)

    def close(self) -> None:
        assert self.complaints == []
        self.context.close()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Visit]:
    one = Visit(browser, address)
    yield one
    one.close()


def differ(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).mean()) if a.shape == b.shape else float("inf")


def test_it_opens_with_an_example_and_predictions(visit: Visit) -> None:
    page = visit.open().page
    assert page.title() == "first and second · vitkit"
    ranks = page.locator(".rank")
    assert ranks.count() == 5
    shares = [float(text.strip("%<")) for text in ranks.locator("b").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 100.5  # five of six classes
    assert page.locator("#examples button[aria-pressed=true]").count() == 1
    visit.until_reads("layer 2")
    playwright.expect(page.locator("#ranks")).to_contain_text("Click a class to see what speaks for it.")


def test_upload_by_choosing_dropping_and_pasting(visit: Visit, tmp_path: Path) -> None:
    page = visit.open().page
    before = visit.pixels()
    file = tmp_path / "mine.png"
    file.write_bytes(image((64, 64), seed=5))
    page.set_input_files("#file", file)
    visit.wait("!document.querySelector('#examples [aria-pressed=true]')")
    visit.until_differs(before, least=5)
    assert "example" not in page.url, "an image of the user's own is not in the address"
    transfer = """(kind) => {
      const bytes = Uint8Array.from(atob(window.given), (c) => c.charCodeAt(0));
      const transfer = new DataTransfer();
      transfer.items.add(new File([bytes], "x.jpg", { type: "image/jpeg" }));
      const options = { bubbles: true, cancelable: true };
      const event = kind === "drop" ? new DragEvent("drop", { ...options, dataTransfer: transfer })
        : new ClipboardEvent("paste", { ...options, clipboardData: transfer });
      window.dispatchEvent(event);
    }"""
    for kind, seed in (("drop", 6), ("paste", 7)):
        before = visit.pixels()
        page.evaluate("(text) => { window.given = text }", base64.b64encode(image((50, 70), "JPEG", seed)).decode())
        page.evaluate(transfer, kind)
        visit.until_differs(before, least=2)


def test_hovering_a_patch_shows_what_it_attends_to(visit: Visit) -> None:
    visit.open()
    resting = visit.pixels()
    visit.hover(0.1, 0.1)
    visit.until_reads("Patch 0,0")
    first = visit.until_differs(resting, least=0.5)
    visit.hover(0.9, 0.6)
    visit.until_reads("Patch 3,2")
    visit.until_differs(resting, first, least=0.5)
    visit.page.mouse.move(5, 5)
    visit.until_reads("The class token")
    visit.until_same(resting)


def test_a_click_keeps_the_patch_and_the_address_knows_it(visit: Visit) -> None:
    page = visit.open().page
    visit.hover(0.4, 0.9)
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(5, 5)
    visit.until_reads("Patch 1,3")
    playwright.expect(page).to_have_url(re.compile("patch=1,3"))
    kept = visit.pixels()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    visit.until_reads("Patch 1,3")
    visit.until_same(kept, most=0.5)
    page.get_by_role("button", name="Show the output").click()
    visit.until_reads("The class token")
    assert "patch" not in page.url


def test_layers_and_heads(visit: Visit) -> None:
    page = visit.open().page
    seen = [visit.pixels()]
    page.get_by_role("radio", name="Layer 0").click()
    visit.until_reads("layer 0, mean of the heads")
    seen.append(visit.until_differs(*seen))
    page.get_by_role("radio", name="Head 1").click()
    visit.until_reads("layer 0, head 1")
    visit.until_differs(*seen)
    assert "layer=0&head=1" in page.url


def test_play_goes_through_the_layers_and_stops(visit: Visit) -> None:
    visit.page.clock.install()
    page = visit.open().page
    page.get_by_role("button", name="Play").click()
    for layer in (0, 1, 2):
        visit.wait(f"document.querySelector('.readout').innerText.includes('layer {layer},')")
    page.get_by_role("button", name="Pause").click()
    now = page.locator(".readout").first.inner_text()
    page.clock.run_for(5000)  # as if five seconds had passed
    assert page.locator(".readout").first.inner_text() == now


def test_methods_and_classes_change_the_overlay(visit: Visit) -> None:
    page = visit.open().page
    seen = [visit.pixels()]
    for method in ("Rollout", "Relevance", "Grad-CAM"):
        page.get_by_role("radio", name=method).check()
        seen.append(visit.until_differs(*seen))
    page.locator(".rank").nth(2).click()
    playwright.expect(page.locator(".rank").nth(2)).to_have_attribute("aria-pressed", "true")
    third, name = visit.until_differs(*seen), page.locator(".rank span").nth(2).inner_text()
    page.locator(".rank").nth(0).click()
    visit.until_differs(third)
    page.locator("#class").select_option(label=name)
    visit.until_same(third)


def test_strength_grid_and_smoothness(visit: Visit) -> None:
    page = visit.open("#strength=0&grid=0").page
    plain = visit.pixels()
    page.get_by_label("Overlay").fill("50")
    half = visit.until_differs(plain, least=5)
    page.get_by_label("Overlay").fill("100")
    full = visit.until_differs(half)
    assert differ(full, plain) > differ(half, plain)
    page.get_by_label("Smooth").uncheck()
    blocks = visit.until_differs(full)
    page.get_by_label("Patch grid").check()
    lines = visit.until_differs(blocks, least=0.1) - blocks
    side = lines.shape[0]
    assert np.abs(lines[side // 4 + side // 8]).mean() < np.abs(lines[round(side / 4)]).mean()


def test_two_classes_side_by_side(visit: Visit) -> None:
    page = visit.open().page
    page.get_by_label("Side by side").select_option("class")
    playwright.expect(page.locator(".stage")).to_have_count(2)
    visit.until_differs(visit.pixels(1))
    before = visit.pixels(1)
    page.get_by_label("Second class").select_option(index=4)
    visit.until_differs(before, index=1)
    titles = page.locator(".stage figcaption b").all_inner_texts()
    assert titles[0] != titles[1]


def test_two_models_side_by_side(visit: Visit) -> None:
    page = visit.open().page
    page.get_by_label("Side by side").select_option("model")
    playwright.expect(page.locator(".stage figcaption b")).to_have_text(["first", "second"])
    playwright.expect(page.locator(".rank")).to_have_count(10)
    playwright.expect(page.locator("#strip-from")).to_have_text("first, seen from the class token")
    resting = visit.pixels(1)
    visit.hover(0.1, 0.1, index=0)
    visit.until_reads("Patch 0,0", index=1)
    visit.until_differs(resting, index=1)  # the patch is marked in both models


# --- models that predict something else, or cannot be looked into -------------------------------------


@pytest.fixture
def page_of(browser: Any) -> Iterator[Callable[[Any], Visit]]:
    """Opens the page of a server of this one model."""
    with contextlib.ExitStack() as stack:

        def open_(served: Any) -> Visit:
            where, _ = stack.enter_context(live([served]))
            one = Visit(browser, where).open()
            stack.callback(one.close)
            return one

        yield open_


def test_values_are_shown_as_numbers_and_explained(page_of: Callable[[Any], Visit]) -> None:
    visit = page_of(values_model())
    page = visit.page
    assert page.locator(".rank span").all_inner_texts() == ["age", "height (cm)"]
    numbers = [float(text) for text in page.locator(".rank b").all_inner_texts()]
    assert 0 < numbers[0] < 100 < numbers[1] < 250
    assert page.locator(".rank i").count() == 0, "a number is no share: it has no bar"
    before = visit.pixels()
    playwright.expect(page.locator("#ranks .hint")).to_have_text("Click a value to see what raises it.")
    page.locator(".rank").nth(1).click()
    playwright.expect(page.locator("#method-words")).to_contain_text("What raises a value")
    playwright.expect(page.locator(".stage figcaption b")).to_have_text("height (cm)")
    visit.until_differs(before)
    assert page.locator("#class-label").inner_text() == "Value"
    page.get_by_label("Side by side").select_option(label="Two values")
    playwright.expect(page.locator(".stage")).to_have_count(2)
    page.get_by_role("tab", name="API").click()
    playwright.expect(page.locator("#panel-api")).to_contain_text("The values")


def test_fresh_weights_are_named_as_such(page_of: Callable[[Any], Visit]) -> None:
    trained = small_model("trained")
    trained.model.pretrained = True
    assert page_of(trained).page.locator(".untrained").count() == 0
    page = page_of(small_model("fresh")).page
    playwright.expect(page.locator(".untrained")).to_contain_text("not trained")


def test_nothing_to_click_without_a_classifier_or_attention(page_of: Callable[[Any], Visit]) -> None:
    page = page_of(small_model("bare", classes=0)).page
    playwright.expect(page.locator("#ranks")).to_have_text("This model has no classifier.")
    assert page.locator(".untrained").count() == 0
    assert page.get_by_role("radio", name="Relevance").is_disabled()
    page = page_of(resnet_model()).page
    playwright.expect(page.locator(".rank")).to_have_count(4)
    assert page.locator("button.rank, #ranks .hint").count() == 0
    playwright.expect(page.locator(".readout")).to_contain_text("no attention")
    assert page.locator("#strips").is_hidden()


def test_tabs_about_the_model(visit: Visit) -> None:
    page = visit.open().page
    page.get_by_role("tab", name="Filters").click()
    page.wait_for_selector(".tiles canvas")
    assert page.locator("#panel-filters .tiles li").count() == 56
    page.get_by_role("tab", name="Positions").click()
    mosaic = page.locator(".map").first
    mosaic.wait_for()
    box = mosaic.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    caption = page.locator("#panel-positions figcaption").first
    playwright.expect(caption).to_have_text(re.compile("^Patch 0,0"))
    page.get_by_role("tab", name="Layers").click()
    page.wait_for_selector("#panel-layers table")
    assert "encoder.blocks.2.mlp.down" in page.locator("#panel-layers").inner_text()
    page.get_by_role("tab", name="API").click()
    playwright.expect(page.locator("#panel-api")).to_contain_text(f"{visit.address}/api/v1/predict")
    page.get_by_role("tab", name="Distance").click()
    page.wait_for_selector(".dot")
    assert page.locator("#panel-distance .dot").count() == 12
    page.locator("#panel-distance .dot").nth(1).click()
    visit.until_reads("layer 0, head 1")
    assert page.get_by_role("tab", name="Image").get_attribute("aria-selected") == "true"


def test_with_the_keyboard_alone(visit: Visit) -> None:
    page = visit.open().page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('role')"))
    assert {"theme", "tab-image", "file", "application", "play", "radio", "versus", "strength", "grid"} <= reached
    page.locator(".frame canvas").focus()
    page.keyboard.press("ArrowRight")
    visit.until_reads("Patch 2,3")
    page.keyboard.press("ArrowUp")
    visit.until_reads("Patch 1,3")
    page.keyboard.press("[")
    visit.until_reads("layer 1")
    page.keyboard.press("Escape")
    visit.until_reads("The class token")
    page.locator("#layer-strip [aria-checked=true]").focus()
    page.keyboard.press("Home")
    visit.until_reads("layer 0")
    page.locator("#methods input:checked").focus()
    page.keyboard.press("ArrowRight")
    visit.until_reads("up to layer 0")
    page.locator("#tab-image").focus()
    page.keyboard.press("End")
    playwright.expect(page.locator("#panel-api")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    playwright.expect(page.locator("#panel-layers")).to_be_visible()


def test_errors_are_shown_in_words(visit: Visit, tmp_path: Path) -> None:
    page = visit.open().page
    text = tmp_path / "notes.png"
    text.write_text("not an image at all")
    shown = page.locator("#errors")
    page.set_input_files("#file", text)
    playwright.expect(shown).to_contain_text("Not an image")
    empty = tmp_path / "empty.png"
    empty.write_bytes(b"")
    page.set_input_files("#file", empty)
    playwright.expect(shown).to_contain_text("empty")
    large = tmp_path / "large.png"
    large.write_bytes(b"x" * 3_000_000)
    page.set_input_files("#file", large)
    playwright.expect(shown).to_contain_text("2.9 MB")
    page.get_by_role("button", name="Dismiss").click()
    playwright.expect(shown).to_be_empty()
    assert visit.pixels().std() > 5, "the last good image is still there"
    page.context.set_offline(True)
    page.locator("#examples button").nth(1).click()
    playwright.expect(shown).to_contain_text("cannot be reached")
    page.context.set_offline(False)
    visit.complaints.clear()  # Chromium itself notes refused and failed requests
    good = tmp_path / "good.png"
    good.write_bytes(image())
    page.set_input_files("#file", good)
    playwright.expect(shown).to_be_empty()


def test_a_strange_address_is_no_error(visit: Visit) -> None:
    visit.open("#layer=99&head=77&method=magic&patch=50,60&class=9999&strength=500&tab=../x&example=<b>")
    visit.until_reads("layer 2")
    visit.open("#layer=0&method=rollout&strength=40")
    visit.until_reads("up to layer 0")
    assert visit.page.get_by_label("Overlay").input_value() == "40"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 2000])
def test_phone_and_wide(browser: Any, address: str, width: int, theme: str) -> None:
    visit = Visit(browser, address, width, 800, color_scheme=theme, has_touch=width == 360).open()
    page = visit.page
    for tab in ("image", "filters", "positions", "distance", "layers", "api"):
        page.locator(f"#tab-{tab}").click()
        playwright.expect(page.locator(f"#panel-{tab}")).to_be_visible()
        visit.settle()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{tab} is wider than the screen"
    page.locator("#tab-image").click()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (theme == "dark")
    if width == 360:
        box = page.locator(".frame canvas").bounding_box()
        page.locator(".frame canvas").scroll_into_view_if_needed()
        box = page.locator(".frame canvas").bounding_box()
        page.touchscreen.tap(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.1)
        visit.until_reads("Patch 0,3")
    visit.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, address: str, theme: str) -> None:
    axe_module = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python"
    )
    visit = Visit(browser, address, color_scheme=theme, bypass_csp=True)
    found = []
    views = ["", "#method=relevance&versus=class", "#tab=distance", "#tab=layers"]
    if theme == "light":  # the other views have no colours of their own
        views += ["#versus=model", "#tab=filters", "#tab=positions", "#tab=api"]
    for hash_ in views:
        visit.open(hash_)
        visit.page.reload()
        visit.page.wait_for_selector("html[data-ready]")
        visit.settle()
        for problem in axe_module.Axe().run(visit.page).response["violations"]:
            if problem["impact"] in ("serious", "critical"):
                where = [node["html"][:120] for node in problem["nodes"][:3]]
                found.append(f"{hash_} {problem['id']}: {problem['help']} {where}")
    assert not found, "\n".join(found)
    visit.close()


def test_the_token_page(browser: Any) -> None:
    with live([small_model()], token="a-long-secret") as (where, _):
        visit = Visit(browser, where)
        page = visit.page
        page.goto(where)
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Enter").click()
        playwright.expect(page.get_by_role("alert")).to_contain_text("not the token")
        page.get_by_label("Token").fill("a-long-secret")
        page.get_by_role("button", name="Enter").click()
        page.wait_for_selector("html[data-ready]")
        assert page.locator(".rank").count() == 4
        visit.complaints.clear()  # Chromium itself notes the two answers with 401
        visit.close()


def test_the_theme_can_be_chosen(visit: Visit) -> None:
    page = visit.open().page
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.locator("#theme").click()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("#theme").inner_text() == "Dark theme"
