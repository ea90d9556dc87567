"""The graph that is written for ONNX Runtime: fixed sizes, short attention, and still the same answers."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitkit
from peers import randomize
from vitkit.model.config import ViTConfig
from vitkit.runtime.base import merged
from vitkit.runtime.eager import Eager

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from vitkit.runtime.onnx import OPSET, Onnx, to_onnx  # noqa: E402

BASE = ViTConfig(image_size=32, patch_size=8, width=32, depth=3, heads=2, mlp_width=48, classes=10)
KINDS = {
    "plain": {},
    "mean": {"pooling": "mean"},
    "map": {"pooling": "map"},
    "registers": {"registers": 3, "distillation_token": True},
    "relative": {"positions": "relative"},
    "rotary": {"positions": "rope-2d"},
    "not square": {"image_size": (32, 48)},
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


@pytest.mark.parametrize("merge", [0, 2])
def test_sizes_are_not_computed_again_in_every_block(merge: int) -> None:
    shallow, deep = (operations(to_onnx(merged(model_of(depth=depth), merge))) for depth in (2, 5))
    assert deep["MatMul"] > shallow["MatMul"]
    for kind in ("Shape", "Sqrt", "Div", "Range") if merge == 0 else ("Sqrt", "Range"):
        assert deep[kind] == shallow[kind], kind


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's, about the exporter that is used
def test_other_exports_are_left_alone(tmp_path) -> None:
    to_onnx(model_of())
    images = torch.randn(1, 2, 4, 8)  # of 8 channels, not of the 16 that the model above has per head
    torch.onnx.export(Bare(), (images,), tmp_path / "m.onnx", dynamo=False, opset_version=OPSET)
    found = Onnx(tmp_path / "m.onnx").run(images)
    torch.testing.assert_close(found, Bare()(images), atol=1e-6, rtol=1e-5)
