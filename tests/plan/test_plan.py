"""Plans against closed forms, PyTorch's own counter, timm's published speeds and measured memory."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import vitkit
from vitkit.checkpoints.native import save
from vitkit.cli.main import app
from vitkit.errors import ConfigError
from vitkit.evaluation.features import features
from vitkit.model.config import ViTConfig
from vitkit.plan import Setup, estimate, plan
from vitkit.plan.estimate import GEMM_SHARE, LAUNCH, PASSES, flops_per_image, gpu_step, macs_per_image
from vitkit.plan.memory import training_memory
from vitkit.plan.setup import complete
from vitkit.training import frozen, optim, run
from vitkit.training.config import TrainConfig
from vitkit.training.parts import add_lora, freeze

PLAIN = ViTConfig(
    image_size=(64, 64), patch_size=(8, 8), width=96, depth=3, heads=3, mlp_width=384, classes=10, pooling="mean"
)
ADAMW = TrainConfig(optimizer="adamw", lr=1e-3, weight_decay=0.05)


def test_activations_of_a_block_are_those_one_can_count_by_hand() -> None:
    """Two norms keep their inputs, four linear maps theirs, attention q, k, v and its output, GELU its input."""
    images, tokens = 4, PLAIN.tokens
    deeper = PLAIN.replace(depth=PLAIN.depth + 1)
    block = [training_memory(c, ADAMW, images).activations for c in (PLAIN, deeper)]
    values = (
        8 * PLAIN.width + 2 * PLAIN.mlp_width + PLAIN.heads + 4
    )  # a logsumexp per head, mean and deviation per norm
    assert block[1] - block[0] == 4 * images * tokens * values


def test_checkpointing_keeps_the_input_of_each_block() -> None:
    images = 4
    train = ADAMW.replace(gradient_checkpointing=True)
    kept = [training_memory(PLAIN.replace(depth=d), train, images).activations for d in (3, 4)]
    states = 4 * images * PLAIN.tokens * PLAIN.width
    assert states <= kept[1] - kept[0] <= 1.05 * states  # beside it a state of the random generator
    assert training_memory(PLAIN, train, images).peak < training_memory(PLAIN, ADAMW, images).peak


@pytest.mark.parametrize(("optimizer", "per_weight"), [("adamw", 8), ("sgd", 4)])
def test_state_of_optimisers(optimizer: str, per_weight: int) -> None:
    memory = training_memory(PLAIN, ADAMW.replace(optimizer=optimizer), 1)
    count = memory.parameters // 4
    assert count == sum(p.numel() for p in vitkit.create(PLAIN).parameters())
    assert memory.optimizer == pytest.approx(per_weight * count, abs=1000)  # and a step count per tensor
    assert memory.gradients == memory.parameters


def test_muon_keeps_one_number_per_weight_of_the_blocks() -> None:
    muon = training_memory(PLAIN, ADAMW.replace(optimizer="muon"), 1)
    sgd, adamw = (training_memory(PLAIN, ADAMW.replace(optimizer=o), 1).optimizer for o in ("sgd", "adamw"))
    assert sgd < muon.optimizer < (sgd + adamw) / 2


def test_bf16_halves_what_linear_maps_keep() -> None:
    single, half = (
        training_memory(PLAIN, ADAMW.replace(precision=p, device="cuda"), 16).activations for p in ("fp32", "bf16")
    )
    assert 0.5 < half / single < 0.65  # the residual stream stays in fp32


def test_many_processes() -> None:
    one, ddp = (training_memory(PLAIN, ADAMW, 4, n) for n in (1, 4))
    assert ddp.peak - one.peak == one.parameters  # the buckets
    shards = training_memory(PLAIN, ADAMW.replace(shard=True), 4, 4)
    assert shards.parameters == one.parameters // 4
    assert shards.optimizer == one.optimizer // 4
    assert shards.activations == one.activations
    parts = training_memory(PLAIN, ADAMW.replace(accumulate=2), 4)
    assert parts.peak == one.peak + one.gradients  # they are there from the first part on


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_multiply_adds_are_those_that_pytorch_counts(pooling: str) -> None:
    config = PLAIN.replace(pooling=pooling)
    model = vitkit.create(config)
    attention = 2 * config.tokens**2 * config.width * config.depth  # the fused kernel of the CPU is not in its table
    if pooling == "cls":
        attention -= 2 * (config.tokens - 1) * config.tokens * config.width
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 3, 64, 64))
    assert macs_per_image(config) == pytest.approx(counter.get_total_flops() / 2 + attention, rel=0.01)


# Images a second when training with AMP: timm, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv
@pytest.mark.parametrize(
    ("name", "batch", "published"),
    [("vit-s/16", 384, 1052.9), ("vit-b/16", 192, 390.9), ("vit-b/32", 512, 1703.6), ("vit-l/32", 256, 521.7)],
)
def test_speed_of_a_gpu_against_published_figures(name: str, batch: int, published: float) -> None:
    """timm computes the whole last block, so its multiply-adds are 3 to 8% more than ours: hence 15%."""
    made = plan(Setup(name, gpus=1, device="rtx3090", batch_size=batch))
    assert made.images_per_second == pytest.approx(published, rel=0.15)


def test_checkpointing_costs_a_third_more_compute() -> None:
    count = 4096
    setup = complete(Setup("mu", device="a100", batch_size=count))
    memory = training_memory(PLAIN, setup.train, count)
    plain = gpu_step(PLAIN, setup, memory)
    by_hand = count * sum(flops_per_image(PLAIN, ADAMW)) / (GEMM_SHARE * 312e12) + PASSES * memory.activations / 2039e9
    assert plain.passes == pytest.approx(by_hand)
    few = gpu_step(PLAIN, replace(setup, batch_size=1), training_memory(PLAIN, setup.train, 1))
    assert few.passes == pytest.approx(LAUNCH * PLAIN.depth)  # nothing to do but start kernels
    again = ADAMW.replace(gradient_checkpointing=True)
    assert sum(flops_per_image(PLAIN, again)) == pytest.approx(4 / 3 * sum(flops_per_image(PLAIN, ADAMW)))
    known = gpu_step(PLAIN, replace(setup, mfu=0.5), memory)
    assert known.passes == pytest.approx(count * sum(flops_per_image(PLAIN, ADAMW)) / (0.5 * 312e12))


def test_exchange_of_gradients_shows_when_it_cannot_hide() -> None:
    setup = complete(Setup("mu", device="l4", batch_size=64, gpus=64))
    memory = training_memory(PLAIN, setup.train, 1, 64)
    near, far = (gpu_step(PLAIN, replace(setup, per_machine=n), memory) for n in (64, 8))
    assert near.exchange == 0 < far.exchange


def test_steps_hours_and_cost() -> None:
    made = plan(Setup("mu", images=10_000, gpus=4, device="l4", epochs=3, batch_size=128, price=2.0))
    assert made.steps == 3 * (10_000 // 128)
    assert made.hours == pytest.approx(made.steps * made.step.total / 3600)
    assert made.cost == pytest.approx(made.hours * 4 * 2.0)
    assert made.shards % 4 == 0
    assert made.machines == 1
    assert math.isfinite(made.images_per_second)


PARTS: list[dict] = [{"freeze": "backbone"}, {"freeze": "0"}, {"freeze": "2"}, {"freeze": "3"}, {"lora": 4}]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_what_learns_is_what_learns_in_training(part: dict) -> None:
    """Weights, gradients and state of AdamW, after the functions of training and a real step of a real model."""
    train = ADAMW.replace(**part)
    model = vitkit.create(PLAIN)
    freeze(model, train.freeze)
    add_lora(model, train.lora)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    (optimizer,) = optim.build(model, train)
    optimizer.step()
    memory = training_memory(PLAIN, train, 2)
    assert memory.parameters == sum(p.nbytes for p in model.parameters())
    assert memory.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert memory.optimizer == sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    made = plan(Setup("vit-ti/16", images=100, device="l4", epochs=2, batch_size=10, classes=10, **part))
    peer = vitkit.create("vit-ti/16", classes=10)
    freeze(peer, train.freeze)
    add_lora(peer, train.lora)
    assert made.learning == sum(p.numel() for p in peer.parameters() if p.requires_grad)


@pytest.mark.parametrize("part", PARTS[:-1], ids=str)
def test_multiply_adds_of_frozen_parts_are_those_that_pytorch_counts(part: dict) -> None:
    """Of linear maps: attention's fused kernel is not in PyTorch's table, so its share is left out on both sides.

    PyTorch gives the first map that learns no gradient of its input where nothing below wants one: hence the bounds.
    """
    model = vitkit.create(PLAIN).train()
    freeze(model, part["freeze"])
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(torch.randn(2, 3, 64, 64))
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, 3, 64, 64)).sum().backward()
    below, above = flops_per_image(PLAIN, ADAMW.replace(**part))
    blocks = 0 if part["freeze"] == "backbone" else PLAIN.depth - int(part["freeze"])
    attention = 4 * PLAIN.tokens**2 * PLAIN.width
    planned = below - attention * (PLAIN.depth - blocks) + above - 3 * attention * blocks
    qkv = 6 * PLAIN.tokens * PLAIN.width**2
    assert counter.get_total_flops() / 2 <= 1.001 * planned
    assert counter.get_total_flops() / 2 >= 0.999 * (planned - max(qkv, above / 3 if not blocks else 0))
    assert forward.get_total_flops() < counter.get_total_flops()


@pytest.mark.parametrize(
    ("changes", "once"),
    [
        ({"augment": "none"}, True),
        ({"epochs": 1.4}, True),
        ({}, False),
        ({"augment": "none", "epochs": 1}, False),
        ({"augment": "none", "gpus": 2}, False),
    ],
)
def test_states_are_kept_where_images_do_not_vary(changes: dict, once: bool) -> None:
    settings = {"images": 1000, "device": "a100", "epochs": 10.0, "batch_size": 100, "image_size": "32", "freeze": "1"}
    made = plan(Setup("vit-ti/16", **{**settings, **changes}))
    whole = plan(Setup("vit-ti/16", **{**settings, **changes, "freeze": ""}))
    assert made.memory.peak < whole.memory.peak
    if once:
        assert made.once is not None
        assert (made.once.images, made.once.bytes) == (1000, 4 * 1000 * (4 + 1) * 192)
        assert made.hours == pytest.approx((made.steps * made.step.total + made.once.seconds) / 3600)
    else:
        assert made.once is None
        assert "run in every step" in made.advice[0]


@pytest.mark.parametrize(
    ("changes", "views"),
    [({}, 1), ({"augment": "light", "epochs": 3.0}, 3), ({"optimizer": "sgd"}, 0), ({"gpus": 2}, 0)],
)
def test_passes_of_a_frozen_backbone_are_those_of_training(
    changes: dict, views: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(Setup("mu", images=60, device="a100", **{"classes": 3, "freeze": "backbone", **changes}))
    if not views:
        assert made.once is None
        assert made.memory.gradients > 0
        return
    assert made.once is not None
    assert made.memory.gradients == made.memory.optimizer == 0
    assert made.once.head > 0
    found = tmp_path / "init.safetensors"
    save(vitkit.create("mu", classes=3), found)
    seen = []
    monkeypatch.setattr(frozen, "features", lambda *a, **k: seen.append(a[1].split) or features(*a, **k))
    images = np.random.default_rng(0).integers(0, 255, (80, 32, 32, 3), dtype=np.uint8)
    np.savez(
        tmp_path / "set.npz",
        train_images=images[:60],
        train_labels=np.arange(60) % 3,
        val_images=images[60:],
        val_labels=np.arange(20) % 3,
    )
    given = {"augment": "light", "epochs": 3.0} if views > 1 else {}
    config = TrainConfig(
        str(tmp_path / "set.npz"), init=str(found), out=str(tmp_path / "run"), freeze="backbone", baseline="no", **given
    )
    run.train(config, started=0.0)
    assert seen.count("train") == views == made.once.images / 60
    kept = [path.stat().st_size for path in (tmp_path / "run").glob("features/*/train*.f32")]
    assert sum(kept) == made.once.bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"freeze": "backbon"}, "'backbone' or a number of blocks"),
        ({"freeze": "99"}, "the model has only"),
        ({"freeze": "1", "lora": 2}, "lora already freezes"),
        ({"lora": -1}, "lora=-1 must not be negative"),
        ({"augment": "lihgt"}, "Did you mean light"),
    ],
)
def test_frozen_parts_that_training_refuses(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(Setup("mu", device="a100", **changes))


def test_what_does_not_fit_comes_with_what_would() -> None:
    made = plan(Setup("vit-b/16", gpus=1, device="l4", batch_size=1024))
    assert not made.fits
    assert "--accumulate" in made.advice[0] or "--checkpointing" in made.advice[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "h10"}, "Did you mean h100"),
        ({"gpus": 3, "device": "a100", "batch_size": 128}, "divided by the 3"),
        ({"images": 0}, "--images"),
        ({"gpus": 2}, "cpu"),
        ({"accumulate": 100}, "--accumulate 100"),
        ({"mfu": 40.0}, "--mfu"),
    ],
)
def test_impossible_plans(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        complete(Setup("mu", **changes))


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    options = ["--images", "1000", "--gpus", "2", "--device", "a100", "--batch-size", "64", "--checkpointing"]
    found = json.loads(runner.invoke(app, ["plan", "mu", *options, "--json"]).stdout)
    assert found["memory"]["peak"] > 0
    assert found["fits"] is True
    text = runner.invoke(app, ["plan", "mu", *options]).stdout
    assert "activations" in text
    assert "buckets" in text
    assert "$" in text


@pytest.mark.parametrize(
    "part", [{"freeze": "backbone"}, {"freeze": "1", "augment": "none"}, {"freeze": "1"}, {"lora": 2}]
)
def test_frozen_parts_on_a_cpu_are_measured(part: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate.measured_step, "__defaults__", (0.0, False))
    options = ["mu", "--images", "100", "--epochs", "2", "--batch-size", "10", "--classes", "3", "--json"]
    options += [word for key, value in part.items() for word in (f"--{key}", str(value))]
    found = json.loads(CliRunner().invoke(app, ["plan", *options]).stdout)
    assert 0 < found["hours"] < math.inf
    assert found["freeze"] == part.get("freeze", "")
    assert found["learning"] < found["parameters"]
    assert (found["once"] is not None) == (part.get("augment") == "none" or part.get("freeze") == "backbone")


def test_a_cpu_is_measured() -> None:
    made = plan(Setup("mu", images=100, epochs=1, batch_size=4))
    assert 0 < made.step.total < math.inf
    assert made.device.memory == 0


MEASURE = """
import gc, resource, sys
from pathlib import Path
import vitkit.plan.estimate as speed
from vitkit.model.build import create
from vitkit.plan.setup import Setup, complete
name, batch, checkpointing, optimizer = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "yes", sys.argv[4]
def settings(name, **changes):
    return complete(Setup(name, optimizer=optimizer, **changes)).train
