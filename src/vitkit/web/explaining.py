"""One image, one question -> arrays, as JSON, .npy or a PNG. Always by PyTorch as it is, whatever runtime predicts.

Shapes: L layers, H heads, T tokens, h x w grid of patches, K classes.
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from fastapi import Query
from torch import Tensor

from vitkit.data.preprocess import normalise
from vitkit.errors import InputError
from vitkit.explanation.attention import output_attention, query_attention, rollouts
from vitkit.explanation.distance import attention_distance
from vitkit.explanation.inside import attention_weights, grid_of, to_grid
from vitkit.explanation.relevance import class_relevance
from vitkit.figures.overlay import overlay
from vitkit.web.answers import Problem
from vitkit.web.body import to_png
from vitkit.web.models import Served

Method = Literal["attention", "rollout", "relevance", "gradcam", "distance"]
Format = Literal["json", "npy", "png"]
PATCH = r"^(output|all|\d{1,4},\d{1,4})$"
QUERY = "'output', a patch as ROW,COLUMN (counted from 0), or 'all'."
CLASSES = "Names, or numbers (#3 is always a number); default: the likeliest."
MOST_VALUES = 2**24  # in one answer
MOST_JSON = 2**19
Explained = tuple[bytes, str]  # the body of an answer and its media type


@dataclass(frozen=True)
class Question:
    """The fields of the address: FastAPI reads them from here. (So annotations in this file are no strings.)"""

    method: Annotated[Method, Query(description="What to compute.")] = "attention"
    layer: Annotated[str, Query(pattern=r"^(all|-?\d{1,4})$", description="From 0; -1 is the last; or 'all'.")] = "-1"
    head: Annotated[str, Query(pattern=r"^(mean|all|\d{1,4})$", description="From 0; 'mean' or 'all'.")] = "mean"
    query: Annotated[str, Query(pattern=PATCH, description=QUERY)] = "output"
    classes: Annotated[list[str] | None, Query(alias="class", max_length=16, description=CLASSES)] = None
    format: Annotated[Format, Query(description="json, npy (float32) or png (the map over the image).")] = "json"
    strength: Annotated[float, Query(ge=0, le=1, description="Of the colours in a PNG.")] = 0.7

    @property
    def patch(self) -> tuple[int, int] | None:
        row, _, column = self.query.partition(",")
        return (int(row), int(column)) if column else None


class Map(NamedTuple):
    axes: list[str]
    values: np.ndarray
    more: dict[str, object]


def explain(served: Served, pixels: Tensor, question: Question) -> Explained:
    device = next(served.model.parameters()).device
    images = normalise(pixels[None].to(device), served.model.config.preprocessing)  # one, where the weights are
    try:
        made = _METHODS[question.method](served, images, question)
    except InputError as e:
        raise Problem(422, "bad_field", str(e)) from None
    size, most = made.values.size, MOST_JSON if question.format == "json" else MOST_VALUES
    if size > most:
        action = "choose a layer, a head" + " or format=npy" * (size <= MOST_VALUES)
        raise Problem(422, "too_many", f"the answer would hold {size:,} values, more than {most:,}; {action}")
    if question.format == "png":
        if made.axes != ["row", "column"]:
            message = f"format=png draws one map over the image, and this has the axes {', '.join(made.axes)}"
            raise Problem(422, "bad_field", f"{message}; choose one layer, head, class and patch, or format=json")
        image = pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()  # H W 3, also of a grey one
        return to_png(overlay(image, made.values, question.strength)), "image/png"
    if question.format == "npy":
        out = io.BytesIO()
        np.save(out, made.values.astype("<f4"), allow_pickle=False)
        return out.getvalue(), "application/octet-stream"
    rounded = np.reshape([float(f"{v:.6g}") for v in made.values.ravel().tolist()], made.values.shape).tolist()
    head = {"model": served.name, "method": question.method, "axes": made.axes, "shape": list(made.values.shape)}
    body = {**head, "values": rounded, **made.more}
    return json.dumps(body, ensure_ascii=False, allow_nan=False).encode(), "application/json"


# --- what can be asked -------------------------------------------------------------------------------


def _attention(served: Served, images: Tensor, question: Question) -> Map:
    model, grid = served.vit, grid_of(served.vit.config, images)
    layers, axes = _layers(question, model.config.depth), ["layer", "head", "row", "column"]
    if question.patch is not None:
        values = query_attention(model, images, question.patch, layers)[0]  # L H h w
    elif question.query == "output":
        values = output_attention(model, images).raw[0][layers]
    else:
        _check_count(len(layers) * model.config.all_heads * (grid[0] * grid[1]) ** 2, question)
        prefix = model.config.prefix_tokens
        weights = [w[0, :, prefix:] for w in attention_weights(model, images, layers)]  # each H N T
        values = to_grid(torch.stack(weights), prefix, grid).unflatten(2, grid).float().cpu().numpy()  # L H h w h w
        axes[2:2] = ["query_row", "query_column"]
    if question.head != "all":
        heads, axes = model.config.all_heads, [axis for axis in axes if axis != "head"]
        chosen = range(heads) if question.head == "mean" else [_index("head", question.head, heads, "'mean' or 'all'")]
        values = values[:, list(chosen)].mean(axis=1)
    return _map(axes, values, question.layer == "all", {"layers": layers})


def _rollout(served: Served, images: Tensor, question: Question) -> Map:
    """Rolled out from the input to each of the layers."""
    config, grid = served.vit.config, grid_of(served.vit.config, images)
    layers, axes = _layers(question, config.depth), ["layer", "row", "column"]
    if question.query == "all":
        _check_count(len(layers) * (grid[0] * grid[1]) ** 2, question)
        axes[1:1] = ["query_row", "query_column"]
    whole: Literal["all", "output"] = "all" if question.query == "all" else "output"
    values = rollouts(served.vit, images, layers, question.patch or whole)[0]
    return _map(axes, values, question.layer == "all", {"layers": layers})


def _relevance(served: Served, images: Tensor, question: Question) -> Map:
    if not served.names:
        raise Problem(422, "no_classes", f"{served.name} has no classifier, so there is no class to explain")
    classes = [served.find_output(word) for word in question.classes or ()]
    if not classes:  # the likeliest class, or the first value
        with torch.no_grad():
            classes = [0 if served.model.outputs.kind == "values" else int(served.vit(images)[0].argmax())]
    maps = class_relevance(served.vit, images, torch.tensor([classes], device=images.device))
    values = (maps.relevance if question.method == "relevance" else maps.gradcam)[0]  # K h w
    named = [{"class": c, "name": served.names[c]} for c in classes]
    return _map(["class", "row", "column"], values, len(classes) > 1, {"classes": named})


def _distance(served: Served, images: Tensor, question: Question) -> Map:
    reach = attention_distance(served.vit, images)
    more = {"entropy": reach.entropy[0].round(5).tolist(), "unit": "pixels"}
    more |= {"uniform_distance": reach.uniform_distance, "uniform_entropy": reach.uniform_entropy}
    return Map(["layer", "head"], reach.distance[0], more)


_METHODS: dict[str, Callable[[Served, Tensor, Question], Map]] = {
    "attention": _attention,
    "rollout": _rollout,
    "relevance": _relevance,
    "gradcam": _relevance,
    "distance": _distance,
}


def _layers(question: Question, depth: int) -> list[int]:
    if question.layer == "all":
        return list(range(depth))
    return [_index("layer", question.layer, depth, "or -1 for the last, or 'all'")]


def _index(name: str, value: str, count: int, others: str) -> int:
    if -count <= int(value) < count:
        return int(value) % count
    raise Problem(422, "bad_field", f"{name}={value} does not exist; the model has {name}s 0 to {count - 1}, {others}")


def _map(axes: list[str], values: np.ndarray, several: bool, more: dict[str, object]) -> Map:
    """Without its first axis where only one layer or class was asked for."""
    return Map(axes, values, more) if several else Map(axes[1:], values[0], more)


def _check_count(count: int, question: Question) -> None:
    """Before the memory is taken, not after."""
    if count > 4 * MOST_VALUES:
        message = f"query=all with layer={question.layer} is {count:,} values; ask for one layer, or one patch"
        raise Problem(422, "too_many", message)
