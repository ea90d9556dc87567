"""ViTConfig: checked when made, JSON in and out, errors that name the rule."""

import dataclasses
import json

import pytest
from hypothesis import given

from strategies import configs
from vitkit.errors import ConfigError
from vitkit.model.config import Preprocessing, ResNetConfig, RotaryConfig, StemConfig, ViTConfig, as_size
from vitkit.model.zoo import ZOO


@given(configs())
def test_survives_json(config: ViTConfig) -> None:
    again = ViTConfig.from_json(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()
    assert hash(again) == hash(config)


@pytest.mark.parametrize("name", ZOO)
def test_zoo_survives_json(name: str) -> None:
    config = ZOO[name]
    assert type(config).from_dict(json.loads(config.to_json())) == config


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ViTConfig().width = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "size"),
    [(224, (224, 224)), ("224", (224, 224)), ("224x448", (224, 448)), ([3, 4], (3, 4)), ((3, 4), (3, 4))],
)
def test_sizes(value: object, size: tuple[int, int]) -> None:
    assert as_size(value) == size  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "axb", "1x2x3", 0, -1, (1, 2, 3), (1.5, 2), None, True, 2.0, (0, 4)])
def test_bad_sizes(value: object) -> None:
    with pytest.raises(ConfigError, match="is not a size; write 224"):
        as_size(value)  # type: ignore[arg-type]


BAD = [
    ({"heads": 5}, "heads=5 must divide width=768"),
    ({"image_size": 225}, "nearest sizes are 224x224 and 240x240"),
    ({"pooling": "max"}, "Choose one of: cls, mean"),
    ({"pooling": "cls", "class_token": False}, "needs class_token=True"),
    ({"positions": "rope-2d", "heads": 384}, "rope-2d"),
    ({"positions": "learned2d"}, "Did you mean learned-2d"),
    ({"positions": "sincos-2d", "width": 6, "heads": 2}, "multiple of 4"),
    ({"depth": 0}, "depth=0 must be at least 1"),
    ({"depth": 1.5}, "whole number"),
    ({"width": True}, "whole number"),
    ({"classes": -1}, "must not be negative"),
    ({"dropout": 1.0}, "below 1"),
    ({"norm_eps": 0}, "above 0"),
    ({"norm_eps": float("nan")}, "finite"),
    ({"qkv_bias": 1}, "true or false"),
    ({"distillation_token": True, "pooling": "mean"}, "goes with pooling='cls'"),
    ({"pre_logits": 3, "projection": 3}, "cannot both"),
    ({"stem": StemConfig(), "patch_size": 8}, "multiple of the stem's stride 16"),
    ({"preprocessing": Preprocessing(mean=(0.5, 0.5))}, "2 values for channels=3"),
    ({"preprocessing": {"crop": 0}}, "above 0 and at most 1"),
    ({"preprocessing": {"std": [0.0]}}, "std=.* must be above 0"),
    ({"preprocessing": {"mean": "abc"}}, "must be numbers"),
    ({"preprocessing": {"interpolation": "cubic"}}, "Did you mean bicubic"),
    ({"stem": {"layers": [0]}}, "blocks per stage"),
    ({"stem": {"width": 3}}, "multiple of 4"),
    ({"stem": {"widths": [], "strides": []}}, "every convolution"),
    ({"stem": {"widths": [8, 0]}}, "every convolution"),
    ({"stem": {"widths": [8]}}, "must be as many"),
    ({"stem": {"widths": [8, 8], "strides": [2, 3]}}, "multiple of the stem's stride 6"),
]


