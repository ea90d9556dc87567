"""ONNX Runtime: the model as an ONNX file, and that file run.

The file stands for one image size, with positions as a finished table, and any number of images.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.runtime.base import Choice, Runtime, Spec, config_of, example_of, prepared, thread_count
from vitkit.runtime.seal import checked, seal

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 20  # the first with Gelu; LayerNormalization came with 17
_LIMIT = 2**31 - 2**20  # bytes that one file of protobuf can hold


class Onnx(Runtime):
    """An .onnx file, or its content, in ONNX Runtime on the CPU."""

    def __init__(self, file: Path | bytes, name: str = "onnx", threads: int | None = None) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = thread_count(threads)
        what = "the exported model" if isinstance(file, bytes) else str(file)
        try:
            content = file if isinstance(file, bytes) else checked(file)[0]  # in memory: no other file is read
            self.session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except ConfigError:
            raise
        except Exception as e:  # its errors have no common type
            raise ConfigError(f"ONNX Runtime cannot open {what}: {str(e).splitlines()[0]}; export it again") from e
        super().__init__(name, metadata=self.session.get_modelmeta().custom_metadata_map)

    def outputs(self, array: np.ndarray) -> list[np.ndarray]:
        found: list[np.ndarray] = self.session.run(None, {self.session.get_inputs()[0].name: array})
        return found

    def compute(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.outputs(images.numpy())[0])


open_file = Onnx


def build(model: nn.Module, choice: Choice, spec: Spec) -> Onnx:
    return Onnx(_proto(prepared(model, spec), spec).SerializeToString(), choice.name, choice.threads)


def write(model: nn.Module, path: Path, metadata: Mapping[str, str], spec: Spec) -> None:
    import onnx

    proto = _proto(model, spec)
    onnx.helper.set_model_props(proto, dict(metadata))
    path.write_bytes(proto.SerializeToString())
    seal(path)


def _proto(model: nn.Module, spec: Spec) -> ModelProto:
    from vitkit.runtime.onnx_graph import to_dynamic, to_static

    proto = to_onnx(model, spec.raw)
    if not spec.int8:
        return proto
    return to_dynamic(proto) if spec.calibration is None else to_static(proto, spec.calibration)


def to_onnx(model: nn.Module, raw: bool = False) -> ModelProto:
    """Inputs `images` (or `pixels`), outputs `logits`."""
    import onnx

    from vitkit.runtime.onnx_graph import own_nodes, with_fixed_shapes

    example = example_of(model, raw)
    name = "pixels" if raw else "images"
    axes = {0: "batch", 1: "height", 2: "width"} if raw else {0: "batch"}
    size = sum(p.numel() * 4 for p in model.parameters())
    if size > _LIMIT:
        raise ConfigError(f"the weights take {size / 2**30:.1f} GB, and an .onnx file holds 2; use --to torch-export")
    with (
        warnings.catch_warnings(),
        own_nodes(config_of(model), OPSET),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")  # the tracer warns of every branch on a shape: shapes are fixed here
        traced, shapes = io.BytesIO(), {name: axes, "logits": {0: "batch"}}
        # The new exporter, dynamo, needs minutes for a model that merges tokens.
        trace = partial(torch.onnx.export, dynamo=False, opset_version=OPSET)
        trace(model, (example,), traced, input_names=[name], output_names=["logits"], dynamic_axes=shapes)  # type: ignore[arg-type]
        # Another example that differs in all that may differ: the number of images, and with `raw` their size.
        other = (example[:1, :-1, :-2] if raw else example[:1]).contiguous()
        examples = [example.numpy(), other.numpy()]
        proto = onnx.load_from_string(traced.getvalue())
        return with_fixed_shapes(proto, examples, lambda content: Onnx(content).outputs)
