"""Installing elsewhere: the conda recipe is what pyproject.toml says, names suit every system, nothing needs fork."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import vitkit

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = sorted((ROOT / "src").rglob("*.py"))


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    import yaml
    from jinja2 import Template

    text = (ROOT / "recipe" / "meta.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(Template(text).render(PYTHON="python"))
    assert recipe["package"] == {"name": PROJECT["name"], "version": vitkit.__version__}
    names = {"torch": "pytorch"}
    wanted = {re.split(r"[;#]", line)[0].strip() for line in PROJECT["dependencies"]}
    pairs = (re.fullmatch(r"([\w-]+)(>=.+)", line) for line in wanted)
    asked = {f"{names.get(found[1], found[1])} {found[2]}" for found in pairs if found}
    assert set(recipe["requirements"]["run"]) == asked | {f"python {PROJECT['requires-python']}"}
    assert recipe["build"]["entry_points"] == [f"vitkit = {PROJECT['scripts']['vitkit']}"]


def test_version_as_json() -> None:
    words = [sys.executable, "-m", "vitkit", "--version", "--json"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert found["vitkit"] == vitkit.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"]


def test_no_file_of_ours_has_a_name_that_windows_refuses() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    for name in filter(None, files):
        assert not re.search(r'[<>:"\\|?*]', name.strip('"')), name
        assert not PureWindowsPath(name).is_reserved() if sys.version_info < (3, 13) else True, name


def names_written(tree: ast.AST) -> list[str]:
    """What looks like the name of a file in the source: text with a suffix of ours."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in texts if re.fullmatch(r"[^\s/=]+\.(json|jsonl|csv|png|safetensors|npy|npz|html)", text)]


def test_names_of_files_that_a_run_writes_suit_windows() -> None:
    written = {name for path in SOURCE for name in names_written(ast.parse(path.read_text(encoding="utf-8")))}
    assert "log.jsonl" in written
    assert not [name for name in written if re.search(r'[<>:"|?]', name)]  # a * is a pattern


@pytest.mark.parametrize("call", ["os.fork", "os.geteuid", "os.setsid", "os.getuid"])
def test_nothing_calls_what_only_unix_has(call: str) -> None:
    for path in SOURCE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == call], path


SPAWNED = """
import multiprocessing, sys, torch
multiprocessing.set_start_method("spawn", force=True)
import vitkit
from vitkit.data import Loader
from vitkit.model.config import Preprocessing
if __name__ == "__main__":
    source = vitkit.open_data(sys.argv[1]).split("train")
    def images(workers):
        with Loader(source, Preprocessing(size=(16, 16)), 4, workers=workers) as loader:
            return torch.cat([batch.images for batch in loader])
    assert torch.equal(images(0), images(2))
    print("the same")
"""


def write_images(folder: Path) -> Path:
    import numpy as np
    from PIL import Image

    for seed, name in enumerate(("cats", "dogs")):
        (folder / "train" / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.random.default_rng([seed, i]).integers(0, 255, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "train" / name / f"{i}.png")
    return folder


def test_workers_that_are_spawned_load_the_same_images(tmp_path: Path) -> None:
    """As on Windows and macOS, where nothing can be forked."""
    (tmp_path / "load.py").write_text(SPAWNED)
    words = [sys.executable, str(tmp_path / "load.py"), str(write_images(tmp_path / "set"))]
    found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert found.stdout.strip() == "the same", found.stderr


COMMANDED = """
import multiprocessing, sys
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    from vitkit.cli.main import run
    run()
"""


@pytest.mark.slow
def test_commands_whose_processes_are_spawned(tmp_path: Path) -> None:
    """`data check` and `train` with two loading processes: the same weights as with none."""
    import torch

    write_images(tmp_path / "set")
    (tmp_path / "command.py").write_text(COMMANDED)

    def command(*words: str) -> str:
        line = [sys.executable, "command.py", *words]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "12" in command("data", "check", "set", "--workers", "2")
    for workers in ("0", "2"):
        more = ("--model", "mu", "--image-size", "32", "--steps", "2", "--out", f"run{workers}", "--workers", workers)
        command("train", "set", *more)
    one, two = (vitkit.load(tmp_path / name).state_dict() for name in ("run0", "run2"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_server_decodes_in_spawned_processes(monkeypatch) -> None:
    """Where there is no forkserver, `vitkit serve` spawns the processes that decode."""
    import multiprocessing

    from vitkit.web import decoding

    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    context = decoding._context.__wrapped__()
    assert context.get_start_method() == "spawn"
