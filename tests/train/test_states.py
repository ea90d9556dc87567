"""Training above frozen blocks from states that are computed once: the same weights as from images, in less time."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from peers import randomize
from train.test_frozen import Listening
from train.test_runs import finished, run_killed
from vitkit.data import preset
from vitkit.errors import ConfigError
from vitkit.model.vit import ViT
from vitkit.training import states
from vitkit.training.config import TrainConfig
from vitkit.training.log import read
from vitkit.training.stopping import Stopped

SMALL = {"depth": 3, "width": 32, "heads": 2, "mlp_width": 32, "channels": 1, "classes": 2}


@pytest.fixture
def above(short: dict, tmp_path: Path) -> dict:
    """Fine-tuning the last of three blocks, without augmentation."""
    vitkit.save(randomize(vitkit.create("vit-8px/2", **SMALL)), tmp_path / "init.safetensors")
    kept = {k: short[k] for k in ("data", "out", "steps", "batch_size", "evaluations", "log_every", "lr")}
    return {**kept, "init": str(tmp_path / "init.safetensors"), "freeze": "2", "augment": preset("none")}


def both(settings: dict, tmp_path: Path) -> list[vitkit.training.result.Result]:
    return [vitkit.train(TrainConfig(**{**settings, "out": str(tmp_path / how), "states": how})) for how in ("once", "each")]


def same(one: Path, other: Path) -> float:
    """The largest difference between the weights of two runs."""
    ours, theirs = (vitkit.load(out / "model.safetensors").state_dict() for out in (one, other))
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"augment": preset("light", flip=0.5), "views": 3},
        {"ema": 0.9, "balanced": True, "accumulate": 2},
        {"precision": "bf16"},
        {"freeze": "3"},
    ],
    ids=["plain", "views", "average", "bf16", "all blocks"],
)
def test_the_weights_are_those_of_a_run_that_sees_images(above: dict, more: dict, tmp_path: Path) -> None:
    once, each = both({**above, **more}, tmp_path)
    print(same(tmp_path / "once", tmp_path / "each"))
    assert same(tmp_path / "once", tmp_path / "each") < 1e-5
