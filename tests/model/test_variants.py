"""What published variants have beside the paper's model: closed forms, and everything that a model can do.

`tests/parity/test_timm_blocks.py` compares the same parts with timm's.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from peers import randomize
from strategies import PUBLISHED
from vitkit.errors import CheckpointError, ConfigError, InputError
from vitkit.model.attention import Attention
from vitkit.model.attention_variants import VariantAttention, build_attention
from vitkit.model.config import RotaryConfig, ViTConfig
from vitkit.model.encoder import Block
from vitkit.model.mlp import MLP
from vitkit.model.patches import PatchEmbedding
from vitkit.model.torch_attention import to_torch
from vitkit.plan.memory import training_memory
from vitkit.tasks.trainee import Trainee
from vitkit.training import optim
from vitkit.training.config import TrainConfig
from vitkit.training.parts import add_lora, freeze, plain

BASE = ViTConfig(image_size=32, patch_size=8, width=32, depth=3, heads=2, mlp_width=48, classes=5)
everywhere = pytest.mark.parametrize("kind", PUBLISHED)


def model_of(kind: str = "", **changes: object) -> vitkit.ViT:
    model = randomize(vitkit.ViT(BASE.replace(**(PUBLISHED.get(kind, {}) | changes))), scale=0.2)
    assert isinstance(model, vitkit.ViT)
    return model


def images_of(model: vitkit.ViT, count: int = 2) -> Tensor:
    return torch.randn(count, 3, *model.config.image_size, generator=torch.Generator().manual_seed(1))


# --- closed forms ------------------------------------------------------------------------------------


def test_the_plain_model_is_made_of_plain_parts() -> None:
    block = vitkit.ViT(BASE).encoder.blocks[0]
    assert [type(block), type(block.attention), type(block.mlp)] == [Block, Attention, MLP]
    assert type(vitkit.ViT(BASE).patches) is PatchEmbedding


def test_scores_scaled_by_the_width_and_heads_without_a_projection() -> None:
    config = BASE.replace(score_scale="width", attention_out=False, head_width=16)
    ours, x = randomize(build_attention(config), scale=0.3), torch.randn(2, 7, 32)
    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in ours.qkv(x).chunk(3, dim=-1))
    expected = (q @ k.mT / math.sqrt(32)).softmax(-1) @ v
    torch.testing.assert_close(ours(x), expected.transpose(1, 2).flatten(2))
    seen: list[Tensor] = []
    torch.testing.assert_close(ours(x, on_weights=seen.append), ours(x))
    torch.testing.assert_close(seen[0], (q @ k.mT / math.sqrt(32)).softmax(-1))


def test_norms_around_the_patch_map() -> None:
    model = model_of(patch_norms=("after", "before"), patch_embedding="linear", patch_bias=False)
    images, part = images_of(model), model.patches
    cut = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
    before = F.layer_norm(cut, (192,), part.norm_before.weight, part.norm_before.bias, 1e-6)
    expected = F.layer_norm(before @ part.weight.T, (32,), part.norm_after.weight, part.norm_after.bias, 1e-6)
    torch.testing.assert_close(part(images)[0], expected)
    assert "patches.bias" not in model.state_dict()


def test_images_are_cut_as_a_convolution_cuts_them() -> None:
    model = model_of("cut")
    images, part = images_of(model), model.patches
    expected = F.conv2d(images, part.weight, part.bias, stride=8).flatten(2).mT
    torch.testing.assert_close(model.embedded(images)[0][:, 3:], expected + model.positions.learned[3:])
    assert torch.equal(model(images), model(images[..., :32, :32]))
    with pytest.raises(InputError, match="not divided"):
        model(images[..., :5, :])
    assert model(images[..., :5, :], pad=True).shape == (2, 5)


def test_pooling_all_tokens_no_final_norm_and_an_mlp_head() -> None:
    model = model_of(pooling="mean-all", registers=2, final_norm=False, pre_logits=12, pre_logits_activation="gelu")
    images = images_of(model)
    (states,) = model.features(images)
    assert torch.equal(model.tokens(images), states), "there is no norm behind the blocks"
    assert model.norm is None
    hidden = F.gelu(model.head.pre_logits(states.mean(dim=1)))
    torch.testing.assert_close(model(images), model.head.classifier(hidden))


def test_three_dropouts_apart() -> None:
    model = model_of(dropout=0.1, embedding_dropout=0.0, mlp_dropout=0.3)
    block = model.encoder.blocks[0]
    assert (model.config.embedding_rate, block.dropout, block.mlp.dropout) == (0.0, 0.1, 0.3)
    assert torch.equal(model.train().embedded(images_of(model))[0], model.eval().embedded(images_of(model))[0])
    assert BASE.replace(dropout=0.2).mlp_rate == BASE.replace(dropout=0.2).embedding_rate == 0.2


def test_post_norms_start_at_the_layer_scale() -> None:
    block = vitkit.ViT(BASE.replace(block="post-norm", layer_scale=0.1)).encoder.blocks[0]
    assert (block.norm1.weight == 0.1).all()
    assert block.scale1 is None


# --- everything that a model can do ------------------------------------------------------------------


@everywhere
def test_all_paths_agree(kind: str) -> None:
    model = model_of(kind)
    images, seen = images_of(model), list[Tensor]()
    logits = model(images)
    for other in (model(images, on_weights=seen.append), model.head(model.tokens(images)), model(images[:1])):
        torch.testing.assert_close(other, logits[: len(other)], rtol=1e-4, atol=1e-5)
    config = model.config
    assert [w.shape for w in seen] == [(2, config.all_heads, config.tokens, config.tokens)] * 3
    torch.testing.assert_close(seen[0].sum(-1), torch.ones_like(seen[0][..., 0]))
    first, last = model.features(images, [0, 2])
    place = model.embedded(images)[1]
    torch.testing.assert_close(first, model.encoder.blocks[0](model.embedded(images)[0], place))
    torch.testing.assert_close(model.tokens(images), last if model.norm is None else model.norm(last))
    assert model.features(images, grid=True)[0].shape == (2, 32, *config.grid)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(images).float(), logits, rtol=0.1, atol=0.1 * logits.abs().max().item())


@everywhere
def test_merging(kind: str) -> None:
    """Equal patches lose nothing when they merge; the two paths, shown and not shown, agree."""
    model = model_of(kind, positions="none")
    images, config = images_of(model), model.config
    alike = images[:, :, :8, :8].tile(1, 1, 5, 5)[..., : config.image_size[0], : config.image_size[1]]
    before = model(alike)
    model.merge = 3
    torch.testing.assert_close(model(alike), before, rtol=1e-4, atol=1e-5)  # log n makes up for what is gone
    torch.testing.assert_close(model(images, on_weights=lambda w: None), model(images), rtol=1e-4, atol=1e-5)
    assert model.tokens(images).shape == (2, config.tokens, 32)


@everywhere
def test_a_training_step(kind: str) -> None:
    """With patch dropout, recomputed or not: every parameter learns, by the same gradients."""
    model, grads = model_of(kind, stochastic_depth=0.1), []
    for recompute in (False, True):
        model.gradient_checkpointing = recompute
        model.zero_grad()
        torch.manual_seed(0)
        Trainee(model, patch_dropout=0.5).train()(images_of(model)).square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert grad is not None, name
        assert grad.isfinite().all(), name
        assert grad.abs().max() > 0 or "key" in name, name
        torch.testing.assert_close(grads[1][name], grad, msg=name)


@everywhere
def test_adapters_freezing_and_layer_decay(kind: str) -> None:
    model, train = model_of(kind), TrainConfig(data="", out="", layer_decay=0.5, optimizer="adamw")
    factor = {id(p): group["factor"] for group in optim.groups(model, train) for p in group["params"]}
    for name, parameter in model.named_parameters():
        block = int(name.split(".")[2]) if name.startswith("encoder.") else -1
        block = 3 if name.startswith(("norm", "head")) else block
        assert factor[id(parameter)] == 0.5 ** (3 - block), name
    freeze(model, "2")
    learning = {name.rsplit(".", 1)[0] for name, p in model.named_parameters() if p.requires_grad}
    assert all(name.startswith(("encoder.blocks.2", "norm", "head")) for name in learning)
    add_lora(model, 2)
    for name, parameter in model.named_parameters():
        if name.endswith("original"):
            continue
        torch.nn.init.normal_(parameter, std=0.1) if ".parametrizations." in name else None
    updated = [name for name, _ in model.named_parameters() if name.endswith("0.b")]
    assert len(updated) == 3 * model.config.branches * (1 + model.config.attention_out)
    torch.testing.assert_close(plain(model)(images_of(model)), model(images_of(model)), rtol=1e-4, atol=1e-5)


@everywhere
def test_summary_and_plan(kind: str) -> None:
    """Parameters are all there; multiply-adds are half of what PyTorch's own counter sees of the real model."""
    model = model_of(kind)
    found = vitkit.summarize(model.config)
    params = sum(p.numel() for p in model.parameters())
    assert found["params"] == sum(row["params"] for row in found["layers"]) == params
    # the counter knows matrix products, and not the CPU's fused attention
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.head(model.tokens(images_of(model, 1)))
    assert sum(row["macs"] for row in found["layers"]) * 2 == counter.get_total_flops()
    memory = training_memory(model.config, TrainConfig(data="", out="", optimizer="adamw"), 2)
    assert memory.parameters == found["params"] * 4
    assert memory.activations > 0


