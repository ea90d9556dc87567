"""The addresses of the Open Inference Protocol (KServe V2), for clients that know it: Triton's, KServe's, MLServer's.

The same models, queues, limits and tokens as those of our own API; errors are {"error": "a sentence"}, as it wants.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

import numpy as np
import torch
from fastapi import Path, Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from vitkit import __version__
from vitkit.web import answers as doc
from vitkit.web.models import Served
from vitkit.web.service import Service
from vitkit.web.tensors import INPUTS, LENGTH, bad, read_request, shapes, write_answer

ROOT, VERSION = "/v2", "1"  # of a model: the one that is served
Name = Annotated[str, Path(description="Of a model.", max_length=200)]
Version = Annotated[str, Path(description="Of the model: 1.", max_length=20)]

Handler = Callable[..., Awaitable[Response]]


def service_of(request: Request) -> Service:
    return request.app.state.service


async def server(request: Request) -> Response:
    return JSONResponse({"name": "vitkit", "version": __version__, "extensions": ["binary_tensor_data"]})


async def live() -> Response:
    return JSONResponse({"live": True})


async def ready(request: Request) -> Response:
    service_of(request).check_ready()
    return JSONResponse({"ready": True})


async def model_ready(request: Request, name: Name) -> Response:
    _served(request, name)
    service_of(request).check_ready()
    return JSONResponse({"name": name, "ready": True})


async def model(request: Request, name: Name) -> Response:
    """Its inputs, of which one is sent, and its outputs."""
    served = _served(request, name)
    known = shapes(served.model.config)
    inputs = [{"name": n, "datatype": kind, "shape": known[n]} for n, kind in INPUTS.items()]
    outputs = [{"name": n, "datatype": kind, "shape": shape} for n, (kind, shape) in _outputs(served).items()]
    about = {"name": name, "versions": [VERSION], "platform": f"vitkit_{served.runtime.name}"}
    return JSONResponse({**about, "inputs": inputs, "outputs": outputs})


async def infer(request: Request, name: Name) -> Response:
    service, served = service_of(request), _served(request, name)
    if "content-encoding" in request.headers:
        raise bad("compressed requests are not read; send them without Content-Encoding")
    if not served.names:
        raise bad(f"{served.name} has no classifier; /api/explain shows its attention")
    config, length = served.model.config, request.headers.get(LENGTH)
    asked, rows = await service.infer(
        request, served, lambda body: read_request(body, length, config, service.settings.max_pictures)
    )
    about = {"model_name": name, "model_version": VERSION}
    content, head = write_answer(about, _found(served, torch.stack(rows)), asked)
    headers = {} if head is None else {LENGTH: str(head)}
    return Response(content, headers=headers, media_type=f"application/{'json' if head is None else 'octet-stream'}")


def versioned(handler: Handler) -> Handler:
    """The same with a version in the address."""

    async def answer(request: Request, name: Name, version: Version) -> Response:
        _served(request, name)
        if version != VERSION:
            raise doc.Problem(404, "no_version", f"{name} has the version {VERSION} alone; leave it out")
        return await handler(request, name)

    answer.__name__ = f"{handler.__name__}_version"
    return answer


def _served(request: Request, name: str) -> Served:
    for served in service_of(request).models:
        if served.name == name:
            return served
    known = ", ".join(served.name for served in service_of(request).models) or "none"
    raise doc.Problem(404, "no_model", f"the model {name[:60]!r} is not served here; there is {known}")


def _outputs(served: Served) -> dict[str, tuple[str, list[int]]]:
    """Datatype and shape, by name."""
    count = len(served.names)
    if served.model.outputs.kind == "values":
        return {"values": ("FP32", [-1, count])}
    found = {"probabilities": ("FP32", [-1, count]), "logits": ("FP32", [-1, count])}
    return {**found, "label": ("BYTES", [-1])} if served.model.outputs.kind == "classes" else found


def _found(served: Served, outputs: Tensor) -> dict[str, np.ndarray]:
    if not outputs.isfinite().all():
        raise doc.Problem(500, "not_finite", "the model's answer is no finite number; its weights may be damaged")
    activated = served.task.activate(outputs.float()).cpu().numpy()
    if served.model.outputs.kind == "values":
        return {"values": activated}
    labels = np.array([served.names[i] for i in activated.argmax(axis=1)])
    found = {"probabilities": activated, "logits": outputs.float().cpu().numpy(), "label": labels}
    return {name: found[name] for name in _outputs(served)}
