"""OpenVINO: Intel's runtime. int8 pays on processors with VNNI or AMX, and is slower than fp32 without them."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.runtime.base import described, merged, need
from vitkit.runtime.example import example_of
from vitkit.runtime.onnx import on_cpu_in_fp32
from vitkit.runtime.onnx_int8 import Calibration

_PLACE = "vitkit"  # where our words are in the file's own information


class OpenVino:
    """An .xml file with its .bin, or a model in memory."""

    def __init__(self, model: Any, name: str = "openvino", threads: int | None = None) -> None:
        ov = need("openvino", "the runtime openvino", "openvino")
        options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}  # one batch at a time, by all threads
        options["INFERENCE_PRECISION_HINT"] = "f32"  # not half precision behind our back
        if threads:
            options["INFERENCE_NUM_THREADS"] = threads
        try:
            model = ov.Core().read_model(str(model)) if isinstance(model, (str, Path)) else model
            self.compiled = ov.Core().compile_model(model, "CPU", options)
        except RuntimeError as e:
            raise ConfigError(f"OpenVINO cannot open the model: {str(e).splitlines()[0]}; export it again") from e
        self.name, self.metadata = name, read_metadata(model)

    def run(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.compiled(images.numpy())[0].copy())


def read_metadata(model: Any) -> dict[str, str]:
    if not model.has_rt_info([_PLACE]):
        return {}
    return {k: str(v.value) for k, v in model.get_rt_info([_PLACE]).astype(dict).items()}


def build(
    model: nn.Module,
    int8: bool = False,
    merge: int = 0,
    threads: int | None = None,
    calibration: Calibration | None = None,
) -> OpenVino:
    """A model in OpenVINO, without a file."""
    converted = to_openvino(merged(model, merge))
    if int8:
        converted = quantized(converted, calibration)
    return OpenVino(converted, described("openvino", int8, merge), threads)


def to_openvino(model: nn.Module, raw: bool = False) -> Any:
    ov = need("openvino", "the runtime openvino", "openvino")
    example = example_of(model, raw)
    shape = [-1, -1, -1, example.shape[3]] if raw else [-1, *example.shape[1:]]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        converted = ov.convert_model(on_cpu_in_fp32(model), example_input=example, input=[ov.PartialShape(shape)])
    converted.inputs[0].get_tensor().set_names({"pixels" if raw else "images"})
    converted.outputs[0].get_tensor().set_names({"logits"})
    return converted


def quantized(model: Any, calibration: Calibration | None) -> Any:
    """Without pictures the weights alone become int8; with pictures the activations too, by NNCF."""
    nncf = need("nncf", "int8 for OpenVINO", "openvino")
    nncf.set_log_level(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):  # it draws bars where our answers go
        if calibration is None:
            return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
        pictures = nncf.Dataset([batch.numpy() for batch in calibration])
        return nncf.quantize(model, pictures, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(calibration))


def save(model: Any, path: Path, metadata: dict[str, str]) -> None:
    ov = need("openvino", "writing OpenVINO", "openvino")
    for key, value in metadata.items():
        model.set_rt_info(value, [_PLACE, key])
    ov.save_model(model, str(path), compress_to_fp16=False)
