"""Every family of the zoo compiles, exports with a free batch size, and runs in bf16 and float64."""

import shutil

import pytest
import torch
from torch import nn

import vitkit
from peers import randomize
from vitkit.model.zoo import ZOO

# One small model per family of the zoo, made from its row, with the sizes brought down.
SMALL = {"depth": 2, "width": 48, "heads": 3, "mlp_width": 64, "classes": 5}
FAMILIES: dict[str, tuple[str, dict]] = {
    "vit": ("vit-ti/16", {**SMALL, "image_size": 64}),
    "hybrid": ("r26+s/32", {**SMALL, "image_size": 64}),
    "hybrid stem": ("r+ti/16", {**SMALL, "image_size": 64}),
    "small images": ("vit-8px/2", {}),
    "convolutions": ("conv+8px/2", {}),
    "whitened": ("hybrid-28px/8", {}),
    "vit-lite": ("vit-lite-7/4", {"depth": 2}),
    "resnet": ("resnet-28px", {}),
    "mu": ("mu", {}),
    "map, registers": ("mu", {"pooling": "map", "registers": 2, "layer_scale": 0.1}),
    "distilled": ("mu", {"distillation_token": True, "pre_logits": 16}),
    **{kind: ("mu", {"positions": kind}) for kind in ("none", "learned-2d", "relative", "sincos-2d", "rope-2d")},
}


def family(name: str) -> tuple[nn.Module, torch.Tensor]:
    row, changes = FAMILIES[name]
    model = randomize(vitkit.create(row, **changes)).eval()
    return model, torch.randn(3, model.config.channels, *model.config.image_size)


def test_every_family_is_here() -> None:
    prefixes = {"vit-ti", "r26", "r+ti", "vit-8px", "conv", "hybrid", "vit-lite", "resnet", "mu"}
    others = {"vit-s", "vit-b", "vit-l/", "vit-h", "r50", "vit-28px", "vit-32px"}  # the same classes, other sizes
    assert all(any(name.startswith(p) for p in prefixes | others) for name in ZOO)


@pytest.mark.parametrize("name", FAMILIES)
def test_exports_with_a_free_batch(name: str) -> None:
    model, images = family(name)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (1, 2, 5):
        other = torch.randn(batch, *images.shape[1:])
        with torch.no_grad():
            # the exported graph holds the same operations; only their fusion may differ
            torch.testing.assert_close(program.module()(other), model(other), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_compiles_in_one_graph(name: str) -> None:
    """The graph is captured whole (no break); its code is generated in the slow test below."""
    model, images = family(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("name", ["vit", "hybrid stem", "resnet", "relative"])  # one per kind of code
def test_compiles_to_code(name: str) -> None:
    model, images = family(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-4)
    compiled(images).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_float64_and_bfloat16(name: str) -> None:
    model, images = family(name)
    with torch.no_grad():
        single = model(images)
        double = model.double()(images.double())
        assert double.dtype == torch.float64
        torch.testing.assert_close(single.double(), double, atol=1e-5, rtol=1e-4)
        half = model.bfloat16()(images.bfloat16())
    assert half.dtype == torch.bfloat16
    # bf16 keeps 8 bits: 0.4% per operation, a few operations deep; the hybrid has 26 convolutions before them
    error = (half.double() - double).abs().max() / double.abs().max()
    assert error < (0.25 if name == "hybrid" else 0.06)