@pytest.mark.parametrize(("changes", "words"), BAD, ids=[w for _, w in BAD])
def test_bad_configs_name_the_rule(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ViTConfig.from_dict(changes)


def test_unknown_fields_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no field 'widht'.*Did you mean width"):
        ViTConfig.from_dict({"widht": 3})
    with pytest.raises(ConfigError, match=r"no field 'patchsize'.*patch_size"):
        ViTConfig().replace(patchsize=3)
    with pytest.raises(ConfigError, match="not valid JSON"):
        ViTConfig.from_json("{")
    with pytest.raises(ConfigError, match="wants a JSON object"):
        ViTConfig.from_json("[]")


def test_preprocessing_follows_size_and_channels() -> None:
    config = ViTConfig(preprocessing=Preprocessing(mean=(0.2, 0.4, 0.6), std=(0.1, 0.2, 0.3)))
    larger = config.replace(image_size=(384, 224))
    assert larger.preprocessing.size == (384, 224)
    assert larger.preprocessing.mean == (0.2, 0.4, 0.6)
    grey = config.replace(channels=1)
    assert grey.preprocessing.mean == pytest.approx((0.4,))
    kept = config.replace(image_size=384, preprocessing=Preprocessing(size=224))  # type: ignore[arg-type]
    assert kept.preprocessing.size == (224, 224)


def test_official_preprocessing_is_the_default() -> None:
    pre = ViTConfig().preprocessing
    assert (pre.mean, pre.std, pre.fit, pre.size) == ((0.5,), (0.5,), "squash", (224, 224))


def test_resnet_config_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"needs stem\.layers"):
        ResNetConfig(stem=StemConfig(()))
    with pytest.raises(ConfigError, match="nearest sizes are 224x224"):
        ResNetConfig(image_size=230, stem=StemConfig((3, 4, 6, 3)))  # type: ignore[arg-type]


def test_only_a_call_is_told_to_pad() -> None:
    """A configuration, as `train --image-size` makes one, has no such argument."""
    with pytest.raises(ConfigError, match=r"nearest sizes are 224x224 and 240x240$"):
        ViTConfig(image_size=225)


def test_fields_of_published_variants_go_to_json_and_back() -> None:
    for rotary in (RotaryConfig(kind="box", base=100.0, half=True, jitter=1.1), RotaryConfig(reference=(14, 16))):
        assert RotaryConfig.from_json(rotary.to_json()) == rotary
        config = ViTConfig(rotary=rotary)
        assert ViTConfig.from_json(config.to_json()) == config
    for wrong, message in [({"jitter": 1.1}, "jitter goes with kind=box, not with grid"), ({"base": 0}, "above 0")]:
        with pytest.raises(ConfigError, match=message):
            RotaryConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"jitter and rescale are 0 \(off\) or factors from 1 up"):
        RotaryConfig(kind="box", jitter=0.5)
    with pytest.raises(ConfigError, match="rotary goes with positions none, learned"):
        ViTConfig(rotary=RotaryConfig(), positions="relative")
    with pytest.raises(ConfigError, match="rotary needs width / heads = 6 to be a multiple of 4"):
        ViTConfig(rotary=RotaryConfig(), width=48, heads=8)
    for name, (wrong, message) in {
        "branches": (0, "branches=0 must be at least 1"),
        "embedding_dropout": (1, "must be at least 0 and below 1"),
        "head_width": (-1, "head_width=-1 must not be negative"),
        "patch_norms": (["inside"], "must hold 'before'"),
        "norm": ("batchnorm", "norm='batchnorm' is not known"),
    }.items():
        with pytest.raises(ConfigError, match=message):
            ViTConfig(**{name: wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mlp_dropout='much' must be a finite number"):
        ViTConfig(mlp_dropout="much")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="final_norm"):
        ViTConfig(final_norm=False, norm_after_pooling=True)


def test_fields_that_came_later_change_no_file_of_a_plain_model() -> None:
    """Version 0.1 refuses names that it does not know, and what it kept about a model is found by this text."""
    plain = ViTConfig(stem=StemConfig()).to_dict()
    assert not {"block", "norm", "rotary", "mlp_dropout", "unit_length"} & plain.keys()
    assert list(plain["stem"]) == ["layers", "width", "root", "numerics"]
    assert ViTConfig(norm="rmsnorm").to_dict()["norm"] == "rmsnorm"
