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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_pictures(kind: str, fused: bool) -> None:
    model = model_of(**KINDS[kind])
    runtime = Onnx(to_onnx(model, fused=fused).SerializeToString())
    for count in (1, 2, 7):
        images = torch.randn(count, 3, *model.config.image_size)
        torch.testing.assert_close(runtime.run(images), Eager(model).run(images), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("merge", [0, 2])
def test_sizes_are_not_computed_again_in_every_block(merge: int) -> None:
    shallow, deep = (operations(to_onnx(merged(model_of(depth=depth), merge))) for depth in (2, 5))
    assert deep["MatMul"] > shallow["MatMul"]
    for kind in ("Shape", "Sqrt", "Div", "Range") if merge == 0 else ("Sqrt", "Range"):
        assert deep[kind] == shallow[kind], kind


def test_only_what_ONNX_Runtime_runs_has_its_own_operations() -> None:
    plain, fused = to_onnx(model_of()), to_onnx(model_of(), fused=True)
    assert {node.domain for node in plain.graph.node} == {""}
    onnx.checker.check_model(plain)
    assert operations(fused)["MultiHeadAttention"] == 3
    assert operations(fused)["Softmax"] == 0


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_other_exports_are_left_alone(tmp_path) -> None:
    to_onnx(model_of(), fused=True)
    torch.onnx.export(Bare(), (torch.randn(1, 2, 4, 8),), tmp_path / "m.onnx", dynamo=False, opset_version=OPSET)
    assert operations(onnx.load(tmp_path / "m.onnx"))["MultiHeadAttention"] == 0
