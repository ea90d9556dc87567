"""Training: from a folder of pictures to a good model, and a run that cannot be lost.

`vitkit.train(TrainConfig(data="digits"))` runs it: the package itself can be called.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from vitkit.train.config import TrainConfig

__all__ = ["TrainConfig"]


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from vitkit.train.run import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
