"""The page in a real browser: Debian's Chromium, driven by Playwright.

Where there is no Chromium the tests are skipped; with VITKIT_NEED_CHROMIUM=1 they fail instead.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from serving import live, picture, small_model

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


class Visit:
    """One page, what it logged, and how to look at its picture."""

    def __init__(self, browser: Any, address: str, width: int = 1200, height: int = 900, **more: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height}, **more)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.complaints: list[str] = []
        self.address = address
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))

    def open(self, hash_: str = "") -> Visit:
        self.page.goto(f"{self.address}/{hash_}")
        self.page.wait_for_selector("html[data-ready]")
        self.settle()
        return self

    def wait(self, expression: str) -> None:
        """Playwright's own wait evaluates strings inside the page, which its security policy forbids."""
        for _ in range(600):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(30)
        raise AssertionError(f"never true: {expression}")

    def settle(self) -> None:
        """No map is on its way any more, and what has come is drawn."""
        self.wait("!document.querySelector('.frame.waiting')")
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def pixels(self, index: int = 0) -> np.ndarray:
        """What is drawn on the canvas of a stage, without what lies around it."""
        self.settle()
        script = "(c) => c.toDataURL('image/png').split(',')[1]"
        data = base64.b64decode(self.page.locator(".frame canvas").nth(index).evaluate(script))
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(float)

    def hover(self, row: float, column: float, index: int = 0) -> None:
        box = self.page.locator(".frame canvas").nth(index).bounding_box()
        self.page.mouse.move(box["x"] + box["width"] * column, box["y"] + box["height"] * row)
        self.settle()

    @property
    def words(self) -> str:
        self.settle()
        return self.page.locator(".readout").first.inner_text()

    def close(self) -> None:
        assert self.complaints == []
        self.context.close()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Visit]:
    one = Visit(browser, address)
    yield one
    one.close()


def differ(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).mean())


