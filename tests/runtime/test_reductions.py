"""What computes less: smaller images, methods that compete, and choices that held-out images confirm."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitkit
from peers import randomize
from vitkit.data import normalise
from vitkit.errors import ConfigError
from vitkit.model.base import Outputs
from vitkit.model.config import ViTConfig
from vitkit.model.merge_plan import MergePlan
from vitkit.runtime.base import Choice, build, made_up
from vitkit.runtime.confirm import Confirmed, confirm, hold_out
from vitkit.runtime.export import open_exported, written
from vitkit.runtime.reductions import Reduction, fitted, halved, harms, plain_reductions, reductions, sure_enough
from vitkit.runtime.shrunk import Shrunk, shrunk_side
from vitkit.runtime.tune import tune
from vitkit.runtime.tuned import store, stored
from vitkit.runtime.verify import Images, outputs_of
from vitkit.tasks.paired import kept_on

BASE = ViTConfig(image_size=(32, 48), patch_size=8, width=32, depth=3, heads=2, mlp_width=48, classes=5)


def model_of(**changes: Any) -> Any:
    torch.manual_seed(0)
    return randomize(vitkit.create(BASE.replace(**changes)), scale=0.15).eval()


@pytest.mark.parametrize("scale", [0.75, 0.5])
def test_smaller_images_are_those_of_pytorch(scale: float) -> None:
    """Antialiased bilinear interpolation, then the model at that size, whose positions resize by themselves."""
    model, images = model_of(position_resize="timm"), torch.randn(2, 3, 32, 48)
    size = (shrunk_side(32, 8, scale), shrunk_side(48, 8, scale))
    assert size == {0.75: (24, 32), 0.5: (16, 24)}[scale]  # 4.5 patches are 4: halves to even
    smaller = F.interpolate(images, size, mode="bilinear", antialias=True)
    torch.testing.assert_close(Shrunk(model, scale)(images), model(smaller), atol=1e-5, rtol=1e-5)
    runtime = build(model, Choice(scale=scale))
    assert runtime.name == f"eager scale {scale:g}"
    assert not Choice(scale=scale).exact
    torch.testing.assert_close(runtime.run(images), model(smaller).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", ["learned", "relative", "rope-2d"])
def test_smaller_images_in_an_exported_file(positions: str, tmp_path: Path) -> None:
    """Models whose tokens cannot merge can be made faster so too."""
    pytest.importorskip("onnxruntime")
    model, images = model_of(positions=positions), torch.randn(3, 3, 32, 48)
    choice = Choice("onnx", scale=0.5)
    written(model, "onnx", tmp_path / "m.onnx", choice.spec(None))
    found = open_exported(tmp_path / "m.onnx")[0].run(images)
    torch.testing.assert_close(found, build(model, Choice(scale=0.5)).run(images), atol=1e-4, rtol=0)


def test_the_least_change_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a method that changes nothing among others that do, and how many images each is shown."""
    from vitkit.runtime import reductions as module

    model, images = model_of(), Images(made_up(BASE, 80))
    expected = outputs_of(build(model, Choice()), images, model.config, 8)
    seen: dict[int | str, int] = {}

    class Planted:
        def __init__(self, spec: int | str) -> None:
            self.spec, self.at = spec, 0

        def run(self, batch: torch.Tensor) -> torch.Tensor:
            seen[self.spec] = seen.get(self.spec, 0) + len(batch)
            start, self.at = self.at, self.at + len(batch)
            return expected[start : self.at] * {3: 1.3, "pitome:3": 1.0, "prune:3": 1.1}[self.spec]

    monkeypatch.setattr(module, "build", lambda model, choice: Planted(choice.merge))
    assert halved(model, [3, "pitome:3", "prune:3"], images, expected) == "pitome:3"
    assert seen == {3: 16, "pitome:3": 48, "prune:3": 48}, "the worse half is out after the first round"


def test_what_is_tried() -> None:
    model = model_of()
    plain = plain_reductions(model)
    assert plain[0] == Reduction()
    assert plain[-2:] == [Reduction(scale=0.75), Reduction(scale=0.5)]
    images = Images(made_up(BASE, 24))
    found = reductions(model, images, outputs_of(build(model, Choice()), images, BASE, 8))
    assert found[0] == Reduction()
    assert found[-2:] == plain[-2:]
    assert any(":late" in str(one.merge) for one in found)
    assert all(one.merge == 0 for one in plain_reductions(model_of(positions="rope-2d")))
    assert plain_reductions(model_of(image_size=16, classes=5))[-1].scale == 1, "two patches are too few"


def test_counts_of_lost_and_won_images() -> None:
    model, labels = model_of(), torch.tensor([0, 1, 2, 3, 4, 0])
    ours, theirs = torch.eye(5)[[0, 1, 2, 0, 0, 0]], torch.eye(5)[[0, 1, 0, 3, 1, 2]]
    pixels = torch.zeros(6, 3, 8, 8, dtype=torch.uint8)
    assert confirm(model, ours, theirs, Images(pixels, labels)) == Confirmed(6, lost=2, won=1)
    assert confirm(model, ours, theirs, Images(pixels)) == Confirmed(6, lost=4, won=0, labelled=False)
    model.outputs = Outputs("values")
    assert confirm(model, ours, theirs, Images(pixels, labels)) is None
    words = Confirmed(200, 3, 1).words()
    assert "on 200 held-out images 1.00 points of accuracy are lost" in words
    assert "McNemar p = 0.62" in words  # 2 (1 + 4) / 16


