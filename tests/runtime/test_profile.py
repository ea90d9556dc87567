"""Where the time goes: planted sleeps, known numbers of operations, and shares that add up."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vitkit
import vitkit.runtime.profile as profile_module
from vitkit.errors import ConfigError
from vitkit.figures.profile import Slice, rows
from vitkit.model.build import outline
from vitkit.model.config import ViTConfig
from vitkit.model.summary import layer_table
from vitkit.runtime.limits import Limits, machine_limits
from vitkit.runtime.profile import ADVICE, KINDS, PYTHON, Cell, Profile, profile

CONFIG = ViTConfig(
    image_size=32, patch_size=8, width=32, depth=3, heads=2, mlp_width=64, classes=10, class_token=False, pooling="mean"
)
MACHINE = Limits(1e9, 1e9)


class Sleeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1)
        return x


class Works(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 80)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_module_that_sleeps_is_found() -> None:
    """100 ms of sleep beside some microseconds of work: nearly all of the time, in its place, as Python."""
    model = nn.Sequential()
    model.add_module("works", Works())
    model.add_module("sleeps", Sleeps())
    found = profile(model, images=torch.ones(6, 48), seconds=0.0)
    layers = {line.name: line for line in found.by_layer}
    assert layers["sleeps"].share > 0.5
    assert found.share(PYTHON) > 0.5
    assert sum(line.share for line in found.by_kind) == pytest.approx(1)
    assert sum(line.share for line in found.by_layer) == pytest.approx(1)
    product = found.line("matrix products")
    assert product is not None
    assert product.flops == 2 * 6 * 48 * 80
    (cell,) = [cell for cell in found.cells if cell.kind == "matrix products"]
    assert cell.path == ("works", "linear")
    assert cell.bytes == 4 * (6 * 48 + 48 * 80 + 80 + 6 * 80)


def test_the_operations_of_a_vit_are_those_of_its_summary() -> None:
    """2 flops for each multiply-add that `summary` counts, where all tokens go through all blocks."""
    model, batch = vitkit.create(CONFIG), 2
    found = profile(model, batch, seconds=0.0)
    counted = sum(line.flops for line in found.by_kind if line.name in ("matrix products", "attention"))
    assert counted == 2 * batch * sum(layer["macs"] for layer in layer_table(outline(CONFIG)))
    assert found.line("attention").flops == batch * 3 * 4 * 16 * 16 * 32
    names = [line.name for line in found.by_layer if line.name.startswith("block")]
    assert names == ["block 0", "block 1", "block 2"]
    assert {cell.kind for cell in found.cells if cell.path[:2] == ("block 1", "mlp")} >= {"matrix products"}
    assert not model._forward_hooks, "the model is left as it was"


def test_the_limit_is_the_slower_of_computing_and_memory() -> None:
    assert MACHINE.seconds(2e9, 1e9) == 2
    assert MACHINE.seconds(1e9, 3e9) == 3
    measured = machine_limits(torch.float32, torch.device("cpu"), side=64)
    assert measured.flops > 0
    assert measured.bandwidth > 0


def of(name: str = "m", reached: float = 0.9, **shares: float) -> Profile:
    """A second of work, with matrix products at `reached` of the limit."""
    names = {kind.replace(" ", "_"): kind for kind in (*KINDS, PYTHON)}
    cells = [
        Cell(("block 0",), names[kind], share, flops=share * reached * 1e9 if kind == "matrix_products" else 0.0)
        for kind, share in shares.items()
    ]
    return Profile(name, 2, (224, 224), 10_000, tuple(cells), MACHINE)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (of(matrix_products=0.9, norms=0.1), "matrix products at 90% of the limit.*vitkit tune m DATA --max-drop"),
        (of(reached=0.3, matrix_products=0.9, norms=0.1), "reach 30% .* --batch 8"),
        (of(matrix_products=0.5, Python_and_dispatch=0.5), "50% is Python.*--latency"),
        (of(matrix_products=0.5, attention=0.5), "50% is attention.*--image-size 112x112"),
        (of(matrix_products=0.5, norms=0.3, copies=0.2), "50% are norms.*--runtimes onnx"),
    ],
)
def test_what_would_help(found: Profile, words: str) -> None:
    import re

    assert any(re.search(words, line) for line in found.advice()), found.advice()


def test_nothing_is_said_without_a_reason() -> None:
    calm = of(matrix_products=0.55, attention=0.2, norms=0.1, copies=0.05, Python_and_dispatch=0.1)
    assert [words for rule in ADVICE[1:] if (words := rule(calm))] == []


def test_every_row_of_the_figure_is_as_long_as_the_model() -> None:
    slices = [
        Slice((), PYTHON, 1.0),
        Slice(("patches",), "matrix products", 2.0),
        Slice(("block 0", "mlp", "up"), "matrix products", 3.0),
        Slice(("block 0", "mlp", "down"), "matrix products", 4.0),
        Slice(("block 0", "attention"), "attention", 5.0),
    ]
    found = rows(slices, "m")
    assert [sum(seconds for _, seconds in row) for row in found] == [15.0] * 4
    assert dict(found[1]) == {"": 1.0, "patches": 2.0, "block 0": 12.0}
    assert ("mlp", 7.0) in found[2]


def test_the_command(command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    vitkit.save(vitkit.create(CONFIG), tmp_path / "m.safetensors")
    args = ("profile", tmp_path / "m.safetensors", "--batch", "2", "--seconds", "0")
    code, out, err = command(*args, "--out", tmp_path / "p.png", "--image-size", "48")
    assert code == 0, err
    assert "GFLOP/s in matrix products" in out
    assert "block 2" in out
    assert "batch 2 of 48x48" in out
    assert (tmp_path / "p.png").stat().st_size > 1000
    code, out, _ = command(*args, "--json")
    found = json.loads(out)
    assert code == 0
    assert sum(row["share"] for row in found["kinds"]) == pytest.approx(1)
    assert found["limits"]["gflops"] > 0
    with pytest.raises(ConfigError, match="at least 1"):
        profile(vitkit.create(CONFIG), batch=0)


def test_blocks_of_a_stem_are_not_those_of_the_encoder() -> None:
    words = profile_module._words
    assert words("encoder.blocks.1.mlp.up") == ("block 1", "mlp", "up")
    assert words("stem.blocks.1.convs.0") == ("stem block 1", "convs", "0")
    assert words("stem.stages.1.0.conv1") == ("stage 1", "0", "conv1")
