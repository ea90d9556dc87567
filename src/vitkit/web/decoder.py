"""A process that decodes what strangers send, and nothing else: a crash or a bomb in a decoder ends it, not the server.

It is forked from a clean process, so that a new one is there within milliseconds. Its memory is bounded, and
the seconds of CPU that one image may take. It reads jobs and writes answers on one socket (`decoding` has the other
end) and ends when that is closed. What it answers is numbers and text: the server runs nothing of it.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from PIL import UnidentifiedImageError
from torch import Tensor

from vitkit.data.decode import BadImage, Header, available_formats, header
from vitkit.data.preprocess import read_image
from vitkit.model.config import Preprocessing

try:
    import resource
except ImportError:  # Windows: no limits but the deadline
    resource = None  # type: ignore[assignment]

KINDS = "JPEG, PNG, WebP, GIF, BMP, TIFF or another common format"
SLOW_FORMATS = {"JPEG2000": 8, "AVIF": 4}  # so many times the work of the same pixels as PNG
SCANS = 16  # of a JPEG; ordinary progressive ones have about 10, and each costs as much as the whole image
HEAD = struct.Struct(">cQI")  # of an answer: which, the work of the image in pixels, bytes that follow
PIXELS, LARGE, REFUSED = b"P", b"L", b"R"
available_formats()  # finds Pillow's decoders now: what is forked from here need not


@dataclass(frozen=True)
class Limits:
    """Of one process."""

    bytes: int  # beside what it has at the beginning
    seconds: int  # of CPU, for each image
    nice: int = 0  # above 0: gives way to the model and to other decoders


class Target(Protocol):
    """What an image becomes; a model's configuration is one."""

    @property
    def channels(self) -> int: ...
    @property
    def preprocessing(self) -> Preprocessing: ...


@dataclass(frozen=True)
class Job:
    """What to make of an image."""

    pre: Preprocessing
    channels: int
    prepared: bool  # it has the right size already
    most: int  # pixels of the image as sent
    work: int  # more than this is not begun but answered with LARGE

    @staticmethod
    def of(config: Target, prepared: bool, most: int, work: int) -> Job:
        pre = config.preprocessing
        return Job(Preprocessing(size=pre.size) if prepared else pre, config.channels, prepared, most, work)


def answer(job: Job, data: bytes) -> bytes:
    """HEAD, then the pixels as the model sees them (uint8 C H W), or [status, code, message] as JSON."""
    try:
        about = header(data)
        _check(about, job)
        effort = work(about, data)
        if effort > job.work:
            return HEAD.pack(LARGE, effort, 0)
        pixels: Tensor = read_image(data, job.pre, job.channels).contiguous()
        return HEAD.pack(PIXELS, effort, pixels.numel()) + pixels.numpy().tobytes()
    except BadImage as e:
        status, code, reason = 422, "bad_image", f"the image cannot be read: {e.reason}"
        if isinstance(e.__cause__, UnidentifiedImageError):
            status, code, reason = 415, "not_an_image", f"not an image; send {KINDS}"
        elif isinstance(e.__cause__, MemoryError):
            reason = "the image cannot be read: it needs more memory than one image may take; send a smaller one"
        text = json.dumps([status, code, reason]).encode()
        return HEAD.pack(REFUSED, 0, len(text)) + text


def _check(about: Header, job: Job) -> None:
    width, height = about.width, about.height
    if width < 1 or height < 1:
        raise BadImage(f"an image of {width}x{height} pixels has nothing in it")
    if width * height > job.most:
        raise BadImage(f"{width}x{height} pixels is beyond the limit of {job.most:,}; send a smaller one")
    if job.prepared and (height, width) != job.pre.size:
        wanted = f"{job.pre.size[1]}x{job.pre.size[0]}"
        raise BadImage(f"prepared=true wants an image of {wanted} pixels, not {width}x{height}")


def work(about: Header, data: bytes) -> int:
    """How much work an image is, in pixels of an ordinary one."""
    times = SLOW_FORMATS.get(about.format, 1)
    if about.format in ("JPEG", "MPO"):
        times = max(1, data.count(b"\xff\xda") // SCANS)
    return about.width * about.height * times


# --- the process -------------------------------------------------------------------------------------


def run(connection: socket.socket, limits: Limits) -> None:
    """Answer jobs until the other end is closed."""
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):  # by a terminal or a supervisor: the server ends us
        signal.signal(sent_to_all, signal.SIG_IGN)
    _bound(limits)
    connection.setblocking(True)
    while head := _read(connection, 12):
        about, length = struct.unpack(">IQ", head)
        job = pickle.loads(_read(connection, about))  # from the server, which we trust; never the other way round
        data = _read(connection, length)
        _allow_seconds(limits.seconds)
        try:
            connection.sendall(answer(job, data))
        except OSError:  # the server has ended
            return
        del data


def _bound(limits: Limits) -> None:
    os.nice(limits.nice) if limits.nice and hasattr(os, "nice") else None
    if resource is None:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = Path("/proc/self/statm")
    if pages.exists():  # elsewhere the address space cannot be bounded
        have = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (have + limits.bytes, have + limits.bytes))


def _allow_seconds(seconds: int) -> None:
    """From now on. One that takes longer is ended by the kernel, wherever it is."""
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, hard))


def _read(connection: socket.socket, length: int) -> bytes:
    """Exactly so many bytes; none when the other end is closed."""
    held, at = bytearray(length), 0
    while at < length:
        got = connection.recv_into(memoryview(held)[at:])
        if not got:
            return b""
        at += got
    return bytes(held)
