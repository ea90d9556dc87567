"""A request's body -> the images in it, or a `Problem`; and the way back to a PNG.

Limits hold while bytes arrive: what is too large is never stored. Nothing is decoded here.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.message import Message
from functools import partial
from typing import NamedTuple

import numpy as np
from fastapi import Request
from PIL import Image
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError

from vitkit.web.answers import Problem
from vitkit.web.settings import ServeSettings

_PATIENCE = 4  # times the limit: so much is thrown away unread, so that an ordinary client hears the answer
FRESH = 1.0  # seconds that an upload may take in any case
BUSY = Problem(503, "busy", "too much is being uploaded at once; try again in a second")


class Upload(NamedTuple):
    name: str | None  # as the client calls it; only ever repeated to the client
    data: bytes


class Intake:
    """Reads bodies, and bounds what all requests together may hold in memory."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings, self.buffered = settings, 0
        self._reading: dict[asyncio.Task[None], tuple[bytearray, float]] = {}  # uploads that have not ended, and since

    @asynccontextmanager
    async def body(self, request: Request, most: int | None = None) -> AsyncIterator[bytes]:
        """The body of a request, counted in `buffered` until the end of the block."""
        held = bytearray()
        reading = asyncio.ensure_future(self._read(request, held, most or self.settings.max_bytes))
        self._reading[reading] = held, time.monotonic()
        try:
            await asyncio.wait({reading}, timeout=self.settings.timeout)
            if not reading.done():
                message = f"the request did not arrive within {self.settings.timeout:g} seconds"
                raise Problem(408, "slow_upload", message)
            if reading.cancelled():
                raise BUSY
            reading.result()
            del self._reading[reading]
            yield bytes(held)
        finally:
            reading.cancel()
            self._reading.pop(reading, None)
            self.buffered -= len(held)

    def _make_room(self, wanted: int) -> None:
        """Uploads that stand still do not keep others out: the oldest that have not ended are given up."""
        for reading, (held, since) in list(self._reading.items()):
            if self.buffered + wanted <= self.settings.max_buffered or time.monotonic() - since < FRESH:
                break
            if held and reading is not asyncio.current_task():
                self.buffered -= len(held)
                held.clear()
                reading.cancel()
        if self.buffered + wanted > self.settings.max_buffered:
            raise BUSY

    async def _read(self, request: Request, held: bytearray, limit: int) -> None:
        seen = 0
        too_large = Problem(413, "too_large", f"the request is larger than the limit of {limit:,} bytes")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > _PATIENCE * limit:
            raise too_large
        async for chunk in request.stream():
            seen += len(chunk)
            if seen > _PATIENCE * limit:
                raise too_large
            if seen > limit:
                self.buffered -= len(held)
                held.clear()
            else:
                self._make_room(len(chunk))
                self.buffered += len(chunk)
                held += chunk
        if seen > limit:
            raise too_large


def uploads(content_type: str, body: bytes, most: int) -> list[Upload]:
    """The images of a body: the files of a form, or the body itself."""
    head = Message()
    head["content-type"] = content_type or "application/octet-stream"
    kind = head.get_content_type()
    if kind == "application/json":
        raise Problem(415, "not_an_image", "JSON holds no image; send the file itself, or a form with files")
    files = [Upload(None, body)]
    if kind == "multipart/form-data":
        files = [_file(part, bytes(data)) for part, data in _parts(body, head.get_boundary(), most)]
    if not any(upload.data for upload in files):
        raise Problem(422, "no_image", "no image was sent; put the file in the body, or into a form with files")
    return files


def _file(part: Message, data: bytes) -> Upload:
    name = part.get_filename()
    if name is None and part.get_content_maintype() != "image":
        option = str(part.get_param("name", header="content-disposition"))[:60]
        message = f"the form's field {option!r} is not a file; write options into the address: ?{option}=..."
        raise Problem(422, "bad_form", message)
    return Upload(name, data)


def _parts(body: bytes, boundary: str | None, most: int) -> list[tuple[Message, bytearray]]:
    if not boundary:
        raise Problem(422, "bad_form", "the form has no boundary; let your HTTP library write the Content-Type")
    parts: list[tuple[Message, bytearray]] = []
    words = [b"", b""]  # the header that is being read: its name and its value

    def begin() -> None:
        if len(parts) >= most:
            raise Problem(422, "too_many", f"the form has more than {most} images; send them in several requests")
        parts.append((Message(), bytearray()))

    def add(index: int, data: bytes, start: int, end: int) -> None:
        words[index] += data[start:end]

    def header_end() -> None:
        parts[-1][0][words[0].decode("latin-1")] = words[1].decode("utf-8", "replace")
        words[:] = b"", b""

    callbacks = {
        "on_part_begin": begin,
        "on_header_field": partial(add, 0),
        "on_header_value": partial(add, 1),
        "on_header_end": header_end,
        "on_part_data": lambda data, start, end: parts[-1][1].extend(memoryview(data)[start:end]),
    }
    try:
        parser = MultipartParser(boundary.encode("latin-1"), callbacks)  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except (FormParserError, UnicodeEncodeError) as e:
        raise Problem(422, "bad_form", f"the form cannot be read ({e}); was it cut short?") from None
    return parts


def to_png(array: np.ndarray) -> bytes:
    """H W or H W 3, uint8."""
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG", compress_level=3)
    return out.getvalue()
