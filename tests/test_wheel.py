"""The wheel holds what an installed vitkit needs, and nothing else; the sdist what it takes to build and test it."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vitkit"


@pytest.mark.slow
def test_the_wheel_is_complete_and_small(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 1_250_000
    inside = {info.filename: info.compress_size for info in zipfile.ZipFile(wheel).infolist()}
    assert max(inside.values()) < 25_000, "code, a page and its three images: nothing in it is large"
    here = {
        p.relative_to(SOURCE.parent).as_posix()
        for p in SOURCE.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert here <= inside.keys()  # modules, py.typed, and the files of the page
    assert "vitkit/py.typed" in inside
    page = SOURCE / "web" / "static"
    assert not page.exists() or any(name.startswith("vitkit/web/static/") for name in inside)
    assert not any(name.startswith(("tests/", "docs/", "benchmarks/")) for name in inside)
    for table in ("checkpoints/timm_models.json", "explanation/report.css", "web/static/index.html"):
        assert f"vitkit/{table}" in inside


@pytest.mark.slow
def test_the_sdist_can_be_built_and_tested(tmp_path: Path) -> None:
    """All that git has of these, so that a packager can run the tests; nothing that git ignores."""
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert sdist.stat().st_size < 6_000_000
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    parts = ("src", "tests", "docs", "recipe", "benchmarks", "constraints.txt", "pyproject.toml", "LICENSE")
    known = subprocess.run(["git", "ls-files", *parts], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert set(known.splitlines()) <= inside
    assert not any("__pycache__" in name or name.startswith((".venv", "runs", "site")) for name in inside)
