"""What a client gets: a `Problem` when it cannot be served, and what the OpenAPI description says about all answers."""

from __future__ import annotations

import json
from typing import Literal

from fastapi.responses import Response
from pydantic import BaseModel, Field

from vitkit.errors import VitkitError


class Problem(VitkitError):
    """An answer that is not what was asked for. `code` stays the same between versions; the words may not."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def response(self, path: str = "") -> Response:
        """As our API has it, or below /v2 as the Open Inference Protocol does: the words alone."""
        plain = path == "/v2" or path.startswith("/v2/")
        body = json.dumps(
            {"error": str(self) if plain else {"code": self.code, "message": str(self)}}, ensure_ascii=False
        )
        headers = {401: {"WWW-Authenticate": 'Bearer realm="vitkit"'}, 503: {"Retry-After": "1"}}.get(self.status)
        return Response(body.encode(errors="replace"), self.status, headers, media_type="application/json")


# --- what OpenAPI says -------------------------------------------------------------------------------

ABOUT = """Ask a Vision Transformer what it sees, and why.

Images are sent as they are, in the body or as the files of a form; options go into the address:

    curl --data-binary @cat.jpg http://127.0.0.1:8000/api/v1/predict
    curl -F a=@cat.jpg -F b=@dog.jpg 'http://127.0.0.1:8000/api/v1/predict?top=3'
    curl --data-binary @cat.jpg 'http://127.0.0.1:8000/api/v1/explain?method=relevance&format=png' -o why.png

