"""What the tests of serving share: small models, an application in this process, and a real server in a thread."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import httpx
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from PIL import Image, ImageDraw

import vitkit
from peers import randomize
from vitkit.data import normalise, prepare, to_tensor
from vitkit.data.decode import decode
from vitkit.model.base import Outputs
from vitkit.model.config import ResNetConfig, StemConfig
from vitkit.runtime import open_runtime
from vitkit.web.app import create_app
from vitkit.web.explored import Explored
from vitkit.web.models import Served
from vitkit.web.server import Server
from vitkit.web.settings import ServeSettings

T = TypeVar("T")


def small_model(name: str = "small", classes: int = 4, seed: int = 0, **changes: Any) -> Served:
    """A ViT of two layers with random weights, also in its classifier."""
    torch.manual_seed(seed)
    about = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2, "mlp_width": 64} | changes
    model: Any = randomize(vitkit.create("vit-ti/16", classes=classes, **about)).eval()
    model.class_names = tuple(f"kind {i}" for i in range(classes)) if classes else None
    return Served(name, model, open_runtime(model, "eager"), ())


def values_model(name: str = "ages") -> Served:
    """The same, but its two outputs are numbers."""
    served = small_model(name, classes=2, seed=4)
    served.model.outputs = Outputs("values", ("age", "height (cm)"), mean=(40.0, 170.0), std=(10.0, 2.0))
    return served


def resnet_model(name: str = "cnn") -> Served:
    """No attention to look at."""
    torch.manual_seed(0)
    config = ResNetConfig((32, 32), 3, 4, StemConfig((1, 1), 8, "small"))
    model = randomize(vitkit.create(config)).eval()
    return Served(name, model, open_runtime(model, "eager"), ())


def image(size: tuple[int, int] = (48, 40), kind: str = "PNG", seed: int = 0) -> bytes:
    """Something with large shapes, so that patches differ."""
    random = np.random.default_rng(seed)
    canvas = Image.fromarray(random.integers(0, 80, (size[1], size[0], 3), dtype=np.uint8))
    draw = ImageDraw.Draw(canvas)
    draw.ellipse((size[0] // 4, size[1] // 5, size[0] - 3, size[1] // 2), fill=(240, 200, 40))
    draw.rectangle((2, size[1] // 2, size[0] // 2, size[1] - 4), fill=(30, 90, 220))
    out = io.BytesIO()
    canvas.save(out, kind)
    return out.getvalue()


def with_client(app: FastAPI, use: Callable[[httpx.AsyncClient], Awaitable[T]], keep: bool = False) -> T:
    """Run `use` with a client of the application, in this process; the application is closed afterwards or kept."""

    async def run() -> T:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            try:
                return await use(client)
            finally:
                if not keep:
                    await asyncio.to_thread(app.state.service.close)

    return asyncio.run(run())


@contextmanager
def live(models: list[Served], data: Explored | None = None, **settings: Any) -> Iterator[tuple[str, Server]]:
    """A real server on a free port of this machine; ends as it does after SIGTERM."""
    chosen = ServeSettings(port=0, **settings)
    listener = socket.create_server((chosen.host, 0))
    app = create_app(models, chosen, data)
    server = Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://{chosen.host}:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
    assert not thread.is_alive(), "the server did not end"


# --- asking an application without a server ------------------------------------------------------------

MODEL = small_model()
SECOND = small_model("other", classes=3, seed=1, image_size=(16, 32))


def images_of(served: Served, data: bytes) -> torch.Tensor:
    pre = served.model.config.preprocessing
    return normalise(to_tensor(prepare(decode(data, served.model.config.channels), pre))[None], pre)


def ask(method: str, path: str, models: tuple[Served, ...] = (MODEL,), settings: Any = None, **more: Any) -> Any:
    return with_client(app_of(models, settings), lambda client: client.request(method, path, **more), keep=True)


@cache
def app_of(models: tuple[Served, ...], settings: ServeSettings | None) -> FastAPI:
    return create_app(models, settings or ServeSettings())


def explained(query: str, data: bytes = image(), models: tuple[Served, ...] = (MODEL,)) -> Any:
    answer = ask("POST", f"/api/explain?{query}", models, content=data)
    assert answer.status_code == 200, answer.text
    return answer


def message(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    return error["message"]
