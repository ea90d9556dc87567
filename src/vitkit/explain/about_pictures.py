"""Sections about pictures: attention, relevance, one patch's view, token states, occlusion, faithfulness."""

from __future__ import annotations

import numpy as np

from vitkit.explain.faithfulness import RANDOM, Faithfulness, faithfulness_curves
from vitkit.explain.figures import checks, maps
from vitkit.explain.query import query_attention
from vitkit.explain.section import Section, Subject
from vitkit.explain.tokens import token_colours, token_similarity, token_states

OUTPUT = {
    "cls": "the class token",
    "mean": "all patches alike (the model pools by their mean)",
    "cls+mean": "the class token and the mean of the patches",
    "map": "the probe of the MAP head",
}
MOST_TOKEN_ROWS = 4


def attention(subject: Subject) -> list[Section]:
    subject.need_pictures()
    found, shown = subject.attention, subject.pictures.shown()
    last = found.raw[:, -1].mean(axis=1) if found.probe is None else found.probe.mean(axis=1)
    share = np.mean([half_mass(m) for m in found.rollout])
    arrays = {"raw": found.raw, "rollout": found.rollout, "names": np.array(subject.pictures.names)}
    arrays |= {} if found.probe is None else {"probe": found.probe}
    output = OUTPUT[subject.model.config.pooling]
    overlays = Section(
        name="attention",
        heading="Attention from the output token",
        finding=f"Half of the rolled-out attention falls on {share:.0%} of the picture",
        alt=f"{len(shown)} pictures, each with the last layer's attention, the rollout over all layers, and the "
        f"picture lit where the rollout is high.",
        how=f"Seen from {output}. Last layer: its mean over heads. Rollout: heads averaged, half attention and half "
        f"residual path, rows renormalised, layers multiplied. Each map is scaled to its own maximum.",
        arrays=arrays,
        draw=lambda: maps.draw_attention(shown, last, found.rollout, subject.pictures.names),
    )
    layer, head = np.unravel_index(int(found.raw[0].max(axis=(2, 3)).argmax()), found.raw.shape[1:3])
    heads = Section(
        name="heads",
        heading="Every layer and head",
        finding=f"The most pointed is head {head + 1} of layer {layer + 1}: "
        f"{found.raw[0, layer, head].max():.0%} of its attention is on one patch",
        alt=f"Maps of the first picture's attention from the output token, {found.raw.shape[1]} layers down and "
        f"{found.raw.shape[2]} heads across.",
        how=f"The attention of {output} to the patches of the first picture ({subject.pictures.names[0]}), as it is in "
        f"each layer and head. One scale for all; it ends at the 99.5th percentile.",
        arrays={"raw": found.raw[0]},
        draw=lambda: maps.draw_layers(found.raw[0], shown[0], "attention"),
    )
    return [overlays, heads]


def half_mass(values: np.ndarray) -> float:
    """The smallest share of the patches that holds half of the sum."""
    ordered = np.sort(values.reshape(-1))[::-1]
    total = np.cumsum(ordered)
    return float((np.searchsorted(total, total[-1] / 2) + 1) / len(ordered))