def test_held_out_images_take_no_part() -> None:
    images = Images(torch.arange(61)[:, None, None, None].expand(61, 3, 2, 2).to(torch.uint8), torch.arange(61))
    chosen, held = hold_out(images, 20)
    assert held is not None
    assert len(chosen) + len(held) == 61
    assert set(chosen.labels.tolist()).isdisjoint(held.labels.tolist())
    assert torch.equal(held.pixels[:, 0, 0, 0].long(), held.labels)
    assert hold_out(images, 21) == (images, None)


def test_a_choice_that_breaks_its_promise_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what merges agrees on the images that it is chosen by, and on no other."""
    from vitkit.runtime import tune as module

    model = model_of()
    images, held = Images(made_up(BASE, 24)), Images(made_up(BASE, 30, seed=5), name="held")
    real = module.outputs_of

    def outputs(runtime: Any, given: Images, *rest: Any) -> torch.Tensor:
        plain = real(build(model, Choice()), given, *rest)
        return plain.roll(1, dims=-1) if given is held and runtime.name != "eager" else plain

    monkeypatch.setattr(module, "outputs_of", outputs)
    monkeypatch.setattr(module, "images_per_second", lambda runtimes, *_: {"it": 2.0, "eager": 1.0})
    found = tune(model, images, max_drop=0.05, kinds=["eager"], seconds=0.0, held=held)
    assert found.winner.choice.exact
    assert found.confirmed is None
    monkeypatch.setattr(module, "outputs_of", lambda runtime, given, *rest: real(build(model, Choice()), given, *rest))
    speeds = iter([1.0, 9.0] + [1.5] * 50)
    monkeypatch.setattr(module, "images_per_second", lambda runtimes, *_: {"it": next(speeds), "eager": 1.0})
    found = tune(model, images, max_drop=0.05, kinds=["eager"], seconds=0.0, held=held)
    assert not found.winner.choice.exact
    assert found.confirmed == Confirmed(30, 0, 0, labelled=False)
    assert found.report()["confirmed"]["mcnemar_p"] == 1


def test_the_early_exit_that_is_chosen_loses_no_more_than_it_may() -> None:
    """By a loop over all thresholds: the lowest at which, and above which, no more is lost than allowed."""
    random = torch.Generator().manual_seed(3)
    truth = torch.randint(0, 5, (300,), generator=random)
    first, second = (torch.randn(300, 5, generator=random) for _ in range(2))
    first[torch.arange(300), truth] += 2 * torch.rand(300, generator=random)
    second[torch.arange(300), truth] += 3

    def drop(sure: float) -> float:
        leave = first.softmax(-1).amax(-1) >= sure
        mixed = torch.where(leave[:, None], first, second)
        right = [(each.argmax(-1) == truth).double().mean() for each in (second, mixed)]
        return float(right[0] - right[1])

    for allowed in (0.01, 0.05):
        sure = sure_enough(first, second, truth, allowed)
        assert sure is not None
        assert all(drop(t) <= allowed + 1e-9 for t in np.arange(sure, 1.001, 0.001))
        assert drop(sure - 0.02) > allowed
    assert sure_enough(first, first, truth, 0.0) == pytest.approx(0.001)  # nothing is lost: all may leave
    assert sure_enough(second.roll(1, dims=-1), second, second.argmax(-1), 0.0) is None


def test_images_that_are_easy_leave_early() -> None:
    """The rest gets the very answer of the whole images, in the right places."""
    model = model_of()
    images = normalise(made_up(BASE, 12), BASE.preprocessing)
    first, second = (build(model, Choice(scale=scale)).run(images) for scale in (0.5, 1.0))
    sure = float(first.softmax(-1).amax(-1).median())
    found = build(model, Choice(scale=0.5, sure=sure)).run(images)
    leaves = first.softmax(-1).amax(-1) >= sure
    assert 0 < leaves.sum() < 12
    torch.testing.assert_close(found, torch.where(leaves[:, None], first, second), atol=1e-5, rtol=1e-5)
    assert Choice("onnx", int8=True, scale=0.5, sure=0.9).name == "onnx int8 scale 0.5 sure 0.9"
    assert not Choice(scale=0.5, sure=0.9).exact


def test_tune_tries_early_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where smaller images give the same answers it is found, measured on several batches, and confirmed."""
    from vitkit.runtime import tune as module

    model, seen = model_of(), []
    real = module.outputs_of
    monkeypatch.setattr(module, "outputs_of", lambda runtime, given, *rest: real(build(model, Choice()), given, *rest))

    def speeds(runtimes: Any, batches: Any, seconds: float) -> Any:
        seen.append((runtimes["it"].name, len(batches)))
        return {"it": 9.0 if "sure" in runtimes["it"].name else 1.0, "eager": 1.0}

    monkeypatch.setattr(module, "images_per_second", speeds)
    held = Images(made_up(BASE, 21, seed=5))
    found = tune(model, Images(made_up(BASE, 24)), 0.05, kinds=["eager"], seconds=0.0, held=held)
    assert found.winner.choice.sure
    batches = dict(reversed(seen))  # the first of each counts
    assert {count for name, count in batches.items() if "sure" in name} == {3}  # of 8 images
    assert {count for name, count in batches.items() if "sure" not in name} == {1}
    assert {bool(row.choice.merge) for row in found.rows if row.choice.sure} == {True, False}, (
        "the second look may merge"
    )


