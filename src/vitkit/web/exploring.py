"""The addresses of a data set: its map, its images by number, neighbours, and search by an image."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response

from vitkit.io import json_text
from vitkit.web import answers as doc
from vitkit.web.explored import Explored
from vitkit.web.service import Service

Row = Annotated[int, Query(ge=0, le=2**31, description="The number of an image, from 0.")]
Top = Annotated[int, Query(ge=1, le=200, description="How many images.")]
Size = Annotated[int, Query(ge=16, le=1024, description="Pixels of the longer side, at most.")]


def service_of(request: Request) -> Service:
    return request.app.state.service


def explored(request: Request) -> Explored:
    found = service_of(request).data
    if found is None:
        raise doc.Problem(404, "no_data", "no data set is served here; start with vitkit serve --index INDEX")
    return found


async def summary_of(request: Request) -> Response:
    service, data = service_of(request), explored(request)
    limits = {key: getattr(service.settings, key) for key in doc.LIMITS}
    about = await service.in_thread(data.view.about)
    return JSONResponse({**about, "models": [served.name for served in service.models], "limits": limits})


async def points_of(request: Request) -> Response:
    data = explored(request)
    return Response(await service_of(request).in_thread(lambda: data.points), media_type="application/octet-stream")


async def names_of(request: Request) -> Response:
    return as_json(explored(request).view.index.paths)


async def issues_of(request: Request) -> Response:
    return as_json(explored(request).view.issue_table())


async def sheet_of(
    request: Request, number: Annotated[int, Query(ge=0, le=2**31, description="Which sheet of thumbnails.")]
) -> Response:
    data = explored(request)
    return Response(await service_of(request).in_thread(lambda: data.sheet(number)), media_type="image/jpeg")


async def image_of(request: Request, row: Row, size: Size = 512) -> Response:
    data = explored(request)
    body = await service_of(request).set_image(data, data.check(row), size)
    return Response(body, media_type="image/jpeg")


async def neighbours_of(request: Request, row: Row, top: Top = 12) -> Response:
    data = explored(request)
    data.check(row)
    found = await service_of(request).in_thread(lambda: data.neighbours(row, top))
    return JSONResponse({"row": row, "neighbours": found})


async def search_in(request: Request, top: Top = 24) -> Response:
    return JSONResponse({"neighbours": await service_of(request).search(request, explored(request), top)})


def as_json(value: object) -> Response:
    return Response(json_text(value).encode(), media_type="application/json")
