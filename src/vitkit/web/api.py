"""The addresses: each reads its fields, asks the service and returns bytes that were made elsewhere."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from vitkit.errors import did_you_mean
from vitkit.web import describing as says
from vitkit.web.explaining import Format, Method, Question
from vitkit.web.problems import Problem
from vitkit.web.service import Service

PATCH = r"^(output|all|\d{1,4},\d{1,4})$"


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def known_fields_only(request: Request) -> None:
    """A misspelt field is an error, not a silent default. (Not `async`, it would be run in a thread.)"""
    if not request.scope["query_string"]:
        return
    known = {p.alias for p in request.scope["route"].dependant.query_params}
    for name in request.query_params:
        if name not in known:
            told = f"there is no field {name[:60]!r}.{did_you_mean(name, known)} Known: {', '.join(sorted(known))}"
            raise Problem(422, "bad_field", told)


Served = Annotated[str | None, Query(description="Which model, by name; the first when left out.", max_length=200)]
Prepared = Annotated[bool, Query(description="The picture is already what the model sees: do not resize or cut it.")]
api = APIRouter(dependencies=[Depends(known_fields_only)])
health = APIRouter(dependencies=[Depends(known_fields_only)])


@api.post(
    "/predict",
    summary="The likeliest classes of one or more pictures",
    response_model=says.PredictAnswer,
    responses=says.ASKING,
    openapi_extra=says.picture_body(several=True),
)
async def predict(
    request: Request,
    model: Served = None,
    top: Annotated[int, Query(ge=1, le=100_000, description="How many classes.")] = 5,
    picture: Annotated[bool, Query(description="Also return each picture as the model sees it.")] = False,
    prepared: Prepared = False,
) -> Response:
    body = await service_of(request).predict(request, model, top, picture, prepared)
    return Response(body, media_type="application/json")


@api.post(
    "/explain",
    summary="Where a model looks, and what speaks for a class",
    response_model=says.ExplainAnswer,
    responses={**says.ASKING, 200: {"content": says.ANY_BODY}},
    openapi_extra=says.picture_body(several=False),
)
async def explain(
    request: Request,
    method: Annotated[Method, Query(description="What to compute.")] = "attention",
    layer: Annotated[str, Query(pattern=r"^(all|-?\d{1,4})$", description="From 0; -1 is the last; or 'all'.")] = "-1",
    head: Annotated[str, Query(pattern=r"^(mean|all|\d{1,4})$", description="From 0; 'mean' or 'all'.")] = "mean",
    query: Annotated[str, Query(pattern=PATCH, description="'output', a patch as ROW,COLUMN, or 'all'.")] = "output",
    classes: Annotated[
        list[str] | None,
        Query(
            alias="class",
            max_length=16,
            description="Names, or numbers (#3 is always a number); default: the likeliest.",
        ),
    ] = None,
    format: Annotated[Format, Query(description="json, npy (float32) or png (the map over the picture).")] = "json",
    strength: Annotated[float, Query(ge=0, le=1, description="Of the colours in a PNG.")] = 0.7,
    model: Served = None,
    prepared: Prepared = False,
) -> Response:
    question = Question(method, layer, head, query, tuple(classes or ()), format, strength)
    body, kind = await service_of(request).explain(request, model, question, prepared)
    return Response(body, media_type=kind)


@api.get("/model", summary="What is served here", response_model=says.ModelAnswer, responses=says.READING)
async def about(request: Request, model: Served = None) -> Response:
    service = service_of(request)
    told = await service.in_thread(service.model(model).describe, [served.name for served in service.models])
    limits = {key: getattr(service.settings, key) for key in ("max_bytes", "max_pixels", "max_pictures")}
    return JSONResponse({**told, "limits": limits})


async def _part(request: Request, model: str | None, part: str) -> Response:
    """A part of the model, made once, in a thread."""
    service = service_of(request)
    served = service.model(model)

    def make() -> bytes:
        return json.dumps(getattr(served, part), ensure_ascii=False).encode()

    return Response(await service.in_thread(make), media_type="application/json")


@api.get("/model/filters", summary="Principal components of the patch embedding", responses=says.READING)
async def filters(request: Request, model: Served = None) -> Response:
    return await _part(request, model, "filters")


@api.get("/model/positions", summary="Similarity of positions", responses=says.problems(400, 401, 404, 422))
async def positions(request: Request, model: Served = None) -> Response:
    return await _part(request, model, "positions")


@api.get("/model/layers", summary="Layer table: shapes, parameters, multiply-adds", responses=says.READING)
async def layers(request: Request, model: Served = None) -> Response:
    return await _part(request, model, "summary")


@health.get("/healthz", summary="The process lives", response_model=says.Health, responses=says.problems(400, 422))
async def healthz() -> Any:
    return {"status": "ok"}


@health.get(
    "/readyz", summary="Work may be sent here", response_model=says.Health, responses=says.problems(400, 422, 503)
)
async def readyz(request: Request) -> Any:
    if (why := service_of(request).not_ready()) is not None:
        raise Problem(503, "not_ready", why, retry_after=1)
    return {"status": "ready"}


@health.get(
    "/metrics", summary="For Prometheus", response_class=PlainTextResponse, responses=says.problems(400, 401, 422)
)
async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4")
