"""Experiment trackers that a run feeds besides its own log: `train --track mlflow`. One file each, and a row here."""

from __future__ import annotations

from vitkit.training.trackers.base import About, Tracker
from vitkit.training.trackers.mlflow import MLflow
from vitkit.training.trackers.tensorboard import TensorBoard
from vitkit.training.trackers.wandb import WandB

__all__ = ["TRACKERS", "About", "Tracker"]

TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
