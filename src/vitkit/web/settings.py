"""Everything that can be chosen about serving, in one frozen dataclass, checked when made."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from vitkit.checkpoints.options import ModelOptions
from vitkit.errors import ConfigError


@dataclass(frozen=True)
class ServeSettings:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    runtime: str = "auto"
    device: str | None = None  # the fastest there is
    model: ModelOptions = field(default_factory=ModelOptions, hash=False)
    token: str | None = None
    cors: tuple[str, ...] = ()  # origins whose pages may call the API

    max_batch: int = 16  # images computed at once
    max_wait: float = 0.005  # seconds that a batch waits for images that are still being decoded
    queue: int = 32  # images that may wait beside the batch that is being computed
    timeout: float = 30.0  # seconds for reading a request, and again for answering it

    max_bytes: int = 16 * 2**20  # of one request's body
    max_buffered: int = 256 * 2**20  # of all bodies together
    max_pixels: int = 50_000_000  # of one image, as sent and as resized
    max_request_pixels: int = 200_000_000  # of all images of one request
    max_total_pixels: int = 400_000_000  # of large images that all requests together wait for
    max_pictures: int = 32  # in one request

    max_connections: int = 1000  # fewer where the process may not open so many files
    max_per_address: int = 500  # of these
    idle: float = 15.0  # seconds that a connection may stay open without a request, or an answer unread

    def __post_init__(self) -> None:
        least_one = ("max_batch", "queue", "max_bytes", "max_pixels", "max_request_pixels", "max_total_pixels")
        for name in (*least_one, "max_pictures", "max_connections", "max_per_address"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_wait < 0 or self.timeout <= 0 or self.idle <= 0:
            times = f"timeout={self.timeout} and idle={self.idle} above 0"
            raise ConfigError(f"max_wait={self.max_wait} must not be negative, {times}")
        if self.max_total_pixels < self.max_request_pixels:
            raise ConfigError("max_total_pixels must be at least max_request_pixels: of one request")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be from 1 to 65535, or 0 for any free one")
        if self.token is not None and (len(self.token) < 8 or not self.token.isascii() or not self.token.isprintable()):
            raise ConfigError("the token must be at least 8 printable ASCII characters; a long random one is best")
        for origin in self.cors:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(f"--cors {origin} is not an origin; write it as https://example.org, or '*' for all")

    @property
    def loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
