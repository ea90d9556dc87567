"""Around everything: who may come in, headers that protect browsers, and a count of every answer.

Plain ASGI, so that uploads stream through and a client that hangs up is noticed.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
import time
import traceback
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitkit.web.assets import ASSETS, page
from vitkit.web.problems import ClientGone, Problem
from vitkit.web.service import Service
from vitkit.web.settings import ServeSettings

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
HEALTH = ("/healthz", "/readyz")
ROUTES = (
    *("/api/predict", "/api/explain", "/api/model", "/api/model/filters", "/api/model/positions", "/api/model/layers"),
    *("/", "/healthz", "/readyz", "/metrics", "/openapi.json"),
)
COOKIE = "vitkit_token"
LOCAL = ("localhost", "127.0.0.1", "[::1]")


class Outside:
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
                headers.setdefault("Cache-Control", "no-store")
                if self.service.draining:
                    headers["Connection"] = "close"
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self.service.answered += 1

        try:
            await self.app(scope, receive, decorated)
        except ClientGone:
            status = 499  # nobody reads an answer
            self.service.gone += 1
        except Exception:
            traceback.print_exc(file=sys.stderr)
            if status == 0:
                failed = Problem(500, "failed", "the server failed at this; its log has the reason")
                await failed.response()(scope, receive, decorated)
        finally:
            route = _route(scope["path"])
            self.service.metrics.requests.labels(route, str(status)).inc()
            self.service.metrics.seconds.labels(route).observe(time.perf_counter() - start)
        return None


def _route(path: str) -> str:
    path = path.replace("/api/v1/", "/api/", 1) if path.startswith("/api/v1/") else path
    return path if path in ROUTES else "/static" if path.removeprefix("/static/") in ASSETS else "other"


class Door:
    """Lets in who may come in: by the host that was asked for, and by the token."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self.app, self.settings, self.loopback = app, settings, settings.loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in HEALTH:
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        answer = self._wrong_host(headers) if self.settings.token is None else await self._ask(scope, headers, receive)
        return await (answer or self.app)(scope, receive, send)

    def _wrong_host(self, headers: Headers) -> Response | None:
        """Without a token, a page elsewhere must not reach this machine's own server under a name of its choice."""
        name = headers.get("host", "localhost").rsplit(":", 1)
        host = name[0] if len(name) == 2 and name[1].isdigit() else headers.get("host", "localhost")
        if not self.loopback or host.lower() in (*LOCAL, self.settings.host):
            return None
        told = f"this server answers to localhost, not to {host[:60]!r}; start it with --token, or --host for others"
        return Problem(400, "wrong_host", told).response()

    async def _ask(self, scope: Scope, headers: Headers, receive: Receive) -> Response | None:
        token = self.settings.token or ""
        if _same(headers.get("authorization", ""), f"Bearer {token}") or _same(_cookie(headers), _key(token)):
            return None
        shown = scope["path"] == "/"
        if shown and scope["method"] == "GET":
            query = parse_qs(scope["query_string"].decode("latin-1"))
            given = query.pop("token", [""])[0]
            if _same(given, token):
                return _let_in(token, urlencode(query, doseq=True))
        if shown and scope["method"] == "POST":
            form = parse_qs((await _small_body(receive)).decode("latin-1"))
            if _same(form.get("token", [""])[0], token):
                return _let_in(token)
            return HTMLResponse(page("token.html", "That is not the token."), 401)
        if shown or scope["path"].removeprefix("/static/") in ("style.css", "icon.svg"):
            return HTMLResponse(page("token.html"), 401) if shown else None
        told = "a token is needed: send the header 'Authorization: Bearer TOKEN' with what was given to --token"
        return Problem(401, "no_token", told).response()


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _key(token: str) -> str:
    """What the browser keeps: enough to come in, not the token itself."""
    return hmac.new(token.encode(), b"vitkit page", hashlib.sha256).hexdigest()


def _cookie(headers: Headers) -> str:
    try:
        kept = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if kept is None else kept.value


def _let_in(token: str, query: str = "") -> Response:
    answer = RedirectResponse(f"/?{query}" if query else "/", 303)
    answer.set_cookie(COOKIE, _key(token), max_age=30 * 24 * 3600, httponly=True, samesite="strict")
    return answer


async def _small_body(receive: Receive, most: int = 4096) -> bytes:
    body = b""
    while len(body) <= most:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return body
    return b""