def relevance(subject: Subject) -> list[Section]:
    subject.need_classifier()
    found, shown = subject.relevance, subject.pictures.shown()
    labels = []
    for i, name in enumerate(subject.pictures.names):
        classes = subject.explained[i].tolist()
        words = [f"{subject.class_name(c)}: {subject.probability[i, c]:.0%}" for c in classes]
        labels.append([name, *words, words[0]])
    columns = ["why the likeliest?", "why the second?"]
    if subject.classes is not None:
        columns = [f"why {subject.class_name(c)}?" for c in subject.classes]
    finding = f"Half of the relevance is on {np.mean([half_mass(m[0]) for m in found.relevance]):.0%} of the picture"
    if found.relevance.shape[1] > 1:
        alike = float(np.mean([correlation(m[0], m[1]) for m in found.relevance]))
        verdict = "differ between classes" if alike < 0.9 else "are nearly the same for both classes"
        finding = f"The maps {verdict}: their mean correlation is {alike:.2f}"
    section = Section(
        name="relevance",
        heading="Relevance for a class",
        finding=finding,
        alt=f"{len(shown)} pictures, each with a relevance map for {found.relevance.shape[1]} classes and Grad-CAM.",
        how="What in the picture raises the score of the class named below each map. Attention of all layers weighted "
        "by the gradient of the class score, negative values dropped (Chefer et al.). Each map is "
        "shown from its smallest value to its largest. "
        "Grad-CAM is for the first class, on the last patch states that reach the classifier.",
        arrays={
            "relevance": found.relevance,
            "gradcam": found.gradcam,
            "classes": subject.explained.numpy(),
            "probability": subject.probability.gather(1, subject.explained).numpy(),
            "names": np.array(subject.pictures.names),
        },
        draw=lambda: maps.draw_relevance(shown, found.relevance, found.gradcam[:, 0], columns, labels),
    )
    return [section]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's, of two maps; 0 when one of them is constant."""
    a, b = a.reshape(-1) - a.mean(), b.reshape(-1) - b.mean()
    length = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / length if length > 0 else 0.0


def query(subject: Subject) -> list[Section]:
    subject.need_pictures()
    patch = subject.query_patch
    values = query_attention(subject.model, subject.pictures.images[:1], patch)[0]  # L H h w
    itself = values[:, :, patch[0], patch[1]]
    layer, head = np.unravel_index(int(itself.argmax()), itself.shape)
    section = Section(
        name="query",
        heading="What one patch attends to",
        finding=f"The marked patch gives itself {itself.mean():.1%} of its attention on average, "
        f"most in head {head + 1} of layer {layer + 1} ({itself.max():.0%})",
        alt=f"The first picture with patch row {patch[0] + 1}, column {patch[1] + 1} marked, and its attention to all "
        f"patches, {values.shape[0]} layers down and {values.shape[1]} heads across.",
        how=f"The query is the patch in row {patch[0] + 1}, column {patch[1] + 1} of {subject.pictures.names[0]}; "
        f"choose another with --query ROW,COLUMN (from 0). One scale for all; it ends at the 99.5th percentile.",
        arrays={"attention": values, "patch": np.array(patch)},
        draw=lambda: maps.draw_layers(values, subject.pictures.shown()[0], "attention of the marked patch", patch),
    )
    return [section]


def tokens(subject: Subject) -> list[Section]:
    subject.need_pictures()
    depth, patch = subject.model.config.depth, subject.query_patch
    chosen = sorted({round(d) for d in np.linspace(0, depth, 5)})
    names = [state_name(d) for d in chosen]
    states = token_states(subject.model, subject.pictures.images, chosen)  # B S h w D
    parts = [token_colours(states[:, s]) for s in range(len(chosen))]
    colours, shares = np.stack([c for c, _ in parts]), np.stack([v for _, v in parts])
    every = token_states(subject.model, subject.pictures.images[:1])[0]
    similar = token_similarity(every, patch)  # S h w
    rows = min(MOST_TOKEN_ROWS, len(subject.pictures))
    shown = subject.pictures.shown()
    pca = Section(
        name="tokens",
        heading="Patch states as colours",
        finding=f"Three components hold {shares[-1].sum():.0%} of the variance of the last layer's patch states",
        alt=f"{rows} pictures, each with maps of its patch states at {len(chosen)} depths; similar states have similar "
        f"colours.",
        how="The first three principal components of the patch states as red, green and blue, computed over all "
        "pictures of a layer together: within a column the same colour means the same kind of content.",
        arrays={"colours": colours, "variance": shares, "layers": np.array(chosen)},
        draw=lambda: maps.draw_tokens(shown[:rows], colours[:, :rows], names, subject.pictures.names[:rows]),
    )
    count = similar[0].size
    mean = (similar.sum(axis=(1, 2)) - 1) / max(1, count - 1)  # without the patch itself, whose similarity is 1
    few = sorted({round(d) for d in np.linspace(0, depth, 7)})  # with the picture, two rows of four
    alike = Section(
        name="similarity",
        heading="Which patches become alike",
        finding=f"The other patches' mean similarity to the marked one goes from {mean[0]:.2f} at the input "
        f"to {mean[-1]:.2f} after the last layer",
        alt=f"The first picture with one patch marked and {len(few)} maps of how similar all patches are to it.",
        how="Cosine similarity of the patch states to that of the marked patch, after each layer. One scale for all.",
        arrays={"similarity": similar, "patch": np.array(patch)},
        draw=lambda: maps.draw_similar(shown[0], similar[few], [state_name(d) for d in few], patch),
    )
    return [pca, alike]


