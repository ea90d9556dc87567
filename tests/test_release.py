"""What a maintainer relies on: one version everywhere, notes for it, workflows that can be read, a tour that runs."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load_script(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_version_and_a_section_for_it() -> None:
    notes = load_script(ROOT / ".github" / "release_notes.py")
    (version,) = notes.versions()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {version} (" in changelog
    dated = re.sub(rf"## {re.escape(version)} \([^)]*\)", f"## {version} (2026-01-01)", changelog)
    assert notes.notes(version, dated).startswith("- ")
    with pytest.raises(SystemExit, match="no section"):
        notes.notes("9.9.9", changelog)
    with pytest.raises(SystemExit, match="no date"):
        notes.notes("1.0.0", "## 1.0.0 (unreleased)\n- much\n")


def test_workflows_run_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        used |= set(re.findall(r"run: make ([a-z-]+)", path.read_text()))
    assert {"lint", "types", "test", "docs", "test-slow"} <= used <= targets


def workflows() -> dict[str, dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return {p.name: yaml.safe_load(p.read_text()) for p in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_actions_are_pinned_by_digest() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (.+)", path.read_text())
        assert used
        loose = [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)]
        assert not loose, f"{path.name}: write owner/name@digest # vX.Y.Z for {loose}"


def test_workflows_may_only_read() -> None:
    """But for the jobs that publish, which check out nothing and run none of our code."""
    for name, workflow in workflows().items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job, about in workflow["jobs"].items():
            uses = [step.get("uses", "").split("@")[0] for step in about["steps"]]
            if "permissions" in about:
                assert (name, job) in {("release.yml", "publish"), ("release.yml", "release")}
                assert "actions/checkout" not in uses
                assert not any(word in str(about["steps"]) for word in ("pip", "python ", "make "))
            for step in about["steps"]:
                if step.get("uses", "").startswith("actions/checkout"):
                    assert step["with"]["persist-credentials"] is False


def test_a_release_is_tested_then_built_then_published() -> None:
    jobs = workflows()["release.yml"]["jobs"]
    assert [(job, about.get("needs")) for job, about in jobs.items()] == [
        ("test", None),
        ("build", "test"),
        ("publish", "build"),
        ("release", "publish"),
    ]
    steps = str(jobs["build"]["steps"])
    assert "pip-audit --strict" in steps
    assert "cyclonedx-py environment" in steps
    assert jobs["publish"]["environment"] == "pypi"


@pytest.mark.parametrize(("package", "least"), [("torch", "2.10"), ("onnx", "1.21"), ("pillow", "12.3")])
def test_minimum_versions_exclude_known_holes(package: str, least: str) -> None:
    found = re.findall(rf'"{package}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert len(found) == 1
    assert [int(n) for n in found[0].split(".")] >= [int(n) for n in least.split(".")]


def test_workflows_test_every_python_we_promise() -> None:
    pythons = re.findall(r'"(3\.\d+)"', (ROOT / ".github" / "workflows" / "checks.yml").read_text())
    assert {"3.10", "3.11", "3.12", "3.13"} <= set(pythons)
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()


def test_tables_of_the_readme_are_those_of_the_results() -> None:
    tables = load_script(ROOT / "benchmarks" / "tables.py")
    for name, language in tables.LANGUAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert tables.put(text, tables.made(tables.RESULTS, language)) == text, "run `make tables`"


def test_the_front_is_what_nothing_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pareto = load_script(ROOT / "benchmarks" / "pareto.py")
    rows = [
        {"ratio_to_timm": r, "accuracy": a} for r, a in [(1.0, 0.8), (1.2, 0.8), (2.0, 0.79), (1.5, 0.7), (3.0, 0.5)]
    ]
    found = pareto.front(rows)
    assert [row["ratio_to_timm"] for row in found] == [1.2, 2.0, 3.0]
    beaten = [
        r
        for r in rows
        if any(o["ratio_to_timm"] >= r["ratio_to_timm"] and o["accuracy"] >= r["accuracy"] and o != r for o in rows)
    ]
    assert [row for row in rows if row not in beaten] == found


def test_speeds_with_accuracies_stand_after_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pareto = load_script(ROOT / "benchmarks" / "pareto.py")
    row = {"model": "mu", "batch": 8, "images": 400, "rounds": 3, "agreement": 1.0, "accuracy": 0.8}
    row |= {"drop_in_points": 0.0, "drop_interval": [-0.1, 0.1], "ratio_quartiles": [1.0, 2.0]}
    chosen = {"fastest_at": [0.005], "kept_on_parts": {"0.005": [1, 2]}}
    rows = [row | {"system": "timm", "ratio_to_timm": 1.0}, row | chosen | {"system": "vitkit", "ratio_to_timm": 1.5}]
    machine = {"cpu": "a processor", "threads": 2, "commit": "abc", "date": "today"}
    (tmp_path / "curves.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    for name, language in pareto.LANGUAGES.items():
        page = (ROOT / name).read_text(encoding="utf-8")
        text = pareto.placed(page, pareto.made(tmp_path, language))
        assert "| mu | 8 | vitkit | 1.50x (1.00-2.00) | 80.0% | 0.0 (-0.1 to 0.1) | 100.0% | 0.5 (1/2) |" in text
        assert text.index(pareto.AFTER) < text.index(pareto.BEGIN) < text.index(pareto.END)
        assert pareto.placed(text, pareto.made(tmp_path, language)) == text


def test_tables_are_of_one_run(tmp_path: Path) -> None:
    """Only what the last `make bench` measured has a table, under one line about machine, commit and day."""
    tables = load_script(ROOT / "benchmarks" / "tables.py")
    assert tables.made(tmp_path, 0) == ""
    row = {"model": "mu", "batch": 8, "ratio_to_best_peer": 0.5, "ratio_quartiles": [0.4, 0.6]}
    rows = [
        row | {"system": "vitkit", "images_per_second": 10.0},
        row | {"system": "timm", "images_per_second": 20.0},
    ]
    machine = {"cpu": "slow", "threads": 1, "date": "2026-01-01", "commit": "abc", "packages": {"torch": "2"}}
    (tmp_path / "forward.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    (tmp_path / "plan.json").write_text("of an earlier run")
    (tmp_path / "bench.json").write_text(json.dumps({"machine": machine, "form": "short", "minutes": {"forward": 3}}))
    english, chinese = (tables.made(tmp_path, language) for language in (0, 1))
    assert "commit abc" in english
    assert "| mu | 8 | 10.0 | **20.0** | 0.50x (0.40-0.60) |" in english
    assert "吞吐（img/s）" in chinese
    assert english.count("|") == chinese.count("|")


def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell, with a training of one epoch instead of many."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    path = ROOT / "docs" / "tour.ipynb"
    assert path.stat().st_size < 200_000
    cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    shortened = re.sub(r"epochs=\d+", "epochs=1", code)
    assert shortened != code
    exec(compile(shortened, path.name, "exec"), {"__name__": "__tour__"})
