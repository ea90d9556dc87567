"""The models by name: a table. This module imports no torch.

Numbers of every row are tested in `tests/model/test_zoo.py`, and that no row was forgotten.
"""

from __future__ import annotations

import re

from vitkit.errors import ConfigError, did_you_mean
from vitkit.model.config import AnyConfig, ConvStemConfig, ResNetConfig, StemConfig, ViTConfig, WhitenedStemConfig


def _vit(size: int, patch: int, width: int, depth: int, heads: int, mlp_width: int, **more: object) -> ViTConfig:
    return ViTConfig(size, patch, width=width, depth=depth, heads=heads, mlp_width=mlp_width, **more)  # type: ignore[arg-type]


def _resnet(size: int, layers: tuple[int, ...], width: int = 64, **more: object) -> ResNetConfig:
    root = "imagenet" if size >= 64 else "small"
    return ResNetConfig(size, stem=StemConfig(layers, width, root), **more)  # type: ignore[arg-type]


_GREY = {"channels": 1, "classes": 10}
_MEAN = {"pooling": "mean", "class_token": False, "classes": 10}
_SCALED = {**_MEAN, "layer_scale": 0.1}
_R, _R26, _R50 = StemConfig(()), StemConfig((2, 2, 2, 2)), StemConfig((3, 4, 6, 3))
_C8, _C28 = ConvStemConfig((32, 64), (1, 1)), ConvStemConfig((16, 32), (2, 1))
_C32 = ConvStemConfig((64, 128), (2, 2))
_W8, _W28 = WhitenedStemConfig((24, 96), (2, 2), 8), WhitenedStemConfig((24, 48, 96), (2, 2, 1), 8)
_W32S = WhitenedStemConfig((32, 96, 128), (2, 2, 2), pool="behind")
_W32M = WhitenedStemConfig((48, 128, 192), (2, 2, 2), pool="behind")
_W32L = WhitenedStemConfig((64, 256, 256), (2, 2, 2), pool="behind")
_R50_16 = StemConfig((3, 4, 9))  # the third stage takes the blocks of the fourth, to stop at stride 16

# fmt: off
ZOO: dict[str, AnyConfig] = {
    #                    pixels patch width depth heads  mlp
    "vit-ti/16":    _vit(224,  16,   192,  12,   3,   768),
    "vit-s/16":     _vit(224,  16,   384,  12,   6,  1536),
    "vit-b/32":     _vit(224,  32,   768,  12,  12,  3072),
    "vit-b/16":     _vit(224,  16,   768,  12,  12,  3072),
    "vit-l/32":     _vit(224,  32,  1024,  24,  16,  4096),
    "vit-l/16":     _vit(224,  16,  1024,  24,  16,  4096),
    "vit-h/14":     _vit(224,  14,  1280,  32,  16,  5120),
    # hybrids: patches of a ResNet's feature map; the patch size still counts pixels
    "r+ti/16":      _vit(224,  32,   192,  12,   3,   768, stem=_R),
    "r26+s/32":     _vit(224,  32,   384,  12,   6,  1536, stem=_R26),
    "r50+b/16":     _vit(384,  16,   768,  12,  12,  3072, stem=_R50_16),
    "r50+l/32":     _vit(384,  32,  1024,  24,  16,  4096, stem=_R50),
    # for small images
    "vit-8px/2":    _vit(  8,   2,    64,   6,   4,   256, **_GREY),
    "vit-28px/7":   _vit( 28,   7,    96,   4,   4,   384, **_GREY),
    "vit-28px/4":   _vit( 28,   4,    96,   4,   4,   384, **_GREY),
    "vit-32px/4":   _vit( 32,   4,   128,   6,   4,   256, classes=10),
    "vit-lite-7/4": _vit( 32,   4,   256,   7,   4,   512, classes=10),
    # for small images and little time: plain convolutions before the patches
    "conv+8px/2":   _vit(  8,   2,    64,   3,   4,   256, stem=_C8, channels=1, **_MEAN),
    "conv+28px/8":  _vit( 32,   8,    96,   2,   4,   384, stem=_C28, channels=1, **_MEAN),  # enlarged to 32
    "conv+32px/8":  _vit( 32,   8,   128,   4,   4,   256, stem=_C32, **_MEAN),
    # the same with a whitened stem, whose filters Muon trains: the best that minutes on a CPU can buy
    "hybrid-8px/2":    _vit(16, 4,   96,   2,   4,   192, stem=_W8, channels=1, **_MEAN),  # enlarged to 16
    "hybrid-28px/8":   _vit(32, 8,   96,   2,   4,   192, stem=_W28, channels=1, **_MEAN),  # enlarged to 32
    "hybrid-32px/8":   _vit(32, 8,  128,   2,   2,   256, stem=_W32S, **_SCALED),
    "hybrid-32px/8-m": _vit(32, 8,  192,   2,   3,   384, stem=_W32M, **_SCALED),
    "hybrid-32px/8-l": _vit(32, 8,  256,   2,   4,   512, stem=_W32L, **_SCALED),
    # the CNN that ViT is compared with
    "resnet-26":    _resnet(224, (2, 2, 2, 2)),
    "resnet-50":    _resnet(224, (3, 4, 6, 3)),
    "resnet-101":   _resnet(224, (3, 4, 23, 3)),
    "resnet-8px":   _resnet(  8, (2, 2), width=16, **_GREY),
    "resnet-28px":  _resnet( 28, (1, 1, 1), width=16, **_GREY),
    "resnet-32px":  _resnet( 32, (2, 2, 2), width=16, classes=10),
    # the smallest that has every part, for tests
    "mu":           _vit( 32,   8,    32,   2,   2,   128, classes=10),
}
# fmt: on

_LETTER = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h"}
_PLAIN = re.compile(
    r"(?:[\w.-]+/)?(?:vit|deit)[_-](tiny|small|base|large|huge)[_-](distilled[_-])?patch(\d+)[_-](\d+)([._-].*)?"
)
_HYBRID = {
    "vit_tiny_r_s16_p8": "r+ti/16",
    "vit_small_r26_s32": "r26+s/32",
    "vit_base_r50_s16": "r50+b/16",
    "vit_large_r50_s32": "r50+l/32",
    "vit-hybrid-base-bit": "r50+b/16",
}
_HYBRID_NAME = re.compile(rf"(?:[\w.-]+/)?({'|'.join(_HYBRID)})[_-](\d+)([._-].*)?")


def config(name: str, **changes: object) -> AnyConfig:
    """The configuration behind a name: ours, timm's (vit_base_patch16_224) or Hugging Face's (google/vit-...)."""
    own = name.lower()
    found: AnyConfig | None = ZOO.get(own) or _foreign(own)
    if found is None:
        raise ConfigError(f"no model is called {name!r}.{did_you_mean(own, ZOO)} `vitkit zoo` lists them all")
    return found.replace(**changes) if changes else found


def _foreign(name: str) -> AnyConfig | None:
    """timm's and Hugging Face's names for models of the table; None when the name is neither."""
    if match := _PLAIN.fullmatch(name):
        size, distilled, patch, pixels, tag = match.groups()
        row = next(r for r in ZOO if r.startswith(f"vit-{_LETTER[size]}/"))
        changes: dict[str, object] = {"patch_size": int(patch), "distillation_token": bool(distilled)}
    elif match := _HYBRID_NAME.fullmatch(name):
        hybrid, pixels, tag = match.groups()
        row, changes = _HYBRID[hybrid], {}
    else:
        return None
    if (tag or "").endswith("in21k"):
        changes["classes"] = 21_843
    return ZOO[row].replace(image_size=int(pixels), **changes)
