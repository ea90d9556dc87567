"""What every model offers: features of any layer, at any size; the pooled state; blocks and classifiers."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import vitkit
from peers import randomize
from vitkit.errors import ConfigError, InputError
from vitkit.model import blocks, encoder
from vitkit.model.base import Part, VisionModel
from vitkit.model.config import ConvStemConfig, ResNetConfig, RotaryConfig, StemConfig, ViTConfig, WhitenedStemConfig

VIT = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 3, "heads": 2, "mlp_width": 24, "classes": 5}
MODELS = {
    "plain": {},
    "registers": {"registers": 3, "distillation_token": True, "positioned_prefix": "class"},
    "no prefix": {"class_token": False, "pooling": "mean", "norm_after_pooling": True},
    "rotary, pre-norm": {"positions": "rope-2d", "pre_norm": True},
    "relative, LayerScale": {"positions": "relative", "layer_scale": 0.5, "pooling": "cls+mean"},
    "map": {"pooling": "map", "pre_logits": 6, "positions": "sincos-2d"},
    "hybrid": {"stem": StemConfig((1, 1), 8, "small")},
    "convolutions": {"stem": ConvStemConfig((4, 8))},
    "whitened": {"stem": WhitenedStemConfig((4, 8, 8), (1, 2, 3))},
}
SIZES = [(32, 32), (48, 24)]


def model_of(**changes: object) -> vitkit.ViT:
    return randomize(vitkit.ViT(ViTConfig(**(VIT | changes))), scale=0.2).eval()


def by_hand(model: vitkit.ViT, images: Tensor) -> list[Tensor]:
    """The states after every block, with the block written out."""
    x, place = model.embedded(images)
    states = []
    for block in model.encoder.blocks:
        bias = None if block.relative is None else block.relative(place.grid)
        y = block.attention(block.norm1(x), bias, place.rotate)
        x = x + (y if block.scale1 is None else y * block.scale1)
        y = block.mlp(block.norm2(x))
        x = x + (y if block.scale2 is None else y * block.scale2)
        states.append(x)
    return states


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_features_are_the_states_of_the_blocks(name: str, size: tuple[int, int]) -> None:
    model, images = model_of(**MODELS[name]), torch.randn(2, 3, *size)
    expected = by_hand(model, images)
    # the same operations in the same order: equal to the last bit
    for found, layer in zip(model.features(images, [2, 0, -2]), (2, 0, 1), strict=True):
        assert torch.equal(found, expected[layer])
    (maps,) = model.features(images, grid=True)
    h, w = size[0] // 8, size[1] // 8
    patches = expected[-1][:, model.config.prefix_tokens :]
    assert torch.equal(maps, patches.transpose(1, 2).reshape(2, 16, h, w))
    (normed,) = model.features(images, norm=True)
    # a norm after pooling is not a norm of tokens: then the states stay as they are
    assert torch.equal(normed, model.tokens(images))
    assert model.features(images, []) == []


@pytest.mark.parametrize("name", ["plain", "registers", "no prefix", "map", "hybrid"])
def test_features_of_merged_tokens_stand_in_their_places(name: str) -> None:
    model, images = model_of(**MODELS[name]), torch.randn(2, 3, 48, 32)
    model.merge = 3
    first, last = model.features(images, [0, -1], norm=True)
    assert torch.equal(last, model.tokens(images))
    assert first.shape == last.shape == (2, model.config.prefix_tokens + 24, 16)
    patches = first[0, model.config.prefix_tokens :]
    assert len(patches.unique(dim=0)) == 24 - 3  # three stand for another each
    assert model.features(images, [0], grid=True)[0].shape == (2, 16, 6, 4)


def test_nothing_deeper_runs() -> None:
    model, ran = model_of(), []
    for i, block in enumerate(model.encoder.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    model.features(torch.randn(1, 3, 32, 32), [1])
    assert ran == [0, 1]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_features_can_be_trained_through(checkpointing: bool) -> None:
    model = model_of(registers=2).train()
    model.gradient_checkpointing = checkpointing
    model.features(torch.randn(2, 3, 32, 32), [1], grid=True)[0].square().mean().backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None}
    assert {"patches.weight", "positions.learned", "encoder.blocks.1.mlp.down.weight"} <= reached
    assert not any(n.startswith(("encoder.blocks.2", "norm", "head")) for n in reached)


def test_any_size_with_pad_and_errors_that_name_the_layers() -> None:
    model = model_of()
    assert model.features(torch.randn(1, 3, 30, 41), grid=True, pad=True)[0].shape == (1, 16, 4, 6)
    with pytest.raises(InputError, match="the nearest sizes are 24x40 and 32x48"):
        model.features(torch.randn(1, 3, 30, 41))
    for broken in (3, -4):
        with pytest.raises(InputError, match=f"layer {broken} does not exist; the model has layers 0 to 2"):
            model.features(torch.randn(1, 3, 32, 32), [broken])


def test_stages_of_a_resnet() -> None:
    model = randomize(vitkit.ResNet(ResNetConfig(32, stem=StemConfig((1, 2, 1), 8, "small"), classes=4))).eval()
    images = torch.randn(2, 3, 24, 40)
    x = model.stem.enter(images)
    expected = [x := stage(x) for stage in model.stem.stages]
    first, last = model.features(images, [0, -1], grid=True)
    assert torch.equal(first, expected[0])
    assert torch.equal(last, expected[2])
    assert last.shape == (2, 128, 6, 10)
    (rows,) = model.features(images, [1])
    assert torch.equal(rows, expected[1].flatten(2).transpose(1, 2))
    assert torch.equal(model.pooled(images), last.mean((-2, -1)))
    with pytest.raises(InputError, match="layer 3 does not exist"):
        model.features(images, [3])
    assert (model.blocks, model.mergeable, model.classifiers) == ([], False, [model.head])
    model.gradient_checkpointing, model.merge = True, 0  # of no effect without blocks
    with pytest.raises(ConfigError, match="ResNet has no tokens that could be merged"):
        model.merge = 2


@pytest.mark.parametrize("name", MODELS)
def test_pooled_is_what_the_classifier_sees(name: str) -> None:
    model, images = model_of(**MODELS[name]), torch.randn(2, 3, 32, 32)
    seen: list[Tensor] = []
    for part in model.classifiers:
        part.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    model(images)
    torch.testing.assert_close(model.pooled(images), torch.stack(seen).mean(dim=0))
    assert len(model.classifiers) == 1 + model.config.distillation_token
    assert len(model.blocks) == 3
    without = vitkit.ViT(model.config.replace(classes=0)).eval()
    without.load_state_dict(model.state_dict(), strict=False)
    assert without.classifiers == []
    torch.testing.assert_close(without(images), model.pooled(images))


def parts(kind: type[Part] = Part) -> Iterator[type[Part]]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("vitkit.model.") and one is not VisionModel:
            yield one
        yield from parts(one)


def alone(kind: type[Part]) -> Part:
    """A part with what it needs; most need the configuration alone."""
    values = VIT | {"layer_scale": 0.1, "positions": "relative", "pre_logits": 8, "patch_norms": ["after"]}
    config: object = ViTConfig(**(values | {"key_bias": False, "mlp_norm": True}))
    wanted: dict[str, object] = {"width": 16, "heads": 2, "mlp_width": 32, "channels": 3, "patch": (4, 4)}
    wanted |= {"kind": blocks.PostNormBlock, "branches": nn.ModuleList([encoder.Block(config)])}
    wanted |= {"stride": 2, "count": 2, "filters": 8, "numerics": "official", "rotary": RotaryConfig("mixed")}
    stems = {"ResNetStem": StemConfig((1,), 8), "ConvStem": ConvStemConfig(), "ResNet": ResNetConfig(classes=2)}
    stems |= {"ResNetDStem": StemConfig((1,), 8, variant="d"), "WhitenedStem": WhitenedStemConfig((64,), (1,))}
    wanted["config"] = stems.get(kind.__name__, config)
    asked = [p for p in inspect.signature(kind.__init__).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return kind(**{p.name: wanted[p.name] for p in asked[1:] if p.default is p.empty})


@pytest.mark.parametrize("kind", sorted(set(parts()), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_parts_made_alone_start_with_proper_weights(kind: type[Part]) -> None:
    """Nothing is left as the memory was, and two of a kind differ."""
    filler = torch.full((1_000_000,), float("nan"))  # freed memory is what torch.empty gives back
    del filler
    one, two = alone(kind).state_dict(), alone(kind).state_dict()
    assert all(t.isfinite().all() and t.abs().max() < 10 for t in one.values())
    fixed = kind.__name__ == "Whitening"  # until it is fitted to images
    assert not one or fixed or any(not torch.equal(t, two[n]) for n, t in one.items())


def test_a_part_alone_draws_what_it_draws_in_a_model() -> None:
    from vitkit.model.patches import PatchEmbedding

    torch.manual_seed(5)
    alone = PatchEmbedding(3, (4, 4), 64)
    assert alone.weight.std().item() == pytest.approx(48**-0.5, rel=0.05)
    assert not alone.bias.any()
