"""Recipes by name: what papers trained with, brought to this machine by stated rules.

`--recipe NAME` sets what the user left open, `--recipe NAME --show` prints every value with its source. Three rules
scale what does not fit: the batch is this machine's if the published one is larger; the learning rate follows it, by
the recipe's own power; the warm-up keeps its length, but takes at most a fifth of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vitkit.data.augment import Augment
from vitkit.errors import ConfigError, check_one_of
from vitkit.model.jsonable import Json
from vitkit.training.config import TrainConfig

_RANDOM = Augment(crop="resized", flip=0.5)
_DEIT = Augment(
    crop="resized", flip=0.5, policy="randaugment", magnitude=9, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1
)


@dataclass(frozen=True)
class Recipe:
    source: str
    batch: int  # the published one; `lr` belongs to it
    power: float  # the learning rate grows with (batch / published) to this power
    epochs: float = 0.0  # as published: one of the two
    steps: int = 0
    warmup_epochs: float = 0.0  # one of the two
    warmup_steps: int = 0
    fields: dict[str, object] = field(default_factory=dict)  # of TrainConfig
    model: dict[str, Json] = field(default_factory=dict)  # of the model's configuration
    init: bool = False  # whether it begins with somebody's weights
    without: str = ""  # what the paper does besides and vitkit does not


# Weight decay of the paper's pre-training, by its table 3: 0.3 on ImageNet (with dropout 0.1), 0.03 on ImageNet-21k.
# Google published no configuration of these runs: vision_transformer has the fine-tuning, and big_vision's vit_i1k.py
# is a later recipe, whose 1e-4 is not multiplied by its learning rate of 1e-3: 0.1 in these words.
RECIPES: dict[str, Recipe] = {
    "paper-pretrain": Recipe(
        "Dosovitskiy et al. 2021, table 3 and appendix B.1 (ViT on ImageNet)", 4096, 0.5, epochs=300,
        warmup_steps=10_000,
        fields={"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.3, "beta2": 0.999, "clip": 1.0,
                "schedule": "cosine", "augment": _RANDOM},
        model={"dropout": 0.1}, without="the tanh layer before the classifier: --set model.pre_logits=768 for ViT-B",
    ),
    "paper-finetune": Recipe(
        "Dosovitskiy et al. 2021, table 4 and appendix B.1.1; warm-up as in the official code", 512, 1.0,
        steps=20_000, warmup_steps=500, init=True,
        fields={"optimizer": "sgd", "lr": 0.03, "momentum": 0.9, "weight_decay": 0.0, "clip": 1.0,
                "schedule": "cosine", "layer_decay": 1.0, "image_size": 384, "augment": _RANDOM},
        without="the sweep of four learning rates (0.003, 0.01, 0.03, 0.06): try them with --lr",
    ),
    "deit": Recipe(
        "Touvron et al. 2021, table 9", 1024, 1.0, epochs=300, warmup_epochs=5,
        fields={"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05, "beta2": 0.999, "clip": 0.0,
                "schedule": "cosine", "end": 0.01, "augment": _DEIT},
        model={"stochastic_depth": 0.1}, without="repeated augmentation",
    ),
    "deit3": Recipe(
        "Touvron et al. 2022 (DeiT III), table 1: ImageNet-1k, ViT-B", 2048, 1.0, epochs=400, warmup_epochs=5,
        fields={"optimizer": "lamb", "lr": 3e-3, "weight_decay": 0.02, "beta2": 0.999, "clip": 1.0,
                "schedule": "cosine", "loss": "bce",
                "augment": Augment(crop="resized", flip=0.5, policy="three", jitter=0.3, mixup=0.8, cutmix=1.0)},
        model={"stochastic_depth": 0.2, "layer_scale": 1e-4}, without="repeated augmentation",
    ),
    "mae-finetune": Recipe(
        "He et al. 2022, table 9 (ViT-B)", 1024, 1.0, epochs=100, warmup_epochs=5, init=True,
        fields={"optimizer": "adamw", "lr": 4e-3, "weight_decay": 0.05, "beta2": 0.999, "clip": 0.0,
                "schedule": "cosine", "layer_decay": 0.75, "augment": _DEIT},
        model={"stochastic_depth": 0.1},
    ),
    "dinov2-linear": Recipe(
        "Oquab et al. 2023, appendix B.3 (linear evaluation)", 1024, 1.0, steps=12_500, init=True,
        fields={"optimizer": "sgd", "lr": 0.04, "momentum": 0.9, "weight_decay": 0.0, "clip": 0.0,
                "schedule": "cosine", "freeze": "backbone", "augment": _RANDOM},
        without="the sweep of 13 learning rates and of features from the last four blocks: try rates with --lr",
    ),
}  # fmt: skip


def find(name: str) -> Recipe:
    check_one_of(name, RECIPES, f"--recipe {name} is not known")
    return RECIPES[name]


def apply(config: TrainConfig, batch: int, count: int) -> tuple[TrainConfig, list[str]]:
    """The configuration with the recipe's values where the user left it open, and what was scaled, in words.

    `batch` is what this machine takes, `count` the number of training images.
    """
    recipe, plain = find(config.recipe), TrainConfig()
    if recipe.init and config.init is None:
        raise ConfigError(f"--recipe {config.recipe} begins with trained weights; name them with --init")
    batch = config.batch_size or min(batch, recipe.batch)
    values = recipe.fields | {"batch_size": batch}
    values["lr"] = float(str(recipe.fields["lr"])) * (batch / recipe.batch) ** recipe.power
    if not (config.epochs or config.steps or config.budget):
        values |= {"epochs": recipe.epochs or recipe.steps * recipe.batch / count}
    size = values.pop("image_size", None) if config.budget and config.image_size is None else None
    left_open = {name: value for name, value in values.items() if getattr(config, name) == getattr(plain, name)}
    config = config.replace(**left_open, changes={**recipe.model, **config.changes})
    config = config.replace(warmup=_warmup(recipe, config, batch, count))
    reasons = [f"recipe: {config.recipe}, {recipe.source}"]
    if size is not None:
        reasons.append(f"recipe: not at {size} pixels, for a budget chooses the size (else: --image-size {size})")
    if batch != recipe.batch:
        reasons.append(f"recipe: batches of {batch} instead of {recipe.batch}, learning rate {config.lr:g} for them")
    return config, reasons + ([f"recipe: left out: {recipe.without}"] if recipe.without else [])


def _warmup(recipe: Recipe, config: TrainConfig, batch: int, count: int) -> float:
    """As a share of the run: the published length, at most a fifth. A budget has the published share."""
    imagenet = 1_281_167 / recipe.batch  # steps of an epoch, as published
    steps = recipe.warmup_steps or recipe.warmup_epochs * imagenet
    published = recipe.steps or recipe.epochs * imagenet
    if config.budget:
        return min(0.2, steps / published)
    per_epoch = max(1, count // batch)
    steps = recipe.warmup_steps or recipe.warmup_epochs * per_epoch
    return min(0.2, steps / (config.steps or config.epochs * per_epoch))


def rows(name: str) -> list[tuple[str, str, str]]:
    """(setting, value, source) of everything a recipe states."""
    recipe = find(name)
    length = f"{recipe.epochs:g} epochs" if recipe.epochs else f"{recipe.steps:,} steps"
    warm = f"{recipe.warmup_steps:,} steps" if recipe.warmup_steps else f"{recipe.warmup_epochs:g} epochs"
    values = {"batch_size": recipe.batch, "length": length, "warm-up": f"{warm}, at most a fifth of the run"}
    values |= recipe.fields | {
        f"model.{key}": "its width" if value == -1 else value for key, value in recipe.model.items()
    }
    values["lr"] = f"{recipe.fields['lr']} x (batch / {recipe.batch}) ^ {recipe.power:g}"
    found = []
    for key, value in values.items():
        if isinstance(value, Augment):
            default = Augment()
            turned = {k: v for k, v in vars(value).items() if v != getattr(default, k) or k == "crop"}
            found += [(f"augment.{k}", str(v), recipe.source) for k, v in turned.items()]
        else:
            found.append((key, str(value), recipe.source))
    return found + ([("left out", recipe.without, "not in vitkit")] if recipe.without else [])
