"""Whatever is wrong with a request is said in words; who may come in, and what browsers are told."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from serving import MODEL, ask, image, message, small_model, with_client

from vitkit.web.app import create_app
from vitkit.web.settings import ServeSettings


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("layer=99", "layers 0 to 2"),
        ("layer=last", "not understood"),
        ("laier=1", "Did you mean layer?"),
        ("head=2", "heads 0 to 1"),
        ("query=4,0", "rows are 0 to 3"),
        ("query=north", "not understood"),
        ("method=magic", "attention"),
        ("method=relevance&class=zebra", "zebra"),
        ("method=relevance&class=-1", "-1"),
        ("format=png&layer=all", "draws one map"),
        ("strength=2", "less than or equal to 1"),
        ("prepared=true", "32x32"),
        ("method=relevance&" + "&".join(["class=1"] * 17), "at most 16"),
    ],
)
def test_wrong_fields_are_named(query: str, words: str) -> None:
    answer = ask("POST", f"/api/explain?{query}", content=image())
    assert answer.status_code == 422
    assert words in answer.json()["error"]["message"]


def test_not_a_image() -> None:
    for body in (b"hello", b"%PDF-1.4 ...", b"\0" * 5000, b"<svg xmlns='http://www.w3.org/2000/svg'/>"):
        assert "JPEG" in message(ask("POST", "/api/predict", content=body), 415, "not_an_image")
    answer = ask("POST", "/api/predict", json={"image": "x"})
    assert "JSON" in message(answer, 415, "not_an_image")
    assert "no image" in message(ask("POST", "/api/predict", content=b""), 422, "no_image")


def test_images_that_cannot_be_read() -> None:
    data = image(kind="JPEG")
    assert "truncated" in message(ask("POST", "/api/predict", content=data[: len(data) // 2]), 422, "bad_image")
    answer = ask("POST", "/api/predict", files=[("a", ("good.png", image())), ("b", ("bad.jpg", data[:300]))])
    assert "image 2 (bad.jpg)" in message(answer, 422, "bad_image")


def flat_png(width: int, height: int) -> bytes:
    """An image of very many pixels in very few bytes."""
    out = io.BytesIO()
    Image.new("1", (width, height)).save(out, "PNG")
    return out.getvalue()


def test_bombs_and_absurd_dimensions() -> None:
    bomb = flat_png(9000, 9000)
    assert len(bomb) < 20_000
    assert "50,000,000" in message(ask("POST", "/api/predict", content=bomb), 422, "bad_image")
    thin = small_model("thin", preprocessing=None)
    config = thin.model.config.replace(preprocessing=type(thin.model.config.preprocessing)(size=(32, 32), fit="crop"))
    thin.model.config = config
    answer = ask("POST", "/api/predict", (thin,), content=flat_png(10_000_000, 1))  # 10 GB if it were enlarged whole
    assert answer.status_code == 200


def test_too_large_is_refused_while_it_arrives() -> None:
    settings = ServeSettings(max_bytes=10_000)
    read = 0

    async def endless() -> Any:
        nonlocal read
        while True:
            read += 1000
            yield b"x" * 1000

    answer = ask("POST", "/api/predict", settings=settings, content=endless())
    assert "10,000 bytes" in message(answer, 413, "too_large")
    assert read <= 50_000, "an endless body must not be read to its end"
    answer = ask("POST", "/api/predict", settings=settings, content=b"x" * 20_000)
    message(answer, 413, "too_large")


def test_forms_that_are_wrong() -> None:
    answer = ask("POST", "/api/predict", files={"a": image()}, data={"top": "3"})
    assert "?top=" in message(answer, 422, "bad_form")
    head = {"content-type": "multipart/form-data"}
    assert "boundary" in message(ask("POST", "/api/predict", content=b"--x", headers=head), 422, "bad_form")
    head = {"content-type": "multipart/form-data; boundary=x"}
    message(ask("POST", "/api/predict", content=b"no form at all", headers=head), 422, "bad_form")
    many = [("f", (f"{i}.png", b"x")) for i in range(40)]
    assert "more than 32" in message(ask("POST", "/api/predict", files=many), 422, "too_many")
    two = [("a", ("a.png", image())), ("b", ("b.png", image()))]
    assert "more than 1" in message(ask("POST", "/api/explain", files=two), 422, "too_many")


def test_a_slow_upload_is_given_up() -> None:
    async def slowly() -> Any:
        yield b"\x89PNG"
        await asyncio.sleep(5)

    answer = ask("POST", "/api/predict", settings=ServeSettings(timeout=0.2), content=slowly())
    assert "0.2 seconds" in message(answer, 408, "slow_upload")


def test_too_many_values_are_refused_before_they_are_made() -> None:
    wide = small_model("wide", image_size=256, patch_size=4, depth=3)  # 4096 patches: 16 million pairs per head
    answer = ask("POST", "/api/explain?layer=all&head=all&query=all&format=npy", (wide,), content=image())
    assert "one layer" in message(answer, 422, "too_many")
    middle = small_model("middle", image_size=128, patch_size=4, depth=1)
    answer = ask("POST", "/api/explain?query=all", (middle,), content=image())
    assert "format=npy" in message(answer, 422, "too_many")


def test_unknown_addresses_and_methods() -> None:
    message(ask("GET", "/api/nothing"), 404, "no_route")
    message(ask("GET", "/static/../app.py"), 404, "no_route")
    message(ask("GET", "/static/%2e%2e%2fapp.py"), 404, "no_route")
    answer = ask("GET", "/api/predict")
    message(answer, 405, "no_route")
    assert answer.headers["allow"] == "POST"


# --- who may come in, and what browsers are told -----------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/api/model", "/static/app.js", "/nothing", "/healthz", "/openapi.json"])
def test_headers_that_protect(path: str) -> None:
    headers = ask("GET", path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


def test_cors_only_when_asked() -> None:
    head = {"origin": "https://example.org", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in ask("OPTIONS", "/api/predict", headers=head).headers
    settings = ServeSettings(cors=("https://example.org",))
    answer = ask("OPTIONS", "/api/predict", settings=settings, headers=head)
    assert answer.headers["access-control-allow-origin"] == "https://example.org"
    head["origin"] = "https://elsewhere.org"
    assert "access-control-allow-origin" not in ask("OPTIONS", "/api/predict", settings=settings, headers=head).headers


def test_a_page_elsewhere_cannot_pretend_to_be_local() -> None:
    head = {"host": "rebound.example.org"}
    assert "localhost" in message(ask("GET", "/api/model", headers=head), 400, "wrong_host")
    assert ask("GET", "/api/model", headers={"host": "127.0.0.1:8000"}).status_code == 200
    assert ask("GET", "/api/model", headers={"host": "[::1]:8000"}).status_code == 200
    assert ask("GET", "/api/model", settings=ServeSettings(host="0.0.0.0"), headers=head).status_code == 200


def test_the_token() -> None:
    settings = ServeSettings(token="a-long-secret")
    for path in ("/api/model", "/metrics", "/openapi.json", "/static/app.js", "/"):
        assert ask("GET", path, settings=settings).status_code == 401, path
        good = {"authorization": "Bearer a-long-secret"}
        assert ask("GET", path, settings=settings, headers=good).status_code == 200, path
        bad = {"authorization": "Bearer a-long-secreT"}
        assert ask("GET", path, settings=settings, headers=bad).status_code == 401, path
    for path in ("/healthz", "/readyz"):
        assert ask("GET", path, settings=settings).status_code == 200
    message(ask("POST", "/api/predict", settings=settings, content=image()), 401, "no_token")


def test_bearer_in_any_case() -> None:
    settings = ServeSettings(token="a-long-secret")
    for scheme, status in (("bearer", 200), ("BEARER", 200), ("Bearer ", 200), ("Basic", 401), ("", 401)):
        answer = ask("GET", "/api/model", settings=settings, headers={"authorization": f"{scheme} a-long-secret"})
        assert answer.status_code == status, scheme


def test_openapi_says_that_a_token_is_needed() -> None:
    settings = ServeSettings(token="a-long-secret")
    good = {"authorization": "Bearer a-long-secret"}
    description = ask("GET", "/openapi.json", settings=settings, headers=good).json()
    assert description["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert description["security"] == [{"token": []}]
    assert description["paths"]["/healthz"]["get"]["security"] == []
    assert "security" not in description["paths"]["/api/v1/predict"]["post"]
    assert "securitySchemes" not in ask("GET", "/openapi.json").json()["components"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # a program
        ({"origin": "http://localhost"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:9999"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "https://behind.proxy", "sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_a_page_of_another_site_has_nothing_computed(headers: dict[str, str], status: int) -> None:
    for path in ("predict", "explain"):
        answer = ask("POST", f"/api/{path}", content=image(), headers=headers)
        assert answer.status_code == status
        if status == 403:
            assert "--cors" in message(answer, 403, "foreign_origin")
    assert ask("GET", "/api/model", headers=headers).status_code == 200  # which its browser does not let it read


def test_a_page_that_may_call_the_api() -> None:
    head = {"origin": "https://example.org", "sec-fetch-site": "cross-site"}
    for cors in ("https://example.org", "*"):
        settings = ServeSettings(cors=(cors,))
        assert ask("POST", "/api/predict", settings=settings, content=image(), headers=head).status_code == 200
    head["origin"] = "https://elsewhere.org"
    settings = ServeSettings(cors=("https://example.org",))
    message(ask("POST", "/api/predict", settings=settings, content=image(), headers=head), 403, "foreign_origin")


def test_the_token_of_a_browser_becomes_a_cookie() -> None:
    app = create_app((MODEL,), ServeSettings(token="a-long-secret"))

    async def visit(client: httpx.AsyncClient) -> None:
        assert "asks for the token" in (await client.get("/")).text
        wrong = await client.post("/", data={"token": "guess"})
        assert wrong.status_code == 401
        assert "not the token" in wrong.text
        assert (await client.get("/?token=guess")).status_code == 401
        right = await client.get("/?token=a-long-secret")
        assert (right.status_code, right.headers["location"]) == (303, "/")
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "a-long-secret" not in cookie
        assert (await client.get("/api/model")).status_code == 200
        client.cookies.clear()
        assert (await client.post("/", data={"token": "a-long-secret"})).status_code == 303
        assert (await client.get("/")).status_code == 200

    with_client(app, visit)


@pytest.mark.parametrize("named", ["{path}", '{{"path": "{path}"}}', "file://{path}"])
def test_a_request_cannot_name_a_file_of_the_server(tmp_path: Path, named: str) -> None:
    """Clients send the bytes of an image; what names one, by path or by address, is no image."""
    (tmp_path / "secret.png").write_bytes(image())
    text = named.format(path=tmp_path / "secret.png").encode()
    assert ask("POST", "/api/predict", content=image()).status_code == 200
    assert ask("POST", "/api/predict", content=text).status_code in (415, 422, 400)
    form = ask("POST", "/api/predict", files=[("a", (str(tmp_path / "secret.png"), text))])
    assert "predictions" not in form.json() or "error" in form.json()["predictions"][0]
