"""ONNX Runtime: the model as an ONNX file, and that file run.

The file stands for one picture size, with positions as a finished table, and any number of pictures.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.runtime.base import described, merged, need
from vitkit.runtime.example import example_of
from vitkit.runtime.onnx_graph import attention_nodes, with_fixed_shapes
from vitkit.runtime.onnx_int8 import Calibration, to_dynamic, to_static

OPSET = 20  # the first with Gelu; LayerNormalization came with 17
_LIMIT = 2**31 - 2**20  # bytes that one file of protobuf can hold


class Onnx:
    """An .onnx file, or its content, in ONNX Runtime."""

    def __init__(self, file: str | Path | bytes, name: str = "onnx", threads: int | None = None) -> None:
        ort = need("onnxruntime", "the runtime onnx", "onnx")
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if threads:
            options.intra_op_num_threads = threads
        given = file if isinstance(file, bytes) else str(file)
        try:
            self.session = ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as e:  # its errors have no common type
            what = "the exported model" if isinstance(file, bytes) else file
            raise ConfigError(f"ONNX Runtime cannot open {what}: {str(e).splitlines()[0]}; export it again") from e
        self.name = name
        self.input = self.session.get_inputs()[0].name

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.session.get_modelmeta().custom_metadata_map)

    def run(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {self.input: images.numpy()})[0])


def build(
    model: nn.Module,
    int8: bool = False,
    merge: int = 0,
    threads: int | None = None,
    calibration: Calibration | None = None,
) -> Onnx:
    """A model in ONNX Runtime, without a file."""
    need("onnxruntime", "the runtime onnx", "onnx")
    proto = to_onnx(merged(model, merge))
    if int8:
        proto = quantized(proto, calibration)
    return Onnx(proto.SerializeToString(), described("onnx", int8, merge), threads)


def quantized(proto: Any, calibration: Calibration | None) -> Any:
    return to_dynamic(proto) if calibration is None else to_static(proto, calibration)


def to_onnx(model: nn.Module, raw: bool = False) -> Any:
    """The model as an onnx.ModelProto: inputs `images` (or `pixels`), outputs `logits`."""
    onnx = need("onnx", "writing ONNX", "onnx")
    example = example_of(model, raw)
    name = "pixels" if raw else "images"
    axes = {0: "batch", 1: "height", 2: "width"} if raw else {0: "batch"}
    size = sum(p.numel() * 4 for p in model.parameters())
    if size > _LIMIT:
        raise ConfigError(f"the weights take {size / 2**30:.1f} GB, and an .onnx file holds 2; use --to torch-export")
    with (
        tempfile.TemporaryDirectory(prefix="vitkit-") as folder,
        warnings.catch_warnings(),
        attention_nodes(model.config, OPSET),  # type: ignore[arg-type]
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")  # the tracer warns of every branch on a shape: shapes are fixed here
        torch.onnx.export(
            on_cpu_in_fp32(model),
            (example,),
            Path(folder, "model.onnx"),
            dynamo=False,  # the new exporter needs minutes for a model that merges tokens
            input_names=[name],
            output_names=["logits"],
            dynamic_axes={name: axes, "logits": {0: "batch"}},
            opset_version=OPSET,
        )
        return with_fixed_shapes(onnx.load(str(Path(folder, "model.onnx"))), varied(example, raw))


def varied(example: Tensor, raw: bool) -> list[np.ndarray]:
    """The example, and one that differs in all that may differ: the number of pictures, and with `raw` their size."""
    other = example[:1, :-1, :-2] if raw else example[:1]
    return [example.numpy(), other.contiguous().numpy()]


def on_cpu_in_fp32(model: nn.Module) -> nn.Module:
    """Where and how a model is exported; the given one stays as it is."""
    first = next(model.parameters())
    if first.device.type == "cpu" and first.dtype == torch.float32:
        return model.eval()
    return copy.deepcopy(model).to("cpu", torch.float32).eval()


def save(proto: Any, path: Path, metadata: dict[str, str]) -> None:
    onnx = need("onnx", "writing ONNX", "onnx")
    onnx.helper.set_model_props(proto, metadata)
    path.write_bytes(proto.SerializeToString())
