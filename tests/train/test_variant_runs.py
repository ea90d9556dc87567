"""LoRA and plans for the layers of other papers: rotary positions and registers, attention pooling, relative positions.

Two steps each, on the CPU; what is compared are counts in closed form and bits, not accuracies.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from peers import randomize
from vitkit.model.config import RotaryConfig, ViTConfig
from vitkit.plan import Setup, plan
from vitkit.plan.estimate import macs_per_image
from vitkit.training.config import TrainConfig

BASE = ViTConfig((8, 8), (2, 2), channels=1, width=32, depth=2, heads=2, mlp_width=48, classes=2)
VARIANTS = {
    "DINOv3": BASE.replace(
        positions="none", rotary=RotaryConfig("box", half=True), registers=3, key_bias=False, layer_scale=0.5
    ),
    "SigLIP": BASE.replace(class_token=False, pooling="map", positioned_prefix="none", activation="gelu-tanh"),
    "BEiT": BASE.replace(
        positions="relative", key_bias=False, layer_scale=0.1, pooling="mean", norm_after_pooling=True, norm_eps=1e-12
    ),
}


def saved(config: ViTConfig, folder: Path) -> str:
    model = randomize(vitkit.create(config), scale=0.1)
    vitkit.save(model, folder / "start.safetensors")
    return str(folder / "start.safetensors")


@pytest.mark.parametrize("name", VARIANTS)
def test_two_steps_of_lora(name: str, short: dict, tmp_path: Path) -> None:
    """Only the maps of attention and the classifier change, the former by a matrix of rank 2 at most."""
    start = saved(VARIANTS[name], tmp_path)
    settings = short | {"steps": 2, "evaluations": 1, "lora": 2, "init": start}
    vitkit.train(TrainConfig(**{key: value for key, value in settings.items() if key not in ("model", "changes")}))
    before, tuned = vitkit.load(start), vitkit.load(short["out"])
    assert tuned.config == before.config
    old, new = before.state_dict(), tuned.state_dict()
    changed = {key for key in old if not torch.equal(old[key], new[key])}
    maps = {key for key in old if ".attention." in key and key.endswith("weight") and "blocks" in key}
    assert changed == maps | {key for key in old if key.startswith("head.classifier.")}
    for key in maps:
        assert torch.linalg.matrix_rank(new[key] - old[key], rtol=1e-3) <= 2, key


@pytest.mark.parametrize("name", VARIANTS)
def test_a_plan_counts_every_layer(name: str, tmp_path: Path) -> None:
    """Parameters are those of the model, and operations those that PyTorch counts."""
    config = VARIANTS[name]
    model = vitkit.create(config).eval()
    made = plan(Setup(saved(config, tmp_path), images=640, epochs=1, device="a100", batch_size=64))
    assert made.parameters == sum(p.numel() for p in model.parameters())
    assert made.steps == 10
    assert made.memory.parameters == 4 * made.parameters
    assert made.step.total > 0
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():  # it counts no other
        model(torch.zeros(1, 1, 8, 8))
    assert 2 * macs_per_image(config) == pytest.approx(counter.get_total_flops(), rel=0.01)
