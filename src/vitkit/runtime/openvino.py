"""OpenVINO: Intel's runtime. int8 pays on processors with VNNI or AMX, and is slower than fp32 without them."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import openvino as ov
import torch
from openvino import Model
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.runtime.base import Choice, Runtime, Spec, example_of, prepared, thread_count
from vitkit.runtime.seal import checked, seal
from vitkit.runtime.top import OUTPUTS

_PLACE = "vitkit"  # where our words are in the file's own information
_BF16 = "bf16"  # a word there: compute so, where the processor can


class OpenVino(Runtime):
    """An .xml file with its .bin, or a model in memory."""

    def __init__(self, model: Model | str | Path, name: str = "openvino", threads: int | None = None) -> None:
        # One batch at a time, by all threads; in half precision only where it is asked for. Left to itself OpenVINO
        # counts the cores of the machine: it would ignore OMP_NUM_THREADS, and the second thread of each core.
        options: dict[str, str | int | bool] = {"PERFORMANCE_HINT": "LATENCY"}
        options |= {"INFERENCE_NUM_THREADS": thread_count(threads), "NUM_STREAMS": 1, "ENABLE_HYPER_THREADING": True}
        try:
            if isinstance(model, (str, Path)):  # read, not mapped: the model owns its weights
                graph, weights = checked(Path(model), Path(model).with_suffix(".bin"))
                model = ov.Core().read_model(graph, weights)
            about = model.get_rt_info([_PLACE]).astype(dict) if model.has_rt_info([_PLACE]) else {}
            options["INFERENCE_PRECISION_HINT"] = "bf16" if _BF16 in about else "f32"
            self.compiled = ov.Core().compile_model(model, "CPU", options)
        except RuntimeError as e:
            raise ConfigError(f"OpenVINO cannot open the model: {str(e).splitlines()[0]}; export it again") from e
        super().__init__(name, metadata={key: str(value.value) for key, value in about.items()})

    def compute(self, images: Tensor) -> Tensor:
        return self.all_outputs(images)[0]

    def all_outputs(self, images: Tensor) -> list[Tensor]:
        found = self.compiled(images.numpy())
        return [torch.from_numpy(found[i].copy()) for i in range(len(self.compiled.outputs))]


open_file = OpenVino


def build(model: nn.Module, choice: Choice, spec: Spec) -> OpenVino:
    return OpenVino(_converted(prepared(model, spec), spec), choice.name, choice.threads)


def write(model: nn.Module, path: Path, metadata: Mapping[str, str], spec: Spec) -> None:
    converted = _converted(model, spec)
    for key, value in metadata.items():
        converted.set_rt_info(value, [_PLACE, key])
    try:
        ov.save_model(converted, str(path), compress_to_fp16=False)
    except RuntimeError as e:
        if "iostream" not in str(e):
            raise
        raise OSError(errno.ENOSPC, "OpenVINO could not write all of it; is the disk full?") from e
    seal(path, path.with_suffix(".bin"))


def _converted(model: nn.Module, spec: Spec) -> Model:
    if spec.dynamic_size:
        advice = "export with --to onnx, which OpenVINO reads as it is"
        raise ConfigError(f"--to openvino writes one image size; {advice}")
    example = example_of(model, spec)
    shape = [-1, -1, -1, example.shape[3]] if spec.raw else [-1, *example.shape[1:]]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        converted = ov.convert_model(model, example_input=example, input=[ov.PartialShape(shape)])
    converted.inputs[0].get_tensor().set_names({"pixels" if spec.raw else "images"})
    for output, name in zip(converted.outputs, OUTPUTS, strict=False):
        output.get_tensor().set_names({name})
    if spec.bf16:
        converted.set_rt_info("yes", [_PLACE, _BF16])
    if not spec.int8:
        return converted
    import nncf

    nncf.set_log_level(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):  # it draws bars where our answers go
        if spec.calibration is None:  # the weights alone become int8
            return nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_SYM)
        images = nncf.Dataset([batch.numpy() for batch in spec.calibration])
        how = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(spec.calibration)}
        return nncf.quantize(converted, images, **how)
