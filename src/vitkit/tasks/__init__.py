"""What a model learns to say (classes, labels, numbers), how it learns it, and how well it does."""

from vitkit.tasks.base import Metric, Settings, Task
from vitkit.tasks.match import columns_of
from vitkit.tasks.table import METHODS, TASKS, open_data_for, task_of

__all__ = ["METHODS", "TASKS", "Metric", "Settings", "Task", "columns_of", "open_data_for", "task_of"]
