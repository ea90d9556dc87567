"""Everything that can be chosen about serving, in one frozen dataclass, checked when made."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from vitkit.errors import ConfigError

MEGABYTE = 2**20


@dataclass(frozen=True)
class ServeSettings:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    runtime: str = "auto"
    token: str | None = None
    cors: tuple[str, ...] = ()  # origins whose pages may call the API

    max_batch: int = 16  # pictures computed at once
    max_wait: float = 0.005  # seconds that a batch waits for pictures that are still being decoded
    queue: int = 32  # pictures that may wait beside the batch that is being computed
    timeout: float = 30.0  # seconds for reading a request, and again for answering it

    max_bytes: int = 16 * MEGABYTE  # of one request's body
    max_buffered: int = 256 * MEGABYTE  # of all bodies together
    max_pixels: int = 50_000_000  # of one picture, as sent and as resized
    max_pictures: int = 32  # in one request

    def __post_init__(self) -> None:
        for name in ("max_batch", "queue", "max_bytes", "max_pixels", "max_pictures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_wait < 0 or self.timeout <= 0:
            raise ConfigError(f"max_wait={self.max_wait} must not be negative and timeout={self.timeout} above 0")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be from 1 to 65535, or 0 for any free one")
        if self.token is not None and (len(self.token) < 8 or not self.token.isascii() or not self.token.isprintable()):
            raise ConfigError("the token must be at least 8 printable ASCII characters; a long random one is best")
        for origin in self.cors:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(f"--cors {origin} is not an origin; write it as https://example.org, or '*' for all")

    @property
    def in_flight(self) -> int:
        """Pictures of one model that may be anywhere between being read and being answered."""
        return self.queue + self.max_batch

    @property
    def loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
