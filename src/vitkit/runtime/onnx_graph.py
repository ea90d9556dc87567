"""What makes an ONNX graph of a ViT quick: attention as few nodes, shapes as constants, and products in int8.

PyTorch's exporter computes the scale of attention and the sizes of every reshape from the shape of what flows through,
again in each block and for each batch. Here the scale is a constant, and so is every size that turns out to be the
same for different batches, and whatever is computed from constants alone. Only standard operations are used: ONNX
Runtime's own attention node was no faster on an AVX2 processor (0.97x to 1.03x with 197 tokens, 0.95x with 1600).

In int8, matrix products have weights in 8 bits, one scale per output channel. Dynamic: activations are measured and
rounded as they come, so no data is needed. Static: their ranges are taken from images beforehand. In a file that may
travel weights use 7 of the 8 bits: on processors without VNNI the product of two 8-bit numbers, added in pairs, may
overflow the 16 bits that the instruction has (onnxruntime calls it reduce_range).

Shapes: K inputs, M outputs of one matrix product.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import onnx
import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from vitkit.runtime.base import Calibration

T = TypeVar("T")
Open = Callable[[bytes], Callable[[np.ndarray], list[np.ndarray]]]  # a graph -> input -> all outputs


class Value(Protocol):
    """What the exporter hands to a function that writes an operation."""

    shape: Sequence[int]

    def producer(self) -> Node | None: ...


class Node(Protocol):
    op_type: str
    inputs: Sequence[Value]


def own_nodes() -> dict[Callable[..., object], Callable[..., object]]:
    """How the exporter writes attention, query, key and value cut apart, and tokens that are picked."""
    op = importlib.import_module("onnxscript").opset20

    def attention(q: Value, k: Value, v: Value, mask: Value | None = None, dropout: float = 0.0) -> Value:
        scaled = op.Mul(q, op.Constant(value_float=q.shape[-1] ** -0.5))  # q, k, v: B H N K
        scores = op.MatMul(scaled, op.Transpose(k, perm=[0, 1, 3, 2]))
        return op.MatMul(op.Softmax(scores if mask is None else op.Add(scores, mask), axis=-1), v)

    def unbind(x: Value, dim: int = 0) -> list[Value]:
        return [op.Gather(x, op.Constant(value_int=i), axis=dim) for i in range(x.shape[dim])]

    def gather(x: Value, dim: int, index: Value) -> Value:
        made = index.producer()
        rows = made.inputs[0] if made is not None and made.op_type == "Expand" else None
        if dim == 1 and rows is not None and list(rows.shape) == [*index.shape[:2], 1]:
            return op.GatherND(x, rows, batch_dims=1)  # whole tokens: a sixth of the time of entry by entry
        return op.GatherElements(x, index, axis=dim)

    aten = torch.ops.aten
    return {aten.scaled_dot_product_attention.default: attention, aten.unbind.int: unbind, aten.gather.default: gather}


def with_any_count(proto: ModelProto, count: int) -> ModelProto:
    """A graph for `count` images, a number that is no other size -> one for any number of images."""
    graph, make = proto.graph, onnx.helper.make_node
    constants = [n for n in graph.node if n.op_type == "Constant"]
    _replace(graph.node, [n for n in graph.node if n.op_type != "Constant"])
    graph.initializer.extend(_tensor_of(node) for node in constants)
    first = [make("Shape", [graph.input[0].name], ["count/shape"], start=0, end=1)]
    first += [make("Squeeze", ["count/shape"], ["count"])]
    for tensor in [t for t in graph.initializer if t.data_type == TensorProto.INT64]:
        sizes, name = onnx.numpy_helper.to_array(tensor), tensor.name
        times = np.where(sizes % count, 0, sizes // count)
        if times.any():  # sizes = count * times + rest
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.where(times, 0, sizes), f"{name}/rest"))
            graph.initializer.append(onnx.numpy_helper.from_array(times, f"{name}/times"))
            first += [make("Mul", ["count", f"{name}/times"], [f"{name}/counted"])]
            first += [make("Add", [f"{name}/counted", tensor.name], [name])]
    _replace(graph.node, [*first, *graph.node])
    for node in graph.node:
        del node.metadata_props[:]  # where in the code it was
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return proto


def _tensor_of(constant: NodeProto) -> TensorProto:
    (attribute,) = constant.attribute
    value = onnx.helper.get_attribute_value(attribute)
    if not isinstance(value, TensorProto):
        value = onnx.numpy_helper.from_array(np.asarray(value, np.float32 if "float" in attribute.name else np.int64))
    value.name = constant.output[0]
    return value


def with_fixed_shapes(proto: ModelProto, examples: list[np.ndarray], open_graph: Open) -> ModelProto:
    """Sizes that are the same for all examples become constants; what computed them is gone.

    The examples differ in whatever may differ later: in their number, or their height and width too. A reshape
    to a shape of which one size differs works that one out itself (-1).
    """
    graph = proto.graph
    constants, sizes = _computed_from(graph, shapes=False), _computed_from(graph, shapes=True)
    reshapes = [n for n in graph.node if n.op_type == "Reshape" and n.input[1] in sizes and n.output[0] not in sizes]
    asked: set[str] = set()
    for group in (constants, sizes):
        asked |= group & {name for n in graph.node if not group.issuperset(n.output) for name in n.input}
    names = [*sorted(asked), *(n.output[0] for n in reshapes)]  # what are they for each example?
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


def _computed_from(graph: GraphProto, shapes: bool) -> set[str]:
    """What is computed from constants alone, or from them and shapes: no pixel has to be known."""
    constants = {t.name for t in graph.initializer} | {""}
    known = set(constants)
    for node in graph.node:
        read = node.input[:1] if node.op_type == "CastLike" else node.input  # of the other it takes the type alone
        if (shapes and node.op_type == "Shape") or known.issuperset(read):
            known.update(node.output)
    return known - constants


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
    for i in reversed(range(len(graph.initializer))):
        if graph.initializer[i].name not in wanted:
            del graph.initializer[i]


def quantize_weight(weight: np.ndarray, bits: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """K M -> int8 K M and the scale of each column."""
    top = 2 ** (bits - 1) - 1
    scale = np.maximum(np.abs(weight).max(axis=0), 1e-12).astype(np.float32) / top  # M
    return np.clip(np.rint(weight / scale), -top, top).astype(np.int8), scale


def to_dynamic(proto: ModelProto, bits: int = 7) -> ModelProto:
    """Every MatMul and Gemm with constant weights -> the integer product that ONNX Runtime fuses into one kernel.

    Its own tool gives the same nodes, as accurate and as fast, but needs 20 times as long to write them.
    """
    graph, nodes = proto.graph, []
    constants = {t.name: t for t in graph.initializer}
    rounded: set[str] = set()  # activations: query, key and value share one rounding
    exact = _of_pixels(graph)
    for node in graph.node:
        weight = None if node.name in exact else _weight_of(node, constants)
        nodes += [node] if weight is None else _integer_product(graph, node, weight, rounded, bits)
    _replace(graph.node, nodes)
    _drop_unused(graph)
    return proto


def _of_pixels(graph: GraphProto) -> list[str]:
    """The nodes before the first norm or convolution; their products, of resizing and of patches, stay in fp32."""
    kinds = [node.op_type for node in graph.node]
    end = min((kinds.index(kind) for kind in ("LayerNormalization", "ReduceMean", "Conv") if kind in kinds), default=0)
    return [node.name for node in graph.node[:end] if node.name]


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


def _integer_product(
    graph: GraphProto, node: NodeProto, weight: np.ndarray, rounded: set[str], bits: int
) -> list[NodeProto]:
    make, source, name = onnx.helper.make_node, node.input[0], node.output[0]
    values, scale = quantize_weight(weight, bits)
    arrays = {"weight": values, "weight_scale": scale, "weight_zero": np.zeros(len(scale), dtype=np.int8)}
    graph.initializer.extend(onnx.numpy_helper.from_array(array, f"{name}/{key}") for key, array in arrays.items())
    bias = node.input[2] if len(node.input) > 2 else None  # of a Gemm
    result = name if bias is None else f"{name}/product"
    narrowing = len(weight) > len(scale)
    nodes = _evened(graph, source) if narrowing and f"{source}/even" not in rounded else []
    source, product_name = (f"{source}/even", f"{name}/even") if narrowing else (source, result)
    activation = [f"{source}/int8", f"{source}/scale", f"{source}/zero"]
    nodes += [] if source in rounded else [make("DynamicQuantizeLinear", [source], activation)]
    rounded.add(source)
    product = [activation[0], f"{name}/weight", activation[2], f"{name}/weight_zero"]
    nodes += [
        make("Mul", [activation[1], f"{name}/weight_scale"], [f"{name}/scale"]),
        make("MatMulInteger", product, [f"{name}/int32"]),
        make("Cast", [f"{name}/int32"], [f"{name}/float"], to=onnx.TensorProto.FLOAT),
        make("Mul", [f"{name}/float", f"{name}/scale"], [product_name]),
        *([make("Mul", [product_name, f"{node.input[0]}/top"], [result])] if narrowing else []),
    ]
    return nodes if bias is None else [*nodes, make("Add", [result, bias], [name])]


def _evened(graph: GraphProto, source: str) -> list[NodeProto]:
    """`source`/even: every token over `source`/top, its largest entry. Behind an activation they are of all sizes.

    One scale for all tokens, taken from the largest, leaves few steps for the rest: it made nearly all of the error of
    a trained ViT-B/16, which falls from 0.088 to 0.038 of what the logits vary by, for 4% of the time.
    """
    make = onnx.helper.make_node
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), f"{source}/last"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1e-12), f"{source}/least"))
    return [
        make("ReduceMax", [source, f"{source}/last"], [f"{source}/high"], keepdims=1),
        make("ReduceMin", [source, f"{source}/last"], [f"{source}/low"], keepdims=1),
        make("Neg", [f"{source}/low"], [f"{source}/depth"]),
        make("Max", [f"{source}/high", f"{source}/depth", f"{source}/least"], [f"{source}/top"]),
        make("Div", [source, f"{source}/top"], [f"{source}/even"]),
    ]


def to_static(proto: ModelProto, calibration: Calibration, bits: int = 7) -> ModelProto:
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
            how = {"quant_format": tool.QuantFormat.QDQ, "per_channel": True, "reduce_range": bits < 8}
            how |= {"activation_type": tool.QuantType.QUInt8, "weight_type": tool.QuantType.QInt8}
            how |= {"op_types_to_quantize": ["MatMul", "Gemm"], "extra_options": {"MatMulConstBOnly": True}}
            tool.quantize_static(plain, done, Reader(), nodes_to_exclude=_of_pixels(proto.graph), **how)
            return onnx.load(str(done))
    finally:
        logging.getLogger().setLevel(level)
