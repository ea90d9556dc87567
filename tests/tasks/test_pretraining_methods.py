"""Methods of pre-training against loops, closed forms and definitions written out here."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import vitkit
from vitkit.data.preprocess import normalise
from vitkit.errors import ConfigError
from vitkit.model.vit import ViT
from vitkit.tasks.pretraining import dino, health, lejepa, mae, masked_patch
from vitkit.tasks.pretraining.dino import DinoOptions, SelfDistillation
from vitkit.tasks.pretraining.lejepa import Lejepa, LejepaOptions
from vitkit.tasks.pretraining.mae import MaeOptions, MaskedAutoencoder
from vitkit.tasks.pretraining.masked_patch import MaskedPatchOptions, MaskedPatchPredictor


def small(**changes: object) -> ViT:
    torch.manual_seed(0)
    model = vitkit.create("mu", **{"classes": 0, "depth": 1, **changes})
    assert isinstance(model, ViT)
    return model


# --- mae --------------------------------------------------------------------------------------------


def test_mae_loss_in_loops() -> None:
    learner = MaskedAutoencoder(small(), MaeOptions(masking=0.6, decoder_depth=1))
    images, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
    with torch.no_grad():
        predicted, masked = learner.predict(images, noise)
        losses = learner.losses(images, noise)
    for b in range(2):
        ranks = [sum(float(other) < float(value) for other in noise[b]) for value in noise[b]]
        hidden = [rank >= int(16 * 0.4) for rank in ranks]
        assert masked.hidden[b].tolist() == [float(h) for h in hidden]
        errors = []
        for n in (n for n in range(16) if hidden[n]):
            row, column = divmod(n, 4)
            values = []
            for y in range(8):
                for x in range(8):
                    values += [float(images[b, c, 8 * row + y, 8 * column + x]) for c in range(3)]
            mean = sum(values) / len(values)
            variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
            wanted = [(v - mean) / math.sqrt(variance + 1e-6) for v in values]
            errors.append(np.mean([(float(p) - w) ** 2 for p, w in zip(predicted[b, n], wanted, strict=True)]))
        assert float(losses[b]) == pytest.approx(np.mean(errors), abs=1e-5)


@pytest.mark.parametrize("stem", [False, True])
def test_the_encoder_of_mae_sees_nothing_of_hidden_patches(stem: bool) -> None:
    model = vitkit.create("conv+32px/8", classes=0) if stem else small()
    learner = MaskedAutoencoder(model, MaeOptions(masking=0.5)).eval()
    images, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
    before, masked = learner.predict(images, noise)
    hidden = masked.hidden.view(2, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
    after, _ = learner.predict(images + 100 * hidden * torch.randn_like(images), noise)
    assert torch.equal(before, after)


def test_a_reconstruction_shows_visible_patches_as_they_are() -> None:
    learner = MaskedAutoencoder(small(), MaeOptions())
    images = torch.randn(2, 3, 32, 32)
    empty, painted = learner.reconstruct(images)
    hidden = mae.mask(learner.fixed_noise(images), 0.75).hidden
    for patches in (empty, painted):
        same = (mae.cut(patches, (8, 8)) - mae.cut(images, (8, 8))).abs().amax(dim=-1) < 1e-6
        assert torch.equal(same, hidden == 0)


@pytest.mark.parametrize("masking", [0.0, 1.0, -0.5])
def test_masking_must_leave_something_to_predict_and_to_see(masking: float) -> None:
    with pytest.raises(ConfigError, match=r"nothing to predict, or nothing to see; 0\.75 is usual"):
        MaeOptions(masking=masking)


def test_mae_names_the_methods_that_relative_positions_allow() -> None:
    with pytest.raises(ConfigError, match="choose --method masked-patch, dino or lejepa"):
        MaskedAutoencoder(small(positions="relative"), MaeOptions())


# --- masked-patch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "parts"), [(3, (1, 1)), (3, (4, 4)), (1, (1, 1)), (1, (2, 4))])
def test_colours_in_loops(channels: int, parts: tuple[int, int]) -> None:
    pre = small(channels=channels).config.preprocessing
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, channels, 16, 24), dtype=np.uint8))
    pixels[0, :, :8, :8] = 32  # exactly on the edge of a level
    pixels[0, :, 8:, :8] = 255
    found = masked_patch.colours(normalise(pixels, pre), pre, (8, 8), parts)
    h, w = 8 // parts[0], 8 // parts[1]
    for b in range(2):
        for n in range(6):
            for r in range(parts[0] * parts[1]):
                top, left = 8 * (n // 3) + h * (r // parts[1]), 8 * (n % 3) + w * (r % parts[1])
                wanted = 0
                for c in range(channels):
                    total = sum(int(pixels[b, c, y, x]) for y in range(top, top + h) for x in range(left, left + w))
                    wanted = 8 * wanted + total // (h * w * 32)  # 3 bits of the mean
                assert int(found[b, n, r]) == wanted
    assert int(found.max()) < 8**channels


def test_corruption_has_the_shares_of_the_paper() -> None:
    corrupted, masked, shown = masked_patch.corruption(torch.rand(400, 3, 64), 64, 0.5)
    assert (corrupted.sum(dim=1) == 32).all()
    replaced = shown != torch.arange(64)
    assert not (masked & ~corrupted).any()
    assert not (replaced & (masked | ~corrupted)).any()
    count = int(corrupted.sum())  # 12,800: three standard errors are 0.011
    assert float(masked.sum() / count) == pytest.approx(0.8, abs=0.011)
    assert float(replaced.sum() / count) == pytest.approx(0.1, abs=0.011)


@pytest.mark.parametrize("target", ["colour", "downsampled", "pixels"])
def test_masked_patch_loss_is_that_of_the_corrupted_patches(target: str) -> None:
    learner = MaskedPatchPredictor(small(), MaskedPatchOptions(), target)
    images, draws = torch.randn(2, 3, 32, 32), torch.rand(2, 3, 16)
    with torch.no_grad():
        predicted, corrupted = learner.predict(images, draws)
    config = learner.vit.config
    for b in range(2):
        errors = []
        for n in corrupted[b].nonzero()[:, 0].tolist():
            if target == "pixels":
                row, column = divmod(n, 4)
                wanted = images[b, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].permute(1, 2, 0).flatten()
                errors.append(float((predicted[b, n] - wanted).square().mean()))
            else:
                classes = masked_patch.colours(images, config.preprocessing, (8, 8), learner.parts)[b, n]
                logits = predicted[b, n].view(len(classes), -1)
                errors.append(
                    float(-torch.stack([x.log_softmax(0)[c] for x, c in zip(logits, classes, strict=True)]).mean())
                )
        assert float(learner.losses(images, draws)[b]) == pytest.approx(np.mean(errors), abs=1e-5)
    assert predicted.shape[-1] == {"colour": 512, "downsampled": 16 * 512, "pixels": 192}[target]


def test_masked_patches_show_the_mask_token_and_nothing_else() -> None:
    learner = MaskedPatchPredictor(small(), MaskedPatchOptions(masking=1.0), "colour").eval()
    draws = torch.rand(1, 3, 16)
    draws[:, 1] = 0.1  # all of them masked
    predicted = [learner.predict(torch.randn(1, 3, 32, 32), draws)[0] for _ in range(2)]
    assert torch.equal(*predicted)


# --- lejepa -----------------------------------------------------------------------------------------


def by_definition(samples: np.ndarray) -> float:
    """N * integral of |phi(t) - exp(-t^2/2)|^2 exp(-t^2/2) dt over [-3, 3], by a much finer sum."""
    t = np.linspace(-3, 3, 6001)
    phi = np.array([np.exp(1j * x * samples).mean() for x in t])
    return float(len(samples) * np.trapezoid(np.abs(phi - np.exp(-(t**2) / 2)) ** 2 * np.exp(-(t**2) / 2), t))


SAMPLES = {
    "normal": lambda r: r.normal(size=400),
    "shifted": lambda r: r.normal(size=400) + 1,
    "wide": lambda r: 3 * r.normal(size=400),
    "uniform": lambda r: r.uniform(-1, 1, size=400),
    "two points": lambda r: r.choice([-1.0, 1.0], size=400),
    "collapsed": lambda r: np.zeros(400),
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_sigreg_is_its_definition(kind: str) -> None:
    samples = SAMPLES[kind](np.random.default_rng(0))
    found = float(lejepa.epps_pulley(torch.from_numpy(samples).float()[:, None])[0])
    assert found == pytest.approx(by_definition(samples), rel=5e-3, abs=5e-3)  # 17 points and float32


def test_sigreg_in_closed_form() -> None:
    """Of constant zeros phi is 1, and of many normal samples the statistic is what chance leaves: about constant."""
    ends = math.sqrt(math.pi) * math.erf(3), math.sqrt(math.pi / 1.5) * math.erf(3 * math.sqrt(1.5))
    wanted = 100 * (math.sqrt(2 * math.pi) * math.erf(3 / math.sqrt(2)) - 2 * ends[0] + ends[1])
    assert float(lejepa.epps_pulley(torch.zeros(100, 1))[0]) == pytest.approx(wanted, rel=2e-3)
    torch.manual_seed(0)
    directions = torch.randn(8, 64)
    normal, other = (lejepa.sigreg(x, directions) for x in (torch.randn(2000, 8), torch.rand(2000, 8)))
    # its mean for normal samples: integral of (1 - exp(-t^2)) exp(-t^2/2)
    assert float(normal) == pytest.approx(math.sqrt(2 * math.pi) - math.sqrt(math.pi / 1.5), rel=0.3)
    assert float(other) > 100 * float(normal)


def test_lejepa_loss_is_agreement_and_sigreg() -> None:
    torch.manual_seed(0)
    z, directions = torch.randn(6, 3, 4), torch.randn(4, 5)
    agreement, gaussian = lejepa.lejepa_loss(z, directions, 0.2)
    for b in range(6):
        mean = [sum(float(z[b, v, e]) for v in range(3)) / 3 for e in range(4)]
        gaps = [(float(z[b, v, e]) - mean[e]) ** 2 for v in range(3) for e in range(4)]
        assert float(agreement[b]) == pytest.approx(0.8 * sum(gaps) / 12, rel=1e-4)
    unit = directions / directions.norm(dim=0)
    each = [by_definition((z[:, v] @ unit[:, s]).numpy()) for v in range(3) for s in range(5)]
    assert float(gaussian) == pytest.approx(0.2 * np.mean(each), rel=5e-3)


def test_lejepa_has_gradients_everywhere_and_new_directions_each_step() -> None:
    learner = Lejepa(small(), LejepaOptions())
    views = torch.randn(4, 2, 3, 32, 32)
    first = learner.losses(views, torch.zeros(4))
    first.mean().backward()
    assert all(p.grad is not None for p in learner.parameters())
    assert torch.equal(learner.losses(views, torch.zeros(4)), first)
    learner.after_step(0.1)
    assert not torch.equal(learner.losses(views, torch.zeros(4)), first)


# --- dino -------------------------------------------------------------------------------------------


def test_dino_loss_in_loops() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 4, 5), torch.randn(3, 2, 5).softmax(dim=-1)
    found = dino.cross_entropy(student, teacher)
    for b in range(3):
        losses = []
        for t in range(2):
            for s in range(4):
                if s != t:
                    weights = [math.exp(float(x) / 0.1) for x in student[b, s]]
                    losses.append(-sum(float(teacher[b, t, k]) * math.log(weights[k] / sum(weights)) for k in range(5)))
        assert float(found[b]) == pytest.approx(np.mean(losses), rel=1e-4)


def test_the_centre_and_the_teacher_follow_in_closed_form() -> None:
    options = DinoOptions(codes=8, local_views=1, momentum=0.9)
    learner = SelfDistillation(small(), options)
    views, centre = torch.randn(4, 3, 3, 32, 32), torch.zeros(8)
    for step in range(3):
        learner.train()
        with torch.no_grad():
            scores = learner.teacher_head(learner.teacher(views[:, :2].flatten(0, 1)))
        learner.losses(views, torch.rand(4, 2, 16)).mean().backward()
        torch.testing.assert_close(learner.centre, centre)  # nothing changes before the step is taken
        with torch.no_grad():
            for parameter in learner.vit.parameters():
                parameter.add_(0.1)
        before = [p.clone() for p in learner.teacher.parameters()]
        learner.after_step(step / 3)
        centre = 0.9 * centre + 0.1 * scores.mean(dim=0)
        torch.testing.assert_close(learner.centre, centre, atol=1e-5, rtol=1e-5)
        momentum = 1 - 0.1 * (math.cos(math.pi * step / 3) + 1) / 2  # from 0.9 up to 1
        for now, old, ours in zip(learner.teacher.parameters(), before, learner.vit.parameters(), strict=True):
            torch.testing.assert_close(now, momentum * old + (1 - momentum) * ours)
    assert learner.kept is learner.teacher
    assert all(p.grad is None for p in learner.teacher.parameters())


def test_teacher_momentum_rises_unless_it_is_switched_off() -> None:
    assert [dino.teacher_momentum(0.9, p) for p in (0.0, 0.5, 1.0)] == pytest.approx([0.9, 0.95, 1.0])
    assert [dino.teacher_momentum(0.0, p) for p in (0.0, 0.5, 1.0)] == [0, 0, 0]


def test_features_are_standardised_as_by_a_batch_norm() -> None:
    torch.manual_seed(0)
    ours, torchs = dino.Standardise(4), torch.nn.BatchNorm1d(4, affine=False)
    for _ in range(50):
        x = 3 + 2 * torch.randn(512, 4)
        torch.testing.assert_close(ours(x), torchs(x), atol=1e-5, rtol=1e-5)
    for module in (ours, torchs):
        module.eval()
    torch.testing.assert_close(ours(x), torchs(x), atol=5e-3, rtol=5e-3)  # torch divides by one less


def test_codes_are_centred_and_sharpened() -> None:
    learner = SelfDistillation(small(), DinoOptions(codes=8)).eval()
    learner.centre.copy_(torch.arange(8.0) / 10)
    scores = torch.randn(3, 8)
    wanted = ((scores - torch.arange(8.0) / 10) / 0.04).softmax(dim=-1)
    torch.testing.assert_close(learner.codes(scores, "centre"), wanted)
    learner.progress.fill_(0.5)  # after the warm-up of the temperature
    wanted = ((scores - torch.arange(8.0) / 10) / 0.07).softmax(dim=-1)
    torch.testing.assert_close(learner.codes(scores, "centre"), wanted)


def test_sinkhorn_uses_all_codes_alike() -> None:
    torch.manual_seed(0)
    codes = dino.sinkhorn(torch.randn(64, 8), 0.5, rounds=50)
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(64))
    torch.testing.assert_close(codes.mean(dim=0), torch.full((8,), 1 / 8), atol=1e-4, rtol=0)


def test_koleo_in_loops() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    unit = [(row / row.norm()).tolist() for row in x]
    nearest = [min(math.dist(a, b) for j, b in enumerate(unit) if i != j) for i, a in enumerate(unit)]
    assert float(dino.koleo(x)) == pytest.approx(-np.mean(np.log(nearest)), rel=1e-4)


def test_ibot_compares_masked_patches_only() -> None:
    learner = SelfDistillation(small(), DinoOptions(codes=8, ibot=1.0, koleo=0.1, local_views=0))
    ours, theirs, masked = torch.randn(2, 2, 17, 32), torch.randn(2, 2, 17, 32), torch.rand(2, 2, 16) < 0.4
    found = learner.patch_loss(ours, theirs, masked)
    codes = (learner.teacher_patch_head(theirs[:, :, 1:]) / 0.04).softmax(dim=-1)
    log_p = (learner.patch_head(ours[:, :, 1:]) / 0.1).log_softmax(dim=-1)
    for b in range(2):
        each = [float(-(codes[b, v, n] * log_p[b, v, n]).sum()) for v, n in masked[b].nonzero().tolist()]
        assert float(found[b]) == pytest.approx(np.mean(each), rel=1e-4)
    learner.losses(torch.randn(2, 2, 3, 32, 32), torch.rand(2, 2, 16)).mean().backward()
    assert learner.mask_token.grad is not None


# --- health -----------------------------------------------------------------------------------------


def directions(rank: int, count: int = 4000, width: int = 16) -> Tensor:
    """Images whose features vary alike in so many directions, around a mean that is far away."""
    torch.manual_seed(0)
    return torch.randn(count, rank) @ torch.linalg.qr(torch.randn(width, rank))[0].T + 5


def test_effective_rank_of_planted_directions() -> None:
    for rank in (1, 4, 16):
        assert health.effective_rank(directions(rank)) == pytest.approx(rank, rel=0.01)


def test_spread_and_uniformity() -> None:
    sphere = directions(16) - 5
    assert health.spread(sphere) == pytest.approx(1, abs=0.01)
    assert health.spread(torch.ones(50, 8)) == 0
    assert health.uniformity(torch.ones(50, 8)) == pytest.approx(0, abs=1e-9)
    two = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert health.uniformity(two) == pytest.approx(-8)  # |x - y|^2 = 4


def test_attention_entropy_of_known_attention() -> None:
    everywhere, one = torch.full((1, 2, 4, 4), 0.25), torch.eye(4).expand(1, 2, 4, 4)
    assert health.attention_entropy(everywhere).item() == pytest.approx(1)
    assert health.attention_entropy(one).item() == pytest.approx(0, abs=1e-6)


def test_information_of_codes() -> None:
    assert health.information(torch.eye(8)) == pytest.approx(1)
    assert health.information(torch.full((8, 8), 1 / 8)) == pytest.approx(0, abs=1e-9)
    assert health.information(torch.eye(8)[[0] * 8]) == pytest.approx(0, abs=1e-9)


def test_neighbours_and_retrieval() -> None:
    torch.manual_seed(0)
    labels = torch.arange(100) % 5
    features = torch.eye(5)[labels] + 0.01 * torch.randn(100, 5)
    assert health.neighbours_accuracy(features, labels, 5) == 1
    assert health.neighbours_accuracy(torch.randn(100, 5), labels, 5) < 0.4
    apart = torch.randn(100, 16)
    assert health.retrieval_accuracy(apart, apart + 0.01 * torch.randn(100, 16)) == 1
    assert health.retrieval_accuracy(torch.ones(100, 16), torch.ones(100, 16)) == 0
