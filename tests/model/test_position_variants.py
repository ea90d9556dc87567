"""Rotary and relative positions in the rest of the house: saved, resized, looked at, merged (or not), exported."""

from pathlib import Path

import pytest
import torch

import vitkit
from peers import randomize
from vitkit.errors import ConfigError
from vitkit.explanation.relevance import class_relevance
from vitkit.explanation.weights import position_offsets, position_similarity
from vitkit.model.config import RotaryConfig, ViTConfig

GRID = RotaryConfig(axes="xy", offset=1.0)
BOX = RotaryConfig("box", 100.0, half=True, jitter=1.5)
MIXED = RotaryConfig("mixed", 10.0)
KINDS: dict[str, dict[str, object]] = {
    "rotary grid": {"positions": "none", "rotary": GRID},
    "learned and rotary box": {"positions": "learned", "rotary": BOX},
    "rotary mixed": {"positions": "none", "rotary": MIXED},
    **{word: {"positions": word} for word in ("rope-2d", "relative", "relative-shared", "relative-mlp")},
    **{word: {"positions": word} for word in ("relative-mlp-shared", "learned+relative", "learned+relative-shared")},
}


def small(kind: str, **changes: object) -> vitkit.ViT:
    shape = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 16, "classes": 4}
    return randomize(vitkit.ViT(ViTConfig(image_size=(24, 32), patch_size=8, **shape, **(KINDS[kind] | changes))))


@pytest.mark.parametrize("how", ["official", "timm", "huggingface"])
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_at_another_size_is_the_model_called_at_it(kind: str, how: str, tmp_path: Path) -> None:
    model = small(kind, position_resize=how)
    vitkit.save(model, tmp_path / "m.safetensors")
    images = torch.randn(2, 3, 40, 24)
    with torch.no_grad():
        assert torch.equal(vitkit.load(tmp_path / "m.safetensors")(images), model(images))
        larger = vitkit.load(tmp_path / "m.safetensors", image_size=(40, 24))
        torch.testing.assert_close(larger(images), model(images), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_looked_at_from_all_sides(kind: str) -> None:
    model, images, seen = small(kind), torch.randn(2, 3, 40, 24), []
    plain = model.tokens(images)
    torch.testing.assert_close(model.tokens(images, on_weights=seen.append), plain, atol=1e-6, rtol=0)
    assert [w.shape for w in seen] == [(2, 2, 16, 16)] * 2
    torch.testing.assert_close(model.features(images, norm=True)[0], plain, atol=1e-6, rtol=0)
    assert class_relevance(model, images, torch.zeros(2, 1, dtype=torch.long)).relevance.shape[-2:] == (5, 3)
    with pytest.raises(ConfigError, match="a merged token has no one place"):
        model.merge = 1


@pytest.mark.parametrize("kind", KINDS)
def test_relevance_runs_the_blocks_that_the_model_runs(kind: str) -> None:
    """Block by block, with the place that each gets, the states are those of the model."""
    model, images = small(kind), torch.randn(1, 3, 24, 32)
    with torch.no_grad():
        x, place = model.embedded(images)
        for i, block in enumerate(model.encoder.blocks):
            x = block(x, place.at(i))
        torch.testing.assert_close(model.norm(x), model.tokens(images))


@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_positions(kind: str) -> None:
    model = small(kind)
    if "relative" in kind:
        layers = 1 if "shared" in kind else 2
        assert position_offsets(model).shape == (layers, 2, 5, 7)
    else:
        similarity = position_similarity(model)
        assert similarity.shape == (3, 4, 3, 4)
        assert similarity[1, 2, 1, 2] == pytest.approx(1.0)


def test_a_shared_bias_is_that_of_every_block() -> None:
    shared, apart = small("relative-shared"), small("relative")
    tensors = shared.state_dict()
    tables = {n: tensors.pop(n) for n in list(tensors) if n.startswith("positions.relative.")}
    for name, table in tables.items():
        for i in range(2):
            tensors[name.replace("positions.", f"encoder.blocks.{i}.")] = table
    apart.load_state_dict(tensors)
    images = torch.randn(2, 3, 24, 32)
    torch.testing.assert_close(apart(images), shared(images))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "pt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_exported_files_agree(kind: str, format: str, tmp_path: Path) -> None:
    """`export` keeps a file only when it agrees with the model."""
    vitkit.save(small(kind), tmp_path / "m.safetensors")
    vitkit.export(tmp_path / "m.safetensors", tmp_path / f"m.{format}")
    assert (tmp_path / f"m.{format}").exists()
