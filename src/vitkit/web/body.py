"""A request's body -> the pictures in it. Limits hold while bytes arrive: what is too large is never stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError

from vitkit.web.problems import ClientGone, Problem, busy
from vitkit.web.settings import ServeSettings

_PATIENCE = 4  # times the limit: so much is thrown away unread, so that an ordinary client hears the answer


@dataclass(frozen=True)
class Upload:
    name: str | None  # as the client calls it; only ever repeated to the client
    data: bytes


@dataclass
class _Part:
    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)


class Intake:
    """Reads bodies, and bounds what all requests together may hold in memory."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.buffered = 0

    @contextmanager
    def reading(self) -> Iterator[_Held]:
        held = _Held(self)
        try:
            yield held
        finally:
            self.buffered -= held.count


class _Held:
    """The body of one request, counted as long as the request lasts."""

    def __init__(self, intake: Intake) -> None:
        self.intake, self.count = intake, 0

    async def read(self, request: Request) -> bytes:
        limit = self.intake.settings.max_bytes
        try:
            return await asyncio.wait_for(self._read(request, limit), self.intake.settings.timeout)
        except (asyncio.TimeoutError, TimeoutError):
            seconds = self.intake.settings.timeout
            raise Problem(408, "slow_upload", f"the request did not arrive within {seconds:g} seconds") from None

    async def _read(self, request: Request, limit: int) -> bytes:
        too_large = Problem(413, "too_large", f"the request is larger than the limit of {limit:,} bytes")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > _PATIENCE * limit:
            raise too_large
        seen, chunks = 0, []
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            seen += len(chunk)
            if seen > _PATIENCE * limit:
                raise too_large
            if seen <= limit:
                self._hold(len(chunk))
                chunks.append(chunk)
            else:
                chunks.clear()
            if not message.get("more_body"):
                break
        if seen > limit:
            raise too_large
        return b"".join(chunks)

    def _hold(self, count: int) -> None:
        if self.intake.buffered + count > self.intake.settings.max_buffered:
            raise busy("too much is being uploaded at once")
        self.intake.buffered += count
        self.count += count


def uploads(content_type: str, body: bytes, most: int) -> list[Upload]:
    """The pictures of a body: the files of a form, or the body itself."""
    header = Message()
    header["content-type"] = content_type or "application/octet-stream"
    kind = header.get_content_type()
    if kind == "multipart/form-data":
        found = _of_form(header, body, most)
    elif kind == "application/json":
        raise Problem(415, "not_an_image", "JSON holds no picture; send the file itself, or a form with files")
    else:
        found = [Upload(None, body)]
    if not found or not any(upload.data for upload in found):
        raise Problem(422, "no_image", "no picture was sent; put the file in the body, or into a form with files")
    return found


def _of_form(header: Message, body: bytes, most: int) -> list[Upload]:
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise Problem(422, "bad_form", "the form has no boundary; let your HTTP library write the Content-Type")
    found = []
    for part in _parts(body, boundary, most):
        about = Message()
        about["content-disposition"] = part.headers.get("content-disposition", "")
        field_name, name = about.get_param("name", header="content-disposition"), about.get_filename()
        if name is None and not part.headers.get("content-type", "").startswith("image/"):
            told = str(field_name)[:60]
            raise Problem(
                422, "bad_form", f"the form's field {told!r} is not a file; write options into the address: ?{told}=..."
            )
        found.append(Upload(name, bytes(part.data)))
    return found


def _parts(body: bytes, boundary: str, most: int) -> list[_Part]:
    parts: list[_Part] = []
    names: list[bytes] = [b"", b""]  # the header that is being read: its name and its value

    def begin() -> None:
        if len(parts) >= most:
            raise Problem(422, "too_many", f"the form has more than {most} pictures; send them in several requests")
        parts.append(_Part())

    def header_end() -> None:
        parts[-1].headers[names[0].decode("latin-1").lower()] = names[1].decode("utf-8", "replace")
        names[:] = b"", b""

    def add(index: int, data: bytes, start: int, end: int) -> None:
        names[index] += data[start:end]

    try:
        parser = MultipartParser(
            boundary.encode("latin-1"),
            {
                "on_part_begin": begin,
                "on_header_field": lambda data, start, end: add(0, data, start, end),
                "on_header_value": lambda data, start, end: add(1, data, start, end),
                "on_header_end": header_end,
                "on_part_data": lambda data, start, end: parts[-1].data.extend(memoryview(data)[start:end]),
            },
        )
        parser.write(body)
        parser.finalize()
    except (FormParserError, UnicodeEncodeError) as e:
        raise Problem(422, "bad_form", f"the form cannot be read ({e}); was it cut short?") from None
    return parts
