"""Why this class? Gradient-weighted attention relevance, and Grad-CAM on tokens.

Relevance follows Chefer, Gur & Wolf (2021): in each layer the attention is weighted by the gradient of the
class score, negative values are dropped, heads are averaged, and the layers are combined as R = R + A R.
Only the row of the output token is wanted, and v (I + A_L) ... (I + A_1) can be computed from the last
layer to the first: the order of the backward pass. So each block is run again with its attention formed,
differentiated, used and let go: the attention of one layer is in memory at a time, however deep the model.

Grad-CAM weights the channels of the last patch states that still reach the class score by their mean
gradient: the final states when the head reads patches, otherwise what the last block's attention reads.

Shapes: B images, K classes each, H heads, T tokens, D width, h x w grid of patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explanation.inside import as_vit, batch_size, batches, grid_of, half_mass, readout, states, to_grid
from vitkit.explanation.subject import Section, Subject
from vitkit.figures.overlay import TOP, overlay
from vitkit.figures.panels import image_rows
from vitkit.model.encoder import Block
from vitkit.model.positions import Place
from vitkit.model.vit import ViT

MOST = 8  # images in a batch


@dataclass(frozen=True)
class ClassRelevance:
    relevance: np.ndarray  # B K h w, not negative
    gradcam: np.ndarray  # B K h w, not negative


def class_relevance(model: nn.Module, images: Tensor, classes: Tensor) -> ClassRelevance:
    """Maps of what speaks for each of `classes` (B, or B K class numbers) in each image."""
    vit = as_vit(model)
    check_classes(vit, classes)
    classes = classes if classes.ndim == 2 else classes[:, None]
    parts = zip(batches(vit, images, MOST), classes.split(batch_size(vit.config, images, MOST)), strict=True)
    found = [_sweep(vit, batch, which.to(batch.device)) for batch, which in parts]
    grid, prefix = grid_of(vit.config, images), vit.config.prefix_tokens
    both = (torch.cat(maps, dim=1).transpose(0, 1).cpu() for maps in zip(*found, strict=True))
    return ClassRelevance(*(to_grid(maps, prefix, grid).numpy() for maps in both))


def check_classes(model: ViT, classes: Tensor) -> None:
    count = model.config.classes
    if not count:
        raise InputError("the model has no classifier (classes=0), so no class can be explained; fine-tune it first")
    wrong = classes[(classes < 0) | (classes >= count)]
    if len(wrong):
        raise InputError(f"class {wrong[0]} does not exist; the model has classes 0 to {count - 1}")


def _sweep(model: ViT, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance and Grad-CAM of all tokens, each K B T, from the last layer to the first."""
    with torch.no_grad():
        before = states(model, images, range(model.config.depth + 1))
        start = readout(model, images)  # B T
        place = model.embedded(images)[1]
    flowing, rows, cam = _from_head(model, before.pop(), classes, start)  # K B T D, K B T, K B T
    cams = []
    for i, block in reversed(list(enumerate(model.encoder.blocks))):
        assert isinstance(block, Block)
        flowing, rows, of_block = _through_block(block, before.pop(), place.at(i), flowing, rows)
        cams.append(of_block)
    return rows, cams[0] if model.config.pooling == "cls" else cam


