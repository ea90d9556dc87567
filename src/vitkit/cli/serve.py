"""`vitkit serve`: a page where you see what a model sees, and an HTTP API."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def serve(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL [MODEL]", help="A checkpoint, a run's folder, or a name; two are compared."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8000,
    runtime: Annotated[str, typer.Option(help="What computes predictions, as for `vitkit predict`.")] = "auto",
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    token: Annotated[
        str | None, typer.Option(help="Ask for this token everywhere but for health; or set VITKIT_TOKEN.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Let pages of this origin call the API; may be repeated. Default: none.")
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Pictures computed at once, at most.")] = 16,
    max_wait: Annotated[float, typer.Option(min=0, help="Milliseconds a batch waits for more pictures.")] = 5,
    queue: Annotated[int, typer.Option(min=1, help="Pictures that may wait; more are refused with 503.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request is given up.")] = 30,
    max_megabytes: Annotated[float, typer.Option(min=0.001, help="Of one request.")] = 16,
) -> None:
    """Serve a model: a page that shows what it sees, and an HTTP API that batches requests.

    Listens on this machine alone unless --host says otherwise. SIGTERM answers what was accepted, then ends.
    """
    from vitkit.errors import MissingPackage

    for package in ("fastapi", "uvicorn", "python_multipart", "prometheus_client"):
        try:
            __import__(package)
        except ImportError:
            raise MissingPackage(package.replace("_", "-"), "serving", "serve") from None
    from vitkit.web.server import serve as run
    from vitkit.web.settings import ServeSettings

    settings = ServeSettings(
        host=host,
        port=port,
        runtime=runtime,
        token=token or os.environ.get("VITKIT_TOKEN") or None,
        cors=tuple(cors or ()),
        max_batch=max_batch,
        max_wait=max_wait / 1000,
        queue=queue,
        timeout=timeout,
        max_bytes=round(max_megabytes * 2**20),
    )
    run(models, settings, open_page, lambda line: typer.echo(line, err=True))
