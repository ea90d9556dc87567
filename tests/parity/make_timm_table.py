"""Write src/vitkit/checkpoints/timm_models.json: what timm's names mean, asked from the installed timm.

Every architecture: its class, the arguments that differ from the class's own, and the preprocessing of its default
weights. Functions and classes become words: a norm its name and epsilon, a backbone its kind and stages.

python tests/parity/make_timm_table.py
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "src/vitkit/checkpoints/timm_models.json"
sys.path.insert(0, str(ROOT / "tests"))
import peers  # noqa: E402

timm = peers.import_timm()
from timm.layers import GluMlp, HybridEmbed, SwiGLU  # noqa: E402
from timm.models.resnetv2 import ResNetV2  # noqa: E402
from torch import nn  # noqa: E402

MODULES = ["vision_transformer", "deit", "eva", "beit", "vision_transformer_hybrid"]
MODULES += ["naflexvit", "vision_transformer_relpos", "vision_transformer_sam"]
NORMS = ("norm_layer", "embed_norm_layer")
# What no result depends on, or that is said elsewhere.
LEFT_OUT = {"self", "args", "kwargs", "device", "dtype", "cfg", "weight_init", "fix_init", "head_init_scale"}
LEFT_OUT |= {"pretrained_filter_fn", "pretrained_strict", "feature_cfg", "pretrained_cfg", "pretrained_cfg_overlay"}
LEFT_OUT |= {"cache_dir", "dynamic_img_size", "dynamic_img_pad"}


class Asked(BaseException):
    """Ends the building of a model as soon as its arguments are known."""


def constructor_call(module: str, name: str) -> tuple[type, dict[str, object]]:
    def ask(cls: type, variant: str, pretrained: bool, **arguments: object) -> None:
        raise Asked(cls, arguments)

    with mock.patch.object(importlib.import_module(f"timm.models.{module}"), "build_model_with_cfg", ask):
        try:
            timm.create_model(name)
        except Asked as asked:
            return asked.args  # type: ignore[return-value]
    raise RuntimeError(f"{name} does not use build_model_with_cfg")


def words(arguments: dict[str, object]) -> dict[str, object]:
    """Arguments as JSON: also `norm_eps`, which is hidden in a function."""
    found: dict[str, object] = {}
    for key, value in arguments.items():
        if key in LEFT_OUT:
            continue
        if key in NORMS and value is not None:
            made = timm.layers.get_norm_layer(value)(8)
            found[key] = type(made).__name__.lower()
            if key == "norm_layer":
                found["norm_eps"] = made.eps
        else:
            found[key] = word(value)
    return found


def word(value: object) -> object:
    if isinstance(value, functools.partial):
        return partial_word(value)
    if value is SwiGLU:
        return "swiglu"
    if value is nn.SiLU:
        return "silu"
    return value.__name__ if inspect.isclass(value) or inspect.isfunction(value) else value


def partial_word(value: functools.partial[object]) -> str:
    if value.func is GluMlp and value.keywords == {"act_layer": nn.SiLU, "gate_last": False}:
        return "swiglu-packed"
    if value.func is not HybridEmbed:
        return value.func.__name__
    backbone = value.keywords["backbone"]
    if isinstance(backbone, ResNetV2):
        return "-".join(["resnetv2", *(str(len(stage.blocks)) for stage in backbone.stages)])
    if isinstance(backbone, timm.models._features.FeatureListNet):
        stages = [str(len(stage)) for key, stage in backbone.items() if key.startswith("layer")]
        return "-".join(["resnetd", *stages])
    return "resnetv2" if hasattr(backbone, "conv") else type(backbone).__name__  # a root without stages


def class_defaults(cls: type) -> dict[str, object]:
    parameters = [
        p for base in reversed(cls.__mro__[:-1]) for p in inspect.signature(base.__init__).parameters.values()
    ]
    plain = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    own = {"norm_layer": "layernorm", "norm_eps": 1e-6}  # where a class says None
    return own | {key: value for key, value in words(plain).items() if key != "norm_layer" or value}


def preprocessing(name: str) -> dict[str, object]:
    cfg = timm.get_pretrained_cfg(name)
    keys = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")
    return {key: getattr(cfg, key) for key in keys}


def row(module: str, name: str, classes: dict[str, dict[str, object]]) -> dict[str, object]:
    """What is written about one model; its class is added to `classes`."""
    cls, arguments = constructor_call(module, name)
    if cls.__name__ not in classes:
        classes[cls.__name__] = {} if module == "naflexvit" else class_defaults(cls)
    own = classes[cls.__name__]
    found = {key: value for key, value in words(arguments).items() if key not in own or own[key] != value}
    return {"class": cls.__name__, "args": found, "pretrained_cfg": preprocessing(name)}


def table() -> dict[str, object]:
    classes: dict[str, dict[str, object]] = {}
    named = [(module, name) for module in MODULES for name in timm.list_models(module=module)]
    models = {name: row(module, name, classes) for module, name in named}
    return {"timm": timm.__version__, "classes": classes, "models": models}


def text(value: dict[str, object]) -> str:
    """One line for each class and each model."""
    parts = []
    for key, rows in value.items():
        items = rows.items() if isinstance(rows, dict) else ()
        lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in items]
        parts.append(f"{json.dumps(key)}: " + ("{\n" + ",\n".join(lines) + "\n}" if lines else json.dumps(rows)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(text(table()))
