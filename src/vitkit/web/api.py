"""The addresses as a table: a new one is one function and one row of ROUTES. The service does the work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, NamedTuple

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from pydantic import BaseModel

from vitkit.errors import did_you_mean
from vitkit.web import answers as doc
from vitkit.web import exploring as data
from vitkit.web import inference as v2
from vitkit.web.assets import ASSETS, KINDS
from vitkit.web.explaining import Question
from vitkit.web.service import Service

V1 = "/api/v1/"  # every address below it also answers under /api/


def service_of(request: Request) -> Service:
    return request.app.state.service


def fields_of(request: Request) -> dict[str, str]:
    """The fields that an address takes, with their descriptions."""
    fields = get_flat_params(request.scope["route"].dependant)
    return {field.alias: field.field_info.description or "" for field in fields}


async def known_fields_only(request: Request) -> None:
    """A misspelt field is an error, not a silent default. (Not `async`, it would be run in a thread.)"""
    known = fields_of(request)
    if wrong := [name for name in request.query_params if name not in known]:
        hint = f"{did_you_mean(wrong[0], known)} Known: {', '.join(sorted(known))}"
        raise doc.Problem(422, "bad_field", f"there is no field {wrong[0][:60]!r}.{hint}")


ModelName = Annotated[str | None, Query(description="Which model, by name; the first when left out.", max_length=200)]
Prepared = Annotated[bool, Query(description="The image is already what the model sees: do not resize or cut it.")]


async def predict(
    request: Request,
    model: ModelName = None,
    top: Annotated[int, Query(ge=1, le=100_000, description="How many classes.")] = 5,
    image: Annotated[bool, Query(description="Also return each image as the model sees it.")] = False,
    picture: Annotated[bool, Query(description="The same, by its older name.", deprecated=True)] = False,
    prepared: Prepared = False,
) -> Response:
    service = service_of(request)
    body = await service.predict(request, service.model(model), top, image or picture, prepared)
    return Response(body, media_type="application/json")


async def explain(
    request: Request, question: Annotated[Question, Depends()], model: ModelName = None, prepared: Prepared = False
) -> Response:
    service = service_of(request)
    body, kind = await service.explain(request, service.model(model), question, prepared)
    return Response(body, media_type=kind)


async def about(request: Request, model: ModelName = None) -> Response:
    service = service_of(request)
    answer = {**await service.in_thread(service.model(model).describe), "data": service.data is not None}
    limits = {key: getattr(service.settings, key) for key in doc.LIMITS}
    return JSONResponse({**answer, "models": [served.name for served in service.models], "limits": limits})


def part(name: str) -> Callable[..., Awaitable[Response]]:
    """A route that answers with one part of the model, made once, in a thread."""

    async def answer(request: Request, model: ModelName = None) -> Response:
        service = service_of(request)
        text = await service.in_thread(lambda: json.dumps(getattr(service.model(model), name), ensure_ascii=False))
        return Response(text, media_type="application/json")

    answer.__name__ = name
    return answer


async def healthz() -> Response:
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    service_of(request).check_ready()
    return JSONResponse({"status": "ready"})


async def metrics(request: Request) -> Response:
    return Response(generate_latest(service_of(request).metrics.registry), media_type="text/plain; version=0.0.4")


class Route(NamedTuple):
    """One address. What OpenAPI says of its fields stands in the handler's signature; its name is the operation's."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Response]]
    summary: str
    others: doc.Responses = doc.problems(400, 422)  # what else it answers, by status
    answer: type[BaseModel] | None = None
    body: dict[str, object] | None = None  # of the request
    response: type[Response] = JSONResponse


