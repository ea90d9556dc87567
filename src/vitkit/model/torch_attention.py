"""Our attention as PyTorch's own module, and back."""

from __future__ import annotations

from torch import nn

from vitkit.errors import ConfigError
from vitkit.model.attention import Attention


def to_torch(attention: Attention) -> nn.MultiheadAttention:
    """The same attention as PyTorch's own module. Note its boolean masks mean the opposite: True = hidden."""
    if type(attention) is not Attention:
        raise ConfigError(f"nn.MultiheadAttention has no {type(attention).__name__}; only plain attention converts")
    theirs = nn.MultiheadAttention(attention.out.in_features, attention.heads, attention.dropout, batch_first=True)
    theirs = theirs.to(attention.qkv.weight).train(attention.training)
    ours = {"in_proj_" + name: tensor for name, tensor in attention.qkv.state_dict().items()}
    ours |= {"out_proj." + name: tensor for name, tensor in attention.out.state_dict().items()}
    theirs.load_state_dict(theirs.state_dict() | ours)  # its biases start as zeros
    return theirs


def from_torch(theirs: nn.MultiheadAttention) -> Attention:
    """PyTorch's own module as ours; its `batch_first` only says how it is called and does not matter here."""
    if theirs.in_proj_weight is None or theirs.bias_k is not None or theirs.add_zero_attn:
        unlike = "without kdim, vdim, add_bias_kv and add_zero_attn"
        raise ConfigError(f"only self-attention converts: nn.MultiheadAttention {unlike}")
    ours = Attention(theirs.embed_dim, theirs.num_heads, theirs.dropout, qkv_bias=theirs.in_proj_bias is not None)
    ours = ours.to(theirs.in_proj_weight).train(theirs.training)
    tensors = theirs.state_dict().items()
    renamed = {name.replace("in_proj_", "qkv.").replace("out_proj", "out"): tensor for name, tensor in tensors}
    ours.load_state_dict(ours.state_dict() | renamed)  # our biases start as zeros
    return ours