def state_name(depth: int) -> str:
    return "input" if depth == 0 else f"layer {depth}"


def occlusion(subject: Subject) -> list[Section]:
    subject.need_classifier()
    found, shown = subject.occluded, subject.pictures.shown()
    names = [subject.class_name(int(c)) for c in subject.explained[:, 0]]
    largest = np.abs(found.drop).reshape(len(found.drop), -1).max(axis=1)
    labels = [
        (f"{n}: {p:.0%}", f"up to {percent(c)}") for n, p, c in zip(names, found.probability, largest, strict=True)
    ]
    most = found.drop.reshape(len(found.drop), -1).max(axis=1)
    section = Section(
        name="occlusion",
        heading="Occlusion",
        finding=f"Hiding one patch lowers the probability of the class by up to {percent(most.max())}, "
        f"{percent(most.mean())} on average",
        alt=f"{len(shown)} pictures, each beside a map of the fall in probability when a patch is hidden.",
        how="Each patch in turn is filled with the picture's mean colour and the model is asked again. Red: the patch "
        "spoke for the class; blue: against it. Each map goes up to its largest change, which is named below it. "
        "Nothing is assumed about the model: this is the check of the others.",
        arrays={
            "drop": found.drop,
            "probability": found.probability,
            "classes": subject.explained[:, 0].numpy(),
            "names": np.array(subject.pictures.names),
        },
        draw=lambda: maps.draw_occlusion(shown, found.drop, labels),
    )
    return [section]


def percent(share: float) -> str:
    """Two digits that count: 12%, 1.2%, 0.12%."""
    return f"{100 * share:.{0 if share >= 0.1 else 1 if share >= 0.01 else 2}f}%"


def faithfulness(subject: Subject) -> list[Section]:
    subject.need_classifier()
    attention_ = subject.attention
    last = attention_.raw[:, -1].mean(axis=1) if attention_.probe is None else attention_.probe.mean(axis=1)
    candidates = {
        "relevance": subject.relevance.relevance[:, 0],
        "Grad-CAM": subject.relevance.gradcam[:, 0],
        "rollout": attention_.rollout,
        "last layer": last,
        "occlusion": subject.occluded.drop,
    }
    found = faithfulness_curves(subject.model, subject.pictures.images, subject.explained[:, 0], candidates)
    table = found.table()
    section = Section(
        name="faithfulness",
        heading="Which map to believe",
        finding=_verdict(found),
        alt="Two charts of the class probability as patches are hidden, or shown, in the order of each map; a dashed "
        "line for random orders.",
        how="Deletion hides the patches that a map calls most important first; insertion shows them first. The table "
        "gives areas under the curves, and their ratio to random orders (mean of 3). A map that does not beat the "
        "random order says little about this model.",
        arrays={
            "methods": np.array(found.methods),
            "fractions": found.fractions,
            "deletion": found.deletion,
            "insertion": found.insertion,
        },
        draw=lambda: checks.draw_faithfulness(found),
        table=table,
    )
    return [section]


def _verdict(found: Faithfulness) -> str:
    rows = [row for row in found.table() if row["method"] != RANDOM]
    best = min(rows, key=lambda row: row["deletion_ratio"])
    ratio = float(best["deletion_ratio"])
    if ratio > 0.95:
        return (
            f"No map beats a random order by 5% on these pictures (the best by {1 - ratio:.0%}): believe none of them"
        )
    return f"Believe {best['method']} most: its deletion area is {ratio:.2f} of that of a random order"
