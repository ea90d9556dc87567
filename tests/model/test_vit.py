"""The assembled model: properties that must hold for every configuration, and its named paths."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitkit
from peers import randomize
from strategies import configs
from vitkit.errors import ConfigError, InputError
from vitkit.model.config import ViTConfig
from vitkit.model.stem import WhitenedStem

MU = vitkit.create("mu").config
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def mu(**changes: object) -> vitkit.ViT:
    model = randomize(vitkit.create("mu", **changes)).eval()
    assert isinstance(model, vitkit.ViT)
    return model


@settings(max_examples=60)
@given(configs(), st.booleans())
def test_any_legal_config_runs_forward_and_backward(config: ViTConfig, train: bool) -> None:
    model = randomize(vitkit.ViT(config)).train(train)
    height, width = config.image_size
    for size in [(height, width), (height + config.patch_size[0], width)]:
        images = torch.randn(2, config.channels, *size)
        out = model(images)
        assert out.shape == (2, config.classes or config.head_inputs)
        model.zero_grad()
        out.square().sum().backward()
        used = {n: p for n, p in model.named_parameters() if p.numel()}
        assert all(p.grad is not None and p.grad.isfinite().all() for p in used.values())


@given(configs(dropout=0.0, attention_dropout=0.0, stochastic_depth=0.0))
def test_all_paths_give_the_same_logits(config: ViTConfig) -> None:
    """Fused, looked at, through all token states, checkpointed: one function."""
    model = randomize(vitkit.ViT(config)).eval()
    images = torch.randn(2, config.channels, *config.image_size)
    seen: list[torch.Tensor] = []
    plain, looked = model(images), model(images, on_weights=seen.append)
    by_tokens = model.head(model.tokens(images))
    model.train().gradient_checkpointing = True
    if isinstance(model.stem, WhitenedStem):
        model.stem.eval()  # BatchNorm is another function in training
    for other in (looked, by_tokens, model(images)):
        torch.testing.assert_close(other, plain, atol=1e-5, rtol=1e-4)
    assert [w.shape for w in seen] == [(2, config.all_heads, config.tokens, config.tokens)] * config.depth


def shuffled(images: torch.Tensor, order: torch.Tensor, patch: int) -> torch.Tensor:
    """The images with their patches in another order."""
    rows = images.unfold(2, patch, patch).unfold(3, patch, patch)  # B C h w P Q
    grid = rows.shape[2:4]
    rows = rows.flatten(2, 3)[:, :, order].unflatten(2, grid)
    return rows.permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)


@given(st.permutations(range(16)))
def test_without_positions_order_does_not_matter(order: list[int]) -> None:
    model, order_ = mu(positions="none"), torch.tensor(order)
    with torch.no_grad():
        before, after = model.tokens(IMAGES), model.tokens(shuffled(IMAGES, order_, 8))
        torch.testing.assert_close(after[:, 0], before[:, 0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(after[:, 1:], before[:, 1:][:, order_], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(shuffled(IMAGES, order_, 8)), model(IMAGES), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["learned", "learned-2d", "relative", "sincos-2d", "rope-2d"])
def test_with_positions_order_matters(kind: str) -> None:
    # randomize gives small weights, under which attention hardly depends on anything: sharpen it
    model = mu(positions=kind)
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.attention.qkv.weight.mul_(10)
        difference = model(shuffled(IMAGES, torch.arange(16).flip(0), 8)) - model(IMAGES)
    assert difference.abs().max() > 1e-4


def test_tokens_come_class_distillation_registers_patches() -> None:
    model = mu(distillation_token=True, registers=3)
    assert model.tokens(IMAGES).shape == (2, 1 + 1 + 3 + 16, 32)
    with torch.no_grad():
        model.class_token.fill_(1.0)
        model.distillation_token.fill_(2.0)
        model.registers.fill_(3.0)
        model.positions.learned.zero_()
        embedded, place = model.embedded(IMAGES)
    assert embedded[0, :5, 0].tolist() == [1, 2, 3, 3, 3]
    torch.testing.assert_close(embedded[:, 5:], model.patches(IMAGES)[0])
    assert place.grid == (4, 4)


def test_a_look_at_some_layers_only() -> None:
    model = mu(depth=4)
    seen: list[torch.Tensor] = []
    model(IMAGES, on_weights=seen.append, layers=[-1, 1])
    assert len(seen) == 2
    everything: list[torch.Tensor] = []
    model(IMAGES, on_weights=everything.append)
    torch.testing.assert_close(seen, [everything[1], everything[3]])
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(2, 2, 17))
    with pytest.raises(InputError, match="layer 4 does not exist; the model has layers 0 to 3"):
        model(IMAGES, on_weights=seen.append, layers=[4])


def test_only_looked_at_layers_form_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.model import attention

    formed: list[int] = []
    original = attention.attention_weights
    monkeypatch.setattr(attention, "attention_weights", lambda *a: formed.append(1) or original(*a))
    mu(depth=4)(IMAGES, on_weights=lambda _: None, layers=[2])
    assert len(formed) == 1


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = mu(depth=3).train()
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing = True
    for m in (model, twin):
        m(IMAGES).square().sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_layer_scale_and_stochastic_depth() -> None:
    model = vitkit.create("mu", layer_scale=1e-3, stochastic_depth=0.5)
    block = model.encoder.blocks[-1]
    assert block.scale1.tolist() == pytest.approx([1e-3] * 32)
    assert (model.encoder.blocks[0].drop_path_rate, block.drop_path_rate) == (0.0, 0.5)
    randomize(model).train()
    many = IMAGES[:1].expand(64, -1, -1, -1)  # equal twice by chance: once in 2 ** 128
    assert not torch.equal(model(many), model(many))
    kept = vitkit.model.encoder.drop_path(torch.ones(4000, 1, 1), 0.25)
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert kept.mean().item() == pytest.approx(1.0, abs=0.05)


def test_distillation_gives_two_sets_of_logits_and_their_mean() -> None:
    model = mu(distillation_token=True)
    ours, theirs = model.head.both(model.tokens(IMAGES))
    torch.testing.assert_close(model(IMAGES), (ours + theirs) / 2)
    with pytest.raises(ConfigError, match="distillation_token=True"):
        mu().head.both(mu().tokens(IMAGES))


def test_official_initialisation() -> None:
    model = vitkit.create("vit-ti/16", depth=2, pre_logits=64)
    assert model.class_token.abs().max() == 0
    assert model.head.classifier.weight.abs().max() == 0
    assert model(torch.randn(1, 3, 224, 224)).abs().max() == 0
    assert model.positions.learned.std().item() == pytest.approx(0.02, rel=0.02)
    block = model.encoder.blocks[0]
    bound = (6 / (192 + 192)) ** 0.5  # Xavier-uniform of each of query, key and value, not of the stack
    for weight in block.attention.qkv.weight.chunk(3):
        assert weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert block.mlp.up.weight.abs().max().item() == pytest.approx((6 / (192 + 768)) ** 0.5, rel=0.01)
    assert 0 < block.mlp.up.bias.std() < 1e-5
    assert block.attention.qkv.bias.abs().max() == 0


def test_same_seed_same_weights() -> None:
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return list(vitkit.create("r+ti/16", depth=1).state_dict().values())

    assert all(torch.equal(a, b) for a, b in zip(weights(), weights(), strict=True))


def test_one_image_alone_equals_it_in_a_batch() -> None:
    model = mu(depth=4, positions="relative")
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES)[:1], model(IMAGES[:1]), atol=1e-6, rtol=1e-5)
        assert model(IMAGES[:0]).shape == (0, 10)