def kilobytes(key):
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0])
speed.timed_step(create("mu"), settings("mu"), 1)()  # libraries
gc.collect()
before = kilobytes("VmRSS:")
step = speed.timed_step(create(name), settings(name, checkpointing=checkpointing, batch_size=batch), batch)
step()
Path("/proc/self/clear_refs").write_text("5")
step()
print(1024 * (kilobytes("VmHWM:") - before))
"""


def test_only_a_cpu_keeps_attention_in_fp32() -> None:
    half = ADAMW.replace(precision="bf16")
    cpu, gpu = (training_memory(PLAIN, half.replace(device=device), 4) for device in ("cpu", "cuda"))
    assert gpu.activations < cpu.activations < training_memory(PLAIN, ADAMW, 4).activations


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "batch", "checkpointing", "optimizer"),
    [("vit-ti/16", 16, "no", "adamw"), ("vit-ti/16", 32, "yes", "adamw"), ("vit-s/16", 8, "no", "muon")],
)
def test_memory_against_what_a_process_really_holds(name: str, batch: int, checkpointing: str, optimizer: str) -> None:
    """Within 15%. glibc is told to give freed blocks back: otherwise it keeps up to three times what is needed."""
    command = [sys.executable, "-c", MEASURE, name, str(batch), checkpointing, optimizer]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    setup = complete(Setup(name, batch_size=batch, checkpointing=checkpointing == "yes", optimizer=optimizer))
    planned = training_memory(vitkit.create(name).config, setup.train, batch).peak
    assert planned == pytest.approx(int(done.stdout.split()[-1]), rel=0.15)
