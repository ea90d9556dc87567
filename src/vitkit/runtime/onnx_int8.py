"""int8 for ONNX Runtime: matrix products with weights in 8 bits, one scale per output channel.

Dynamic: activations are measured and rounded as they come, so no data is needed. Static: their ranges are taken
from pictures beforehand. Weights use 7 of the 8 bits: on processors without VNNI the product of two 8-bit
numbers, added in pairs, may overflow the 16 bits that the instruction has (onnxruntime calls it reduce_range).

Shapes: K inputs, M outputs of one matrix product.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitkit.runtime.base import need

TOP = 63  # 7 bits
Calibration = list[Tensor]  # batches of normalised pictures


def quantize_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K M -> int8 K M and the scale of each column."""
    scale = np.maximum(np.abs(weight).max(axis=0), 1e-12).astype(np.float32) / TOP  # M
    return np.clip(np.rint(weight / scale), -TOP, TOP).astype(np.int8), scale


def to_dynamic(proto: Any) -> Any:
    """Every MatMul and Gemm with constant weights -> the integer product that ONNX Runtime fuses into one kernel."""
    onnx = need("onnx", "int8", "onnx")
    graph = proto.graph
    constants = {t.name: t for t in graph.initializer}
    rounded: dict[str, tuple[str, str, str]] = {}  # activation -> its int8, scale and zero point
    nodes, used = [], set()
    for node in graph.node:
        weight = _weight_of(node, constants, onnx)
        if weight is None:
            nodes.append(node)
            continue
        values, scale = quantize_weight(weight)
        used.add(node.input[1])
        nodes += _integer_product(onnx, graph, node, values, scale, rounded)
    del graph.node[:]
    graph.node.extend(nodes)
    still = {name for node in graph.node for name in node.input}
    for name in used - still:
        graph.initializer.remove(constants[name])
    return proto


def _weight_of(node: Any, constants: dict[str, Any], onnx: Any) -> np.ndarray | None:
    """K M, or None when the node is no product with constant weights."""
    if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in constants:
        return None
    weight = onnx.numpy_helper.to_array(constants[node.input[1]])
    if weight.ndim != 2 or weight.dtype != np.float32:
        return None
    if node.op_type == "MatMul":
        return weight
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if options.get("alpha", 1.0) != 1.0 or options.get("beta", 1.0) != 1.0 or options.get("transA", 0):
        return None
    return np.ascontiguousarray(weight.T) if options.get("transB", 0) else weight


def _integer_product(
    onnx: Any,
    graph: Any,
    node: Any,
    values: np.ndarray,
    scale: np.ndarray,
    rounded: dict[str, tuple[str, str, str]],
) -> list[Any]:
    make, name, nodes = onnx.helper.make_node, node.output[0], []
    source = node.input[0]
    if source not in rounded:  # query, key and value share one rounding
        rounded[source] = (f"{source}/int8", f"{source}/scale", f"{source}/zero")
        nodes.append(make("DynamicQuantizeLinear", [source], list(rounded[source])))
    activation, activation_scale, zero = rounded[source]
    for suffix, array in (
        ("weight", values),
        ("weight_scale", scale),
        ("weight_zero", np.zeros(len(scale), dtype=np.int8)),
    ):
        graph.initializer.append(onnx.numpy_helper.from_array(array, f"{name}/{suffix}"))
    bias = node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else None
    result = name if bias is None else f"{name}/product"
    nodes += [
        make("Mul", [activation_scale, f"{name}/weight_scale"], [f"{name}/scale"]),
        make("MatMulInteger", [activation, f"{name}/weight", zero, f"{name}/weight_zero"], [f"{name}/int32"]),
        make("Cast", [f"{name}/int32"], [f"{name}/float"], to=onnx.TensorProto.FLOAT),
        make("Mul", [f"{name}/float", f"{name}/scale"], [result]),
    ]
    if bias is not None:
        nodes.append(make("Add", [result, bias], [name]))
    return nodes


def to_static(proto: Any, calibration: Calibration) -> Any:
    """Ranges of the activations from pictures, by ONNX Runtime's own tool."""
    onnx = need("onnx", "int8", "onnx")
    tool = need("onnxruntime.quantization", "int8", "onnx")
    name = proto.graph.input[0].name

    class Reader(tool.CalibrationDataReader):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self.batches: Iterator[Tensor] = iter(calibration)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {name: batch.numpy()}

    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="vitkit-") as folder:
            plain, done = Path(folder, "plain.onnx"), Path(folder, "int8.onnx")
            plain.write_bytes(proto.SerializeToString())
            tool.quantize_static(
                plain,
                done,
                Reader(),
                quant_format=tool.QuantFormat.QDQ,
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                reduce_range=True,
                activation_type=tool.QuantType.QUInt8,
                weight_type=tool.QuantType.QInt8,
                extra_options={"MatMulConstBOnly": True},
            )
            return onnx.load(str(done))
    finally:
        logging.getLogger().setLevel(level)
