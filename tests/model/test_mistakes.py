"""Mistakes that are often made in Vision Transformer code, each with a check that catches it.

Every test holds the mistaken variant, shows that the check fails on it, and that our code passes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import peers
from vitkit import create
from vitkit.errors import VitkitError
from vitkit.model import zoo
from vitkit.model.attention import Attention, attend
from vitkit.model.config import ViTConfig
from vitkit.model.positions import Place
from vitkit.model.torch_attention import to_torch

WIDTH, HEADS, TOKENS = 24, 3, 7


def qkv(seed: int = 0, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, HEADS, TOKENS, WIDTH // HEADS, generator=random)
    return q, k, v


def caught(check: Callable[[], None]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check()


# 1. The scale belongs inside the softmax, and is the square root of the head's width.
def scale_outside_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) / WIDTH**0.5) @ v


def scale_by_model_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / WIDTH**0.5).softmax(-1) @ v


def check_scale(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    q, k, v = qkv()
    torch.testing.assert_close(attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    ones = torch.ones_like(v)  # rows of weights sum to 1, so a constant passes through unchanged
    torch.testing.assert_close(attention(q, k, ones), ones)


def test_scale_is_inside_the_softmax() -> None:
    check_scale(attend)
    caught(lambda: check_scale(scale_outside_softmax))
    caught(lambda: check_scale(scale_by_model_width))


# 2. masked_fill returns a new tensor; without using it the mask does nothing.
def mask_result_thrown_away(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def check_mask(attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
    q, k, v = qkv()
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    mask[:, 3] = False  # nobody may look at token 3
    before = attention(q, k, v, mask)
    k[:, :, 3], v[:, :, 3] = 5.0, -9.0
    torch.testing.assert_close(attention(q, k, v, mask), before)


def test_mask_does_something() -> None:
    check_mask(attend)
    check_mask(lambda q, k, v, mask: attend(q, k, v, mask, on_weights=lambda _: None))
    check_mask(lambda q, k, v, mask: attend(q, k, v, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)))
    caught(lambda: check_mask(mask_result_thrown_away))


# 3. Rows of the qkv weight are (3, heads, K), as in every published checkpoint.
def layout_of_no_checkpoint(x: Tensor, module: Attention) -> Tensor:
    q, k, v = rearrange(module.qkv(x), "b n (h d qkv) -> qkv b h n d", h=HEADS, qkv=3)
    return module.out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


def check_layout(attention: Callable[[Tensor, Attention], Tensor]) -> None:
    module = Attention(WIDTH, HEADS)
    peers.randomize(module, scale=0.3)
    published = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    published.in_proj_weight.data, published.in_proj_bias.data = module.qkv.weight.data, module.qkv.bias.data
    published.out_proj.load_state_dict(module.out.state_dict())
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(attention(x, module), published(x, x, x)[0], rtol=1e-5, atol=1e-6)


def test_qkv_layout_is_the_published_one() -> None:
    check_layout(lambda x, module: module(x))
    caught(lambda: check_layout(layout_of_no_checkpoint))


# 4. nn.MultiheadAttention attends across the batch unless batch_first=True; detaching q and k only hides it.
def check_images_do_not_mix(module: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(module(x)[:1], module(x[:1]), rtol=1e-5, atol=1e-6)


def check_queries_learn(module: Callable[[Tensor], Tensor], in_proj: Tensor) -> None:
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    module(x).square().sum().backward()
    assert in_proj.grad is not None
    assert all(part.abs().max() > 1e-6 for part in in_proj.grad.chunk(3))  # query, key and value


def test_attention_stays_inside_an_image_and_learns() -> None:
    ours, theirs = Attention(WIDTH, HEADS), nn.MultiheadAttention(WIDTH, HEADS)  # batch_first=False is the default
    peers.randomize(ours, scale=0.3)
    peers.randomize(theirs, scale=0.3)

    def detached(x: Tensor) -> Tensor:
        q, k, _ = F.linear(x, theirs.in_proj_weight, theirs.in_proj_bias).detach().chunk(3, dim=-1)
        v = F.linear(x, theirs.in_proj_weight, theirs.in_proj_bias).chunk(3, dim=-1)[2]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        return theirs.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    check_images_do_not_mix(ours)
    caught(lambda: check_images_do_not_mix(lambda x: theirs(x, x, x)[0]))
    batch_first = to_torch(ours)
    check_images_do_not_mix(lambda x: batch_first(x, x, x)[0])
    check_queries_learn(ours, ours.qkv.weight)
    caught(lambda: check_queries_learn(detached, theirs.in_proj_weight))


# 5a. Adding a residual in place destroys what autograd kept.
class InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sigmoid()  # the gradient of sigmoid needs its own output
        y += x
        return y


def check_differentiable(module: nn.Module, x: Tensor) -> None:
    before = x.detach().clone()
    module(x).sum().backward()
    assert torch.equal(x.detach(), before), "the input was changed"


def test_residuals_are_not_added_in_place() -> None:
    model = create("mu")
    peers.randomize(model)
    check_differentiable(model, torch.randn(1, 3, 32, 32, requires_grad=True))
    block = model.get_submodule("encoder.blocks.0")
    x = torch.randn(1, 17, 32)
    before = x.clone()
    block(x, Place((4, 4)))
    assert torch.equal(x, before)
    caught(lambda: check_differentiable(InPlaceBlock(), torch.randn(1, TOKENS, WIDTH, requires_grad=True)))


# 5b. A model must take other image sizes than the one it was built for.
class FixedSizeEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, 8, 8)
        self.positions = nn.Parameter(torch.zeros(1, 16, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).mT + self.positions


def check_other_sizes(model: Callable[[Tensor], Tensor]) -> None:
    for size in ((32, 32), (48, 48), (16, 40), (8, 8)):
        assert len(model(torch.randn(2, 3, *size))) == 2


def test_other_image_sizes_are_taken() -> None:
    check_other_sizes(create("mu"))
    caught(lambda: check_other_sizes(FixedSizeEmbedding()))
    with pytest.raises(VitkitError, match=r"32x32 and 40x40"):
        create("mu")(torch.randn(1, 3, 33, 35))


# 6. The MLP of ViT-B is 3072 wide, not 3012.
def check_mlp_width(config: ViTConfig) -> None:
    assert config.mlp_width == 4 * config.width


def test_mlp_width() -> None:
    for name in ("vit-ti/16", "vit-s/16", "vit-b/32", "vit-b/16", "vit-l/32", "vit-l/16", "vit-h/14"):
        config = zoo.config(name)
        assert isinstance(config, ViTConfig)
        check_mlp_width(config)
    caught(lambda: check_mlp_width(ViTConfig(mlp_width=3012)))


# 7. LayerNorm epsilon and GELU flavour change results without an error: both are in the config.
def check_numerics(config: ViTConfig, eps: float, gelu: Callable[[Tensor], Tensor]) -> None:
    model = create(config)
    peers.randomize(model)
    block = model.get_submodule("encoder.blocks.0")
    x = torch.randn(1, 4, config.width, generator=torch.Generator().manual_seed(4))
    norm, mlp = block.get_submodule("norm2"), block.get_submodule("mlp")
    small = 1e-3 * x  # so that the epsilon shows
    wanted = F.layer_norm(small, (config.width,), norm.weight, norm.bias, eps)  # type: ignore[arg-type]
    torch.testing.assert_close(norm(small), wanted)
    up, down = mlp.get_submodule("up"), mlp.get_submodule("down")
    torch.testing.assert_close(mlp(x), down(gelu(up(x))), rtol=0, atol=1e-7)


def test_epsilon_and_gelu_are_configured() -> None:
    config = zoo.config("mu")
    assert isinstance(config, ViTConfig)
    assert (config.norm_eps, config.activation) == (1e-6, "gelu")  # the official ones

    def tanh(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    check_numerics(config, 1e-6, F.gelu)
    check_numerics(config.replace(norm_eps=1e-12, activation="gelu-tanh"), 1e-12, tanh)
    for mistaken in (1e-5, 1e-12):
        caught(lambda eps=mistaken: check_numerics(config, eps, F.gelu))  # type: ignore[misc]
    caught(lambda: check_numerics(config, 1e-6, tanh))


# 8. The official models want (x - 0.5) / 0.5, not ImageNet's statistics.
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def check_range(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Black becomes -1 and white 1."""
    assert all((0 - m) / s == -1 and (1 - m) / s == 1 for m, s in zip(mean, std, strict=True))


def test_official_models_want_half_and_half() -> None:
    for name in zoo.ZOO:
        preprocessing = zoo.config(name).preprocessing
        check_range(preprocessing.mean, preprocessing.std)
    caught(lambda: check_range(**IMAGENET))
