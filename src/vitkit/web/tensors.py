"""The Open Inference Protocol (KServe V2) on the wire: a request's bytes -> one tensor of images, and the answer back.

A request is JSON; with the binary extension its header says how long the JSON is, and the tensors follow it. One input
of three is sent:
    image   BYTES [N]          encoded files (JPEG, PNG ...); in JSON as base64
    pixels  UINT8 [N, H, W, C] decoded images of any size, which the server prepares as it does files
    input   FP32  [N, C, H, W] what goes into the model, prepared by the client
Everything that is wrong with a request is a `Problem` 400 with a sentence. Sizes are checked before memory is taken.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitkit.io import dumps, parse_json
from vitkit.model.config import AnyConfig
from vitkit.web.answers import Problem
from vitkit.web.body import Upload

LENGTH = "inference-header-content-length"
TYPES: dict[str, np.dtype] = {
    "UINT8": np.dtype("u1"),
    "FP32": np.dtype("<f4"),
}  # of numbers; BYTES have a length before each
INPUTS = {"image": "BYTES", "pixels": "UINT8", "input": "FP32"}
Fields = Mapping[str, object]


@dataclass(frozen=True)
class InferRequest:
    id: str
    files: list[Upload]  # of `image` and `pixels`
    prepared: np.ndarray | None  # of `input`: N C H W
    outputs: dict[str, bool]  # by name, and whether in binary; none: all
    binary: bool  # of outputs that are not named

    @property
    def count(self) -> int:
        return len(self.files) if self.prepared is None else len(self.prepared)


def bad(message: str) -> Problem:
    return Problem(400, "bad_tensor", message)


def shapes(config: AnyConfig) -> dict[str, list[int]]:
    """Of the inputs; -1: any."""
    size = list(config.preprocessing.size)
    return {"image": [-1], "pixels": [-1, -1, -1, config.channels], "input": [-1, config.channels, *size]}


# --- reading -----------------------------------------------------------------------------------------


def read_request(body: bytes, length: str | None, config: AnyConfig, most: int) -> InferRequest:
    head, binary = _cut(body, length)
    try:
        request = parse_json(head)
    except ValueError as e:
        raise bad(f"the request is no JSON ({e}); with binary tensors, {LENGTH} says where they begin") from None
    if not isinstance(request, dict):
        raise bad("the request must be a JSON object with inputs")
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise bad(f"send one input, one of: {', '.join(INPUTS)}")
    name, kind, shape = _described(inputs[0], shapes(config), most)
    data = _data(inputs[0], kind, shape, binary)
    about = (str(request.get("id", ""))[:200], *_wanted(request))
    if isinstance(data, list):
        return InferRequest(about[0], [Upload(None, one) for one in data], None, *about[1:])
    if name == "pixels":
        return InferRequest(about[0], [Upload(None, _as_file(one)) for one in data], None, *about[1:])
    if not np.isfinite(data).all():
        raise bad("input holds numbers that are not finite")
    return InferRequest(about[0], [], data, *about[1:])


def _cut(body: bytes, length: str | None) -> tuple[bytes, bytes]:
    """The JSON, and the tensors behind it."""
    if length is None:
        return body, b""
    if not length.isascii() or not length.isdecimal() or len(length) > 12 or int(length) > len(body):
        raise bad(f"{LENGTH}: {length[:20]!r} is not the length of the JSON in a body of {len(body)} bytes")
    return body[: int(length)], body[int(length) :]


def _described(tensor: Fields, known: Mapping[str, Sequence[int]], most: int) -> tuple[str, str, list[int]]:
    """Name, datatype and shape of an input, when they are ones of ours."""
    name, kind, shape = str(tensor.get("name"))[:60], tensor.get("datatype"), tensor.get("shape")
    if name not in INPUTS:
        raise bad(f"there is no input {name!r}; send one of: {', '.join(INPUTS)}")
    if kind != INPUTS[name]:
        raise bad(f"{name} has the datatype {INPUTS[name]}, not {str(kind)[:20]}")
    wanted = known[name]
    if not isinstance(shape, list) or not all(type(n) is int and 0 < n < 2**31 for n in shape):
        raise bad(f"{name} needs a shape of whole numbers above 0, such as {_words(wanted)}")
    if name == "image" and len(shape) == 2 and shape[1] == 1:  # as batching clients send it
        shape = shape[:1]
    if len(shape) != len(wanted) or any(w not in (-1, n) for n, w in zip(shape, wanted, strict=True)):
        raise bad(f"{name} has the shape {_words(wanted)}, not {_words(shape[:8])}; -1 is any number")
    if shape[0] > most:
        raise Problem(413, "too_many", f"{shape[0]} images in one request are more than {most}; send several requests")
    return name, INPUTS[name], shape


def _words(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _data(tensor: Fields, kind: str, shape: list[int], binary: bytes) -> np.ndarray | list[bytes]:
    parameters, count = tensor.get("parameters"), math.prod(shape)
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None and "data" not in tensor:
        raise bad("the input has neither data nor binary_data_size")
    if size is None:
        return _from_json(tensor["data"], kind, shape)
    if type(size) is not int or size != len(binary):
        raise bad(f"binary_data_size is {str(size)[:20]}, and {len(binary)} bytes follow the JSON")
    if kind == "BYTES":
        return _elements(binary, count)
    if len(binary) != count * TYPES[kind].itemsize:
        wanted = f"{kind} of shape {_words(shape)} takes {count * TYPES[kind].itemsize}"
        raise bad(f"{wanted} bytes, and {len(binary)} were sent")
    return np.frombuffer(binary, TYPES[kind]).reshape(shape)


def _elements(binary: bytes, count: int) -> list[bytes]:
    """BYTES: each has its length before it, four bytes, the lowest first."""
    found, at = list[bytes](), 0
    for _ in range(count):
        if at + 4 > len(binary) or at + 4 + (length := struct.unpack_from("<I", binary, at)[0]) > len(binary):
            raise bad(f"BYTES element {len(found)} of {count} is cut short; each is its length, four bytes, and itself")
        found.append(binary[at + 4 : at + 4 + length])
        at += 4 + length
    if at != len(binary):
        raise bad(f"{len(binary) - at} bytes follow the last of {count} BYTES elements")
    return found


def _from_json(data: object, kind: str, shape: list[int]) -> np.ndarray | list[bytes]:
    flat = _flat(data, math.prod(shape))
    if kind == "BYTES":
        try:
            return [base64.b64decode(str(one), validate=True) for one in flat]
        except (binascii.Error, ValueError):
            raise bad("images in JSON are base64 text; or send them as binary tensors") from None
    numbers = [n for n in flat if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) < len(flat):
        raise bad(f"{kind} data must be numbers")
    if kind == "UINT8" and not all(isinstance(n, int) and 0 <= n <= 255 for n in numbers):
        raise bad("UINT8 data must be whole numbers from 0 to 255")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused
        return np.array([min(max(n, -1e39), 1e39) for n in numbers]).astype(TYPES[kind]).reshape(shape)


def _flat(data: object, count: int) -> list[object]:
    """Nested lists or a flat one, in row-major order."""
    level = [data]
    while any(isinstance(item, list) for item in level):
        level = [one for item in level for one in (item if isinstance(item, list) else [item])]
    if not isinstance(data, list) or len(level) != count:
        raise bad(f"data holds {len(level)} values, and the shape has {count}")
    return level


def _as_file(pixels: np.ndarray) -> bytes:
    """H W C -> a PPM, which the processes that decode read like any other file, with the same limits."""
    height, width, channels = pixels.shape
    return b"P%d %d %d 255\n" % (6 if channels == 3 else 5, width, height) + pixels.tobytes()


def _wanted(request: Fields) -> tuple[dict[str, bool], bool]:
    """Outputs that were asked for, and whether binary is the rule."""
    parameters, outputs = request.get("parameters"), request.get("outputs", [])
    rule = isinstance(parameters, dict) and parameters.get("binary_data_output") is True
    if not isinstance(outputs, list) or not all(
        isinstance(o, dict) and isinstance(o.get("name"), str) for o in outputs
    ):
        raise bad("outputs must be a list of objects with a name")
    found = {}
    for output in outputs:
        own = output.get("parameters")
        found[output["name"]] = bool(own.get("binary_data", rule)) if isinstance(own, dict) else rule
    return found, rule


# --- answering ---------------------------------------------------------------------------------------


def write_answer(about: Fields, found: Mapping[str, np.ndarray], request: InferRequest) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON where binary tensors follow."""
    if unknown := [name for name in request.outputs if name not in found]:
        raise bad(f"there is no output {unknown[0][:60]!r}; the model has {', '.join(found)}")
    outputs, tail = [], b""
    for name in request.outputs or found:
        values = found[name]
        text = values.dtype.kind == "U"
        output: dict[str, object] = {"name": name, "datatype": "BYTES" if text else "FP32", "shape": [*values.shape]}
        if request.outputs.get(name, request.binary):
            content = b"".join(map(_element, values)) if text else values.astype("<f4").tobytes()
            output["parameters"] = {"binary_data_size": len(content)}
            tail += content
        else:
            output["data"] = values.ravel().tolist()
        outputs.append(output)
    head = dumps({**about, **({"id": request.id} if request.id else {}), "outputs": outputs}).encode(errors="replace")
    return head + tail, len(head) if tail else None


def _element(text: str) -> bytes:
    content = str(text).encode(errors="replace")
    return struct.pack("<I", len(content)) + content
