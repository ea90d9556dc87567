"""The map of a data set: its addresses, its page in Chromium, and the file for sharing."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from serving import live, message, small_model, with_client

from vitkit.curation import build_index
from vitkit.curation.map import Map
from vitkit.curation.view import View
from vitkit.web.app import create_app
from vitkit.web.explored import Explored, open_explored
from vitkit.web.settings import ServeSettings
from vitkit.web.share import modules, write_page

ODD = (
    "<img src=x onerror=alert(1)>.png",
    'a "quoted", name.png',
    "Käfer 数字.png",
    "</script>".replace("/", "∕") + ".png",
)


def make_set(folder: Path, count: int = 60) -> Path:
    """Three classes of plain colours; a few images lie in the folder of another class, a few have odd names."""
    random = np.random.default_rng(0)
    issues = [("path", "issue", "split", "label", "suggestion", "score", "group")]
    for i in range(count):
        kind = i % 3
        pixels = random.integers(0, 60, (40, 50, 3), dtype=np.uint8)
        pixels[:, :, kind] += 150
        wrong = i in (7, 23, 41)
        label = ("red", "green", "blue")[(kind + wrong) % 3]
        path = folder / "set" / ("test" if i % 5 == 0 else "train") / label / (ODD[i] if i < len(ODD) else f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        if wrong or i == 1:
            issues.append((str(path), "label", path.parts[-3], label, ("red", "green", "blue")[kind], "0.9", ""))
    with (folder / "issues.csv").open("w", newline="") as file:
        csv.writer(file).writerows(issues)
    return folder / "set"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    folder = tmp_path_factory.mktemp("data")
    build_index(make_set(folder), out=folder / "index")
    return open_explored(folder / "index", None, folder / "issues.csv")


def asked(data: Explored | None, *paths: str, **settings: Any) -> list[httpx.Response]:
    async def use(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.get(path) for path in paths]

    models = [] if data is not None else [small_model()]
    return with_client(create_app(models, ServeSettings(**settings), data), use)


def test_addresses_of_a_set(data: Explored) -> None:
    paths = [
        "data",
        "data/points",
        "data/names",
        "data/issues",
        "data/sheet?number=0",
        "data/image?row=5",
        "data/neighbours?row=5&top=4",
    ]
    about, points, names, issues, sheet, picture, near = asked(data, *(f"/api/v1/{path}" for path in paths))
    assert about.json()["count"] == 60
    assert about.json()["values"]["label"] == ["blue", "green", "red"]
    table = np.load(io.BytesIO(points.content))
    assert table.shape == (len(about.json()["columns"]), 60)
    assert names.json() == data.view.index.paths
    assert len(issues.json()["rows"]) == 4
    assert Image.open(io.BytesIO(sheet.content)).size == (960, 960)
    shown = np.asarray(Image.open(io.BytesIO(picture.content))).astype(int)
    true = np.asarray(Image.open(data.view.index.paths[5])).astype(int)
    assert shown.shape == true.shape
    assert np.abs(shown.mean((0, 1)) - true.mean((0, 1))).max() < 4
    exact = np.argsort(-(data.view.index.features @ data.view.index.features[5]), kind="stable")
    assert [one["row"] for one in near.json()["neighbours"]] == [r for r in exact.tolist() if r != 5][:4]


def test_refusals_of_a_set(data: Explored) -> None:
    """Only numbers name an image: no path is ever read."""
    far, sheet, path, bad, model = asked(
        data,
        "/api/data/image?row=60",
        "/api/data/sheet?number=9",
        "/api/data/image?row=../x",
        "/api/data/image?path=x",
        "/api/model",
    )
    assert "60 images" in message(far, 404, "no_image")
    message(sheet, 404, "no_sheet")
    message(path, 422, "bad_field")
    message(bad, 422, "bad_field")
    message(model, 404, "no_model")
    (none,) = asked(None, "/api/data")
    assert "--index" in message(none, 404, "no_data")
    (locked,) = asked(data, "/api/data/names", token="a-long-secret")
    message(locked, 401, "no_token")


def test_search_by_an_image(data: Explored) -> None:
    """An image of the set finds itself; what is no image, or too large, is refused as everywhere."""
    own = Path(data.view.index.paths[11]).read_bytes()

    async def use(client: httpx.AsyncClient) -> list[httpx.Response]:
        bodies = (own, b"no image", b"x" * 3_000_000)
        return [await client.post("/api/v1/data/search?top=3", content=body) for body in bodies]

    found, text, large = with_client(create_app([], ServeSettings(max_bytes=1_000_000), data), use)
    assert found.json()["neighbours"][0] == {"row": 11, "similarity": pytest.approx(1, abs=1e-3)}
    message(text, 415, "not_an_image")
    message(large, 413, "too_large")


def test_a_shared_file_holds_all_and_runs_nothing_else(data: Explored, tmp_path: Path) -> None:
    size = write_page(data.view, tmp_path / "map.html")
    text = (tmp_path / "map.html").read_text()
    assert size == (tmp_path / "map.html").stat().st_size
    assert "/static/" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    start = text.index('id="embedded">') + len('id="embedded">')
    held = json.loads(text[start : text.index("</script>", start)])
    assert held["names"] == data.view.index.paths
    assert len(held["sheets"]) == data.view.map.sheets
    assert {"data.js", "map-view.js", "dom.js"} <= set(modules())


# --- in a browser --------------------------------------------------------------------------------------

page_tests = pytest.importorskip("test_page")  # skips where there is no Chromium
browser, Visit, expect = page_tests.browser, page_tests.Visit, page_tests.playwright.expect


@pytest.fixture(scope="module")
def where(data: Explored) -> Iterator[str]:
    with live([], data=data) as (address, _):
        yield address


@contextlib.contextmanager
def visiting(browser: Any, where: str, width: int = 1200, **more: Any) -> Iterator[Any]:
    visit = Visit(browser, where, width, 900, **more).open()
    visit.wait("document.querySelector('#map').dataset.busy === 'false'")
    yield visit
    visit.close()


def selected(visit: Any, row: int) -> None:
    """The image is selected, and what is shown of it has come."""
    visit.wait(f"document.querySelector('#picked').dataset.row === '{row}'")
    visit.settle()


def test_review_with_the_keyboard_alone(browser: Any, where: str, data: Explored) -> None:
    with visiting(browser, where) as visit:
        page = visit.page
        page.locator("#map").focus()
        rows = [row for row in data.view.issue_rows if row >= 0]
        page.keyboard.press("n")
        selected(visit, rows[0])
        assert page.locator(".near li").count() == 12
        page.keyboard.press("a")
        selected(visit, rows[1])
        page.keyboard.press("r")
        page.keyboard.press("a")
        expect(page.locator("#tally")).to_contain_text("2 accepted, 1 rejected, 1 open")
        page.keyboard.press("u")
        page.keyboard.press("Control+z")
        expect(page.locator("#tally")).to_contain_text("1 accepted, 0 rejected, 3 open")
        page.reload()
        page.wait_for_selector("html[data-ready]")
        expect(page.locator("#tally")).to_contain_text("1 accepted")  # closing the page loses nothing
        with page.expect_download() as download:
            page.locator("#export").click()
        rows_out = list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))
        assert rows_out == [
            ["path", "issue", "split", "label", "suggestion", "score", "group"],
            list(data.view.issues[0]),
        ]


def test_the_map_answers_mouse_and_keys(browser: Any, where: str, data: Explored) -> None:
    with visiting(browser, where) as visit:
        page = visit.page
        box = page.locator("#map").bounding_box()
        page.locator("#map").focus()
        page.keyboard.press("ArrowRight")
        visit.wait("document.querySelector('#picked').dataset.row >= 0")
        page.keyboard.press("Escape")
        selected(visit, -1)
        before = page.locator("#map").evaluate("(c) => c.toDataURL()")
        page.mouse.move(box["x"] + 300, box["y"] + 300)
        page.mouse.wheel(0, -400)
        page.mouse.down()
        page.mouse.move(box["x"] + 380, box["y"] + 330)
        page.mouse.up()
        visit.until(lambda: page.locator("#map").evaluate("(c) => c.toDataURL()") != before, "the map moved")
        page.keyboard.press("0")
        page.keyboard.press("l")
        corners = [(5, 5), (box["width"] - 5, 5), (box["width"] - 5, box["height"] - 5), (5, box["height"] - 5)]
        page.mouse.move(box["x"] + 5, box["y"] + 5)
        page.mouse.down()
        for x, y in (*corners[1:], corners[0]):
            page.mouse.move(box["x"] + x, box["y"] + y)
        page.mouse.up()
        expect(page.locator("#picked-title")).to_have_text("60 images")
        page.locator("#colour").select_option("issue")
        page.locator("#legend button").first.click()
        expect(page.locator("#legend button").first).to_have_attribute("aria-pressed", "true")
        page.set_input_files("#find", data.view.index.paths[11])
        expect(page.locator("#picked-title")).to_have_text("Most alike")
        expect(page.locator(".near button").first).to_have_attribute("title", __import__("re").compile("similarity 1"))


def test_a_late_answer_belongs_to_nobody(browser: Any, where: str, data: Explored) -> None:
    """The neighbours of the first image are held back until the second is shown; they must not replace its own."""
    with visiting(browser, where) as visit:
        page, held = visit.page, []

        def keep(route: Any) -> None:
            held.append(route)

        first, second = (row for row in data.view.issue_rows[:2])
        page.route(f"**/data/neighbours?row={first}&*", keep)
        page.keyboard.press("n")
        visit.until(lambda: len(held) == 1, "the first was asked about")
        page.keyboard.press("n")
        selected(visit, second)
        shown = page.locator(".near").inner_html()
        with contextlib.suppress(Exception):
            held[0].continue_()
        visit.settle()
        assert page.locator(".near").inner_html() == shown
        assert page.locator("#picked").get_attribute("data-row") == str(second)


def test_odd_names_are_text(browser: Any, where: str, data: Explored) -> None:
    with visiting(browser, where) as visit:
        visit.page.keyboard.press("n")
        selected(visit, data.view.issue_rows[0])
        assert (
            ODD[1] in visit.page.locator("#picked").inner_text()
            or "7.png" in visit.page.locator("#picked").inner_text()
        )
        assert visit.page.locator("img[src=x]").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_and_widths(browser: Any, where: str, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    for width in (360, 1400):
        with visiting(browser, where, width, color_scheme=theme, bypass_csp=True) as visit:
            visit.page.keyboard.press("n")
            visit.settle()
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
            found = [
                v for v in axe.Axe().run(visit.page).response["violations"] if v["impact"] in ("serious", "critical")
            ]
            assert not found, [(v["id"], [n["html"][:100] for n in v["nodes"][:3]]) for v in found]


def test_the_shared_file_in_a_browser(browser: Any, data: Explored, tmp_path: Path) -> None:
    write_page(data.view, tmp_path / "map.html")
    visit = Visit(browser, (tmp_path / "map.html").as_uri().removesuffix("/"))
    visit.page.goto((tmp_path / "map.html").as_uri())
    visit.page.wait_for_selector("html[data-ready]")
    visit.page.keyboard.press("n")
    selected(visit, data.view.issue_rows[0])
    assert visit.page.locator(".near li").count() == 12
    visit.close()


@pytest.mark.slow
def test_fifty_thousand_points(browser: Any, data: Explored, tmp_path: Path) -> None:
    """While the map is panned, a frame is a copy of the bitmap; points are drawn again only beyond it."""
    count, random = 50_000, np.random.default_rng(0)
    index = replace(
        data.view.index,
        features=random.random((count, 2), dtype=np.float32),  # type: ignore[arg-type]
        paths=[f"set/{i}.png" for i in range(count)],
        labels=random.integers(0, 3, count),
        splits=["train"] * count,
    )
    near = random.integers(0, count, (count, 12), dtype=np.int32)
    made = Map(tmp_path, random.random((count, 2), dtype=np.float32), near, "tsne")
    for number in range(made.sheets):
        made.sheet(number).write_bytes(data.sheet(0))
    write_page(View(index, made, "many"), tmp_path / "map.html")
    visit = Visit(browser, "")
    visit.page.goto((tmp_path / "map.html").as_uri())
    visit.page.wait_for_selector("html[data-ready]")
    visit.wait("document.querySelector('#map').dataset.busy === 'false'")
    took = visit.page.locator("#map").evaluate("(map) => map.measure(60)")
    assert took["points"] == count
    assert took["thumbnails"] > 100
    assert 1 <= took["renders"] <= 8, took  # it went 80% of the screen to and fro, and the margin is a quarter of it
    assert took["frame"]["median"] > 0
    visit.close()
