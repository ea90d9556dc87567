"""What makes an ONNX graph of a ViT quick: attention as few nodes, shapes as constants, and products in int8.

The tracer computes the scale of attention and the sizes of every reshape from the shape of what flows through,
again in each block and for each batch. Here the scale is a constant, and so is every size that turns out to be the
same for different batches. Only standard operations are used: ONNX Runtime's own attention node was no faster on an
AVX2 processor (0.97x to 1.03x with 197 tokens, 0.95x with 1600).

In int8, matrix products have weights in 8 bits, one scale per output channel. Dynamic: activations are measured and
rounded as they come, so no data is needed. Static: their ranges are taken from images beforehand. Weights use 7 of the
8 bits: on processors without VNNI the product of two 8-bit numbers, added in pairs, may overflow the 16 bits that the
instruction has (onnxruntime calls it reduce_range).

Shapes: K inputs, M outputs of one matrix product.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import onnx
import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from vitkit.model.config import AnyConfig, ViTConfig
from vitkit.runtime.base import Calibration

T = TypeVar("T")
Value = torch._C.Value  # of the tracer's graph
Open = Callable[[bytes], Callable[[np.ndarray], list[np.ndarray]]]  # a graph -> input -> all outputs


class _Graph(Protocol):
    """What the exporter hands to a function that writes an operation."""

    def op(self, name: str, *inputs: Value, **attributes: object) -> Value: ...


TOP = 63  # 7 bits


@contextmanager
def own_nodes(config: AnyConfig, opset: int) -> Iterator[None]:
    """While torch.onnx.export runs: how attention and RMSNorm are written. A ResNet has neither."""
    usual = config.attention_width // config.heads if isinstance(config, ViTConfig) else 1

    def attention(g: _Graph, q: Value, k: Value, v: Value, mask: Value, *_: object) -> Value:  # q, k, v: B H N K
        known = [sizes[-1] for value in (q, k, v) if (sizes := value.type().sizes())]  # type: ignore[attr-defined]
        scale = (known[0] if known else usual) ** -0.5  # a MAP head may have other heads than the blocks
        scaled = g.op("Mul", q, g.op("Constant", value_t=torch.tensor(scale)))
        scores = g.op("MatMul", scaled, g.op("Transpose", k, perm_i=[0, 1, 3, 2]))
        if not mask.node().mustBeNone():
            scores = g.op("Add", scores, mask)
        return g.op("MatMul", g.op("Softmax", scores, axis_i=-1), v)

    writers: dict[str, Callable[..., Value]] = {
        "aten::scaled_dot_product_attention": attention,
        "aten::rms_norm": _rms_norm,
    }
    for name, write in writers.items():
        torch.onnx.register_custom_op_symbolic(name, write, opset)
    try:
        yield
    finally:
        for name in writers:
            torch.onnx.unregister_custom_op_symbolic(name, opset)


def _rms_norm(g: _Graph, x: Value, shape: Value, weight: Value, eps: Value) -> Value:
    """x / sqrt(mean(x^2) + eps) * weight; the exporter has no words for it, and the opset no node."""
    axis = g.op("Constant", value_t=torch.tensor([-1]))
    mean = g.op("ReduceMean", g.op("Mul", x, x), axis, keepdims_i=1)
    small = g.op("Cast", eps, to_i=onnx.TensorProto.FLOAT)  # a Python float arrives in double precision
    return g.op("Mul", g.op("Div", x, g.op("Sqrt", g.op("Add", mean, small))), weight)


def with_fixed_shapes(proto: ModelProto, examples: list[np.ndarray], open_graph: Open) -> ModelProto:
    """Sizes that are the same for all examples become constants; what computed them is gone.

    The examples differ in whatever may differ later: in their number, or their height and width too. A reshape
    to a shape of which one size differs works that one out itself (-1).
    """
    graph = proto.graph
    sizes = _computed_from_shapes(graph)
    reshapes = [n for n in graph.node if n.op_type == "Reshape" and n.input[1] in sizes]
    read = {name for n in graph.node if n.op_type != "Reshape" and not sizes.issuperset(n.output) for name in n.input}
    asked = sorted(sizes & read)
    names = [*asked, *(n.output[0] for n in reshapes)]  # what are they for each example?
    runs: list[dict[str, np.ndarray]] = [{} for _ in examples]
    if names:
        own = list(graph.output)
        _replace(graph.output, [onnx.ValueInfoProto(name=name) for name in names])
        run = open_graph(proto.SerializeToString())
        runs = [dict(zip(names, run(example), strict=True)) for example in examples]
        _replace(graph.output, own)

    def constant(name: str, value: np.ndarray) -> str:
        graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), f"{name}/fixed"))
        return f"{name}/fixed"

    for node in reshapes:
        first, *others = [np.array(run[node.output[0]].shape) for run in runs]
        differs = np.any([first != other for other in others], axis=0)
        if differs.sum() <= 1:
            node.input[1] = constant(node.output[0], np.where(differs, -1, first))
    same = {name for name in asked if all(np.array_equal(runs[0][name], run[name]) for run in runs[1:])}
    fixed = {name: constant(name, runs[0][name]) for name in sorted(same)}
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = fixed.get(name, name)
    _drop_unused(graph)
    return proto


def _computed_from_shapes(graph: GraphProto) -> set[str]:
    constant = {t.name for t in graph.initializer} | {""}
    computed: set[str] = set()
    for node in graph.node:
        if constant.issuperset(node.input):
            constant.update(node.output)
        elif node.op_type == "Shape" or (computed | constant).issuperset(node.input):
            computed.update(node.output)
    return computed


def _replace(field: MutableSequence[T], values: list[T]) -> None:
    del field[:]
    field.extend(values)


def _drop_unused(graph: GraphProto) -> None:
    """Nodes and constants that nothing reads any more."""
    wanted = {v.name for v in graph.output}
    kept = []
    for node in reversed(graph.node):  # nodes stand in order: what reads comes after what writes
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    _replace(graph.node, kept[::-1])
    for tensor in [t for t in graph.initializer if t.name not in wanted]:
        graph.initializer.remove(tensor)


def quantize_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K M -> int8 K M and the scale of each column."""
    scale = np.maximum(np.abs(weight).max(axis=0), 1e-12).astype(np.float32) / TOP  # M
    return np.clip(np.rint(weight / scale), -TOP, TOP).astype(np.int8), scale


