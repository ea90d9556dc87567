"""Attention: two paths, one result; masks that work; gradients through what a looker sees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers import randomize
from vitkit.errors import ConfigError
from vitkit.model.attention import Attention, attend, attention_weights
from vitkit.model.torch_attention import from_torch


def both_paths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    return [attend(q, k, v, mask, on_weights=look) for look in (None, lambda weights: None)]


MASKS = {
    "none": None,
    "boolean": torch.rand(7, 7) < 0.6,
    "per head": torch.rand(3, 7, 7) < 0.6,
    "per image": torch.rand(2, 1, 1, 7) < 0.6,
    "additive": torch.randn(7, 7),
    "additive with -inf": torch.randn(7, 7).masked_fill(torch.rand(7, 7) < 0.3, -torch.inf),
    "one row sees nothing": torch.arange(7)[:, None].expand(7, 7) != 3,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_paths_agree(mask: torch.Tensor | None, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 3, 7, 8, dtype=dtype)
    fused, plain = both_paths(q, k, v, mask)
    # both are sums of a few products of order 1: a few units in the last place
    torch.testing.assert_close(fused, plain, atol=1e-6 if dtype == torch.float32 else 1e-14, rtol=0)
    assert plain.isfinite().all()


def test_gradients_in_bf16_are_those_of_fp32() -> None:
    """PyTorch's own in bf16 are slow on a CPU, and further from the truth."""
    x = torch.randn(3, 2, 3, 7, 8).bfloat16()
    wide = x.float().requires_grad_()
    attend(*wide).sum().backward()
    half = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(*half)
    y.sum().backward()
    assert wide.grad is not None
    assert half.grad is not None
    assert y.dtype == torch.bfloat16
    assert torch.equal(half.grad, wide.grad.bfloat16())


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
def test_weights_are_a_distribution(tokens: int, heads: int, batch: int) -> None:
    q, k = torch.randn(2, batch, heads, tokens, 4)
    weights = attention_weights(q, k)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(batch, heads, tokens))


def test_a_masked_token_changes_nothing() -> None:
    """What is hidden by the mask has no influence at all: the mask is really used."""
    layer = randomize(Attention(16, 2)).eval()
    x = torch.randn(1, 5, 16)
    visible = torch.tensor([True, True, True, False, True])
    changed = x.clone()
    changed[:, 3] = 100.0
    before, after = (layer(t, mask=visible)[:, visible] for t in (x, changed))
    assert torch.equal(before, after)
    assert not torch.allclose(layer(x)[:, visible], layer(changed)[:, visible])


@pytest.mark.parametrize("queries", [1, 2, 5])
def test_fewer_queries_give_the_same_rows(queries: int) -> None:
    layer = randomize(Attention(16, 2)).eval()
    x, bias = torch.randn(2, 6, 16), torch.randn(2, 6, 6)
    torch.testing.assert_close(layer(x, bias, queries=queries), layer(x, bias)[:, :queries])


def test_gradients_reach_the_weights_seen() -> None:
    layer = randomize(Attention(8, 2))
    seen: list[torch.Tensor] = []
    layer(torch.randn(2, 3, 8), on_weights=seen.append)[:, 0].sum().backward(inputs=seen)
    assert seen[0].grad is not None
    assert seen[0].grad[:, :, 0].abs().sum() > 0
    assert seen[0].grad[:, :, 1:].abs().sum() == 0  # only the first token was asked for


def test_half_precision_scores_do_not_overflow() -> None:
    """q k^T alone is beyond fp16's largest number here; scaled first it is not."""
    q = torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16)
    assert attention_weights(q, q).isfinite().all()


def test_dropout_only_while_training() -> None:
    layer = randomize(Attention(16, 2, dropout=0.5)).train()
    x = torch.randn(1, 5, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_bad_heads() -> None:
    with pytest.raises(ConfigError, match="heads=5 must divide width=16"):
        Attention(16, 5)
    with pytest.raises(ConfigError, match="only self-attention converts"):
        from_torch(torch.nn.MultiheadAttention(16, 2, kdim=8, vdim=8))