READING = doc.problems(400, 401, 422)
ASKING = doc.problems(400, 401, 403, 408, 413, 415, 422, 500, 503, 504)
EXPLORING = doc.problems(400, 401, 404, 422)
SHOWING, SEARCHING = EXPLORING | doc.problems(415, 503), ASKING | doc.problems(404)
V2, WORDS = v2.ROOT, doc.ErrorWords  # the Open Inference Protocol, which has errors of its own
PROTOCOL = doc.problems(400, 401, 404, 422, 503, model=WORDS)
INFERRING = doc.problems(400, 401, 403, 404, 408, 413, 415, 422, 500, 503, 504, model=WORDS) | doc.TENSOR_ANSWER
PER_MODEL = [  # below the name of a model
    Route("POST", "/infer", v2.infer, "Tensors -> tensors", INFERRING, None, doc.TENSORS),
    Route("GET", "/ready", v2.model_ready, "The model may be asked", PROTOCOL, doc.Ready),
    Route("GET", "", v2.model, "Inputs and outputs of a model", PROTOCOL, doc.ModelMetadata),
]
ONE, SEVERAL = doc.image_body("One image"), doc.image_body("One or more images")
CLASSES, WHY = "The likeliest classes of one or more images", "Where a model looks, and what speaks for a class"
ROUTES = [
    Route("POST", f"{V1}predict", predict, CLASSES, ASKING, doc.PredictAnswer, SEVERAL),
    Route("POST", f"{V1}explain", explain, WHY, ASKING | doc.ANY_BODY, doc.ExplainAnswer, ONE),
    Route("GET", f"{V1}model", about, "What is served here", READING, doc.ModelAnswer),
    Route("GET", f"{V1}model/filters", part("filters"), "Principal components of the patch embedding", READING),
    Route("GET", f"{V1}model/positions", part("positions"), "Similarity of positions", READING | doc.problems(404)),
    Route("GET", f"{V1}model/layers", part("layers"), "Layer table: shapes, parameters, multiply-adds", READING),
    Route("GET", f"{V1}data", data.summary_of, "The data set that is served", EXPLORING, doc.DataAnswer),
    Route(
        "GET",
        f"{V1}data/points",
        data.points_of,
        "Places, labels and more of every image, as .npy",
        EXPLORING | doc.NPY,
    ),
    Route("GET", f"{V1}data/names", data.names_of, "The path of every image", EXPLORING),
    Route("GET", f"{V1}data/issues", data.issues_of, "Suggested fixes: the rows of issues.csv", EXPLORING),
    Route("GET", f"{V1}data/sheet", data.sheet_of, "A sheet of thumbnails", EXPLORING | doc.JPEG, response=Response),
    Route("GET", f"{V1}data/image", data.image_of, "An image of the set", SHOWING | doc.JPEG, response=Response),
    Route(
        "GET",
        f"{V1}data/neighbours",
        data.neighbours_of,
        "The images most alike to one",
        EXPLORING,
        doc.NeighboursAnswer,
    ),
    Route(
        "POST",
        f"{V1}data/search",
        data.search_in,
        "The images most alike to a new one",
        SEARCHING,
        doc.NeighboursAnswer,
        ONE,
    ),
    Route("GET", "/healthz", healthz, "The process lives", answer=doc.Health),
    Route("GET", "/readyz", readyz, "Work may be sent here", doc.problems(400, 422, 503), doc.Health),
    Route("GET", V2, v2.server, "Open Inference Protocol: the server", PROTOCOL, doc.ServerAnswer),
    Route("GET", f"{V2}/health/live", v2.live, "The process lives", doc.problems(400, 422, model=WORDS), doc.Live),
    Route("GET", f"{V2}/health/ready", v2.ready, "Work may be sent here", PROTOCOL, doc.Ready),
    *[  # those with a version first: a name may hold slashes
        r._replace(path=f"{V2}/models/{{name:path}}/versions/{{version}}{r.path}", handler=v2.versioned(r.handler))
        for r in PER_MODEL
    ],
    *[r._replace(path=f"{V2}/models/{{name:path}}{r.path}") for r in PER_MODEL],
    Route("GET", "/metrics", metrics, "For Prometheus", READING, response=PlainTextResponse),
]


def short(path: str) -> str:
    return path.replace(V1, "/api/", 1)


def add_routes(app: FastAPI) -> None:
    for route in ROUTES:
        for path in dict.fromkeys((route.path, short(route.path))):
            app.add_api_route(
                path,
                route.handler,
                methods=[route.method],
                summary=route.summary,
                response_model=route.answer,
                responses=route.others,
                response_class=route.response,
                openapi_extra=route.body,
                tags=["api" if route.path.startswith(V1) else "inference" if route.path.startswith(V2) else "health"],
                include_in_schema=path == route.path,
                dependencies=[Depends(known_fields_only)],
            )
    for path in ("/", "/data", "/static/{name}"):
        app.add_api_route(path, asset, include_in_schema=False)


def counted_path(path: str) -> str:
    """The path by which requests are counted: a label of metrics is never what a client sends."""
    if path.startswith(f"{V2}/models/"):
        return f"{V2}/models/{path.rpartition('/')[2] if path.endswith(('/infer', '/ready')) else ''}"
    if path in ("/", "/data", "/openapi.json") or short(path) in {short(route.path) for route in ROUTES}:
        return short(path)
    return "/static" if path.removeprefix("/static/") in ASSETS else "other"


# --- the page ------------------------------------------------------------------------------------------


async def asset(request: Request) -> Response:
    service = service_of(request)
    data_page = request.scope["path"] == "/data" or not service.models
    name = request.path_params.get("name", "data.html" if data_page and service.data is not None else "index.html")
    if name not in ASSETS:
        raise HTTPException(404)
    tag = f'"{hashlib.sha256(ASSETS[name]).hexdigest()[:16]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(ASSETS[name], media_type=KINDS[name.rpartition(".")[2]], headers=headers)
