"""The same model, run by whatever is fastest on this machine, and proven equal. No torch until a runtime is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.progress import SILENT, Progress
from vitkit.runtime.table import FORMATS, RUNTIMES

if TYPE_CHECKING:
    from torch import nn

    from vitkit.runtime.base import Runtime

__all__ = ["FORMATS", "RUNTIMES", "open_runtime"]


def open_runtime(
    model: nn.Module,
    kind: str = "auto",
    *,
    source: str | Path | None = None,
    int8: bool = False,
    merge: int | str = 0,
    progress: Progress = SILENT,
) -> Runtime:
    """A runtime for a loaded model; "auto" takes what `vitkit tune` chose for it, or PyTorch as it is.

    source    where the model was loaded from: beside it, "auto" looks for what `tune` stored
    int8      8-bit matrix products
    merge     patches that each block merges into others
    progress  is told why "auto" does not take what was stored
    """
    from vitkit.runtime.base import Choice, build
    from vitkit.runtime.tuned import stored

    if kind == "auto":
        tuned = None if source is None or int8 or merge else stored(model, source, progress)
        if tuned is not None:
            return tuned
        kind = next(name for name, row in RUNTIMES.items() if not int8 or row.int8 is not None)
    return build(model, Choice(kind, int8, merge=merge))
