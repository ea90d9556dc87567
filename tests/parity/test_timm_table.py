"""timm_models.json says what the installed timm says, name by name."""

from __future__ import annotations

import json

import pytest

import peers

timm = peers.import_timm()
import make_timm_table  # noqa: E402

WRITTEN = json.loads(make_timm_table.TABLE.read_text())


pytestmark = pytest.mark.skipif(
    timm.__version__ != WRITTEN["timm"], reason=f"the table is of timm {WRITTEN['timm']}, not of the installed one"
)


def plain(value: object) -> object:
    return json.loads(json.dumps(value))


def test_every_name_is_in_the_table() -> None:
    names = [name for module in make_timm_table.MODULES for name in timm.list_models(module=module)]
    assert sorted(WRITTEN["models"]) == sorted(names)
    assert len(names) == 284


@pytest.mark.parametrize("module", make_timm_table.MODULES)
def test_a_row_of_every_module_is_what_timm_builds(module: str) -> None:
    name = timm.list_models(module=module)[0]
    assert WRITTEN["models"][name] == plain(make_timm_table.row(module, name, WRITTEN["classes"]))


@pytest.mark.slow
def test_every_row_is_what_timm_builds() -> None:
    asked = plain(make_timm_table.table())
    assert WRITTEN["classes"] == asked["classes"]
    for name, row in asked["models"].items():
        assert WRITTEN["models"][name] == row, f"{name}: run python tests/parity/make_timm_table.py"
