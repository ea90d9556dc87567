"""Every ViT that timm ships, saved as for the hub: loaded exactly, or refused for a stated reason, never else.

A third of the names, by a hash of each, are walked on small images by the fast tests; the slow ones walk all of them
at their native sizes, and hold the table in docs/checkpoints.md to what they found.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm_census as census
import torch

from vitkit.checkpoints import timm_models
from vitkit.checkpoints.load import load
from vitkit.errors import CheckpointError

REASONS = [*timm_models.REFUSED_CLASSES.values(), *timm_models.REFUSED.values()]
LEAST = {"vision_transformer": 150, "vision_transformer_relpos": 13}
FOUND: dict[str, census.Outcome] = {}  # by the slow tests
BARE: dict[str, str] = {}
THIRD = [name for name in census.NAMES if zlib.crc32(name.encode()) % 3 == 0]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two small blocks: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def holds(name: str, found: census.Outcome) -> None:
    assert found.word != "wrong", f"{name}: {found.reason}"
    if found.word == "refused":
        assert any(reason in found.reason for reason in REASONS), f"{name}: {found.reason}"


@pytest.mark.parametrize("name", THIRD)
def test_a_third_of_the_names_on_small_images(name: str, tmp_path: Path) -> None:
    found = census.outcome(name, tmp_path)
    holds(name, found)
    if found.word == "exact":
        assert census.nameless(name) in ("exact", "asked")


@pytest.mark.slow
@pytest.mark.parametrize("name", census.NAMES)
def test_every_name_at_its_native_size(name: str, tmp_path: Path) -> None:
    FOUND[name] = census.outcome(name, tmp_path, native=True)
    holds(name, FOUND[name])
    if FOUND[name].word == "exact":
        BARE[name] = census.nameless(name)
        assert BARE[name] in ("exact", "asked")


@pytest.mark.slow
def test_the_table_in_the_docs_is_of_this_run() -> None:
    """After all names; `python tests/parity/timm_census.py` writes it."""
    if len(FOUND) < len(census.NAMES):
        pytest.skip("needs the outcomes of all names")
    exact = {m: sum(FOUND[n].word == "exact" for n in FOUND if census.NAMES[n] == m) for m in census.MODULES}
    assert all(exact[module] >= least for module, least in LEAST.items()), exact
    assert sum(exact[module] for module in ("deit", "eva", "beit", "vision_transformer_hybrid")) >= 95
    assert census.table(FOUND, BARE) in census.DOCS.read_text()


@pytest.mark.parametrize("name", ["vit_base_patch32_siglip_256", "vit_base_patch16_gap_224"])
@torch.no_grad()
def test_a_bare_file_is_asked_about_and_exact_when_answered(name: str, tmp_path: Path) -> None:
    args = census.shrunken(name, native=False)
    theirs = census.peer(name, **args)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"pass heads=N \(--heads N\)"):
        load(tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r'the file does not say its activation.*"gelu-tanh" in vit_'):
        load(tmp_path / "weights.pth", heads=2)
    ours = load(tmp_path / "weights.pth", heads=2, activation="gelu-tanh" if "patch32" in name else "gelu")
    assert census.compare(ours, theirs, ours.config.image_size) == "exact"
