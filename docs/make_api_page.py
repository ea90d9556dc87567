"""Write docs/api/index.md, the public names of Python, from `vitkit.__all__`: `make commands`."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import get_type_hints

TOP = """# The Python interface

`import vitkit` gives the names on this page. Nothing else is promised: every other module may change without notice,
also those on the pages "Inside". CONTRIBUTING.md says what a promise means. 
The functions have the words of the commands.
"""

ENGINES = ("ray.predictor.Predictor", "spark.predictor", "spark.schema")  # their modules need packages of their own


def page() -> str:
    import vitkit

    public = {name: getattr(vitkit, name) for name in vitkit.__all__ if name != "__version__"}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    classes = {name: value for name, value in public.items() if name not in functions}
    returned = {}
    for function in functions.values():
        kind = get_type_hints(function)["return"]
        if dataclasses.is_dataclass(kind) and kind not in classes.values():
            returned[kind.__name__] = kind
    parts = [TOP]
    for title, found in (("Functions", functions), ("Classes", classes), ("What functions return", returned)):
        parts += [f"## {title}\n", *(f"::: {value.__module__}.{value.__name__}\n" for value in found.values())]
    parts += ["## On engines\n", *(f"::: vitkit.{name}\n" for name in ENGINES)]
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("api").joinpath("index.md").write_text(page(), encoding="utf-8")
