"""preprocessor_config.json <-> `Preprocessing`."""

from __future__ import annotations

from vitkit.checkpoints import writing
from vitkit.checkpoints.family import Fields, Opened, Table
from vitkit.checkpoints.huggingface.kind import Kind
from vitkit.model.config import Preprocessing

_RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # PIL's numbers 0 to 5


def preprocessing(opened: Opened, kind: Kind, notes: list[str]) -> Fields:
    processor = opened.table("preprocessor_config.json") or opened.table("processor_config.json").table(
        "image_processor"
    )
    if not processor:
        notes.append(f"preprocessing: no preprocessor_config.json, mean {kind.statistics['mean']} is assumed")
        return kind.statistics
    resample = processor.whole("resample", 2)
    if not 0 <= resample < len(_RESAMPLE):
        raise processor.wrong("resample", "a number of PIL's filters")
    pre: Fields = {"interpolation": _RESAMPLE[resample], "mean": (0.0,), "std": (1.0,)}
    if processor.get("do_normalize") in (None, True):
        pre |= {"mean": processor.numbers("image_mean"), "std": processor.numbers("image_std")}
    shorter, resized = _edge(processor, "size")
    if shorter or kind.type.startswith("dinov2"):
        pre["fit"] = "crop"
    if processor.get("do_center_crop") and (cropped := _edge(processor, "crop_size")[1]) and resized:
        pre["crop"] = min(1.0, cropped / resized)
    return pre


def _edge(processor: Table, key: str) -> tuple[bool, int]:
    """Whether 224, {"height": 224, "width": 224} or {"shortest_edge": 224} is the last, and the side; 0 for none."""
    if not isinstance(processor.get(key), dict):
        return False, processor.whole(key, 0)
    sides = processor.table(key)
    return "shortest_edge" in sides, sides.whole("shortest_edge", 0) or sides.whole("height")


def processor_json(pre: Preprocessing, channels: int) -> Fields:
    h, w = pre.size
    resized = {"height": round(h / pre.crop), "width": round(w / pre.crop)}
    about: Fields = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "do_rescale": True}
    about |= {"rescale_factor": 1 / 255, "do_normalize": True, "resample": _RESAMPLE.index(writing.interpolation(pre))}
    about["size"] = {"shortest_edge": resized["height"]} if pre.fit == "crop" else resized
    if pre.crop < 1 or pre.fit == "crop":
        about |= {"image_processor_type": "BitImageProcessor", "do_center_crop": True}
        about["crop_size"] = {"height": h, "width": w}
    mean, std = (writing.per_channel(values, channels) for values in (pre.mean, pre.std))
    return about | {"image_mean": mean, "image_std": std}
