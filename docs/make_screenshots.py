"""Make the README's images of the page with Chromium.

    python docs/make_screenshots.py MODEL [IMAGE] [--second MODEL] [--out docs/images]

MODEL is what `vitkit serve` takes, IMAGE an image file (default: one of the page's examples), or `four`: a 4 that is
drawn here. The README's are of `vitkit demo`; look at what the model says of it before they are kept:

    python docs/make_screenshots.py runs/demo four --only page-light page-classes

A server is started on a free port and ended again. Images are kept below 300 kB each.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFilter

LIMIT = 300_000
FOUR, PEN = 320, 255  # pixels of the 4, and how bright it is
STROKES = (((0.52, 0.11), (0.27, 0.57), (0.72, 0.57)), ((0.64, 0.13), (0.60, 0.90)))  # across and down, in 0..1
# name: width, height, theme, what is shown, and the patch that is pointed at (down and across, in 0..1)
SHOTS: dict[str, tuple[int, int, str, str, tuple[float, float] | None]] = {
    "page-light": (1280, 900, "light", "", (0.45, 0.55)),
    "page-dark": (1280, 900, "dark", "", (0.45, 0.55)),
    "page-classes": (1280, 860, "light", "method=relevance&versus=class", None),
    "page-models": (1280, 860, "light", "versus=model&method=relevance", None),
    "page-phone": (390, 844, "dark", "method=relevance", None),
    "page-distance": (1280, 620, "light", "tab=distance", None),
}


@contextmanager
def served(models: list[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "vitkit", "serve", *models, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving on (http://\S+?)/ ", line):
                yield found[1]
                return
        raise SystemExit("".join(lines))
    finally:
        process.terminate()
        process.wait()


def settle(page: Any) -> None:
    """Until no map or panel is on its way."""
    while page.evaluate("Boolean(document.querySelector('.frame.waiting, [aria-busy=true]'))"):
        page.wait_for_timeout(100)


def shoot(browser: Any, address: str, name: str, image: Path | None, folder: Path) -> Path:
    width, height, theme, shown, patch = SHOTS[name]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=2)
    page.set_default_timeout(120_000)
    page.goto(f"{address}/#{shown}")
    page.wait_for_selector("html[data-ready]")
    if image is not None:
        page.set_input_files("#file", image)
        page.locator(".stage figcaption", has_text=image.name).first.wait_for(state="attached")
    settle(page)
    if patch is not None:
        box = page.locator(".frame canvas").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * patch[1], box["y"] + box["height"] * patch[0])
        page.locator(".readout", has_text="Patch").first.wait_for()
        settle(page)
    path = folder / f"{name}.png"
    save_small(page.screenshot(), path)
    page.close()
    return path


def save_small(data: bytes, path: Path) -> None:
    """As many pixels as fit into the limit in full colour; only the last resort has 256 colours."""
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    for scale, colours in ((1, 0), (0.75, 0), (0.6, 0), (0.5, 0), (0.45, 0), (0.5, 256)):
        size = round(whole.width * scale), round(whole.height * scale)
        small = whole.resize(size, Image.Resampling.LANCZOS)
        out = io.BytesIO()
        (small.quantize(colours) if colours else small).save(out, "PNG", optimize=True)
        if out.tell() < LIMIT:
            break
    path.write_bytes(out.getvalue())


def draw_four(folder: Path) -> Path:
    """A 4 as a pen writes it, with the top nearly closed, as a 9 has it."""
    side = 4 * FOUR
    image = Image.new("L", (side, side))
    pen = ImageDraw.Draw(image)
    for stroke in STROKES:
        points = [(x * side, y * side) for x, y in stroke]
        pen.line(points, fill=PEN, width=side // 10, joint="curve")
        for x, y in points:
            pen.ellipse((x - side / 20, y - side / 20, x + side / 20, y + side / 20), fill=PEN)
    path = folder / "a handwritten four.png"
    image.filter(ImageFilter.GaussianBlur(side / 64)).resize((FOUR, FOUR)).save(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("image", nargs="?")
    parser.add_argument("--second", help="a second model, for the image of two")
    parser.add_argument("--only", nargs="+", choices=list(SHOTS), help="these images only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    args = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, served([args.model]) as one, sync_playwright() as p:
        image = draw_four(Path(folder)) if args.image == "four" else Path(args.image) if args.image else None
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        wanted = [name for name in args.only or SHOTS if name != "page-models"]
        for name in wanted:
            print(shoot(browser, one, name, image, args.out))
        if args.second and "page-models" in (args.only or SHOTS):
            with served([args.model, args.second]) as two:
                print(shoot(browser, two, "page-models", image, args.out))
        browser.close()


if __name__ == "__main__":
    main()
