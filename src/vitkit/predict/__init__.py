"""Pictures -> ranked classes or features, for a handful or for millions of them."""

from __future__ import annotations

from vitkit.predict.classify import Classify
from vitkit.predict.features import Embed, Features
from vitkit.predict.inputs import open_inputs
from vitkit.predict.job import Done, run_job, stream

__all__ = ["Classify", "Done", "Embed", "Features", "open_inputs", "run_job", "stream"]
