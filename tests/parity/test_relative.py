"""Relative positions equal timm's layers and transformers' BEiT and Data2VecVision, at the trained grid and at others.

Tolerance: scores of order 1 in fp32; two orders of summation differ by 1e-6.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peers
import vitkit
from vitkit.model.config import Size, ViTConfig
from vitkit.model.relative import BiasMlp, RelativeBias, ScoreBias
from vitkit.model.resizing import resize_offsets

timm = peers.import_timm()
layers = peers._quietly("timm.layers.pos_embed_rel")
transformers = peers.import_transformers()

TOLERANCE = 1e-5
HEADS, HIDDEN = 2, 24


def config(grid: Size = (4, 4), **changes: object) -> ViTConfig:
    size = (8 * grid[0], 8 * grid[1])
    small = ViTConfig(image_size=size, patch_size=8, width=32, depth=2, heads=HEADS, mlp_width=64, classes=0)
    return small.replace(relative_hidden=HIDDEN, **changes)


def fill(bias: RelativeBias, table: Tensor) -> RelativeBias:
    """timm's and BEiT's rows: by offset, then class to patch, patch to class, class to class."""
    with torch.no_grad():
        count = bias.by_offset[0].numel()
        bias.by_offset.copy_(table[:count].T.view_as(bias.by_offset))
        if bias.with_prefix is not None:
            bias.with_prefix.copy_(table[count:][[1, 0, 2]].T)
    return bias.eval()


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid", [(4, 4), (3, 6)])
def test_table_as_timms(grid: Size, prefix: int) -> None:
    theirs = peers.randomize(layers.RelPosBias(grid, HEADS, prefix_tokens=prefix), scale=1.0)
    ours = RelativeBias(config(grid, class_token=bool(prefix), pooling="mean"))
    found = fill(ours, theirs.relative_position_bias_table)(grid)
    torch.testing.assert_close(found, theirs.get_bias()[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid", [(4, 4), (3, 6), (7, 2)])
def test_mlp_as_timms(grid: Size, prefix: int) -> None:
    """It has no table: one model for every grid."""
    theirs = layers.RelPosMlp(grid, HEADS, hidden_dim=HIDDEN, prefix_tokens=prefix).eval()
    ours = BiasMlp(config(class_token=bool(prefix), pooling="mean")).eval()
    names = {name.replace("fc1", "up").replace("fc2", "down"): t for name, t in theirs.state_dict().items()}
    ours.load_state_dict({name: t for name, t in names.items() if name.startswith("mlp.")})
    torch.testing.assert_close(ours(grid), theirs.get_bias()[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("grid", [(7, 7), (3, 9), (4, 6), (1, 5), (20, 4)])
def test_timms_resize_of_a_table(grid: Size) -> None:
    """The same ratio of steps by bisection, up to its 1e-6: offsets of twenty patches then differ by 1e-5."""
    table = torch.randn(49 + 3, HEADS)
    shape = ((2 * grid[0] - 1) * (2 * grid[1] - 1) + 3, HEADS)
    expected = layers.resize_rel_pos_bias_table(table, grid, shape)
    found = resize_offsets(table[:-3].T.unflatten(1, (7, 7)), grid, "timm")
    torch.testing.assert_close(found.flatten(0, 1), expected[:-3], atol=TOLERANCE, rtol=0)


def peer_bias(name: str) -> nn.Module:
    if name == "beit":
        given = transformers.BeitConfig(image_size=32, patch_size=8, hidden_size=32, num_attention_heads=HEADS)
        return transformers.models.beit.modeling_beit.BeitRelativePositionBias(given)
    given = transformers.Data2VecVisionConfig(num_attention_heads=HEADS)
    module = transformers.models.data2vec.modeling_data2vec_vision
    return module.Data2VecVisionRelativePositionBias(given, (4, 4))


@pytest.mark.parametrize("name", ["beit", "data2vec"])
@pytest.mark.parametrize("grid", [(4, 4), (3, 6), (7, 2)])
def test_table_and_its_resize_as_in_transformers(name: str, grid: Size) -> None:
    theirs = peers.randomize(peer_bias(name), scale=1.0)
    ours = fill(RelativeBias(config(position_resize="huggingface")), theirs.relative_position_bias_table)
    torch.testing.assert_close(ours(grid), theirs(grid)[0], atol=TOLERANCE, rtol=0)


BEIT = {
    "embeddings.cls_token": "class_token",
    "embeddings.patch_embeddings.projection": "patches",
    "embeddings.position_embeddings": "positions.learned",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_1": "scale1",
    "lambda_2": "scale2",
}


@pytest.mark.parametrize("size", [(32, 32), (24, 56)])
@pytest.mark.parametrize("kind", ["relative", "relative-shared", "learned+relative", "learned+relative-shared"])
def test_whole_beit_with_its_attention_maps(kind: str, size: Size) -> None:
    """The HF reader renames; what is compared here is each kind of positions, and the maps."""
    uses = {"use_relative_position_bias": "shared" not in kind, "use_shared_relative_position_bias": "shared" in kind}
    uses["use_absolute_position_embeddings"] = "learned" in kind
    shape = {"hidden_size": 32, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 64}
    given = transformers.BeitConfig(image_size=32, patch_size=8, **shape, **uses, attn_implementation="eager")
    theirs = peers.randomize(transformers.BeitModel(given, add_pooling_layer=False), scale=0.3)
    ours = config(positions=kind, layer_scale=1.0, key_bias=False, norm_eps=given.layer_norm_eps)
    model = peers.randomize(vitkit.ViT(ours.replace(final_norm=False, position_resize="huggingface"))).eval()
    biases = [part for part in model.modules() if isinstance(part, ScoreBias)]
    tables = [t for n, t in theirs.named_parameters() if n.endswith("relative_position_bias_table")]
    for bias, table in zip(biases, tables, strict=True):
        fill(bias, table)  # type: ignore[arg-type]
    state = model.state_dict() | from_beit(theirs)
    model.load_state_dict(state)
    images, seen = torch.randn(2, 3, *size), []
    with torch.no_grad():
        states = model.features(images, layers=(0, 1))
        model.tokens(images, on_weights=seen.append)
        # learned positions need to be told to be resized; then the bias is "resized" to the size that it has
        more = {"interpolate_pos_encoding": True} if "learned" in kind and size != (32, 32) else {}
        expected = theirs(images, output_attentions=True, output_hidden_states=True, **more)
    for mine, other in zip(states, expected.hidden_states[1:], strict=True):
        torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=1e-5)
    for mine, other in zip(seen, expected.attentions, strict=True):
        torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=0)


def from_beit(theirs: nn.Module) -> dict[str, Tensor]:
    """What transformers calls its parts in memory differs by version: they are found by what they end with."""
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        for word, ours in BEIT.items():
            name = name.replace(word, ours)
        tensors[name] = tensor[0] if name in ("class_token", "positions.learned") else tensor
    found = {n: t for n, t in tensors.items() if n.startswith(("class_token", "patches", "positions.learned"))}
    for i in range(2):
        mine = {
            n.split(f"layer.{i}.", 1)[-1].split(f"layers.{i}.", 1)[-1]: t for n, t in tensors.items() if f".{i}." in n
        }
        at = lambda *ends: next(t for n, t in mine.items() if n.endswith(ends))  # noqa: B023, E731
        block = f"encoder.blocks.{i}."
        for part in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "scale1", "scale2"):
            found[block + part] = at(part)
        parts = {"query": ("query.", "q_proj."), "key": ("key.", "k_proj."), "value": ("value.", "v_proj.")}
        weights = [at(*(end + "weight" for end in parts[word])) for word in parts]
        found[f"{block}attention.qkv.weight"] = torch.cat(weights)
        for word in ("query", "value"):
            found[f"{block}attention.{word}_bias"] = at(*(end + "bias" for end in parts[word]))
        for kind in ("weight", "bias"):
            found[f"{block}attention.out.{kind}"] = at(f"attention.output.dense.{kind}", f"o_proj.{kind}")
            found[f"{block}mlp.up.{kind}"] = at(f"intermediate.dense.{kind}", f"fc1.{kind}", f"up_proj.{kind}")
            down = [n for n in mine if n.endswith((f"output.dense.{kind}", f"fc2.{kind}", f"down_proj.{kind}"))]
            found[f"{block}mlp.down.{kind}"] = mine[next(n for n in down if "attention" not in n)]
    return found
