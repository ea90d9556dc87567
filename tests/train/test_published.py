"""Recipes by name: their values, the rules that scale them, and that each of them trains."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import peers
import vitkit
from vitkit.data.augment import Augment
from vitkit.data.keys import sample_keys
from vitkit.data.vary import vary
from vitkit.errors import ConfigError
from vitkit.training import published
from vitkit.training.config import TrainConfig
from vitkit.training.optim import Lamb, rate


@pytest.mark.parametrize("name", published.RECIPES)
def test_every_recipe_trains(name: str, tmp_path: Path) -> None:
    tiny = {"width": 16, "depth": 1, "heads": 2, "mlp_width": 16}
    recipe = published.find(name)
    model: dict = {"model": "vit-8px/2", "changes": tiny}
    if recipe.init:
        vitkit.save(vitkit.create("vit-8px/2", classes=10, channels=1, **tiny), tmp_path / "start.safetensors")
        model = {"init": str(tmp_path / "start.safetensors"), "image_size": 8}
    run = vitkit.train("digits", recipe=name, steps=3, out=str(tmp_path / "run"), evaluations=1, **model)
    assert run.steps == 3


def test_what_the_user_states_wins_and_the_rest_is_scaled() -> None:
    config, reasons = published.apply(TrainConfig(recipe="deit", epochs=10, weight_decay=0.01), batch=64, count=6400)
    assert (config.weight_decay, config.epochs, config.batch_size, config.optimizer) == (0.01, 10, 64, "adamw")
    assert config.lr == pytest.approx(1e-3 * 64 / 1024)
    assert config.warmup == 0.2  # five epochs of ten, cut to a fifth
    assert config.augment == Augment(
        crop="resized", flip=0.5, policy="randaugment", magnitude=9, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1
    )
    assert config.changes == {"stochastic_depth": 0.1}
    assert any("repeated augmentation" in line for line in reasons)
    whole, _ = published.apply(TrainConfig(recipe="deit"), batch=4096, count=1_281_167)
    assert (whole.epochs, whole.batch_size, whole.lr) == (300, 1024, 1e-3)
    assert whole.warmup == pytest.approx(5 / 300)


def test_a_budget_chooses_the_size_of_a_recipe_that_has_one() -> None:
    asked = TrainConfig(recipe="paper-finetune", init="model", budget=60.0)
    config, reasons = published.apply(asked, batch=64, count=1000)
    assert config.image_size is None
    assert any("not at 384 pixels, for a budget chooses the size (else: --image-size 384)" in line for line in reasons)
    assert published.apply(asked.replace(image_size=384), 64, 1000)[0].image_size == (384, 384)
    assert published.apply(asked.replace(budget=0.0), 64, 1000)[0].image_size == (384, 384)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="Did you mean deit"):
        published.find("diet")
    with pytest.raises(ConfigError, match="--init"):
        published.apply(TrainConfig(recipe="mae-finetune"), 64, 1000)


def test_show_lists_every_value_with_its_source() -> None:
    for name, recipe in published.RECIPES.items():
        rows = published.rows(name)
        named = {row[0] for row in rows}
        assert named >= {"batch_size", "length", "warm-up", "lr", *(f"model.{key}" for key in recipe.model)}
        assert all(row[2] in (recipe.source, "not in vitkit") for row in rows)


def test_lamb_equals_timms() -> None:
    """timm.optim.Lamb without its clipping, ten steps; two libraries round differently: 1e-6."""
    peers.import_timm()
    from timm.optim import Lamb as TimmLamb

    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))
    theirs = copy.deepcopy(ours)

    def groups(model: torch.nn.Module) -> list[dict]:
        return [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.02},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]

    first = Lamb(groups(ours), lr=3e-2, betas=(0.9, 0.999))
    second = TimmLamb(groups(theirs), lr=3e-2, betas=(0.9, 0.999), eps=1e-6, max_grad_norm=None)
    for _ in range(10):
        x = torch.randn(8, 5)
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


def test_the_rate_ends_where_it_is_told_to() -> None:
    assert rate(1.0, 0.1, "cosine", 0.01) == pytest.approx(0.01)
    assert rate(0.1, 0.1, "cosine", 0.01) == pytest.approx(1.0)
    assert rate(1.0, 0.1, "linear") == 0


def test_three_augment_is_grey_solarised_or_blurred() -> None:
    images = torch.randint(0, 256, (60, 3, 16, 16), dtype=torch.uint8)
    done = vary(images, sample_keys(0, 0, np.arange(60)), Augment(policy="three"))
    grey = (done[:, 0] == done[:, 1]).all(-1).all(-1)
    solarised = (done == torch.where(images >= 128, 255 - images, images)).flatten(1).all(1)
    rest = ~grey & ~solarised
    assert min(grey.sum(), solarised.sum(), rest.sum()) >= 10
    before, after = (x[rest].float().flatten(1).std(1) for x in (images, done))
    assert (after <= before + 0.1).all()  # the narrowest blur changes nothing
    assert (after < 0.5 * before).float().mean() > 0.5
    assert (done[rest].float().mean() - images[rest].float().mean()).abs() < 1
