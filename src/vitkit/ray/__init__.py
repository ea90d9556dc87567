"""vitkit on Ray: `ds.map_batches(vitkit.ray.Predictor, fn_constructor_args=("model.safetensors",), ...)`.

The commands use the rest: `vitkit predict|embed|train --engine ray`.
"""

from importlib.util import find_spec

from vitkit.errors import MissingPackage

if find_spec("ray") is None:
    raise MissingPackage("ray", "vitkit.ray", "ray")

from vitkit.ray.predictor import Predictor  # only where there is a Ray

__all__ = ["Predictor"]
