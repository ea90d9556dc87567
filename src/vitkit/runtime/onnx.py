"""ONNX Runtime: the model as an ONNX file, and that file run.

The file stands for one image size, with positions as a finished table, and any number of images; with
`Spec.dynamic_size` for any size, with positions resized inside. Weights beyond 2 GB are in a second file,
FILE.onnx.data.
"""

from __future__ import annotations

import io
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.runtime.base import Choice, Runtime, Spec, axes_of, config_of, example_of, grid_of, prepared, thread_count
from vitkit.runtime.seal import checked, seal
from vitkit.runtime.top import OUTPUTS
from vitkit.world import has_vnni

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 20  # the first with Gelu; LayerNormalization came with 17
COUNT = 65537  # images while a graph is made: a prime that divides no size of a model
LIMIT = 2**31 - 2**20  # bytes that one file of protobuf can hold


class Onnx(Runtime):
    """An .onnx file, with its .onnx.data if there is one, or the content of one, in ONNX Runtime on the CPU."""

    def __init__(self, file: Path | bytes, name: str = "onnx", threads: int | None = None) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = thread_count(threads)
        options.add_session_config_entry("session.force_spinning_stop", "1")  # or its threads delay what comes next
        what = "the exported model" if isinstance(file, bytes) else str(file)
        try:
            content, *weights = [file] if isinstance(file, bytes) else checked(file, *_beside(file))
            if weights and isinstance(file, Path):  # in memory, as the model: no other file is read
                given = ([data_of(file).name], weights, [len(weights[0])])
                options.add_external_initializers_from_files_in_memory(*given)
            self.session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except ConfigError:
            raise
        except Exception as e:  # its errors have no common type
            raise ConfigError(f"ONNX Runtime cannot open {what}: {str(e).splitlines()[0]}; export it again") from e
        super().__init__(name, metadata=self.session.get_modelmeta().custom_metadata_map)

    def outputs(self, array: np.ndarray, names: list[str] | None = None) -> list[np.ndarray]:
        found: list[np.ndarray] = self.session.run(names, {self.session.get_inputs()[0].name: array})
        return found

    def compute(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.outputs(images.numpy(), [self.session.get_outputs()[0].name])[0])

    def all_outputs(self, images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(array) for array in self.outputs(images.numpy())]


open_file = Onnx


def data_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _beside(path: Path) -> list[Path]:
    """The file with the weights, if this one names it; it may be there from another export."""
    data = data_of(path)
    return [data] if data.exists() and data.name.encode() in path.read_bytes() else []


def build(model: nn.Module, choice: Choice, spec: Spec) -> Onnx:
    chosen = prepared(model, spec)
    if spec.int8 or not _large(chosen):
        return Onnx(_proto(chosen, spec).SerializeToString(), choice.name, choice.threads)
    with tempfile.TemporaryDirectory(prefix="vitkit-") as folder:
        write(chosen, Path(folder, "model.onnx"), {}, spec)
        return Onnx(Path(folder, "model.onnx"), choice.name, choice.threads)


def write(model: nn.Module, path: Path, metadata: Mapping[str, str], spec: Spec) -> None:
    import onnx

    proto, data = _proto(model, spec), data_of(path)
    onnx.helper.set_model_props(proto, dict(metadata))
    apart = _large(model) and not spec.int8
    onnx.save_model(proto, str(path), save_as_external_data=apart, location=data.name)
    return seal(path, *[data] * apart)


def _large(model: nn.Module) -> bool:
    """Whether the weights in fp32 need a file of their own."""
    return sum(p.numel() * 4 for p in model.parameters()) > LIMIT


def _proto(model: nn.Module, spec: Spec) -> ModelProto:
    from vitkit.runtime.onnx_graph import to_dynamic, to_static

    proto = to_onnx(model, spec)
    if not spec.int8:
        return proto
    bits = 8 if spec.here and has_vnni() else 7
    if spec.calibration is None:
        return to_dynamic(proto, bits)
    if _large(model):
        raise ConfigError("--calibrate cannot take weights beyond 2 GB; leave it out, or use --to openvino")
    return to_static(proto, spec.calibration, bits)


def to_onnx(model: nn.Module, spec: Spec = Spec()) -> ModelProto:  # noqa: B008
    """Inputs `images` (or `pixels`), outputs `logits` (and those of `WithTop`), for any number of images.

    PyTorch's exporter takes minutes where it has to work out every size for any number of images, and tokens merge:
    it gets one number, and what is that number in the graph becomes the number of images again.
    """
    from vitkit.runtime.onnx_graph import own_nodes, with_any_count, with_fixed_shapes

    inputs, outputs = ["pixels" if spec.raw else "images"], list(OUTPUTS if spec.top else OUTPUTS[:1])
    axes = {axis: size for axis, size in axes_of(model, spec).items() if axis > 0}
    chatter = io.StringIO()  # what was tried, step by step, where our answers go
    with warnings.catch_warnings(), torch.no_grad(), redirect_stdout(chatter), redirect_stderr(chatter):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            (example_of(model, spec, 1).expand(COUNT, -1, -1, -1),),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(axes,),
            input_names=inputs,
            output_names=outputs,
            custom_translation_table=own_nodes(),
            optimize=_large(model),
            verbose=False,
        )
    assert program is not None
    proto = with_any_count(program.model_proto, COUNT)
    if _large(model):  # more than can be run from memory
        return proto
    return with_fixed_shapes(proto, _examples(model, spec), lambda content: Onnx(content).outputs)


def _examples(model: nn.Module, spec: Spec) -> list[np.ndarray]:
    """Batches that differ in all that may differ; where sizes do, one of them has that of the configuration."""
    if spec.dynamic_size:
        h, w = grid_of(config_of(model))
        grids = [(h, w), (h + 2, w + 5), (h + 3, w + 4 + (h == w + 1))]
        return [example_of(model, spec, count, grid).numpy() for count, grid in zip((3, 1, 2), grids, strict=True)]
    example = example_of(model, spec).numpy()
    return [example, np.ascontiguousarray(example[:1, :-1, :-2] if spec.raw else example[:1])]