def test_it_opens_with_an_example_and_predictions(visit: Visit) -> None:
    page = visit.open().page
    assert page.title() == "first and second · vitkit"
    ranks = page.locator(".rank")
    assert ranks.count() == 5
    shares = [float(text.strip("%<")) for text in ranks.locator("b").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 100.5  # five of six classes
    assert page.locator("#examples button[aria-pressed=true]").count() == 1
    assert "layer 3" in visit.words


def test_upload_by_choosing_dropping_and_pasting(visit: Visit, tmp_path: Path) -> None:
    page = visit.open().page
    before = visit.pixels()
    file = tmp_path / "mine.png"
    file.write_bytes(picture((64, 64), seed=5))
    page.set_input_files("#file", file)
    visit.wait("!document.querySelector('#examples [aria-pressed=true]')")
    chosen = visit.pixels()
    assert differ(before, chosen) > 5
    assert "example" not in page.url, "a picture of the user's own is not in the address"
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
        page.evaluate("(text) => { window.given = text }", base64.b64encode(picture((50, 70), "JPEG", seed)).decode())
        with page.expect_response("**/predict*"):
            page.evaluate(transfer, kind)
        page.wait_for_timeout(300)
        assert differ(before, visit.pixels()) > 2, kind


def test_hovering_a_patch_shows_what_it_attends_to(visit: Visit) -> None:
    visit.open()
    resting = visit.pixels()
    visit.hover(0.1, 0.1)
    assert visit.words.startswith("Row 1, column 1")
    first = visit.pixels()
    visit.hover(0.9, 0.6)
    assert visit.words.startswith("Row 4, column 3")
    second = visit.pixels()
    assert differ(first, resting) > 0.5
    assert differ(first, second) > 0.5
    visit.page.mouse.move(5, 5)
    visit.settle()
    assert differ(visit.pixels(), resting) == 0


def test_a_click_keeps_the_patch_and_the_address_knows_it(visit: Visit) -> None:
    page = visit.open().page
    visit.hover(0.4, 0.9)
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(5, 5)
    assert visit.words.startswith("Row 2, column 4")
    assert "patch=1,3" in page.url
    kept = visit.pixels()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert visit.words.startswith("Row 2, column 4")
    assert differ(visit.pixels(), kept) < 0.5
    page.get_by_role("button", name="Show the output").click()
    assert visit.words.startswith("The class token")
    assert "patch" not in page.url


def test_layers_and_heads(visit: Visit) -> None:
    page = visit.open().page
    seen = [visit.pixels()]
    page.get_by_role("radio", name="Layer 1").click()
    assert "layer 1, mean of the heads" in visit.words
    seen.append(visit.pixels())
    page.get_by_role("radio", name="Head 2").click()
    assert "layer 1, head 2" in visit.words
    seen.append(visit.pixels())
    for i in range(3):
        for j in range(i):
            assert differ(seen[i], seen[j]) > 0.3
    assert "layer=0&head=1" in page.url


def test_play_goes_through_the_layers_and_stops(visit: Visit) -> None:
    page = visit.open().page
    page.get_by_role("button", name="Play").click()
    for layer in (1, 2, 3):
        visit.wait(f"document.querySelector('.readout').innerText.includes('layer {layer},')")
    page.get_by_role("button", name="Pause").click()
    now = visit.words
    page.wait_for_timeout(1300)
    assert visit.words == now


def test_methods_and_classes_change_the_overlay(visit: Visit) -> None:
    page = visit.open().page
    seen = {"attention": visit.pixels()}
    for method in ("Rollout", "Relevance", "Grad-CAM"):
        page.get_by_role("radio", name=method).check()
        seen[method] = visit.pixels()
    names = list(seen)
    for i, one in enumerate(names):
        for other in names[:i]:
            assert differ(seen[one], seen[other]) > 0.3, (one, other)
    page.locator(".rank").nth(2).click()
    assert page.locator(".rank").nth(2).get_attribute("aria-pressed") == "true"
    third, name = visit.pixels(), page.locator(".rank span").nth(2).inner_text()
    page.locator(".rank").nth(0).click()
    assert differ(visit.pixels(), third) > 0.3
    page.locator("#class").select_option(label=name)
    assert differ(visit.pixels(), third) == 0


def test_strength_grid_and_smoothness(visit: Visit) -> None:
    page = visit.open("#strength=0&grid=0").page
    plain = visit.pixels()
    page.get_by_label("Overlay").fill("50")
    half = visit.pixels()
    page.get_by_label("Overlay").fill("100")
    full = visit.pixels()
    assert differ(full, plain) > differ(half, plain) > 5
    page.get_by_label("Smooth").uncheck()
    blocks = visit.pixels()
    assert differ(blocks, full) > 0.3
    page.get_by_label("Patch grid").check()
    lines = visit.pixels() - blocks
    side = lines.shape[0]
    assert np.abs(lines[side // 4 + side // 8]).mean() < np.abs(lines[round(side / 4)]).mean()


def test_two_classes_side_by_side(visit: Visit) -> None:
    page = visit.open().page
    page.get_by_label("Side by side").select_option("class")
    assert page.locator(".stage").count() == 2
    assert differ(visit.pixels(0), visit.pixels(1)) > 0.3
    before = visit.pixels(1)
    page.get_by_label("Second class").select_option(index=4)
    assert differ(visit.pixels(1), before) > 0.3
    titles = page.locator(".stage figcaption b").all_inner_texts()
    assert titles[0] != titles[1]


def test_two_models_side_by_side(visit: Visit) -> None:
    page = visit.open().page
    page.get_by_label("Side by side").select_option("model")
    assert page.locator(".stage figcaption b").all_inner_texts() == ["first", "second"]
    assert page.locator(".rank").count() == 10
    resting = visit.pixels(1)
    visit.hover(0.1, 0.1, index=0)
    assert differ(visit.pixels(1), resting) > 0.3, "the patch is marked in both models"
    assert page.locator(".readout").nth(1).inner_text().startswith("Row 1, column 1")


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
    assert page.locator("#panel-positions figcaption").first.inner_text().startswith("Row 1, column 1")
    page.get_by_role("tab", name="Layers").click()
    page.wait_for_selector("#panel-layers table")
    assert "encoder.blocks.2.mlp.down" in page.locator("#panel-layers").inner_text()
    page.get_by_role("tab", name="API").click()
    assert f"{visit.address}/api/v1/predict" in page.locator("#panel-api").inner_text()
    page.get_by_role("tab", name="Distance").click()
    page.wait_for_selector(".dot")
    assert page.locator("#panel-distance .dot").count() == 12
    page.locator("#panel-distance .dot").nth(1).click()
    assert "layer 1, head 2" in visit.words
    assert page.get_by_role("tab", name="Picture").get_attribute("aria-selected") == "true"


def test_with_the_keyboard_alone(visit: Visit) -> None:
    page = visit.open().page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('role')"))
    assert {"theme", "tab-picture", "file", "application", "play", "radio", "versus", "strength", "grid"} <= reached
    page.locator(".frame canvas").focus()
    page.keyboard.press("ArrowRight")
    assert visit.words.startswith("Row 3, column 4")
    page.keyboard.press("ArrowUp")
    assert visit.words.startswith("Row 2, column 4")
    page.keyboard.press("[")
    assert "layer 2" in visit.words
    page.keyboard.press("Escape")
    assert visit.words.startswith("The class token")
    page.locator("#layer-strip [aria-checked=true]").focus()
    page.keyboard.press("Home")
    assert "layer 1" in visit.words
    page.locator("#methods input:checked").focus()
    page.keyboard.press("ArrowRight")
    assert "up to layer 1" in visit.words
    page.locator("#tab-picture").focus()
    page.keyboard.press("End")
    assert page.locator("#panel-api").is_visible()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#panel-layers").is_visible()


def test_errors_are_shown_in_words(visit: Visit, tmp_path: Path) -> None:
    page = visit.open().page
    text = tmp_path / "notes.png"
    text.write_text("not a picture at all")
    shown = page.locator("#errors")
    page.set_input_files("#file", text)
    playwright.expect(shown).to_contain_text("Not a picture")
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
    assert visit.pixels().std() > 5, "the last good picture is still there"
    page.context.set_offline(True)
    page.locator("#examples button").nth(1).click()
    playwright.expect(shown).to_contain_text("cannot be reached")
    page.context.set_offline(False)
    visit.complaints.clear()  # Chromium itself notes refused and failed requests
    good = tmp_path / "good.png"
    good.write_bytes(picture())
    page.set_input_files("#file", good)
    playwright.expect(shown).to_be_empty()


def test_a_strange_address_is_no_error(visit: Visit) -> None:
    visit.open("#layer=99&head=77&method=magic&patch=50,60&class=9999&strength=500&tab=../x&example=<b>")
    assert "layer 3" in visit.words
    visit.open("#layer=0&method=rollout&strength=40")
    assert "up to layer 1" in visit.words
    assert visit.page.get_by_label("Overlay").input_value() == "40"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 2000])
def test_phone_and_wide(browser: Any, address: str, width: int, theme: str) -> None:
    visit = Visit(browser, address, width, 800, color_scheme=theme, has_touch=width == 360).open()
    page = visit.page
    for tab in ("picture", "filters", "positions", "distance", "layers", "api"):
        page.locator(f"#tab-{tab}").click()
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{tab} is wider than the screen"
    page.locator("#tab-picture").click()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (theme == "dark")
    if width == 360:
        box = page.locator(".frame canvas").bounding_box()
        page.locator(".frame canvas").scroll_into_view_if_needed()
        box = page.locator(".frame canvas").bounding_box()
        page.touchscreen.tap(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.1)
        assert visit.words.startswith("Row 1, column 4")
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
        visit.page.wait_for_timeout(400)
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
