"""Every row of the table has its numbers here, and no row is forgotten."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from vitkit.errors import ConfigError
from vitkit.model.config import ResNetConfig, StemConfig, ViTConfig
from vitkit.model.summary import summarize
from vitkit.model.zoo import ZOO, config

# name, pixels, tokens, parameters, without head, GMACs as published (digits as given)
PUBLISHED = [
    ("vit-ti/16", 224, 197, 5_717_416, 5_524_416, "1.254"),
    ("vit-s/16", 224, 197, 22_050_664, 21_665_664, "4.599"),
    ("vit-b/32", 224, 50, 88_224_232, 87_455_232, "4.409"),
    ("vit-b/16", 224, 197, 86_567_656, 85_798_656, "17.564"),
    ("vit-b/16", 384, 577, 86_859_496, 86_090_496, "55.484"),
    ("vit-l/32", 224, 50, 306_535_400, 305_510_400, "15.378"),
    ("vit-l/16", 224, 197, 304_326_632, 303_301_632, "61.555"),
    ("vit-l/16", 384, 577, 304_715_752, 303_690_752, "191.066"),
    ("vit-h/14", 224, 257, 632_045_800, 630_764_800, "167.295"),
    ("vit-h/14", 518, 1370, 633_470_440, 632_189_440, "1016.717"),
    ("r50+b/16", 384, 577, 98_950_952, 98_181_952, "67.43"),
    ("r50+l/32", 384, 145, 329_092_136, 328_067_136, "57.43"),
    ("r26+s/32", 224, 50, 36_431_912, 36_046_912, "3.56"),
    ("r+ti/16", 224, 50, 6_337_704, 6_144_704, "0.44"),
]
# our own rows for small images, the baselines and the test model: name, parameters
OWN = {
    "vit-8px/2": 302_154,
    "vit-28px/7": 455_050,
    "vit-28px/4": 455_050,
    "vit-32px/4": 811_146,
    "conv+8px/2": 187_018,
    "conv+28px/8": 280_426,
    "conv+32px/8": 674_826,
    "hybrid-8px/2": 272_650,
    "hybrid-28px/8": 241_546,
    "hybrid-32px/8": 671_370,
    "hybrid-32px/8-m": 1_425_546,
    "hybrid-32px/8-l": 3_098_122,
    "vit-lite-7/4": 3_722_250,  # published: 3.72M
    "resnet-26": 15_995_176,
    "resnet-50": 25_557_032,  # as timm's resnet50 with its 53,120 BatchNorm weights, here GroupNorm's
    "resnet-101": 44_549_160,
    "resnet-8px": 52_922,
    "resnet-28px": 127_354,
    "resnet-32px": 220_378,
    "mu": 32_554,
}


@pytest.mark.parametrize(("name", "pixels", "tokens", "params", "without_head", "gmacs"), PUBLISHED)
def test_published_numbers(name: str, pixels: int, tokens: int, params: int, without_head: int, gmacs: str) -> None:
    about = summarize(config(name, image_size=pixels), name)
    assert (about["tokens"], about["params"], about["params_without_head"]) == (tokens, params, without_head)
    digits = len(gmacs.split(".")[1])
    assert f"{about['gmacs']:.{digits}f}" == gmacs


@pytest.mark.parametrize("name", OWN)
def test_own_numbers(name: str) -> None:
    assert summarize(ZOO[name])["params"] == OWN[name]


def test_no_row_is_forgotten() -> None:
    assert {row[0] for row in PUBLISHED} | OWN.keys() == ZOO.keys()


@pytest.mark.parametrize("name", ZOO)
def test_multiply_adds_agree_with_torch(name: str) -> None:
    """torch counts two operations for each multiply-add of products and convolutions, and nothing for norms."""
    about = summarize(ZOO[name])
    with torch.device("meta"):
        model = vitkit.create(name).eval()
        images = torch.empty(1, model.config.channels, *model.config.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.head(model.tokens(images)) if isinstance(model, vitkit.ViT) else model(images)
    norms = 0
    if isinstance(model.config, ViTConfig) and isinstance(model.config.stem, StemConfig):
        shapes = [row["shape"] for row in about["layers"] if row["kind"] in ("LayerNorm", "GroupNorm")]
        standardized = sum(p.numel() for p in model.stem.parameters() if p.ndim == 4)
        norms = 5 * sum(torch.Size(s).numel() for s in shapes) + 4 * standardized
    assert sum(row["macs"] for row in about["layers"]) - norms == counter.get_total_flops() // 2


def test_closed_form_of_the_paper() -> None:
    """patch + L (4 T D^2 + 2 T^2 D + 2 T D mlp) + head"""
    for name, row in ZOO.items():
        if isinstance(row, ResNetConfig) or row.stem:
            continue
        t, d = row.tokens, row.width
        patch = (t - 1) * d * row.channels * row.patch_size[0] * row.patch_size[1]
        blocks = row.depth * (4 * t * d * d + 2 * t * t * d + 2 * t * d * row.mlp_width)
        assert sum(r["macs"] for r in summarize(row)["layers"]) == patch + blocks + d * row.classes, name


@pytest.mark.parametrize(
    ("foreign", "ours", "changes"),
    [
        ("vit_base_patch16_224", "vit-b/16", {}),
        ("vit_base_patch16_224.augreg2_in21k_ft_in1k", "vit-b/16", {}),
        ("vit_tiny_patch16_384", "vit-ti/16", {"image_size": 384}),
        ("vit_base_patch8_224", "vit-b/16", {"patch_size": 8}),
        ("vit_huge_patch14_224.orig_in21k", "vit-h/14", {"classes": 21_843}),
        ("google/vit-base-patch16-224", "vit-b/16", {}),
        ("google/vit-large-patch32-384", "vit-l/32", {"image_size": 384}),
        ("google/vit-huge-patch14-224-in21k", "vit-h/14", {"classes": 21_843}),
        ("facebook/deit-small-patch16-224", "vit-s/16", {}),
        ("deit_base_distilled_patch16_384", "vit-b/16", {"image_size": 384, "distillation_token": True}),
        ("vit_base_r50_s16_384", "r50+b/16", {}),
        ("vit_tiny_r_s16_p8_224", "r+ti/16", {}),
        ("google/vit-hybrid-base-bit-384", "r50+b/16", {}),
        ("VIT-B/16", "vit-b/16", {}),
    ],
)
def test_foreign_names(foreign: str, ours: str, changes: dict) -> None:
    assert config(foreign) == ZOO[ours].replace(**changes)


@pytest.mark.parametrize("name", ["vit-b", "vit_giant_patch14_224", "", "resnet50", "google/bert-base"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ConfigError, match="vitkit zoo"):
        config(name)


def test_create() -> None:
    model = vitkit.create("mu", image_size=(64, 32), classes=3)
    assert model(torch.zeros(2, 3, 64, 32)).shape == (2, 3)
    assert vitkit.create(ZOO["mu"], classes=0)(torch.zeros(1, 3, 32, 32)).shape == (1, 32)
    with pytest.raises(ConfigError, match="name or a ViTConfig, not int"):
        vitkit.create(3)  # type: ignore[arg-type]