@everywhere
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    vitkit.save(model, tmp_path / "m.safetensors")
    again = vitkit.load(tmp_path / "m.safetensors")
    assert again.config == model.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(again(images_of(model)), model(images_of(model)))


# --- refused in words --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": "parallel", "branches": 2}, "one branch"),
        ({"branches": 2, "positions": "relative"}, "one branch"),
        ({"branches": 2, "rotary": RotaryConfig(kind="mixed")}, "one branch"),
        ({"attention_out": False, "head_width": 8}, "attention_out=False needs heads that together have width=32"),
        ({"pooling": "map", "map_heads": 5}, "map_heads=5 must divide width=32"),
        ({"indivisible": "cut", "stem": vitkit.ConvStemConfig()}, "a stem reads the whole image"),
        ({"indivisible": "cut", "image_size": 6}, "smaller than a patch"),
        ({"patch_norms": ("before", "before")}, "patch_norms"),
    ],
)
def test_parts_that_do_not_go_together(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BASE.replace(**changes)


def test_formats_that_cannot_hold_a_variant_refuse_it(tmp_path: Path) -> None:
    from vitkit.checkpoints.load import open_checkpoint
    from vitkit.checkpoints.writing import write

    vitkit.save(model_of("post-norm", pooling="cls"), tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="cannot hold a model with block='post-norm'"):
        write(open_checkpoint(tmp_path / "m.safetensors"), tmp_path / "t.pth", "torchvision")


def test_only_plain_attention_becomes_pytorchs() -> None:
    with pytest.raises(ConfigError, match="no VariantAttention"):
        to_torch(VariantAttention(BASE.replace(qk_norm=True)))