def test_the_speed_of_early_exit_is_that_of_easy_and_hard_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of each as there are, also one image at a time: how many leave early decides how fast it is."""
    from vitkit.runtime import tune as module

    model, images, looked_at = model_of(), Images(made_up(BASE, 120)), []
    plain, real = build(model, Choice()), module.outputs_of
    monkeypatch.setattr(module, "outputs_of", lambda runtime, given, *rest: real(plain, given, *rest))

    def speeds(runtimes: Any, batches: Any, seconds: float) -> Any:
        looked_at.extend([torch.cat(batches)] if "sure" in runtimes["it"].name else [])
        return {"it": 9.0 if "sure" in runtimes["it"].name else 1.0, "eager": 1.0}

    monkeypatch.setattr(module, "images_per_second", speeds)
    tune(model, images, 0.05, latency=True, kinds=["eager"], seconds=0.0)
    sure, few = (outputs.softmax(-1).amax(-1) for outputs in (real(plain, images, BASE, 8), plain.run(looked_at[0])))
    assert len(few) == 32
    for share in (0.25, 0.5, 0.75):
        assert (few < sure.quantile(share)).float().mean() == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (2, 1), (5, 0), (3, 8)])
def test_a_promise_about_other_images(lost: int, won: int) -> None:
    """Against draws: images that are lost, won or neither, at the same rates."""
    rates = np.array([lost + 0.5, won + 0.5, 400 - lost - won]) / 401
    draws = np.random.default_rng(0).multinomial(200, rates, size=100_000)
    expected = float(np.mean(draws[:, 0] - draws[:, 1] <= 1))
    assert kept_on(lost, won, 400, 0.005) == pytest.approx(expected, abs=0.005)  # three standard errors


@pytest.mark.parametrize(
    "choice",
    [
        Choice(scale=0.5, batch_size=2),
        Choice(merge="pitome:2:late", batch_size=2),
        Choice(scale=0.5, sure=0.2, batch_size=2),
        Choice("onnx", scale=0.5, sure=0.2, batch_size=2),
    ],
)
def test_a_stored_choice_is_run_again(choice: Choice, tmp_path: Path) -> None:
    from vitkit.runtime.kept import Row
    from vitkit.runtime.tune import Tuned

    model, path = model_of(), tmp_path / "m.safetensors"
    vitkit.save(model, path)
    store(path, model, Tuned([Row(choice)], Row(choice), "x", False, "cpu"), None)
    again = stored(model, path)
    assert again is not None
    images = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(again.run(images), build(model, choice).run(images))


def test_patches_merge_where_it_costs_least() -> None:
    """The same work is saved as by the same number everywhere; a block that costs ten times as much merges none."""
    harm = [1.0, 0.1, 0.1, 0.2, 0.1, 0.1]
    plan = MergePlan.of(fitted(4, harm))
    counts = plan.counts(6)
    saved = sum(n * later for n, later in zip(counts, range(5, -1, -1), strict=True))
    assert 4 * 15 <= saved <= 4 * 15 + 8
    assert counts[0] == 0  # the limit of the others lets it merge none
    assert counts[3] < counts[2]
    assert max(counts) <= 10
    assert counts[-1] == 0, "nothing comes after it"
    even = MergePlan.of(fitted(4, [0.1] * 6)).counts(6)
    assert list(even) == sorted(even, reverse=True)  # each costs as much, and early ones save more


def test_harm_is_that_of_one_block_alone() -> None:
    model, images = model_of(), Images(made_up(BASE, 20))
    expected = outputs_of(build(model, Choice()), images, BASE, 8)
    found = harms(model, 4, images, expected)
    with_last = outputs_of(build(model, Choice(merge="tome:0+0+4")), images, BASE, 8)
    assert len(found) == 3
    assert found[0] > found[1] > 0
    assert found[2] == pytest.approx(0, abs=1e-5)  # the last block computes the class token alone
    torch.testing.assert_close(with_last, expected, atol=1e-4, rtol=1e-4)


def test_numbers_of_each_block_are_checked() -> None:
    model = model_of()
    model.merge = "pitome:0+2+4"
    assert model.merge == "pitome:0+2+4"
    model.merge = "tome:0+0+0"
    assert model.merge == 0
    for wrong, words in (
        ("tome:1+2", "names 2 blocks; the model has 3"),
        ("tome:1+x", "joined by"),
        ("tom:1+2+3", "tom"),
    ):
        with pytest.raises(ConfigError, match=words):
            model.merge = wrong
