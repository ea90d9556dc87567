"""How fast the map of a data set pans in Chromium, measured by the page itself: 50,000 points, software rendering.

python benchmarks/map_frames.py [--points 50000]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

import vitkit
from harness import machine
from vitkit.curation.map import COLUMNS, TILE, Map, to_jpeg
from vitkit.curation.view import View
from vitkit.io import parse_json, write_json
from vitkit.web.share import write_page

SIZES = {"desktop": (1400, 900), "phone": (390, 844)}


def make(folder: Path, points: int) -> Path:
    """A page for sharing: places at random, thumbnails of noise."""
    chance = np.random.default_rng(0)
    index = vitkit.index("digits", out=folder / "index")
    more = {"paths": [f"set/{i}.png" for i in range(points)], "splits": ["train"] * points}
    more |= {"labels": chance.integers(0, 10, points), "features": chance.random((points, 2), dtype=np.float32)}
    many = type(index)(**{**vars(index), **more})
    near = chance.integers(0, points, (points, 12), dtype=np.int32)
    made = Map(folder, chance.random((points, 2), dtype=np.float32), near, "tsne")
    side = COLUMNS * TILE
    sheet = to_jpeg(Image.fromarray(chance.integers(0, 255, (side, side, 3), dtype=np.uint8)))
    for number in range(made.sheets):
        made.sheet(number).write_bytes(sheet)
    write_page(View(many, made, "many"), folder / "map.html")
    return folder / "map.html"


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--points", type=int, default=50_000)
    words.add_argument("--save", type=Path, default=Path(__file__).parent / "results" / "map.json")
    given = words.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as play:
        page_file = make(Path(scratch), given.points)
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height}, bypass_csp=True)
            page.set_default_timeout(300_000)
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready]")
            page.wait_for_function("document.querySelector('#map').dataset.busy === 'false'")
            load = os.getloadavg()[0]
            rows[name] = {"load of the machine": load, **page.locator("#map").evaluate("(map) => map.measure(120)")}
            print(name, rows[name], flush=True)
            page.close()
        browser.close()
    before = parse_json(given.save.read_text()) if given.save.exists() else {}
    write_json(given.save, {**before, **machine(), "date": time.strftime("%Y-%m-%d"), "map": rows})


if __name__ == "__main__":
    main()
