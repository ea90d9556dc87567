"""What the OpenAPI description says about bodies and answers, with examples. Nothing here runs for a request."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

CURL = "curl --data-binary @cat.jpg http://127.0.0.1:8000/api/v1/predict"
ABOUT = f"""Ask a Vision Transformer what it sees, and why.

Pictures are sent as they are, in the body or as the files of a form; options go into the address:

    {CURL}
    curl -F a=@cat.jpg -F b=@dog.jpg 'http://127.0.0.1:8000/api/v1/predict?top=3'
    curl --data-binary @cat.jpg 'http://127.0.0.1:8000/api/v1/explain?method=relevance&format=png' -o why.png

Every address under `/api/v1` also answers under `/api`. Errors are JSON: a code for programs and a sentence for people.
With `--token`, send `Authorization: Bearer TOKEN`.
"""


class ErrorText(BaseModel):
    code: str = Field(examples=["not_an_image"])
    message: str = Field(examples=["not a picture; send JPEG, PNG, WebP, GIF, BMP, TIFF or another common format"])


class ErrorAnswer(BaseModel):
    error: ErrorText


class RankedClass(BaseModel):
    class_: int = Field(alias="class", examples=[281])
    name: str = Field(examples=["tabby"])
    probability: float = Field(ge=0, le=1, examples=[0.87])


class Prediction(BaseModel):
    file: str | None = Field(None, description="The name that the form gave the file.", examples=["cat.jpg"])
    classes: list[RankedClass] = Field(description="The likeliest first.")
    picture: str = Field("", description="With picture=true: what the model saw, as a data: address of a PNG.")


class PredictAnswer(BaseModel):
    model: str = Field(examples=["demo"])
    predictions: list[Prediction] = Field(description="One for each picture, in the order they were sent.")


class ExplainAnswer(BaseModel):
    model: str = Field(examples=["demo"])
    method: str = Field(examples=["relevance"])
    axes: list[str] = Field(description="What the dimensions of values are.", examples=[["row", "column"]])
    shape: list[int] = Field(examples=[[2, 2]])
    values: list[Any] = Field(description="Nested lists.", examples=[[[0.1, 0.2], [0.7, 0.0]]])
    layers: list[int] | None = Field(None, description="The layers shown, counted from 0.")
    classes: list[dict[str, Any]] | None = Field(None, description="The classes explained.")


class ModelAnswer(BaseModel):
    name: str = Field(examples=["demo"])
    models: list[str] = Field(description="All that are served here.", examples=[["demo"]])
    notes: list[str] = Field(description="What was assumed when it was loaded.")
    runtime: str = Field(examples=["eager"])
    classes: list[str] = Field(examples=[["cat", "dog"]])
    channels: int = Field(examples=[3])
    image_size: list[int] = Field(description="Height and width.", examples=[[224, 224]])
    params: int = Field(examples=[5717416])
    gmacs: float = Field(examples=[1.254])
    explainable: bool
    limits: dict[str, float] = Field(examples=[{"max_bytes": 16777216, "max_pixels": 50000000, "max_pictures": 32}])


class Health(BaseModel):
    status: str = Field(examples=["ok"])


_BINARY = {"schema": {"type": "string", "format": "binary"}}


def picture_body(several: bool) -> dict[str, Any]:
    """The request body of a route that reads it itself."""
    file = {"type": "string", "format": "binary"}
    form = {"schema": {"type": "object", "properties": {"image": file}, "required": ["image"]}}
    kinds = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
    what = "One or more pictures" if several else "One picture"
    content = dict.fromkeys(kinds, _BINARY) | {"multipart/form-data": form}
    return {"requestBody": {"description": f"{what}, raw or as a form.", "required": True, "content": content}}


_WORDS = {
    400: "The request is not proper HTTP, or names a host that this server is not.",
    401: "A token is needed.",
    404: "The model has no such thing.",
    408: "The upload took too long.",
    413: "The request is too large.",
    415: "Not a picture.",
    422: "A picture that cannot be read, or a wrong field.",
    500: "The model failed.",
    503: "The queue is full; see Retry-After.",
    504: "No answer in time.",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorAnswer, "description": _WORDS[status]} for status in statuses}


READING = problems(400, 401, 422)
ASKING = problems(400, 401, 408, 413, 415, 422, 500, 503, 504)
ANY_BODY = {"application/octet-stream": _BINARY, "image/png": _BINARY}