def to_dynamic(proto: ModelProto) -> ModelProto:
    """Every MatMul and Gemm with constant weights -> the integer product that ONNX Runtime fuses into one kernel.

    Its own tool gives the same nodes, as accurate and as fast, but needs 20 times as long to write them.
    """
    graph, nodes = proto.graph, []
    constants = {t.name: t for t in graph.initializer}
    rounded: set[str] = set()  # activations: query, key and value share one rounding
    for node in graph.node:
        weight = _weight_of(node, constants)
        nodes += [node] if weight is None else _integer_product(graph, node, weight, rounded)
    _replace(graph.node, nodes)
    _drop_unused(graph)
    return proto


def _weight_of(node: NodeProto, constants: dict[str, TensorProto]) -> np.ndarray | None:
    """K M, or None when the node is no product with constant weights."""
    if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in constants:
        return None
    weight = onnx.numpy_helper.to_array(constants[node.input[1]])
    if weight.ndim != 2 or weight.dtype != np.float32:
        return None
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if options.get("alpha", 1.0) != 1.0 or options.get("beta", 1.0) != 1.0 or options.get("transA", 0):
        return None
    return np.ascontiguousarray(weight.T) if options.get("transB", 0) else weight


def _integer_product(graph: GraphProto, node: NodeProto, weight: np.ndarray, rounded: set[str]) -> list[NodeProto]:
    make, source, name = onnx.helper.make_node, node.input[0], node.output[0]
    values, scale = quantize_weight(weight)
    arrays = {"weight": values, "weight_scale": scale, "weight_zero": np.zeros(len(scale), dtype=np.int8)}
    graph.initializer.extend(onnx.numpy_helper.from_array(array, f"{name}/{key}") for key, array in arrays.items())
    bias = node.input[2] if len(node.input) > 2 else None  # of a Gemm
    result = name if bias is None else f"{name}/product"
    activation = [f"{source}/int8", f"{source}/scale", f"{source}/zero"]
    nodes = [] if source in rounded else [make("DynamicQuantizeLinear", [source], activation)]
    rounded.add(source)
    product = [activation[0], f"{name}/weight", activation[2], f"{name}/weight_zero"]
    nodes += [
        make("Mul", [activation[1], f"{name}/weight_scale"], [f"{name}/scale"]),
        make("MatMulInteger", product, [f"{name}/int32"]),
        make("Cast", [f"{name}/int32"], [f"{name}/float"], to=onnx.TensorProto.FLOAT),
        make("Mul", [f"{name}/float", f"{name}/scale"], [result]),
    ]
    return nodes if bias is None else [*nodes, make("Add", [result, bias], [name])]


def to_static(proto: ModelProto, calibration: Calibration) -> ModelProto:
    """Ranges of the activations from images, by ONNX Runtime's own tool."""
    import onnxruntime.quantization as tool

    batches = ({proto.graph.input[0].name: batch.numpy()} for batch in calibration)

    class Reader(tool.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(batches, None)

    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="vitkit-") as folder:
            plain, done = Path(folder, "plain.onnx"), Path(folder, "int8.onnx")
            plain.write_bytes(proto.SerializeToString())
            how = {"quant_format": tool.QuantFormat.QDQ, "per_channel": True, "reduce_range": True}
            how |= {"activation_type": tool.QuantType.QUInt8, "weight_type": tool.QuantType.QInt8}
            how |= {"op_types_to_quantize": ["MatMul", "Gemm"], "extra_options": {"MatMulConstBOnly": True}}
            tool.quantize_static(plain, done, Reader(), **how)
            return onnx.load(str(done))
    finally:
        logging.getLogger().setLevel(level)
