"""Importing is silent and light, and --help answers without torch."""

import subprocess
import sys

import pytest

import vitkit

HEAVY = {"torch", "numpy", "PIL", "rich.table", "matplotlib", "sklearn", "pyarrow", "transformers", "timm"}


def modules_after(code: str) -> tuple[set[str], str]:
    code += "\nimport sys; print('MODULES', *sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    noise, _, names = done.stderr.partition("MODULES ")
    assert noise == "", f"importing printed {noise!r}"
    return set(names.split()), done.stdout


@pytest.mark.parametrize("module", ["vitkit", "vitkit.cli.main", "vitkit.model.zoo", "vitkit.errors"])
def test_light_and_silent(module: str) -> None:
    modules, out = modules_after(f"import {module}")
    assert not modules & HEAVY
    assert out == ""


def test_help_imports_no_torch() -> None:
    code = "import sys, contextlib\nsys.argv = ['vitkit', '--help']\nfrom vitkit.cli.main import run\n"
    code += "with contextlib.suppress(SystemExit):\n    run()"
    modules, out = modules_after(code)
    assert not modules & HEAVY
    assert "summary" in out


def test_every_public_name_is_there() -> None:
    for name in vitkit.__all__:
        assert getattr(vitkit, name) is not None
    assert set(vitkit.__all__) <= set(dir(vitkit))
    with pytest.raises(AttributeError, match="nothing_of_the_sort"):
        vitkit.nothing_of_the_sort  # noqa: B018
