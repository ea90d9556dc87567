"""Findings are functions of the table: fed with made-up numbers, they say what those numbers say."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vitkit.study.studies import STUDIES
from vitkit.study.table import Context, Finding, Result, Row, Setting, Table

JITTER = (-0.002, 0.0, 0.002)  # of the seeds, the same for all arms
# another for each arm; of draws like this one in twenty pairs would show a difference, in this one none does
NOISE = np.random.default_rng(3).normal(0, 0.05, (20, 3)).tolist()


def made_up(name: str, levels: dict[str, float], base: float = 0.9, **extra: Any) -> Table:
    """All arms at `base`, those of `levels` moved by so much; one seed's jitter is common to all arms."""
    rows = []
    for arm in STUDIES[name].arms(Setting(28, 1, 10)):
        level = base + levels.get(arm.name, 0.0)
        tiny = (0.0001, -0.0001, 0.0)  # so that no interval is a point
        accuracy = tuple(level + j + t * (len(rows) % 2) for j, t in zip(JITTER, tiny, strict=True))
        more = tuple(extra[arm.name]) if arm.name in extra else _measured(arm.name, arm.measure)
        losses = ((2.0, 1.0, 0.5),) * 3
        rows.append(Row(arm.name, accuracy, arm.tags, 1e-3, macs=10**6, seconds=1.0, extra=more, losses=losses))
    return Table(tuple(rows), {"train": 3200, "classes": 10, "side": 28})


def _measured(arm: str, measure: str) -> tuple[dict[str, Any], ...]:
    found: dict[str, Any] = {}
    if measure == "moved":
        found = {"shifts": [0, 4], "by_shift": [0.9, 0.8]}
    elif measure == "neighbours":
        found = {"alone": 0.9, "among": 0.9, "changed": 0.0, "differs_from_ours": 1e-7}
    elif measure == "sizes":
        found = {"sizes": [20, 24], "by_size": [0.9, 0.8]}
    elif measure == "reach":
        found = {"distance": [[2.0, 8.0], [5.0, 5.0]], "even": 9.0}
    elif measure == "fewshot":
        found = {"fewshot": 0.4}
    elif measure == "norms":
        found = {"longest": 1.5, "outliers": 0.01}
    elif measure == "scores":
        found = {"deviation": 1.5, "evenness": 0.8, "unit": 3.0}
    return (found,) * 3 if found else ()


def find(name: str, levels: dict[str, float], **extra: Any) -> Finding:
    return STUDIES[name].find(made_up(name, levels, **extra))


@pytest.mark.parametrize(
    ("name", "arm", "less", "more"),
    [
        ("data-size", "ViT, 1/32", "points fewer than the ResNet", "points more than the ResNet"),
        ("positions", "none", "5.0 points fewer than learned 1-D", "5.0 points more than learned 1-D"),
        ("pooling", "mean", "5.0 points fewer than a class token", "5.0 points more than a class token"),
        ("patch-size", "patch 2", "points fewer than patch 14", "points more than patch 14"),
        ("patch-embed", "convolutional stem", "5.0 points fewer than plain", "5.0 points more than plain"),
        ("scale-in-softmax", "softmax(qk)/√d v", "5.0 points fewer than the right", "5.0 points more than the right"),
        ("resolution", "official", "points fewer than one that stays", "points more than one that stays"),
        ("depth-width", "7 x 32", "points fewer than 1 x 84", "points more than 1 x 84"),
        ("dropout", "0.1, all", "", "points more than none"),
    ],
)
def test_both_directions(name: str, arm: str, less: str, more: str) -> None:
    assert arm in [a.name for a in STUDIES[name].arms(Setting(28, 1, 10))]
    assert less in " ".join(find(name, {arm: -0.05}).sentences)
    assert more in " ".join(find(name, {arm: 0.05}).sentences)


