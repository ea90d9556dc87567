"""The structure of the tree: imports point one way, what exists once is used once, nothing grows without being seen.

ARCHITECTURE.md names every module.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import vitkit

SOURCE = Path(vitkit.__file__).parent
LAYERS = [  # lower lines may be imported by higher ones; siblings on one line do not see each other
    {"cli", "__main__"},
    {"api", "sklearn", "hub"},
    {"ray", "spark"},
    {"web"},
    {"study"},
    {"plan"},
    {"training"},
    {"curation"},
    {"prediction"},
    {"explanation", "runtime"},
    {"evaluation"},
    {"figures"},
    {"tasks"},
    {"checkpoints", "data"},
    {"model"},
    {"storage"},
    {"world", "io", "locks", "progress"},
    {"display"},
    {"errors"},
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
TREES = {p.relative_to(SOURCE).as_posix(): ast.parse(p.read_text()) for p in sorted(SOURCE.rglob("*.py"))}


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


# --- one of each: what exists once is called from one place ------------------------------------------


def calls(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            yield ast.unparse(inner.func), inner


def opens_images(tree: ast.AST) -> bool:
    return any(name.split(".")[-2:] == ["Image", "open"] for name, _ in calls(tree))


def renames_files(tree: ast.AST) -> bool:
    """os.replace, os.rename, shutil.move, path.rename(x), path.replace(x); a string's replace takes two arguments."""
    for name, call in calls(tree):
        one_argument = len(call.args) == 1 and not call.keywords
        if name in ("os.replace", "os.rename", "os.renames", "shutil.move"):
            return True
        if name.endswith((".rename", ".replace")) and one_argument and not isinstance(call.args[0], ast.Starred):
            return True
    return False


def draws_bars(tree: ast.AST) -> bool:
    imported = {name for name, _ in imported_names(tree, {})}
    return any(name == "rich.progress" or name.startswith(("rich.progress.", "tqdm")) for name in imported)


def picks_devices(tree: ast.AST) -> bool:
    asked = ("init_process_group", "cuda.is_available", "mps.is_available")
    return any(name.endswith(asked) for name, _ in calls(tree))


RULES: dict[str, tuple[Callable[[ast.AST], bool], set[str]]] = {  # what -> (how it is seen, who may)
    "opens images": (opens_images, {"data/decode.py"}),
    "renames files": (renames_files, {"io.py"}),
    "draws bars": (draws_bars, {"progress.py", "training/live.py"}),
    "picks devices": (picks_devices, {"world.py"}),
}


@pytest.mark.parametrize("rule", RULES)
def test_only_one_module(rule: str) -> None:
    breaks, allowed = RULES[rule]
    found = {name for name, tree in TREES.items() if breaks(tree)}
    assert found <= allowed, f"only {sorted(allowed)} {rule}"


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("opens images", "from PIL import Image\nImage.open(x)"),
        ("opens images", "import PIL.Image\nPIL.Image.open(x)"),
        ("renames files", "part.replace(target)"),
        ("renames files", "import os\nos.replace(a, b)"),
        ("draws bars", "def f():\n    from rich.progress import track"),
        ("draws bars", "def f():\n    from rich import progress"),
        ("picks devices", "import torch\ntorch.backends.mps.is_available()"),
        ("picks devices", "import torch.distributed as dist\ndist.init_process_group()"),
    ],
)
def test_the_rules_see_what_breaks_them(rule: str, code: str) -> None:
    assert RULES[rule][0](ast.parse(code))
    assert not RULES[rule][0](ast.parse("'a'.replace('b', 'c')\nconfig.replace(size=3)\nopen(x)"))


# --- no late import hides a cycle --------------------------------------------------------------------
# An import inside a function is there to keep start-up light, and for nothing else: it brings in a package that
# its module does without. The command line is light as a whole, so its commands import what they need when they run.

HEAVY = {
    "torch",
    "numpy",
    "PIL",
    "rich",
    "matplotlib",
    "pyarrow",
    "sklearn",
    "huggingface_hub",
    "safetensors",
    "einops",
}
HEAVY |= {"onnx", "onnxruntime", "onnxscript", "openvino", "nncf", "fastapi", "uvicorn", "starlette"}
HEAVY |= {"prometheus_client", "fsspec", "aiohttp", "ray", "pandas"}
LATE_IN = {"vitkit", "cli", "__main__", "api"}  # free to import late


