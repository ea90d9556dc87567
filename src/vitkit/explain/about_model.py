"""Sections about the model itself: filters, positions, attention distance, and how it was trained."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from vitkit.explain.distance import AttentionReach, attention_distance
from vitkit.explain.figures import checks, maps, weights
from vitkit.explain.filters import patch_filters
from vitkit.explain.inside import probabilities
from vitkit.explain.positions import position_offsets, position_similarity, row_column_score
from vitkit.explain.section import LeftOut, Section, Subject
from vitkit.explain.training import Curves, Judgement, in_words, judge, read_log


def filters(subject: Subject) -> list[Section]:
    found = patch_filters(subject.model)
    total, half = found.explained.sum(), int(np.searchsorted(np.cumsum(found.explained), 0.5)) + 1
    count = len(found.explained)
    finding = f"The first {count} components hold {total:.0%} of the patch embedding's variance"
    finding += f"; half of it is in {half}" if total >= 0.5 else ""
    where = "the picture's patches" if found.of_pixels else "patches of the stem's feature map (channels averaged)"
    patch = "x".join(map(str, found.components.shape[1:3]))
    section = Section(
        name="filters",
        heading="Patch-embedding filters",
        finding=finding,
        alt=f"{count} tiles of {patch} values, the principal components of the patch embedding, largest first, "
        f"over bars of explained variance from {found.explained[0]:.1%} down to {found.explained[-1]:.1%}.",
        how=f"Each tile is a pattern that the first layer can tell apart in {where}; mid-grey is zero. Trained models "
        f"show smooth waves and colour contrasts; noise means that the filters have not been learned.",
        arrays={"components": found.components, "explained": found.explained},
        draw=lambda: weights.draw_filters(found),
    )
    return [section]


def positions(subject: Subject) -> list[Section]:
    kind, grid = subject.model.config.positions, subject.grid
    if kind == "none":
        raise LeftOut("the model has no positions (positions='none')")
    if kind == "relative":
        return [_offsets(position_offsets(subject.model))]
    similarity = position_similarity(subject.model, grid)
    score = row_column_score(similarity)
    found = max(score.values()) > 0.05
    finding = (
        f"Positions of one row are {score['row']:+.2f} and of one column {score['column']:+.2f} more alike than others"
        if found
        else "Positions of one row or column are no more alike than others"
    )
    phases = " (for rotary positions: of the phases)" if kind == "rope-2d" else ""
    section = Section(
        name="positions",
        heading="Position similarity",
        finding=finding,
        alt=f"A grid of {grid[0]} by {grid[1]} small maps; each shows the cosine similarity of one patch's position "
        f"to all positions, from {similarity.min():.2f} to 1.",
        how=f"Positions are '{kind}'. The small map at row i, column j shows the cosine similarity{phases} of that "
        f"position with all others. The score compares mean similarities: same row (or column) minus elsewhere.",
        arrays={
            "similarity": similarity,
            "row_score": np.array(score["row"]),
            "column_score": np.array(score["column"]),
        },
        draw=lambda: weights.draw_similarity(similarity),
    )
    return [section]


def _offsets(offsets: np.ndarray) -> Section:
    high = np.abs(offsets)
    layer, head, _, _ = np.unravel_index(int(high.argmax()), offsets.shape)
    return Section(
        name="positions",
        heading="Relative positions",
        finding=f"The learned bias by offset reaches {high.max():.2f}, in head {head + 1} of layer {layer + 1}",
        alt=f"{offsets.shape[0]} rows (layers) by {offsets.shape[1]} columns (heads) of maps of the bias by offset.",
        how="What each head adds to its attention scores for a patch so many rows and columns away. The centre of "
        "each map is the patch itself. One scale for all.",
        arrays={"offsets": offsets},
        draw=lambda: weights.draw_offsets(offsets),
    )


def distance(subject: Subject) -> list[Section]:
    images = subject.sample if len(subject.sample) else subject.pictures
    if not len(images):
        subject.need_pictures()
    reach = attention_distance(subject.model, images.images)
    notes = f"{len(images)} pictures; class and register tokens left out, each row renormalised to sum to 1"
    section = Section(
        name="distance",
        heading="Attention distance and entropy",
        finding=_reach_finding(reach),
        alt=f"Two charts over {reach.distance.shape[1]} layers with one dot per head: mean attention distance "
        f"in pixels and attention entropy in nats, with the mean of each layer and of the network.",
        how="How far, in pixels between patch centres, each head looks, and how widely it spreads its attention. "
        "Class, distillation and register tokens have no place in the picture; they are left out, as queries and as "
        "keys, and the rest of each row is renormalised. The dashed line is attention spread evenly over all patches.",
        arrays={k: np.asarray(v) for k, v in asdict(reach).items()},
        draw=lambda: weights.draw_reach(reach, notes),
    )
    return [section]


def _reach_finding(reach: AttentionReach) -> str:
    by_head = reach.distance.mean(axis=0)
    first, last, mean = by_head[0], by_head[-1], by_head.mean()
    span = f"{first.min():.0f} to {first.max():.0f}" if first.max() < 100 or first.max() - first.min() > 1 else ""
    if by_head.max() < 20:
        span = f"{first.min():.1f} to {first.max():.1f}"
        return f"Heads of layer 1 look {span} pixels away, those of the last {last.mean():.1f}; the mean is {mean:.1f}"
    span = span or f"{first.mean():.0f}"
    return f"Heads of layer 1 look {span} pixels away, those of the last {last.mean():.0f}; the mean is {mean:.0f}"


def training(subject: Subject) -> list[Section]:
    made = []
    if subject.run is not None:
        made.append(curves_of(read_log(subject.run)))
    sample = subject.sample
    if sample.labels is not None and len(sample) and subject.has_classifier:
        probability = probabilities(subject.model, sample.images).numpy()
        made += _judged(subject, probability, judge(probability, sample.labels))
    if not made:
        raise LeftOut("it needs the directory of a run (--run), or labelled pictures of the model's classes (--data)")
    return made


def curves_of(curves: Curves) -> Section:
    name = next((n for n in curves if "top1" in n or "accuracy" in n), None)
    if name is not None:
        values = curves[name][1]
        best = "its best" if values[-1] == values.max() else f"below its best of {values.max():.4g}"
        finding = f"{in_words(name).capitalize()} ends at {values[-1]:.4g}, {best}"
    else:
        name = "loss" if "loss" in curves else next(iter(curves))
        finding = f"{in_words(name).capitalize()} went from {curves[name][1][0]:.3g} to {curves[name][1][-1]:.3g}"
    arrays = {f"{n}_{part}": v[i] for n, v in curves.items() for i, part in enumerate(("step", "value"))}
    return Section(
        name="training",
        heading="Training",
        finding=finding,
        alt=f"Curves over training of {', '.join(in_words(n) for n in curves)}.",
        how="Pale lines are the values as logged, strong lines their running mean.",
        arrays=arrays,
        draw=lambda: checks.draw_curves(curves),
    )


def _judged(subject: Subject, probability: np.ndarray, found: Judgement) -> list[Section]:
    sample, names = subject.sample, [subject.class_name(i) for i in range(probability.shape[1])]
    assert sample.labels is not None
    wrong = found.confusion.copy()
    np.fill_diagonal(wrong, 0)
    t, p = np.unravel_index(int(wrong.argmax()), wrong.shape)
    mixed = f"; most often {names[t]} is taken for {names[p]} ({wrong[t, p]} times)" if wrong.any() else ""
    sure = "about as sure as it is right"
    bins = found.calibration
    gap = float(((bins.confidence - bins.accuracy) * bins.count).sum() / bins.count.sum())
    if abs(gap) > 0.02:
        sure = "too sure of itself" if gap > 0 else "not sure enough"
    worst = found.worst
    labels = [
        f"{names[sample.labels[i]][:10]}: {probability[i, sample.labels[i]]:.0%}\n"
        f"said {names[int(probability[i].argmax())][:10]}: {probability[i].max():.0%}"
        for i in worst
    ]
    wrong_count = int((probability.argmax(1) != sample.labels).sum())
    return [
        Section(
            name="confusion",
            heading="Confusion",
            finding=f"{found.accuracy:.1%} of {len(sample)} pictures are right{mixed}",
            alt=f"A square of {len(names)} by {len(names)} classes, true down and predicted across.",
            how="Colours are shares of each true class, numbers are pictures. A good model is bright on the diagonal.",
            arrays={"confusion": found.confusion, "probability": probability, "labels": sample.labels},
            draw=lambda: checks.draw_confusion(found, names),
        ),
        Section(
            name="calibration",
            heading="Calibration",
            finding=f"The model is {sure}: the expected calibration error is {bins.ece:.1%}",
            alt="Share of right predictions by confidence, against the diagonal, over counts of pictures.",
            how="On the diagonal, predictions made with 80% confidence are right 80% of the time. Below it the "
            "model is too sure. Bars are the spread of chance.",
            arrays={"confidence": bins.confidence, "correct": bins.accuracy, "counts": bins.count},
            draw=lambda: checks.draw_calibration(bins),
        ),
        Section(
            name="worst",
            heading="Worst pictures",
            finding=f"{wrong_count} of {len(sample)} pictures are wrong; these give their own class the least",
            alt=f"The {len(worst)} pictures with the lowest probability of their true class, worst first.",
            how="Below each picture: its true class with its probability, then what the model said. Wrong labels and "
            "odd pictures show up here first.",
            arrays={"index": worst, "names": np.array([sample.names[i] for i in worst])},
            draw=lambda: maps.draw_worst(sample.shown()[worst], labels),
        ),
    ]
