"""The process: load, bind, say where, serve; and on SIGTERM answer what was accepted before ending."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from vitkit.errors import ConfigError
from vitkit.web.app import create_app
from vitkit.web.models import load_served
from vitkit.web.service import Service
from vitkit.web.settings import ServeSettings

Say = Callable[[str], None]
BACKLOG = 512  # connections that may wait to be accepted
LAST_WORDS = 1.0  # seconds that a connection may still be silent after that
LAME_DUCK = 0.5  # seconds between the signal and closing the door: whoever is on the way is still let in


class Server(uvicorn.Server):
    """Uvicorn with a drain: after the signal every answer says `Connection: close`, then nobody new is let in."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # the second signal means now
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.service.draining = True  # type: ignore[union-attr]
        await self._while_connected(LAME_DUCK)
        await self._close_door(sockets or [])
        await self._while_connected(LAST_WORDS)  # whoever was let in last may not have spoken yet
        await super().shutdown(sockets)

    async def _while_connected(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            if not self.force_exit and self.server_state.connections:
                await asyncio.sleep(0.05)

    async def _close_door(self, sockets: list[socket.socket]) -> None:
        """At a moment when nobody stands before it: those in the kernel's queue would be turned away unheard."""
        for _ in range(1000):
            if self.force_exit or not select.select(sockets, [], [], 0)[0]:
                break
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()


def serve(sources: Sequence[str], settings: ServeSettings, open_page: bool, say: Say) -> None:
    """Until a signal comes. What cannot work is an error before anything is served."""
    if not 1 <= len(sources) <= 2:
        raise ConfigError(f"serve takes one model, or two to compare, not {len(sources)}")
    listener = _bind(settings)
    with listener:
        for source in sources:
            say(f"loading {source}")
        models = load_served(sources, settings.runtime)
        for served in models:
            for note in served.notes:
                say(f"note: {served.name}: {note}")
        app = create_app(models, settings)
        listener.listen(BACKLOG)  # from the moment that it is said, everyone can come
        _say_where(settings, listener, open_page, say)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=15,
            timeout_graceful_shutdown=round(2 * settings.timeout),
            backlog=BACKLOG,
        )
        Server(config).run([listener])
        say(_last_words(app.state.service))


def _last_words(service: Service) -> str:
    lost = service.begun - service.answered - service.gone
    done = "every accepted request was answered" if not lost else f"{lost:,} accepted requests were not answered"
    return f"stopped after {service.answered:,} answers; {done}"


def _bind(settings: ServeSettings) -> socket.socket:
    """The socket first: a taken port is known before a large model is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as e:
        listener.close()
        where, reason = f"{settings.host}:{settings.port}", getattr(e, "strerror", None) or e
        raise ConfigError(f"cannot listen on {where} ({reason}); choose another --port, or stop what uses it") from e
    return listener


def _say_where(settings: ServeSettings, listener: socket.socket, open_page: bool, say: Say) -> None:
    port = listener.getsockname()[1]
    host = "127.0.0.1" if settings.host == "0.0.0.0" else "[::1]" if settings.host == "::" else settings.host
    address = f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{port}/"
    if not settings.loopback and settings.token is None:
        say("warning: everyone who can reach this machine can use this server; give --token to ask for one")
    say(f"serving on {address} (stop with Ctrl+C); API: {address}openapi.json")
    if open_page:
        link = f"{address}?token={settings.token}" if settings.token else address
        threading.Timer(0.5, webbrowser.open, [link]).start()