@pytest.mark.parametrize("name", list(STUDIES))
def test_noise_is_no_difference(name: str) -> None:
    """Arms that only differ by the luck of seeds: no sentence claims more or less, nor agreement."""
    study = STUDIES[name]
    table = made_up(name, {})
    rows = [
        Row(r.name, tuple(0.9 + n for n in NOISE[i]), r.tags, r.lr, macs=10**6, extra=_noisy(r, i), losses=r.losses)
        for i, r in enumerate(table.rows)
    ]
    found = study.find(Table(tuple(rows), table.data))
    text = " ".join(found.sentences)
    assert "open" in text.lower()
    for claim in ("points more than", "points fewer than", "alike within", "as in the paper", "unlike"):
        assert claim not in text
    assert len(found.sentences) == 2
    assert all(s.endswith(".") and s[0] == s[0].upper() for s in found.sentences)


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.others])
def test_arms_with_fewer_seeds_are_drawn_and_spoken_of(name: str) -> None:
    study, table = STUDIES[name], made_up(name, {})
    about = study.compared([row.name for row in table.rows])
    rows = tuple(r if r.name in about else replace(r, accuracy=r.accuracy[:2]) for r in table.rows)
    study.draw(Table(rows, table.data))
    assert "3 seeds" in study.find(Table(rows, table.data)).first


def _noisy(row: Row, number: int) -> tuple[dict[str, Any], ...]:
    noise = NOISE[number]
    if row.extra and "by_shift" in row.extra[0]:
        return tuple({"shifts": [0, 4], "by_shift": [0.9, 0.8 + n]} for n in noise)
    if row.extra and "alone" in row.extra[0]:
        return tuple({**row.extra[0], "alone": 0.9 + n} for n in noise)
    if row.extra and "distance" in row.extra[0]:
        return tuple({"distance": [[3.0 + 9 * n, 8.0], [8.0, 3.0 - 9 * n]], "even": 9.0} for n in noise)
    if row.extra and "longest" in row.extra[0]:
        return tuple({**row.extra[0], "longest": 1.5 + n} for n in noise)
    return row.extra


def test_the_paper_is_named_when_it_agrees_and_when_not() -> None:
    assert "as in the paper" in find("positions", {"none": -0.05}).sentences[0]
    assert "unlike the paper" in find("positions", {"none": 0.05}).sentences[0]
    assert "unlike the paper, where they are alike" in find("positions", {"RoPE": 0.05}).sentences[1]
    assert "as in the paper, where both work alike" in find("pooling", {"mean": 0.0}).sentences[0]


def test_data_size_sees_the_gap_close() -> None:
    closing = find("data-size", {"ViT, 1/32": -0.1})
    assert "gains on the ResNet by 10.0 points" in closing.sentences[1]
    assert closing.sentences[1].endswith("as in the paper.")
    opening = find("data-size", {"ViT, all": -0.1})
    assert "falls behind the ResNet by 10.0 points" in opening.sentences[1]
    assert opening.sentences[1].endswith("unlike the paper.")


def test_shift_in_both_directions() -> None:
    lost = {"shifts": [0, 4], "by_shift": [0.9, 0.6]}
    assert "ViT loses 20.0 points more than the ResNet" in find("shift", {}, ViT=[lost] * 3).sentences[1]
    assert "ViT loses 20.0 points less than the ResNet" in find("shift", {}, ResNet=[lost] * 3).sentences[1]


def test_heads_in_both_directions() -> None:
    deeper = {"distance": [[1.0, 3.0], [6.0, 7.0]], "even": 9.0}
    nearer = {"distance": [[6.0, 7.0], [1.0, 3.0]], "even": 9.0}
    found = find("heads", {}, trained=[deeper] * 3)
    assert found.headline == "The last layer looks 4.5 pixels farther than the first"
    assert "as in the paper" in found.sentences[0]
    assert "as in the paper" in found.sentences[1]
    found = find("heads", {}, trained=[nearer] * 3)
    assert "4.5 pixels less far" in found.headline
    assert "unlike the paper" in found.sentences[0]


def test_attention_bug_names_its_cause_only_when_it_was_measured() -> None:
    leaking = {"alone": 0.5, "among": 0.7, "changed": 0.25, "differs_from_ours": 2.0}
    found = find(
        "attention-bug",
        {"batch_first=False": -0.1, "False, class token": -0.79},
        **{"batch_first=False": [leaking] * 3},
    )
    assert "is not at fault: with batch_first=True its logits equal ours to 1e-07" in found.sentences[0]
    assert "25.0% of the answers change with the other images of the batch (ours: 0.0%)" in found.sentences[0]
    assert "reaches 70.0% in batches reaches 50.0% when images are asked one by one" in found.sentences[0]
    assert "it reaches 40.0 points fewer than the right one" in found.sentences[0]
    assert found.headline.endswith("costs 40.0 points")
    assert "reaches 11.0%, where guessing gives 10.0%" in found.sentences[1]
    better = {**leaking, "alone": 0.95}
    found = find("attention-bug", {}, **{"batch_first=False": [better] * 3})
    assert "it reaches 5.0 points more than the right one" in found.sentences[0]
    other = {"alone": 0.5, "among": 0.7, "changed": 0.0, "differs_from_ours": 0.5}
    assert "computes something else" in find("attention-bug", {}, **{"batch_first=True": [other] * 3}).sentences[0]


