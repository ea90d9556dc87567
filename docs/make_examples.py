"""Draw the example images of the page (src/vitkit/web/static/example-*.webp): python docs/make_examples.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIDE, FINE = 320, 3  # pixels of the result; how much finer everything is drawn
STATIC = Path(__file__).parents[1] / "src" / "vitkit" / "web" / "static"
Point = tuple[float, float]


def sky(top: Sequence[int], bottom: Sequence[int]) -> Image.Image:
    """From one colour to another, downwards."""
    t = np.linspace(0, 1, SIDE * FINE)[:, None, None]
    column = np.array(top) * (1 - t) + np.array(bottom) * t
    return Image.fromarray(np.broadcast_to(column, (SIDE * FINE, SIDE * FINE, 3)).astype(np.uint8))


def curve(points: Sequence[Point], steps: int = 60) -> list[Point]:
    """A smooth line through the points (Catmull-Rom), which are in 0..1."""
    p = np.array([points[0], *points, points[-1]], dtype=float)
    out = []
    for a, b, c, d in zip(p, p[1:], p[2:], p[3:], strict=False):
        for t in np.linspace(0, 1, steps, endpoint=False):
            out.append(
                0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
            )
    return [tuple(q * SIDE * FINE) for q in [*out, p[-1]]]


class Pen:
    """Shapes in coordinates of 0..1."""

    def __init__(self, image: Image.Image) -> None:
        self.image, self.draw = image, ImageDraw.Draw(image)

    def at(self, *values: float) -> list[float]:
        return [v * SIDE * FINE for v in values]

    def oval(self, x: float, y: float, w: float, h: float, colour: object) -> None:
        self.draw.ellipse(self.at(x - w / 2, y - h / 2, x + w / 2, y + h / 2), fill=colour)

    def shape(self, points: Sequence[Point], colour: object, smooth: bool = False) -> None:
        line = curve([*points, points[0]]) if smooth else [tuple(self.at(*p)) for p in points]
        self.draw.polygon(line, fill=colour)

    def stroke(self, points: Sequence[Point], width: float, colour: object) -> None:
        for x, y in curve(points):
            r = width * SIDE * FINE / 2
            self.draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)


def finish(image: Image.Image, grain: float = 4.0, vignette: float = 0.18) -> Image.Image:
    """Small, with a little grain and darker corners, as a photograph has."""
    pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)).astype(float)
    y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    pixels *= 1 - vignette * ((x**2 + y**2) / 2)[..., None]
    noise = np.random.default_rng(7).normal(0, grain, (SIDE, SIDE, 1))
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


def glow(
    image: Image.Image, x: float, y: float, size: float, colour: tuple[int, int, int], power: float
) -> Image.Image:
    v, u = np.mgrid[0 : 1 : SIDE * FINE * 1j, 0 : 1 : SIDE * FINE * 1j]
    light = power * np.exp(-((u - x) ** 2 + (v - y) ** 2) / size**2)[..., None]
    pixels = np.asarray(image) * (1 - light) + np.array(colour) * light
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def digit(strokes: Sequence[Sequence[Point]]) -> Image.Image:
    """White ink on black, from top to bottom, as in the classic sets."""
    image = Image.new("RGB", (SIDE * FINE, SIDE * FINE), "black")
    pen = Pen(image)
    for points in strokes:
        pen.stroke([(x, 0.5 + 1.15 * (y - 0.5)) for x, y in points], 0.12, "white")
    return finish(image.filter(ImageFilter.GaussianBlur(5 * FINE)), grain=0, vignette=0)


def three() -> Image.Image:
    return digit([[(0.3, 0.22), (0.5, 0.14), (0.68, 0.26), (0.6, 0.42), (0.44, 0.48)],
                  [(0.44, 0.48), (0.66, 0.52), (0.72, 0.7), (0.54, 0.86), (0.28, 0.78)]])  # fmt: skip


def eight() -> Image.Image:
    loop = [(0.66, 0.25), (0.5, 0.14), (0.35, 0.25), (0.44, 0.42), (0.62, 0.58), (0.68, 0.74), (0.5, 0.87)]
    return digit([[*loop, (0.33, 0.74), (0.4, 0.56), (0.6, 0.4), (0.66, 0.25)]])


def cat() -> Image.Image:
    image = glow(sky((126, 168, 158), (58, 92, 96)), 0.75, 0.15, 0.5, (244, 232, 190), 0.55)
    pen = Pen(image)
    fur, dark, light = (222, 142, 66), (172, 92, 34), (250, 226, 192)
    pen.shape([(0, 0.93), (0.5, 0.86), (1, 0.93), (1.2, 1.2), (-0.2, 1.2)], (46, 62, 58), smooth=True)
    pen.shape([(0.22, 1.1), (0.24, 0.72), (0.5, 0.6), (0.76, 0.72), (0.78, 1.1)], fur, smooth=True)
    pen.oval(0.5, 0.95, 0.3, 0.42, light)
    for s in (-1, 1):
        pen.shape([(0.5 + s * 0.3, 0.1), (0.5 + s * 0.31, 0.4), (0.5 + s * 0.07, 0.27)], fur)
        pen.shape([(0.5 + s * 0.27, 0.17), (0.5 + s * 0.27, 0.34), (0.5 + s * 0.13, 0.27)], (236, 164, 150))
    pen.oval(0.5, 0.45, 0.64, 0.52, fur)
    for dx in (-0.09, 0, 0.09):
        pen.shape([(0.5 + dx - 0.025, 0.2), (0.5 + dx + 0.025, 0.2), (0.5 + dx * 0.7, 0.34)], dark)
    for s in (-1, 1):
        for dy in (0, 0.07):
            pen.shape([(0.5 + s * 0.32, 0.42 + dy), (0.5 + s * 0.31, 0.46 + dy), (0.5 + s * 0.2, 0.46 + dy)], dark)
        pen.oval(0.5 + s * 0.085, 0.56, 0.19, 0.15, light)
        pen.oval(0.5 + s * 0.14, 0.42, 0.13, 0.13, (240, 244, 190))
        pen.oval(0.5 + s * 0.14, 0.42, 0.12, 0.12, (116, 164, 74))
        pen.oval(0.5 + s * 0.135, 0.42, 0.045, 0.11, (18, 20, 18))
        pen.oval(0.5 + s * 0.135 + 0.02, 0.395, 0.024, 0.024, "white")
        for dy in (-0.02, 0.01, 0.045):
            pen.stroke([(0.5 + s * 0.13, 0.565 + dy / 2), (0.5 + s * 0.42, 0.55 + dy * 2)], 0.006, (250, 244, 232))
    pen.oval(0.5, 0.61, 0.13, 0.08, light)
    pen.shape([(0.46, 0.51), (0.54, 0.51), (0.5, 0.55)], (206, 106, 104))
    pen.stroke([(0.43, 0.585), (0.465, 0.6), (0.5, 0.56), (0.535, 0.6), (0.57, 0.585)], 0.009, (112, 62, 40))
    return finish(image)


def boat() -> Image.Image:
    image = sky((38, 62, 120), (250, 170, 110))
    image = glow(image, 0.72, 0.56, 0.16, (255, 236, 170), 0.95)
    sea = glow(sky((28, 46, 92), (20, 92, 120)), 0.72, 0.62, 0.22, (250, 190, 120), 0.7)
    fine = SIDE * FINE
    image.paste(sea.crop((0, int(fine * 0.6), fine, fine)), (0, int(fine * 0.6)))
    pen = Pen(image)
    random = np.random.default_rng(3)
    for _ in range(70):
        y = 0.62 + 0.36 * random.random() ** 1.3
        x, w = random.random(), (0.03 + 0.1 * random.random()) * (y - 0.4)
        tone = (255, 206, 140) if abs(x - 0.72) < 0.14 else (70, 134, 160)
        pen.oval(x, y, w, 0.006, tone)
    for x, y, s in ((0.2, 0.16, 1.0), (0.82, 0.24, 0.7)):
        for dx, dy, r in ((0, 0, 0.1), (0.08, 0.012, 0.08), (-0.09, 0.015, 0.075)):
            pen.oval(x + dx * s, y + dy, r * 1.7 * s, r * 0.55 * s, (236, 196, 190))
    pen.shape([(0.42, 0.12), (0.42, 0.66), (0.76, 0.66)], (252, 250, 242))
    pen.shape([(0.42, 0.36), (0.42, 0.66), (0.66, 0.66)], (232, 226, 214))
    pen.shape([(0.395, 0.2), (0.395, 0.66), (0.2, 0.66)], (226, 84, 66))
    pen.shape([(0.4, 0.1), (0.414, 0.1), (0.414, 0.72), (0.4, 0.72)], (72, 44, 30))
    pen.shape([(0.16, 0.7), (0.8, 0.7), (0.7, 0.81), (0.24, 0.81)], (112, 52, 36))
    pen.shape([(0.16, 0.7), (0.8, 0.7), (0.787, 0.72), (0.177, 0.72)], (246, 232, 208))
    return finish(image)


def flower() -> Image.Image:
    image = glow(sky((150, 200, 236), (214, 232, 226)), 0.15, 0.1, 0.45, (255, 250, 220), 0.7)
    pen = Pen(image)
    pen.shape(
        [(-0.2, 0.84), (0.3, 0.76), (0.7, 0.82), (1.2, 0.74), (1.2, 1.3), (-0.2, 1.3)], (92, 148, 72), smooth=True
    )
    pen.stroke([(0.5, 0.5), (0.49, 0.75), (0.53, 1.05)], 0.035, (62, 118, 50))
    pen.shape([(0.5, 0.82), (0.66, 0.66), (0.84, 0.68), (0.7, 0.8)], (74, 138, 58), smooth=True)
    pen.shape([(0.5, 0.88), (0.36, 0.74), (0.2, 0.77), (0.32, 0.87)], (66, 126, 52), smooth=True)
    for ring, (count, reach, tone) in enumerate(((17, 0.37, (238, 160, 20)), (15, 0.31, (252, 202, 44)))):
        for i in range(count):
            angle = 2 * np.pi * (i + 0.5 * ring) / count
            along, across = np.array([np.cos(angle), np.sin(angle)]), np.array([-np.sin(angle), np.cos(angle)])
            centre = np.array([0.5, 0.42])
            points = [centre + along * 0.1, centre + along * reach * 0.62 + across * 0.05, centre + along * reach]
            points.append(centre + along * reach * 0.62 - across * 0.05)
            pen.shape([tuple(p) for p in points], tone, smooth=True)
    pen.oval(0.5, 0.42, 0.25, 0.25, (92, 56, 28))
    for i in range(160):
        r, angle = 0.118 * np.sqrt(i / 160), i * 2.39996
        pen.oval(0.5 + r * np.cos(angle), 0.42 + r * np.sin(angle), 0.012, 0.012, (140 + i // 3, 92 + i // 4, 40))
    return finish(image)


def main(out: Path) -> None:
    for draw in (three, eight, cat, boat, flower):
        draw().save(out / f"example-{draw.__name__}.webp", quality=86, method=6)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else STATIC)
