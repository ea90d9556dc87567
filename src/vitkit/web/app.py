"""Models and settings -> an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from vitkit import __version__
from vitkit.web import describing as says
from vitkit.web.api import api, health
from vitkit.web.assets import ASSETS
from vitkit.web.guard import Door, Outside
from vitkit.web.models import Served
from vitkit.web.problems import Problem, in_words
from vitkit.web.service import Service
from vitkit.web.settings import ServeSettings


def create_app(models: Sequence[Served], settings: ServeSettings) -> FastAPI:
    """The workers start at once and end with the application's lifespan."""
    service = Service(models, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.draining = True
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="vitkit",
        version=__version__,
        description=says.ABOUT,
        lifespan=lifespan,
        docs_url=None,  # they would fetch scripts from elsewhere; /openapi.json is the description
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.state.service = service
    app.include_router(api, prefix="/api/v1", tags=["api"])
    app.include_router(api, prefix="/api", include_in_schema=False)
    app.include_router(health, tags=["health"])
    _add_page(app)
    _add_answers_to_errors(app)
    app.add_middleware(Door, settings=settings)
    if settings.cors:
        headers = ["Authorization", "Content-Type"]
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors, allow_methods=["*"], allow_headers=headers)
    app.add_middleware(Outside, service=service)  # added last: the outermost
    return app


def _add_page(app: FastAPI) -> None:
    def asset(request: Request, name: str) -> Response:
        found = ASSETS.get(name)
        if found is None:
            raise HTTPException(404)
        headers = {"ETag": found.tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        return Response(found.data, media_type=found.kind, headers=headers)

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return asset(request, "index.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        return asset(request, name)


def _add_answers_to_errors(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def wrong_field(request: Request, error: RequestValidationError) -> Response:
        fields = request.scope["route"].dependant.query_params
        meaning = {field.alias: field.field_info.description or "" for field in fields}
        return Problem(422, "bad_field", in_words(error.errors(), meaning)).response()

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        words = {404: "there is nothing at this address; see /openapi.json", 405: "this address has another method"}
        answer = Problem(error.status_code, "no_route", words.get(error.status_code, str(error.detail))).response()
        answer.headers.update(error.headers or {})
        return answer
