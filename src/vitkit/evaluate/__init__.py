"""How good is a model: a model and a set of pictures -> accuracy, calibration, mistakes.

In the order data flows: `classes` (which output is which class) -> `run` (every sample once, on any
number of ranks) -> `records` -> `metrics` -> `result` -> `pictures`. `probes` judge a representation.
"""

from __future__ import annotations

from vitkit.evaluate.classes import columns_of
from vitkit.evaluate.probes import Probe, fewshot, knn
from vitkit.evaluate.records import Records, merge
from vitkit.evaluate.result import Evaluation, Mistake
from vitkit.evaluate.run import evaluate, evaluation_loader, quick, run, run_part

__all__ = [
    "Evaluation",
    "Mistake",
    "Probe",
    "Records",
    "columns_of",
    "evaluate",
    "evaluation_loader",
    "fewshot",
    "knn",
    "merge",
    "quick",
    "run",
    "run_part",
]