def test_patch_embed_tells_rounding_from_another_function() -> None:
    table = made_up("patch-embed", {})
    assert "which is rounding" in STUDIES["patch-embed"].find(table).sentences[0]
    conv, linear, stem = table.rows
    other = Row(linear.name, linear.accuracy, losses=((2.0, 1.1, 0.5),) * 3)
    found = STUDIES["patch-embed"].find(Table((conv, other, stem), table.data))
    assert "they are not one function" in found.sentences[0]
    assert "differ" in found.headline


@pytest.mark.parametrize("name", list(STUDIES))
def test_every_sentence_follows_the_table(name: str) -> None:
    """Another table gives other sentences: nothing is said that was not measured."""
    random = np.random.default_rng(0)
    study = STUDIES[name]

    def told() -> Finding:
        table = made_up(name, {})
        rows = []
        for row in table.rows:
            accuracy = tuple(random.uniform(0.2, 0.9, 3).tolist())
            extra = tuple({key: _moved(value, random) for key, value in one.items()} for one in row.extra)
            losses = tuple(tuple((10 ** random.uniform(-6, 0, 3)).tolist()) for _ in range(3))
            rows.append(Row(row.name, accuracy, row.tags, row.lr, macs=10**6, extra=extra, losses=losses))
        return study.find(Table(tuple(rows), table.data))

    found = [told() for _ in range(8)]
    for number in (0, 1):  # rounding, and "X is best" without more, may make two of them alike
        assert len({one.sentences[number] for one in found}) >= 3


def _moved(value: Any, random: np.random.Generator) -> Any:
    """A measured number or list of numbers, changed; sizes and shifts, which are whole numbers, stay."""
    if isinstance(value, list):
        return [_moved(one, random) for one in value]
    return float(random.uniform(0.2, 0.9) * max(1.0, value)) if isinstance(value, float) else value


def judged(name: str, effects: list[float]) -> Result:
    """A study of these differences between the two arms it is about."""
    study = STUDIES[name]
    table = made_up(name, {})
    first, second = study.compared([row.name for row in table.rows])
    rows = [
        Row(r.name, tuple(0.5 + e if r.name == first else 0.5 for e in effects)) if r.name in (first, second) else r
        for r in table.rows
    ]
    context = Context("", 1, 64, len(effects), "", 1.0, {}, 1.0, study.effect, 0.5, True)
    return Result(study, Table(tuple(rows), table.data), Finding("", "", ""), context)


@pytest.mark.parametrize(
    ("name", "effects", "words"),
    [
        ("positions", [-0.05, -0.051, -0.049], "agrees"),  # a difference of two points is looked for
        ("positions", [-0.005, -0.0051, -0.0049], "agrees"),  # smaller, but there
        ("positions", [0.05, 0.051, 0.049], "contradicts"),
        ("positions", [0.001, -0.001, 0.0], "does not show here"),
        ("positions", [0.3, -0.4, 0.1], "open"),
        ("pooling", [0.001, -0.001, 0.0], "agrees"),  # nothing is claimed to be there
        ("pooling", [0.05, 0.051, 0.049], "contradicts"),
        ("pooling", [0.003, 0.0031, 0.0029], "agrees"),
        ("pooling", [0.3, -0.4, 0.1], "open"),
    ],
)
def test_agreement_follows_the_interval(name: str, effects: list[float], words: str) -> None:
    result = judged(name, effects)
    assert result.agreement == words
    assert any("underpowered" in doubt for doubt in result.doubts) == (words == "open")


@pytest.mark.parametrize("name", list(STUDIES))
def test_figures_have_words_and_no_code_of_formulas(name: str) -> None:
    """A logarithmic axis of less than a decade labels its minor ticks with formulas, which our style does not set."""
    from matplotlib.text import Text

    from vitkit.figures.style import styled

    with styled():
        figure = STUDIES[name].draw(made_up(name, {}))
        figure.draw_without_rendering()
        assert not [text.get_text() for text in figure.findobj(Text) if "$" in text.get_text()]