def _from_head(model: ViT, x: Tensor, classes: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the class scores at the last states (K B T D), where relevance starts and Grad-CAM (K B T)."""
    probe: list[Tensor] = []  # attention of a MAP head, B H 1 T
    with torch.enable_grad():
        x = x.requires_grad_()
        tokens = x if model.norm is None else model.norm(x)
        scores = model.head(tokens, on_weights=probe.append)  # B classes
        wanted = scores.gather(1, classes).sum(dim=0)  # K
    flowing, rows, cams = [], [], []
    for k, score in enumerate(wanted):
        got = torch.autograd.grad(score, (x, tokens, *probe), retain_graph=k + 1 < len(wanted))
        flowing.append(got[0])
        cams.append(_gradcam(tokens.detach(), got[1], model.config.prefix_tokens))
        # the probe's attention is weighted by its gradient, like that of every layer
        seen = (probe[0].detach() * got[2]).clamp_min(0).mean(dim=1)[:, 0] if probe else start
        rows.append(F.pad(seen, (x.shape[1] - seen.shape[-1], 0)))  # a probe may look at the patches alone
    return torch.stack(flowing), torch.stack(rows), torch.stack(cams)


def _through_block(block: Block, x: Tensor, place: Place, flowing: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """One block backwards: gradients at its input (K B T D), relevance before it, and Grad-CAM of what it reads."""
    kept: list[Tensor] = []
    read: list[Tensor] = []
    with torch.enable_grad(), block.attention.register_forward_pre_hook(lambda module, args: read.append(args[0])):
        x = x.requires_grad_()
        y = block(x, place, kept.append)
    before, carried, cams, wanted = [], [], [], (x, kept[0], read[0])
    for k in range(len(flowing)):
        to_x, to_weights, to_read = torch.autograd.grad(y, wanted, flowing[k], retain_graph=k + 1 < len(flowing))
        step = (kept[0].detach() * to_weights).clamp_min_(0).mean(dim=1)  # B T T
        before.append(to_x)
        carried.append(rows[k] + (rows[k][:, None] @ step)[:, 0])
        cams.append(_gradcam(read[0].detach(), to_read, rows.shape[-1] - place.grid[0] * place.grid[1]))
    return torch.stack(before), torch.stack(carried), torch.stack(cams)


def _gradcam(states: Tensor, gradients: Tensor, prefix: int) -> Tensor:
    """B T D twice -> B T: channels weighted by their mean gradient over the patches, what is negative dropped."""
    channels = gradients[:, prefix:].mean(dim=1, keepdim=True)  # B 1 D
    return (states * channels).sum(dim=-1).clamp_min(0)


def relevance_of(subject: Subject) -> ClassRelevance:
    subject.need_classifier()
    return class_relevance(subject.vit, subject.images.images, subject.explained)


def make(subject: Subject) -> Section:
    """Per image: itself, relevance for each class, and Grad-CAM for the first class, each on a scale of its own.

    Scales begin at the smallest value: where patches are averaged, each has its share before anything is learned.
    """
    found, names, rows, labels = subject.once(relevance_of), subject.images.names, [], []
    for i, image in enumerate(subject.images.shown()):
        rows.append([image, *(overlay(image, values) for values in (*found.relevance[i], found.gradcam[i, 0]))])
        words = [subject.prediction(i, c) for c in subject.explained[i].tolist()]
        labels.append([names[i], *words, words[0]])
    classes, probability = subject.explained, subject.predicted.gather(1, subject.explained).numpy()
    finding = f"Half of the relevance is on {np.mean([half_mass(m[0]) for m in found.relevance]):.0%} of the image"
    if found.relevance.shape[1] > 1:
        alike = float(np.mean([correlation(m[0], m[1]) for m in found.relevance]))
        verdict = "differ between classes" if alike < 0.9 else "are nearly the same for both classes"
        finding = f"The maps {verdict}: their mean correlation is {alike:.2f}"
    return Section(
        heading="Relevance for a value" if subject.predicts_values else "Relevance for a class",
        finding=finding,
        alt=f"{len(rows)} images, each with a relevance map for {found.relevance.shape[1]} outputs and Grad-CAM.",
        how="What in the image raises the score of the class (or the value) named below each map. Attention of all "
        "layers weighted by the gradient of the score, negative values dropped (Chefer et al.). Each map is shown from "
        f"its smallest value to its {100 * TOP:.0f}th percentile. Grad-CAM is for the first class, on the last patch "
        "states that reach the classifier.",
        arrays=vars(found) | {"classes": classes.numpy(), "probability": probability, "names": np.array(names)},
        draw=lambda: image_rows(rows, ["image", *columns_of(subject), "Grad-CAM"], labels),
    )


def columns_of(subject: Subject) -> list[str]:
    if subject.predicts_values:
        return [f"what raises {subject.class_name(c)}?" for c in subject.explained[0].tolist()]
    if subject.classes is not None:
        return [f"why {subject.class_name(c)}?" for c in subject.classes]
    return ["why the likeliest?", "why the second?"][: subject.explained.shape[1]]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's, of two maps; 0 when one of them is constant."""
    a, b = a.reshape(-1) - a.mean(), b.reshape(-1) - b.mean()
    length = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / length if length > 0 else 0.0
