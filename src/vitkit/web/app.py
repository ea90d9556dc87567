"""Models and settings -> an ASGI application, with who may come in, headers for browsers and a count of every answer.

The middlewares are plain ASGI, so that uploads stream through and a client that hangs up is noticed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlencode

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitkit import __version__
from vitkit.web.answers import ABOUT, Problem
from vitkit.web.api import add_routes, counted_path, fields_of
from vitkit.web.assets import ASSETS
from vitkit.web.body import Intake
from vitkit.web.explored import Explored
from vitkit.web.models import Served
from vitkit.web.service import Service
from vitkit.web.settings import ServeSettings

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",  # where an answer does not say otherwise
}
OPEN = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")  # to everybody
OPEN_WITH_TOKEN = ("/static/style.css", "/static/icon.svg")  # for the page that asks for it
SAFE = ("GET", "HEAD", "OPTIONS")
COOKIE = "vitkit_token"
LOCAL = ("localhost", "127.0.0.1", "[::1]")


def create_app(models: Sequence[Served], settings: ServeSettings, data: Explored | None = None) -> FastAPI:
    """The workers start at once and end with the application's lifespan."""
    service = Service(models, settings, data)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.draining = True
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="vitkit",
        version=__version__,
        description=ABOUT,
        lifespan=lifespan,
        docs_url=None,  # they would fetch scripts from elsewhere; /openapi.json is the description
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.state.service = service
    add_routes(app)
    _add_answers_to_errors(app)
    if settings.token is not None:
        _describe_token(app)
    app.add_middleware(AuthMiddleware, service=service)
    if settings.cors:
        headers = ["Authorization", "Content-Type"]
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors, allow_methods=["*"], allow_headers=headers)
    app.add_middleware(ObservabilityMiddleware, service=service)  # added last: the outermost
    return app


def _add_answers_to_errors(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Response:
        return error.response(request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def wrong_field(request: Request, error: RequestValidationError) -> Response:
        """Pydantic's complaints, as one sentence for each."""
        meaning, sentences = fields_of(request), []
        for wrong in error.errors():
            _, name = (*wrong["loc"], "the request")[:2]
            value = "" if wrong["type"] == "missing" else f"={str(wrong.get('input'))[:60]!r}"
            reason = "not understood" if wrong["type"] == "string_pattern_mismatch" else str(wrong["msg"])
            wanted = f" ({meaning[name].rstrip('.')})" if name in meaning else ""
            sentences.append(f"{name}{value}: {reason[:1].lower()}{reason[1:]}{wanted}")
        return Problem(422, "bad_field", "; ".join(sentences)).response(request.scope["path"])

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        words = {404: "there is nothing at this address; see /openapi.json", 405: "this address has another method"}
        problem = Problem(error.status_code, "no_route", words.get(error.status_code, str(error.detail)))
        answer = problem.response(request.scope["path"])
        answer.headers.update(error.headers or {})
        return answer


def _describe_token(app: FastAPI) -> None:
    """What OpenAPI says about who may come in: clients that are made from it then send the token."""
    description = app.openapi()  # made once
    description.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    description["security"] = [{"token": []}]
    for path in OPEN:
        description["paths"][path]["get"]["security"] = []


class ObservabilityMiddleware:
    """The outermost layer: headers, metrics, and an answer even when something fails."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status = time.perf_counter(), 0
        self.service.begun += 1

        async def decorated(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if self.service.draining:
                    headers["Connection"] = "close"
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self.service.answered += 1

        try:
            await self.app(scope, receive, decorated)
        except ClientDisconnect:
            status = 499  # nobody reads an answer
            self.service.gone += 1
        except Exception:
            logging.getLogger(__name__).exception("a request failed")
            if status == 0:
                failed = Problem(500, "failed", "the server failed at this; its log has the reason")
                await failed.response(scope["path"])(scope, receive, decorated)
        finally:
            route = counted_path(scope["path"])
            self.service.metrics.requests.labels(route, str(status)).inc()
            self.service.metrics.seconds.labels(route).observe(time.perf_counter() - start)
        return None


class AuthMiddleware:
    """Lets in who may come in: by the token, or by the host that was asked for where there is none."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.settings, self.intake = app, service.settings, service.intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: Response | None = None
        if scope["type"] == "http" and scope["path"] not in OPEN:
            request, token = Request(scope, receive), self.settings.token
            try:
                self._check_origin(request)
                answer = self._wrong_host(request) if token is None else await _no_token(request, token, self.intake)
            except Problem as problem:
                answer = problem.response(scope["path"])
        await (answer or self.app)(scope, receive, send)

    def _check_origin(self, request: Request) -> None:
        """A page of another site must not have anything computed here, even though it could not read the answer.

        Browsers say from where a page asks; programs do not, and are not concerned. Asking for the page's token is not
        computing, and its form comes without an origin.
        """
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
        host = request.headers.get("host", "")
        own = site in ("same-origin", "none") if site else origin in (None, f"http://{host}", f"https://{host}")
        by_token_page = request.scope["path"] == "/"
        if request.method in SAFE or own or by_token_page or origin in self.settings.cors or "*" in self.settings.cors:
            return
        message = f"pages of {(origin or 'another site')[:60]} may not use this server; its owner can allow it: --cors"
        raise Problem(403, "foreign_origin", message)

    def _wrong_host(self, request: Request) -> Response | None:
        """Without a token, a page elsewhere must not reach this machine's own server under a name of its choice."""
        host = re.sub(r":\d+$", "", request.headers.get("host", "localhost"))
        if not self.settings.loopback or host.lower() in (*LOCAL, self.settings.host):
            return None
        message = f"this server answers to localhost, not to {host[:60]!r}; start it with --token, or --host for others"
        return Problem(400, "wrong_host", message).response(request.scope["path"])


async def _no_token(request: Request, token: str, intake: Intake) -> Response | None:
    """An answer to who has no token; None lets in."""
    path = request.scope["path"]  # not that of `request.url`, which the client's Host can change
    key = hmac.new(token.encode(), b"vitkit page", hashlib.sha256).hexdigest()  # what the browser keeps: not the token
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    by_header = scheme.lower() == "bearer" and _same(sent.strip(), token)
    if by_header or _same(request.cookies.get(COOKIE, ""), key) or path in OPEN_WITH_TOKEN:
        return None
    if path != "/":
        message = "a token is needed: send the header 'Authorization: Bearer TOKEN' with the value of --token"
        return Problem(401, "no_token", message).response(path)
    sent, wrong = request.query_params.get("token", ""), ""
    if request.method == "POST":
        async with intake.body(request, most=4096) as body:
            form = parse_qs(body.decode("latin-1"))
        sent, wrong = form.get("token", [""])[0], "That is not the token."
    if not _same(sent, token):
        page = ASSETS["token.html"].decode()  # with a place for a sentence of ours
        return HTMLResponse(page.replace("<!-- message -->", wrong), 401)
    query = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "token"])
    answer = RedirectResponse(f"/?{query}" if query else "/", 303)
    answer.set_cookie(COOKIE, key, max_age=30 * 24 * 3600, httponly=True, samesite="strict")
    return answer


def _same(sent: str, wanted: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "replace"), wanted.encode())
