"""The figures of `vitkit explain`, in the order of the page. One row and one file make a figure; no torch here.

The file of a row has `make(subject) -> Section`: it computes the arrays and says what they show, or raises
`LeftOut` with the reason. `vitkit explain --only`, its help and the docs read this table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitkit.errors import InputError, did_you_mean

CLASSIFIER = "images, a classifier"
LABELLED = "a labelled set of the model's classes"


@dataclass(frozen=True)
class Row:
    name: str  # of its files, and of its module in this package
    question: str  # that it answers
    needs: str = ""
    part_of: str = ""  # another figure: --only with its name makes this one too
    module: str = ""  # of several figures, which has `make_NAME` for this one


FIGURES = (
    Row("attention", "where does the output token look: the last layer, and rolled out over all layers", "images"),
    Row("heads", "the same, by layer and head", "images", "attention", "attention"),
    Row("relevance", "what speaks for a class: gradient-weighted attention, and Grad-CAM on tokens", CLASSIFIER),
    Row("occlusion", "how does the probability fall when each patch is hidden", CLASSIFIER, module="faithfulness"),
    Row("faithfulness", "which of these maps is most faithful: deletion and insertion against random", CLASSIFIER),
    Row("query", "what does one patch attend to, by layer and head", "images", module="attention"),
    Row("tokens", "which patches have similar states: principal components as colours, by layer", "images"),
    Row("similarity", "which patches become similar to one of them, by layer", "images", "tokens", "tokens"),
    Row("distance", "how far and how widely does each head look, by depth", "images or a set"),
    Row("positions", "what does the model know about places: similarity, or the bias by offset", module="weights"),
    Row("filters", "what does the first layer see: 28 principal components of the patch embedding", module="weights"),
    Row("training", "how did training go: the curves of the run", "a run"),
    Row("confusion", "which classes are confused", LABELLED, part_of="training"),
    Row("calibration", "is the model overconfident", LABELLED, "training", "confusion"),
    Row("worst", "which images does it get most wrong", LABELLED, "training", "confusion"),
)


def choose(only: Sequence[str] | None) -> list[Row]:
    """All figures, or those named with what is part of them."""
    names = [row.name for row in FIGURES]
    for name in only or ():
        if name not in names:
            raise InputError(f"there is no figure {name!r}.{did_you_mean(name, names)} Choose from: {', '.join(names)}")
    return [row for row in FIGURES if not only or row.name in only or row.part_of in only]
