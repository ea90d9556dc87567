"""What a finished pre-training shows: hidden patches as it paints them, and the nearest neighbours of images.

Drawn by the first process alone, from images that are evaluated, where matplotlib is installed.
Shapes: B images, N evaluated images.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data import Source, denormalise, normalise
from vitkit.data.decode import BadImage
from vitkit.figures.overlay import enlarged
from vitkit.figures.panels import image_rows
from vitkit.figures.style import save_png
from vitkit.model.build import Model
from vitkit.tasks.trainee import Trainee
from vitkit.training.parts import Parts

ROWS, AMONG, NEIGHBOURS = 4, 200, 5
RECONSTRUCTIONS, NEAREST = "reconstructions.png", "neighbours.png"


def draw_pretraining(parts: Parts, out: Path, verdict: str) -> None:
    if parts.validation is None:
        return
    source, trainee = parts.validation.source, parts.trainee.eval()
    pixels, names = some_images(source, trainee.kept, AMONG)
    images = normalise(pixels.to(parts.world.device), trainee.kept.config.preprocessing)
    with torch.no_grad():
        if hasattr(trainee, "reconstruct") and len(images):
            draw_reconstructions(trainee, images[:ROWS], names, out / RECONSTRUCTIONS, verdict)
        if len(images) > NEIGHBOURS:
            draw_neighbours(trainee.kept, images, pixels, names, out / NEAREST, verdict)


def some_images(source: Source, model: Model, count: int) -> tuple[Tensor, list[str]]:
    """uint8 B C H W of images spread over the set, and their names; unreadable ones are left out."""
    found, names = [], []
    for index in np.linspace(0, len(source) - 1, min(count, len(source))).astype(int).tolist():
        try:
            found.append(source.pixels_of(index, model.config.preprocessing, model.config.channels))
            names.append(Path(source.where(index)).name)
        except BadImage:
            continue
    size = model.config.preprocessing.size
    return torch.stack(found) if found else torch.empty(0, model.config.channels, *size, dtype=torch.uint8), names


def shown(pixels: Tensor) -> list[np.ndarray]:
    """uint8 B C H W -> H W 3 each, as large as they are drawn."""
    pixels = pixels if pixels.shape[1] == 3 else pixels.float().mean(dim=1, keepdim=True).to(torch.uint8)
    rgb = pixels.cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
    return [enlarged(image) for image in rgb]


def draw_reconstructions(trainee: Trainee, images: Tensor, names: list[str], path: Path, verdict: str) -> None:
    pre = trainee.model.config.preprocessing
    empty, painted = trainee.reconstruct(images)  # type: ignore[operator]  # only masked methods have it
    columns = [shown(denormalise(x.float().cpu(), pre)) for x in (images, empty, painted)]
    figure = image_rows(
        list(zip(*columns, strict=True)), ["image", "what it sees", "what it predicts"], [[n] for n in names]
    )
    save_png(figure, path, f"Hidden patches, as they are predicted ({verdict.split(':')[0]})", "Rows of three images.")


def draw_neighbours(model: Model, images: Tensor, pixels: Tensor, names: list[str], path: Path, verdict: str) -> None:
    features = torch.cat([model(part) for part in images.split(64)]).float().cpu()
    unit = F.normalize(features - features.mean(dim=0), dim=1)
    rows, labels = [], []
    for i in np.linspace(0, len(images) - 1, ROWS).astype(int).tolist():
        similarity = unit @ unit[i]
        similarity[i] = torch.inf  # itself first
        nearest = similarity.topk(NEIGHBOURS + 1).indices.tolist()
        rows.append(shown(pixels[nearest]))
        labels.append([names[j] for j in nearest])
    columns = ["image", *(f"neighbour {n + 1}" for n in range(NEIGHBOURS))]
    title = f"The nearest of {len(images)} images, by the features ({verdict.split(':')[0]})"
    save_png(image_rows(rows, columns, labels), path, title, "Each image with its nearest neighbours.")
