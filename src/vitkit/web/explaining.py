"""One picture, one question -> arrays, as JSON, .npy or a PNG. Always by PyTorch as it is, whatever runtime predicts.

Shapes: L layers, H heads, T tokens, h x w grid of patches, K classes.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import InputError
from vitkit.explain.attention import output_attention, with_residual
from vitkit.explain.distance import attention_distance
from vitkit.explain.inside import attention_weights, grid_of, readout, to_grid
from vitkit.explain.query import check_patch, query_attention
from vitkit.explain.relevance import class_relevance
from vitkit.web.colours import overlay
from vitkit.web.models import Served
from vitkit.web.pictures import to_picture, to_png
from vitkit.web.problems import Problem

Method = Literal["attention", "rollout", "relevance", "gradcam", "distance"]
Format = Literal["json", "npy", "png"]
MOST_VALUES = 2**24  # in one answer
MOST_JSON = 2**19


@dataclass(frozen=True)
class Question:
    method: Method = "attention"
    layer: str = "-1"  # a number from 0, from the end when negative; or "all"
    head: str = "mean"  # a number from 0, "mean" or "all"
    query: str = "output"  # whose attention: the output token's, that of the patch ROW,COLUMN, or "all" patches'
    classes: tuple[str, ...] = ()  # numbers or names; none: the likeliest
    format: Format = "json"
    strength: float = 0.7  # of the colours in a PNG


@dataclass(frozen=True)
class Found:
    axes: list[str]
    values: np.ndarray
    more: dict[str, Any]


def explain(served: Served, pixels: Tensor, question: Question) -> tuple[bytes, str]:
    """The body of the answer and its media type."""
    images = served.normalised([pixels])
    try:
        found = _METHODS[question.method](served, images, question)
    except InputError as e:
        raise Problem(422, "bad_field", str(e)) from None
    if found.values.size > MOST_VALUES:
        raise _too_many(found, MOST_VALUES)
    if question.format == "png":
        return _png(pixels, found, question.strength), "image/png"
    if question.format == "npy":
        out = io.BytesIO()
        np.save(out, found.values.astype("<f4"), allow_pickle=False)
        return out.getvalue(), "application/octet-stream"
    if found.values.size > MOST_JSON:
        raise _too_many(found, MOST_JSON, " or format=npy")
    return _json(served, found, question), "application/json"


# --- what can be asked -------------------------------------------------------------------------------


def _attention(served: Served, images: Tensor, question: Question) -> Found:
    model, grid = served.vit, grid_of(served.vit.config, images)
    layers = _layers(question, model.config.depth)
    if question.query == "output":
        values, axes = output_attention(model, images).raw[0][layers], []  # L H h w
    elif question.query == "all":
        _check_count(len(layers) * model.config.heads * (grid[0] * grid[1]) ** 2, question)
        prefix = model.config.prefix_tokens
        kept = [w[0, :, prefix:] for w in attention_weights(model, images, layers)]  # each H N T
        values = to_grid(torch.stack(kept), prefix, grid).unflatten(2, grid).float().cpu().numpy()  # L H h w h w
        axes = ["query_row", "query_column"]
    else:
        values, axes = query_attention(model, images, _patch(question.query), layers)[0], []
    values, axes = _chosen_head(values, ["layer", "head", *axes, "row", "column"], question)
    return _chosen_layer(values, axes, layers, question)


def _rollout(served: Served, images: Tensor, question: Question) -> Found:
    """Rolled out from the input to each of the layers."""
    model, grid = served.vit, grid_of(served.vit.config, images)
    layers, prefix = _layers(question, model.config.depth), model.config.prefix_tokens
    if question.query == "all":
        _check_count(len(layers) * (grid[0] * grid[1]) ** 2, question)
    share = readout(model, images)[0]  # T
    patch = None if question.query in ("output", "all") else prefix + check_patch(_patch(question.query), grid)
    found: list[Tensor] = []
    total: list[Tensor] = []

    def look(weights: Tensor) -> None:
        step = with_residual(weights)[0]  # T T
        total[:] = [step @ total[0] if total else step]
        depth = len(found)
        wanted = depth in layers
        if question.query == "output":
            found.append(share.to(step) @ total[0])  # T
        elif patch is not None:
            found.append(total[0][patch])
        else:
            found.append(total[0][prefix:] if wanted else total[0][:0])  # N T

    with torch.no_grad():
        model.tokens(images, on_weights=look)
    values = to_grid(torch.stack([found[layer] for layer in layers]), prefix, grid)
    axes = ["layer", "row", "column"]
    if question.query == "all":
        values, axes = values.unflatten(1, grid), ["layer", "query_row", "query_column", "row", "column"]
    return _chosen_layer(values.float().cpu().numpy(), axes, layers, question)


def _relevance(served: Served, images: Tensor, question: Question) -> Found:
    model = served.vit
    if not model.config.classes:
        raise Problem(422, "no_classes", f"{served.name} has no classifier, so there is no class to explain")
    if question.classes:
        classes = [served.class_of(word) for word in question.classes]
    else:
        with torch.no_grad():
            classes = [int(model(images)[0].argmax())]
    found = class_relevance(model, images, torch.tensor([classes], device=images.device))
    values = (found.relevance if question.method == "relevance" else found.gradcam)[0]  # K h w
    told = {"classes": [{"class": c, "name": served.classes[c]} for c in classes]}
    if len(classes) > 1:
        return Found(["class", "row", "column"], values, told)
    return Found(["row", "column"], values[0], told)


def _distance(served: Served, images: Tensor, question: Question) -> Found:
    reach = attention_distance(served.vit, images)
    more = {"entropy": reach.entropy[0].round(5).tolist(), "unit": "pixels"}
    more |= {"uniform_distance": reach.uniform_distance, "uniform_entropy": reach.uniform_entropy}
    return Found(["layer", "head"], reach.distance[0], more)


_METHODS = {
    "attention": _attention,
    "rollout": _rollout,
    "relevance": _relevance,
    "gradcam": _relevance,
    "distance": _distance,
}


# --- fields ------------------------------------------------------------------------------------------


def _layers(question: Question, depth: int) -> list[int]:
    if question.layer == "all":
        return list(range(depth))
    layer = int(question.layer)
    if not -depth <= layer < depth:
        told = f"layer={layer} does not exist; the model has layers 0 to {depth - 1}, or -1 for the last, or 'all'"
        raise Problem(422, "bad_field", told)
    return [layer % depth]


def _patch(query: str) -> tuple[int, int]:
    row, column = query.split(",")
    return int(row), int(column)


def _chosen_head(values: np.ndarray, axes: list[str], question: Question) -> tuple[np.ndarray, list[str]]:
    heads = values.shape[1]
    if question.head == "all":
        return values, axes
    if question.head == "mean":
        values = values.mean(axis=1)
    elif int(question.head) < heads:
        values = values[:, int(question.head)]
    else:
        told = f"head={question.head} does not exist; the model has heads 0 to {heads - 1}, 'mean' or 'all'"
        raise Problem(422, "bad_field", told)
    return values, [axes[0], *axes[2:]]


def _chosen_layer(values: np.ndarray, axes: list[str], layers: list[int], question: Question) -> Found:
    if question.layer == "all":
        return Found(axes, values, {"layers": layers})
    return Found(axes[1:], values[0], {"layers": layers})


def _check_count(count: int, question: Question) -> None:
    """Before the memory is taken, not after."""
    if count > 4 * MOST_VALUES:
        told = f"query=all with layer={question.layer} is {count:,} values; ask for one layer, or one patch"
        raise Problem(422, "too_many", told)


def _too_many(found: Found, most: int, other: str = "") -> Problem:
    told = f"the answer would hold {found.values.size:,} values, more than {most:,}; choose a layer, a head{other}"
    return Problem(422, "too_many", told)


# --- answers -----------------------------------------------------------------------------------------


def _json(served: Served, found: Found, question: Question) -> bytes:
    def rounded(values: Any) -> Any:
        return [rounded(v) for v in values] if isinstance(values, list) else float(f"{values:.6g}")

    about = {"model": served.name, "method": question.method, "axes": found.axes, "shape": list(found.values.shape)}
    body = {**about, "values": rounded(found.values.tolist()), **found.more}
    return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()


def _png(pixels: Tensor, found: Found, strength: float) -> bytes:
    if found.axes != ["row", "column"]:
        told = f"format=png draws one map over the picture, and this has the axes {', '.join(found.axes)}"
        raise Problem(422, "bad_field", f"{told}; choose one layer, head, class and patch, or format=json")
    return to_png(overlay(to_picture(pixels), found.values, strength))