def imported_names(tree: ast.AST, modules: Mapping[str, object], late: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether inside a function) of each import that runs; those for type checkers do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name if name in modules or not modules else str(node.module), late) for name in full)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imported_names(node, modules, late or inside)


def module_name(path: str) -> str:
    return ".".join(["vitkit", *(p for p in Path(path).with_suffix("").parts if p != "__init__")])


def reached(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    """The modules that importing one imports, packages above it included."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph.get(name, set())
            if name in graph and name.count(".") > 1:
                todo.append(name.rpartition(".")[0])
    return seen


def cycles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Modules that reach each other, found by asking each what it reaches (packages above are not asked)."""

    def onward(name: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[name])
        while todo:
            other = todo.pop()
            if other in graph and other not in seen:
                seen.add(other)
                todo += graph[other]
        return seen

    reach = {name: onward(name) for name in graph}
    found = {frozenset(o for o in reach[n] if n in reach[o]) for n in graph if n in reach[n]}
    return [set(one) for one in found]


def graph_of(trees: Mapping[str, ast.AST], with_late: bool) -> dict[str, set[str]]:
    names = {module_name(path): tree for path, tree in trees.items()}
    return {m: {n for n, late in imported_names(t, names) if with_late or not late} - {m} for m, t in names.items()}


def test_no_import_goes_in_a_circle() -> None:
    graph = {m: others for m, others in graph_of(TREES, with_late=True).items() if m != "vitkit"}
    assert not cycles(graph), f"these modules import each other: {cycles(graph)}"


def test_late_imports_only_keep_start_up_light() -> None:
    graph = graph_of(TREES, with_late=False)
    useless = []
    for path, tree in TREES.items():
        module = module_name(path)
        if part_of(f"{module}.") in LATE_IN or module == "vitkit":
            continue
        has = {name.split(".")[0] for name in reached(module, graph)} & HEAVY
        for other, late in imported_names(tree, graph):
            brings = {name.split(".")[0] for name in reached(other, graph)} & HEAVY
            if late and other in graph and brings <= has:
                useless.append(f"{path}: {other}")
    assert not useless, f"move these imports to the top of the file: {useless}"


def test_the_graph_sees_late_imports_and_circles() -> None:
    code = {
        "a.py": "def f():\n    from vitkit import b",
        "b.py": "from vitkit.a import f",
        "c.py": "import vitkit.a",
        "d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vitkit.c",
    }
    trees = {path: ast.parse(text) for path, text in code.items()}
    assert cycles(graph_of(trees, with_late=True)) == [{"vitkit.a", "vitkit.b"}]
    assert cycles(graph_of(trees, with_late=False)) == []
    assert graph_of(trees, with_late=True)["vitkit.d"] == {"typing"}


# --- how large it may grow ---------------------------------------------------------------------------

LIMITS = {  # they may only become lower; lines have risen with pre-training, the map, search and label errors, with
    "lines of src": 48_110,  # letters, studies, storage, shards, Ray, lost nodes, trackers, hub, states, sizes
    "times the word Any": 40,
    "lines of nine functions in ten": 20,
    "lines of the longest file": 400,
}


def sizes() -> dict[str, int]:
    texts = {path: (SOURCE / path).read_text() for path in TREES}
    functions = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {
        "lines of src": sum(text.count("\n") for text in texts.values()),
        "times the word Any": sum(len(re.findall(r"\bAny\b", text)) for text in texts.values()),
        "lines of nine functions in ten": functions[len(functions) * 9 // 10],
        "lines of the longest file": max(text.count("\n") for text in texts.values()),
    }


@pytest.mark.parametrize("what", LIMITS)
def test_size(what: str) -> None:
    assert sizes()[what] <= LIMITS[what]


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by name: of two with one name only the first would run."""
    names = [p.name for p in Path(__file__).parent.rglob("*.py") if p.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
