"""What a training before brings: `transfer`, `self-supervision`; and what more images do: `augmentation-vs-data`."""

from __future__ import annotations

from functools import partial

from vitkit.figures.style import Figure
from vitkit.study.numbers import compare, gained, verdict
from vitkit.study.table import Arm, Finding, Setting, Study, Table, accuracies, line_figure

FEW = 1 / 32  # share of the images whose labels are known
SHORT = 0.25  # fine-tuning takes a quarter of the steps
SCRATCH, LONGER, FULL, HEAD, LORA = "from scratch", "from scratch, longer", "all weights", "head alone", "LoRA"
LARGER = "all weights, more pixels"
TARGETS = {"mean colour": "masked-patch:colour", "4x4 colours": "masked-patch:downsampled"}
TARGETS |= {"pixels": "masked-patch:pixels", "MAE": "mae"}
SHARES = {"1/16": 1 / 16, "1/4": 1 / 4, "all": 1.0}
PRESETS = ("none", "light", "medium")


class Transfer(Study):
    name = "transfer"
    question = "What does pre-training on other classes bring, and what is best fine-tuned?"
    varies = "from scratch, all weights, the head alone, LoRA, all weights at more pixels; on few images of new classes"
    claim = "pre-trained models need few images; all weights are fine-tuned, at a higher resolution if that can be paid"
    source = "Dosovitskiy et al. 2021, table 5: B/16 reaches 77.9% on ImageNet by itself, 84.0% after ImageNet-21k"
    fair = "the same few images and steps of fine-tuning; from scratch also as long as both trainings together"
    reference = SCRATCH
    effect, contrast, data = 0.03, (FULL, SCRATCH), "cifar10@32"
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        low, high, patch = {8: (6, 8, 2), 16: (12, 16, 4), 28: (20, 28, 4)}.get(s.side, (20, 32, 4))
        half = s.classes // 2
        known, new = tuple(range(half)), tuple(range(half, 2 * half))
        small, large = (s.vit(image_size=n, patch_size=patch, classes=half) for n in (low, high))
        before = Arm("before", small, classes=known, tags={"kind": "before"})
        few = partial(Arm, share=FEW, classes=new, length=SHORT)
        return [
            before,
            few(SCRATCH, small),
            few(FULL, small, before=before),
            few(HEAD, small, before=before, learns="head"),
            few(LORA, small, before=before, learns="lora"),
            few(LARGER, large, before=before),
            Arm(LONGER, small, share=FEW, classes=new, length=1 + SHORT),
        ]

    def find(self, table: Table) -> Finding:
        gain, longer = table.gap(FULL, SCRATCH), table.gap(FULL, LONGER)
        others = {name: table.gap(name, FULL) for name in (HEAD, LORA, LARGER)}
        first = "fine-tuned on few images of classes it never saw, "
        first += f"{compare('a pre-trained model', 'a fresh one', gain)}, {verdict(gain, 1)}; "
        first += compare("it", "a fresh one with as many steps as both", longer)
        second = "; ".join(compare(name, "all weights", gap) for name, gap in others.items())
        return Finding(f"Pre-training on other classes: {gained(gain)}", first, second)


class SelfSupervision(Study):
    name = "self-supervision"
    question = "Does predicting hidden patches help when few labels are known, and what should be predicted?"
    varies = "mean colour, 4x4 colours and pixels of masked patches (the paper's B.1.2), MAE; then few labels"
    claim = "masked patch prediction gains 2 points over no pre-training; the targets are alike, pixels a bit worse"
    source = "Dosovitskiy et al. 2021, section 4.6 and B.1.2: 79.9% on ImageNet, 2 points more than from scratch"
    fair = "all images without labels, then the same few labelled ones; from scratch also as long as both together"
    reference = SCRATCH
    contrast, others, data = ("mean colour", SCRATCH), 3, "cifar10@16"
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        patch = {8: 2, 16: 2}.get(s.side, 4)
        model, bare = s.vit(patch_size=patch), s.vit(patch_size=patch, classes=0)
        befores = {
            name: Arm(f"{name}, before", bare, task=task, augment="light", tags={"kind": "before"})
            for name, task in TARGETS.items()
        }
        few = partial(Arm, share=FEW, augment="light")
        return [
            *befores.values(),
            few(SCRATCH, model, length=SHORT),
            few(LONGER, model, length=1 + SHORT),
            *(few(name, model, length=SHORT, before=before) for name, before in befores.items()),
        ]

    def find(self, table: Table) -> Finding:
        names = list(TARGETS)
        gain, longer = table.gap(names[0], SCRATCH), table.gap(names[0], LONGER)
        best, worst = table.best(names), table.worst(names)
        among = table.gap(best, worst, pairs=6)
        first = f"after pre-training on mean colours {compare('the model', 'one from scratch', gain)}, "
        first += f"{verdict(gain, 1)}; {compare('it', 'one from scratch with as many steps as both', longer)}"
        second = f"of the targets {best} is best and {worst} worst: {compare(best, worst, among)}"
        return Finding(f"Predicting hidden patches first: {gained(gain)}", first, second)


class AugmentationVsData(Study):
    name = "augmentation-vs-data"
    question = "How much data is augmentation worth?"
    varies = "no, light and medium augmentation on 1/16, 1/4 and all of the images"
    claim = "augmentation and regularisation can be worth ten times the images"
    source = "Steiner et al. 2021"
    fair = "the same steps and images; the learning rate of the arm without augmentation for all three"
    reference = "none, all"
    effect, contrast, slowest = 0.02, ("light, 1/16", "none, 1/16"), "none, all"
    data = "cifar10@16"
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        return [
            Arm(
                f"{preset}, {label}",
                s.vit(),
                share=share,
                augment=preset,
                rate_of="" if preset == "none" else f"none, {label}",
                tags={"augment": preset, "share": label},
            )
            for label, share in SHARES.items()
            for preset in PRESETS
        ]

    def find(self, table: Table) -> Finding:
        few, all_ = (table.gap(f"light, {label}", f"none, {label}") for label in ("1/16", "all"))
        worth = table.gap("light, 1/16", "none, 1/4")
        strong = table.gap("medium, 1/16", "light, 1/16")
        first = f"with 1/16 of the images {compare('light augmentation', 'none', few)}, with all of them "
        first += f"{compare('it', 'none', all_)}"
        second = f"against four times the images without it: {compare('light augmentation', 'more images', worth)}; "
        second += f"with 1/16 {compare('medium augmentation', 'light', strong)}"
        return Finding(f"Light augmentation, 1/16 of the data: {gained(few)}; all: {gained(all_)}", first, second)

    def draw(self, table: Table) -> Figure:
        by_preset = {p: accuracies([table[f"{p}, {label}"] for label in SHARES]) for p in PRESETS}
        x, words = table.images(SHARES)
        return line_figure(x, by_preset, "training images (share of the set)", words)
