"""The graph that is written for ONNX Runtime: fixed sizes, short attention, and still the same answers."""

from collections import Counter

import numpy as np
import pytest
import torch

import vitkit
from peers import randomize
from vitkit.model.config import ConvStemConfig, StemConfig, ViTConfig
from vitkit.runtime.base import Spec, made_up, merged, prepared
from vitkit.runtime.eager import Eager

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from vitkit.runtime.onnx import OPSET, Onnx, _proto, to_onnx  # noqa: E402
from vitkit.runtime.onnx_graph import to_dynamic  # noqa: E402

BASE = ViTConfig(image_size=32, patch_size=8, width=32, depth=3, heads=2, mlp_width=48, classes=10)
KINDS = {
    "plain": {},
    "mean": {"pooling": "mean"},
    "map": {"pooling": "map"},
    "registers": {"registers": 3, "distillation_token": True},
    "relative": {"positions": "relative"},
    "rotary": {"positions": "rope-2d"},
    "not square": {"image_size": (32, 48)},
    "convolutions": {"stem": ConvStemConfig((4, 8))},
    "hybrid": {"stem": StemConfig(layers=(1, 1), width=8, root="small")},
}


def model_of(**changes):
    torch.manual_seed(0)
    return randomize(vitkit.create(BASE.replace(**changes)), scale=0.15).eval()


def operations(proto) -> Counter:
    return Counter(node.op_type for node in proto.graph.node)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_images(kind: str) -> None:
    model = model_of(**KINDS[kind])
    proto = to_onnx(model)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} == {""}, "standard operations alone"
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True).graph
    kinds = {value.type.tensor_type.elem_type for value in inferred.value_info}
    kinds |= {tensor.data_type for tensor in inferred.initializer}
    assert onnx.TensorProto.DOUBLE not in kinds, "TensorRT has no float64"
    runtime = Onnx(proto.SerializeToString())
    for count in (1, 2, 7):
        images = torch.randn(count, 3, *model.config.image_size)
        torch.testing.assert_close(runtime.run(images), Eager(model).run(images), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "relative", "rotary", "hybrid"])
def test_nothing_is_left_that_is_known_beforehand(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Constants are folded, attention is two products and a softmax, and where in our code a node was is not told."""
    with caplog.at_level("WARNING"):
        proto = to_onnx(model_of(**KINDS[kind]))
    assert caplog.text == ""
    constants = {tensor.name for tensor in proto.graph.initializer}
    assert [node.op_type for node in proto.graph.node if constants.issuperset(node.input)] == []
    assert not any(node.metadata_props for node in proto.graph.node)
    found = operations(proto)
    assert {name: found[name] for name in ("Softmax", "Gelu", "LayerNormalization")} == {
        "Softmax": 3,
        "Gelu": 3,
        "LayerNormalization": 7,
    }
    assert found["Shape"] == found["Expand"] == 1  # the class token, once for each image
    assert not found.keys() & {"Constant", "CastLike", "Range", "Sqrt"}
    axes = [value.type.tensor_type.shape.dim[0].dim_param for value in (*proto.graph.input, *proto.graph.output)]
    assert axes == ["batch", "batch"]


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["tome:0+2+3", "pitome:2", "prune:3:late"])
@pytest.mark.parametrize("raw", [False, True])
def test_any_number_of_images_that_merge(merge: str, raw: bool) -> None:
    """With mean pooling: two values of one name, in the pixels and in the model, would make the graph invalid."""
    pooling = "cls" if merge.startswith("prune") else "mean"
    spec = Spec(merge=merge, raw=raw)
    model = prepared(model_of(pooling=pooling), spec)
    proto = to_onnx(model, spec)
    assert operations(proto)["GatherND"] >= 2  # tokens are picked whole
    runtime = Onnx(proto.SerializeToString())
    for count in (1, 2, 7):
        images = (
            made_up(BASE, count, (40, 37)).permute(0, 2, 3, 1).contiguous() if raw else torch.randn(count, 3, 32, 32)
        )
        with torch.no_grad():
            torch.testing.assert_close(runtime.run(images), model(images), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("calibrated", [False, True])
def test_pixels_are_never_rounded(calibrated: bool) -> None:
    """Smaller images and patches are products with constant weights too; they stay as they are."""
    spec = Spec(int8=True, scale=0.5, calibration=[torch.randn(4, 3, 64, 64)] if calibrated else None)
    graph = _proto(prepared(model_of(image_size=64), spec), spec).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    exact = [n for n in graph.node if n.op_type == "MatMul" and onnx.TensorProto.FLOAT in map(kinds.get, n.input)]
    assert len(exact) == 3  # rows, columns, patches
    assert list(kinds.values()).count(onnx.TensorProto.INT8) >= 3 * 4 + 1


@pytest.mark.parametrize("merge", [0, 2])
def test_sizes_are_not_computed_again_in_every_block(merge: int) -> None:
    shallow, deep = (operations(to_onnx(merged(model_of(depth=depth), merge))) for depth in (2, 5))
    assert deep["MatMul"] > shallow["MatMul"]
    for kind in ("Shape", "Sqrt", "Div", "Range") if merge == 0 else ("Sqrt", "Range"):
        assert deep[kind] == shallow[kind], kind


@pytest.mark.parametrize("kind", ["MatMul", "Gemm"])
def test_small_tokens_keep_their_digits_beside_large_ones(kind: str) -> None:
    """Planted: tokens of sizes from 0.01 to 100, as behind an activation, through a product that narrows."""
    random = np.random.default_rng(0)
    weight = random.normal(size=(64, 16)).astype(np.float32)
    sizes = np.geomspace(0.01, 100, 12, dtype=np.float32)[:, None]
    tokens = sizes * random.normal(size=(12, 64)).astype(np.float32)
    bias = random.normal(size=16).astype(np.float32)
    make, value, shape = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    constants = [onnx.numpy_helper.from_array(weight, "w"), onnx.numpy_helper.from_array(bias, "b")]
    node = make(kind, ["x", "w", "b"] if kind == "Gemm" else ["x", "w"], ["y"])
    graph = onnx.helper.make_graph(
        [node], "product", [value("x", shape, ["n", 64])], [value("y", shape, ["n", 16])], constants
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=9)
    found = Onnx(to_dynamic(proto).SerializeToString()).outputs(tokens)[0]
    exact = tokens @ weight
    found = found - bias if kind == "Gemm" else found
    error = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert error.max() < 0.03  # 7 and 8 bits; with one scale for all, the smallest tokens would vanish
    assert np.isfinite(Onnx(to_dynamic(proto).SerializeToString()).outputs(np.zeros_like(tokens))[0]).all()


def test_two_narrow_products_of_the_same_tokens() -> None:
    """Both read what was rounded once: a name that is written twice would make the graph invalid."""
    random = np.random.default_rng(0)
    make, value, kind = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    weights = [random.normal(size=(32, 8)).astype(np.float32) for _ in range(2)]
    constants = [onnx.numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)]
    nodes = [make("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(2)]
    outputs = [value(f"y{i}", kind, ["n", 8]) for i in range(2)]
    graph = onnx.helper.make_graph(nodes, "products", [value("x", kind, ["n", 32])], outputs, constants)
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=9)
    tokens = random.normal(size=(4, 32)).astype(np.float32)
    for found, weight in zip(Onnx(to_dynamic(proto).SerializeToString()).outputs(tokens), weights, strict=True):
        np.testing.assert_allclose(found, tokens @ weight, atol=0.25)  # of values around 6
