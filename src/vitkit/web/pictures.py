"""Bytes from a stranger -> the tensor a model wants, or a `Problem`; and the way back to a PNG."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitkit.data.decode import BadPicture, available_formats, decode
from vitkit.data.preprocess import prepare, to_tensor
from vitkit.model.config import AnyConfig
from vitkit.web.body import Upload
from vitkit.web.problems import Problem

KINDS = "JPEG, PNG, WebP, GIF, BMP, TIFF or another common format"


def to_input(upload: Upload, config: AnyConfig, most: int, prepared: bool = False, where: str = "") -> Tensor:
    """uint8 C H W as the model sees it. `most` bounds the pixels, `where` says which picture of several it is."""
    try:
        _check_size(upload.data, most)
        picture = decode(upload.data, config.channels)
    except BadPicture as e:
        if isinstance(e.__cause__, UnidentifiedImageError):
            raise Problem(415, "not_an_image", f"{where}not a picture; send {KINDS}") from None
        raise Problem(422, "bad_image", f"{where}the picture cannot be read: {e.reason}") from None
    except Problem as e:
        raise Problem(e.status, e.code, f"{where}{e}") from None
    if not prepared:
        return to_tensor(prepare(picture, config.preprocessing))
    height, width = config.preprocessing.size
    if picture.size != (width, height):
        told = f"prepared=true wants a picture of {width}x{height} pixels, not {picture.width}x{picture.height}"
        raise Problem(422, "bad_image", f"{where}{told}")
    return to_tensor(picture)


def _check_size(data: bytes, most: int) -> None:
    """Sizes are known before anything is decoded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=available_formats()) as image:
                width, height = image.size
    except Exception:
        return  # `decode` says what is wrong
    if width < 1 or height < 1:
        raise Problem(422, "bad_image", f"a picture of {width}x{height} pixels has nothing in it")
    if width * height > most:
        raise Problem(422, "bad_image", f"{width}x{height} pixels is beyond the limit of {most:,}; send a smaller one")


def to_picture(pixels: Tensor) -> np.ndarray:
    """uint8 C H W -> H W 3."""
    array = pixels.permute(1, 2, 0).numpy()
    return array if array.shape[2] == 3 else np.repeat(array[:, :, :1], 3, axis=2)


def to_png(array: np.ndarray) -> bytes:
    """H W or H W 3, uint8."""
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG", compress_level=3)
    return out.getvalue()
