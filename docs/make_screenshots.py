"""Make the README's images of the page with Chromium.

    python docs/make_screenshots.py MODEL [IMAGE] [--second MODEL] [--out docs/images]

MODEL is what `vitkit serve` takes, IMAGE an image file (default: one of the page's examples), or the name of a data
set: then the test image that MODEL gets right and is least sure of. The README's are of `vitkit demo`:

    python docs/make_screenshots.py runs/demo digits --only page-light page-classes

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

from PIL import Image

LIMIT = 300_000
SMALL = 64  # pixels; smaller images are enlarged smoothly, as the page would show them in squares
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


def least_sure(model: str, data: str, folder: Path) -> Path:
    """The test image with the right class first and the least probability, as a file."""
    import vitkit

    source = vitkit.open_data(data).split("test")
    found = vitkit.load(model).predict([source.image(i) for i in range(len(source))])
    right = [(p.probability, i) for i, p in enumerate(found) if p.label == source.label_name(i)]
    index = min(right)[1]
    image, name = source.image(index), f"{data}, test image {index}, a {source.label_name(index)}"
    if max(image.size) < SMALL:
        scale, name = round(320 / max(image.size)), f"{name}, enlarged"
        image = image.resize((scale * image.width, scale * image.height), Image.Resampling.BICUBIC)
    path = folder / f"{name}.png"
    image.save(path)
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
        image = Path(args.image) if args.image else None
        if image is not None and not image.is_file():
            image = least_sure(args.model, args.image, Path(folder))
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
