"""Our attention equals PyTorch's nn.MultiheadAttention(batch_first=True), masks included, both ways.

One layer of fp32 on values of order 1 rounds to about 2e-7, so 1e-6 leaves no room for a mistake.
PyTorch's boolean masks mean the opposite of ours: True = hidden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peers
from vitkit.errors import ConfigError
from vitkit.model.attention import Attention, OnWeights
from vitkit.model.torch_attention import from_torch, to_torch

TOLERANCE = 1e-6
WIDTH, HEADS, TOKENS, BATCH = 24, 3, 11, 2


PATHS = {"fused": None, "plain": lambda weights: None}  # who looks forms the weights


def tokens() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5))


def visible() -> Tensor:
    """B 1 N N, True = may attend; every row sees itself, so that no row is empty."""
    keep = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(6)) < 0.5
    return keep | torch.eye(TOKENS, dtype=torch.bool)


def theirs_of(module: nn.MultiheadAttention, x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        mask = mask.expand(BATCH, HEADS, TOKENS, TOKENS).flatten(0, 1)  # PyTorch wants (B H) N N
        mask = ~mask if mask.dtype == torch.bool else mask
    return module(x, x, x, attn_mask=mask, need_weights=False)[0]


def masks() -> dict[str, Tensor | None]:
    additive = torch.randn(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(7))
    return {
        "none": None,
        "boolean": visible(),
        "same for all": visible()[:1],
        "additive": additive,
        "additive with -inf": torch.zeros(BATCH, 1, TOKENS, TOKENS).masked_fill(~visible(), -torch.inf),
    }


@pytest.mark.parametrize("look", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("mask", masks().values(), ids=masks().keys())
def test_equals_pytorch(mask: Tensor | None, look: OnWeights | None) -> None:
    ours = Attention(WIDTH, HEADS)
    peers.randomize(ours, scale=0.3)
    x = tokens()
    expected = theirs_of(to_torch(ours).eval(), x, mask)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(x, mask, on_weights=look), expected, rtol=TOLERANCE, atol=TOLERANCE)
    if mask is not None:
        assert (ours(x) - expected).abs().max() > 1e-2  # the mask does something


def test_weights_equal_pytorch() -> None:
    ours = Attention(WIDTH, HEADS)
    peers.randomize(ours, scale=0.3)
    x, seen = tokens(), list[Tensor]()
    ours(x, visible(), on_weights=seen.append)
    hidden = ~visible().expand(BATCH, HEADS, TOKENS, TOKENS).flatten(0, 1)
    module = to_torch(ours).eval()
    _, expected = module(x, x, x, attn_mask=hidden, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("bias", [True, False])
def test_converts_both_ways(bias: bool) -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True)
    peers.randomize(theirs, scale=0.3)
    ours = from_torch(theirs)
    x = tokens()
    torch.testing.assert_close(ours(x), theirs_of(theirs, x, None), rtol=TOLERANCE, atol=TOLERANCE)
    back = to_torch(ours)
    torch.testing.assert_close(theirs_of(back, x, None), theirs_of(theirs, x, None), rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(back.in_proj_weight, theirs.in_proj_weight)
    assert torch.equal(back.out_proj.weight, theirs.out_proj.weight)
    again = from_torch(back)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("look", PATHS.values(), ids=PATHS)
def test_gradients_equal_pytorch(look: OnWeights | None) -> None:
    ours = Attention(WIDTH, HEADS)
    peers.randomize(ours, scale=0.3)
    theirs = to_torch(ours)
    x, y = tokens().requires_grad_(), tokens().requires_grad_()
    ours(x, on_weights=look).square().mean().backward()
    theirs_of(theirs, y, None).square().mean().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(ours.qkv.weight.grad, theirs.in_proj_weight.grad, rtol=TOLERANCE, atol=TOLERANCE)


def test_what_does_not_convert_says_so() -> None:
    for options in ({"kdim": 8}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ConfigError, match="only self-attention converts"):
            from_torch(nn.MultiheadAttention(WIDTH, HEADS, **options))