Every address under `/api/v1` also answers under `/api`. Errors are JSON: a code for programs and a sentence for people.
With `--token`, send `Authorization: Bearer TOKEN`.
"""
LIMITS = ("max_bytes", "max_pixels", "max_request_pixels", "max_pictures")  # that a client should know
Responses = dict[int | str, dict[str, object]]  # by status
STATUSES = {
    400: "The request is not proper HTTP, or names a host that this server is not.",
    401: "A token is needed.",
    403: "A page of another site asked.",
    404: "The model or the data set has no such thing.",
    408: "The upload took too long.",
    413: "The request is too large.",
    415: "Not an image.",
    422: "An image that cannot be read, or a wrong field.",
    500: "The model failed.",
    503: "The queue is full; see Retry-After.",
    504: "No answer in time.",
}


class ErrorText(BaseModel):
    code: str = Field(examples=["not_an_image"])
    message: str = Field(examples=["not an image; send JPEG, PNG, WebP, GIF, BMP, TIFF or another common format"])


class ErrorAnswer(BaseModel):
    error: ErrorText


class ErrorWords(BaseModel):
    error: str = Field(examples=["there is no input 'x'; send one of: image, pixels, input"])


def problems(*statuses: int, model: type[BaseModel] = ErrorAnswer) -> Responses:
    return {status: {"model": model, "description": STATUSES[status]} for status in statuses}


class RankedClass(BaseModel):
    class_: int = Field(alias="class", examples=[281])
    name: str = Field(examples=["tabby"])
    probability: float = Field(ge=0, le=1, examples=[0.87])


class Value(BaseModel):
    name: str = Field(examples=["age"])
    value: float = Field(examples=[34.2])


class Prediction(BaseModel):
    file: str | None = Field(None, description="The name that the form gave the file.", examples=["cat.jpg"])
    classes: list[RankedClass] = Field(description="The likeliest first; none where the model predicts numbers.")
    values: list[Value] | None = Field(None, description="Of a model that predicts numbers, in its order.")
    picture: str = Field("", description="With image=true: what the model saw, as a data: address of a PNG.")


class PredictAnswer(BaseModel):
    model: str = Field(examples=["demo"])
    predictions: list[Prediction] = Field(description="One for each image, in the order they were sent.")


class ExplainAnswer(BaseModel):
    model: str = Field(examples=["demo"])
    method: str = Field(examples=["relevance"])
    axes: list[str] = Field(description="What the dimensions of values are.", examples=[["row", "column"]])
    shape: list[int] = Field(examples=[[2, 2]])
    values: list[object] = Field(description="Nested lists.", examples=[[[0.1, 0.2], [0.7, 0.0]]])
    layers: list[int] | None = Field(None, description="The layers shown, counted from 0.")
    classes: list[dict[str, object]] | None = Field(None, description="The classes explained.")


class OutputsAnswer(BaseModel):
    kind: Literal["classes", "labels", "values"] = Field(description="One of several, any number, or numbers.")
    names: list[str] = Field(examples=[["cat", "dog"]])


class ModelAnswer(BaseModel):
    name: str = Field(examples=["demo"])
    models: list[str] = Field(description="All that are served here.", examples=[["demo"]])
    notes: list[str] = Field(description="What was assumed when it was loaded.")
    runtime: str = Field(examples=["eager"])
    classes: list[str] = Field(examples=[["cat", "dog"]])
    outputs: OutputsAnswer
    channels: int = Field(examples=[3])
    image_size: list[int] = Field(description="Height and width.", examples=[[224, 224]])
    fit: str = Field(description="How an image is brought to that size.", examples=["crop"])
    crop: float = Field(description="The share of the shorter side that is cut out of the centre.", examples=[0.875])
    trained: bool = Field(description="False: the weights are fresh.")
    params: int = Field(examples=[5717416])
    gmacs: float = Field(examples=[1.254])
    explainable: bool
    data: bool = Field(description="Whether a data set is served too.")
    limits: dict[str, float] = Field(examples=[{"max_bytes": 16777216, "max_pixels": 50000000, "max_pictures": 32}])


class DataAnswer(BaseModel):
    name: str = Field(examples=["photos"])
    count: int = Field(description="Images.", examples=[5000])
    digest: str = Field(description="Of the index.")
    model: str = Field(description="What made the features.", examples=["descriptor"])
    method: str = Field(description="What made the map.", examples=["tsne"])
    prefix: int = Field(description="Characters that all names begin with.")
    columns: list[str] = Field(description="Of data/points.", examples=[["x", "y", "slot", "label", "split"]])
    values: dict[str, list[str]] = Field(description="What the numbers of a column mean; -1 is none.")
    tile: int = Field(description="Pixels of a thumbnail.")
    sheet_columns: int = Field(description="Thumbnails along a side of a sheet.")
    sheets: int
    models: list[str] = Field(description="Models that are served too.")
    limits: dict[str, float]


class NeighbourAnswer(BaseModel):
    row: int = Field(description="The number of the image.")
    similarity: float = Field(description="Cosine of the features.", examples=[0.93])


class NeighboursAnswer(BaseModel):
    row: int | None = Field(None, description="The image that was asked about, where it is one of the set.")
    neighbours: list[NeighbourAnswer] = Field(description="The most alike first.")


class Health(BaseModel):
    status: str = Field(examples=["ok"])


_BINARY = {"schema": {"type": "string", "format": "binary"}}


def image_body(what: str) -> dict[str, object]:
    """The request body of a route that reads it itself."""
    form = {"schema": {"type": "object", "properties": {"image": _BINARY["schema"]}, "required": ["image"]}}
    kinds = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
    content = {**dict.fromkeys(kinds, _BINARY), "multipart/form-data": form}
    return {"requestBody": {"description": f"{what}, raw or as a form.", "required": True, "content": content}}


class ServerAnswer(BaseModel):
    name: str = Field(examples=["vitkit"])
    version: str
    extensions: list[str] = Field(examples=[["binary_tensor_data"]])


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    name: str | None = Field(None, examples=["demo"])
    ready: bool


class TensorAbout(BaseModel):
    name: str = Field(examples=["image"])
    datatype: str = Field(examples=["BYTES"])
    shape: list[int] = Field(description="-1: any number.", examples=[[-1]])


class ModelMetadata(BaseModel):
    name: str = Field(examples=["demo"])
    versions: list[str] = Field(examples=[["1"]])
    platform: str = Field(examples=["vitkit_eager"])
    inputs: list[TensorAbout] = Field(description="One of them is sent.")
    outputs: list[TensorAbout]


_TENSORS = {"schema": {"type": "object", "properties": {"inputs": {"type": "array"}}, "required": ["inputs"]}}
TENSORS: dict[str, object] = {
    "requestBody": {
        "description": "Tensors, as JSON or with the binary tensor extension.",
        "required": True,
        "content": {"application/json": _TENSORS, "application/octet-stream": _BINARY},
    }
}
TENSOR_ANSWER: Responses = {200: {"content": {"application/octet-stream": _BINARY, "application/json": {}}}}
ANY_BODY: Responses = {200: {"content": {"application/octet-stream": _BINARY, "image/png": _BINARY}}}
JPEG: Responses = {200: {"content": {"image/jpeg": _BINARY}}}
NPY: Responses = {200: {"content": {"application/octet-stream": _BINARY}}}
