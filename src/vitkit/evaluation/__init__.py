"""A model and a set -> `run` (every sample once) -> metrics -> `figures`; `probes` evaluate a representation."""

from vitkit.evaluation.probes import Probe, fewshot, knn
from vitkit.evaluation.run import evaluate, evaluation_loader, quick
from vitkit.tasks.result import Evaluation

__all__ = ["Evaluation", "Probe", "evaluate", "evaluation_loader", "fewshot", "knn", "quick"]
