"""Imports point one way, from the command down to the errors; ARCHITECTURE.md names every module."""

import ast
from pathlib import Path

import pytest

import vitkit

SOURCE = Path(vitkit.__file__).parent
LAYERS = [  # lower lines may be imported by higher ones; siblings on one line do not see each other
    {"cli", "__main__"},
    {"web"},
    {"study"},
    {"plan"},
    {"train"},
    {"predict"},
    {"explain", "runtime"},
    {"evaluate"},
    {"checkpoints", "data"},
    {"model"},
    {"ranks"},
    {"errors"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}


def part_of(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path) -> set[str]:
    """Parts of vitkit that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            names = [node.module or ""]
            if node.module == "vitkit":  # from vitkit import x
                names = [f"vitkit.{a.name}" for a in node.names if f"{a.name}" in RANK]
        found |= {part_of(n) for n in names if n.startswith("vitkit.")}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(SOURCE).with_suffix("").parts[0]
    if own == "__init__":  # the package itself only lists where its names live
        return
    for other in imports(path) - {own}:
        same_layer = RANK[own] == RANK[other] and own == "__main__"
        assert RANK[own] < RANK[other] or same_layer, f"{own} must not import {other}"


def test_every_part_has_a_layer_and_a_line_in_the_architecture() -> None:
    parts = {p.stem for p in SOURCE.iterdir() if (p.is_dir() and (p / "__init__.py").exists()) or p.suffix == ".py"}
    assert parts - {"__init__"} <= RANK.keys()
    text = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text()
    modules = [p for p in SOURCE.rglob("*.py") if p.name not in ("__init__.py", "__main__.py")]
    missing = [str(p.relative_to(SOURCE)) for p in modules if p.name not in text]
    assert not missing, f"ARCHITECTURE.md does not mention {missing}"


def test_the_check_itself_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "def f():\n    from vitkit.cli import main\n    import vitkit.model.zoo\n    from vitkit import errors\n"
    )
    assert imports(wrong) == {"cli", "model", "errors"}
