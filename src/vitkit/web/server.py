"""The process: bind, load, serve; and on SIGTERM answer what was accepted before ending."""

from __future__ import annotations

import asyncio
import math
import select
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from vitkit.errors import ConfigError
from vitkit.progress import SILENT, Progress
from vitkit.web.app import create_app
from vitkit.web.connections import ACCEPTED_AT_ONCE, Connections, QuietLog, protocol_for
from vitkit.web.explored import Explored
from vitkit.web.memory import freeze_loaded, return_freed
from vitkit.web.models import load_served
from vitkit.web.settings import ServeSettings

BACKLOG = 4096  # connections that may wait to be accepted, if the kernel allows so many
SILENCE = 1.0  # seconds that a connection may still be silent after that
LAME_DUCK = 0.5  # seconds between the signal and closing the listener: whoever is on the way is still let in


class Server(uvicorn.Server):
    """Uvicorn that knows who is connected, with a drain: after the signal every answer says `Connection: close`, then
    nobody new is let in."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        settings: ServeSettings = config.app.state.service.settings  # type: ignore[union-attr]
        self.connections = Connections(settings)
        config.http = protocol_for(self.connections)
        config.timeout_keep_alive = math.ceil(settings.idle)
        config.backlog = ACCEPTED_AT_ONCE  # asyncio's word for it

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)  # asyncio asked for as few as it accepts at once

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            self.connections.close_idle()
        if counter % 50 == 0:
            self._trimming = asyncio.get_running_loop().run_in_executor(None, return_freed)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second signal means now
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.service.draining = True  # type: ignore[union-attr]
        await self._while_connected(LAME_DUCK)
        for _ in range(1000):  # until nobody waits in the kernel's queue: they would be turned away unheard
            if self.force_exit or not select.select(sockets or [], [], [], 0)[0]:
                break
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        await self._while_connected(SILENCE)  # whoever was let in last may not have spoken yet
        await super().shutdown(sockets)

    async def _while_connected(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            if not self.force_exit and self.server_state.connections:
                await asyncio.sleep(0.05)


def serve(
    sources: Sequence[str],
    settings: ServeSettings,
    open_page: bool,
    progress: Progress = SILENT,
    open_set: Callable[[], Explored] | None = None,
) -> None:
    """Until a signal comes. What cannot work is an error before anything is served."""
    if not (0 if open_set else 1) <= len(sources) <= 2:
        what = "serve takes one model, or two to compare"
        raise ConfigError(f"{what}, not {len(sources)}; a data set alone is served with --index INDEX")
    with _bind(settings) as listener:
        data = open_set() if open_set else None
        for source in sources:
            progress.note(f"loading {source}")
        models = load_served(sources, settings)
        for served in models:
            for note in served.notes:
                progress.note(f"note: {served.name}: {note}")
        app = create_app(models, settings, data)
        app.state.service.decoders.quick.start()
        freeze_loaded()
        listener.listen(BACKLOG)  # from the moment that the address is shown, everyone can connect
        _announce(settings, listener.getsockname()[1], open_page, progress)
        config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, lifespan="on", ws="none")
        config.timeout_graceful_shutdown = round(2 * settings.timeout)
        QuietLog.install()
        Server(config).run([listener])
        service = app.state.service
        lost = service.begun - service.answered - service.gone
        done = f"{lost:,} accepted requests were not answered" if lost else "every accepted request was answered"
        progress.note(f"stopped after {service.answered:,} answers; {done}")


def _bind(settings: ServeSettings) -> socket.socket:
    """The socket first: a taken port is known before a large model is loaded."""
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as e:
        listener.close()
        where, reason = f"{settings.host}:{settings.port}", getattr(e, "strerror", None) or e
        raise ConfigError(f"cannot listen on {where} ({reason}); choose another --port, or stop what uses it") from e
    return listener


def _announce(settings: ServeSettings, port: int, open_page: bool, progress: Progress) -> None:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    if not settings.loopback and settings.token is None:
        progress.note("warning: everyone who can reach this machine can use this server; give --token to ask for one")
    progress.note(f"serving on {address} (stop with Ctrl+C); API: {address}openapi.json")
    if open_page:
        query = f"?token={settings.token}" if settings.token else ""
        threading.Timer(0.5, webbrowser.open, [address + query]).start()
