"""The command: output, JSON, and errors that say what to do next."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vitkit import __version__
from vitkit.cli.main import SPINS, app, run, spin_briefly


def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Run the command in this process, through the same entry point as the shell."""
    monkeypatch.setattr(sys, "argv", ["vitkit", *args])
    with pytest.raises(SystemExit) as done:
        run()
    captured = capsys.readouterr()
    code = done.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"vitkit {__version__}"


def test_zoo_json_and_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vitkit.model.zoo import ZOO

    code, out, _ = invoke(monkeypatch, capsys, "zoo", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [r["name"] for r in rows] == list(ZOO)
    assert all("layers" not in r for r in rows)
    keys = {"name", "image_size", "patch_size", "depth", "width", "heads", "tokens", "params", "gmacs"}
    keys |= {"params_without_head"}
    assert all(keys <= row.keys() for row in rows)
    _, out, _ = invoke(monkeypatch, capsys, "zoo")
    assert all(name in out for name in ZOO)
    assert "86,567,656" in out


def test_summary_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(monkeypatch, capsys, "summary", "vit-b/16", "--image-size", "224x448", "--json")
    about = json.loads(out)
    assert code == 0
    assert (about["image_size"], about["tokens"]) == ([224, 448], 1 + 14 * 28)
    assert sum(row["params"] for row in about["layers"]) == about["params"]
    assert sum(row["macs"] for row in about["layers"]) / 1e9 == pytest.approx(about["gmacs"], abs=1e-6)


def test_summary_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = invoke(monkeypatch, capsys, "summary", "mu", "--classes", "7")
    assert "blocks.1.attention.qkv" in out
    assert "7 classes" in out
    _, out, _ = invoke(monkeypatch, capsys, "summary", "vit_base_patch16_384")
    assert "86,859,496" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["summary", "vit-b16"], ["no model is called 'vit-b16'", "vit-b/16", "vitkit zoo"]),
        (["summary", "vit-b/16", "--image-size", "225"], ["225x225", "224x224", "240x240"]),
        (["summary", "vit-b/16", "--image-size", "big"], ["--image-size big is not a size", "224x448"]),
        (["summary", "vit-b/16", "--classes", "-1"], ["--classes -1 is not a whole number of at least 0"]),
    ],
)
def test_errors_are_one_or_two_lines(
    args: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = invoke(monkeypatch, capsys, *args)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") <= 2
    assert all(word in err for word in words)
    assert "Traceback" not in err


def test_debug_shows_the_traceback() -> None:
    command = [sys.executable, "-m", "vitkit", "summary", "nonsense", "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        (["train", "photos"], {}, SPINS),
        (["predict", "m", "photo.jpg"], {}, None),  # the latency of one image is another matter
        (["train", "photos"], {"OMP_WAIT_POLICY": "active"}, None),
        (["train", "photos"], {"GOMP_SPINCOUNT": "5"}, "5"),
        ([], {}, None),
    ],
    ids=["train", "predict", "policy given", "count given", "nothing"],
)
def test_threads_of_a_training_step_spin_only_briefly(
    monkeypatch: pytest.MonkeyPatch, words: list[str], given: dict[str, str], expected: str | None
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what is set stays here
    spin_briefly(words)
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_a_table_is_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe a row is a line however long; on a narrow terminal long cells go on in the next line."""
    from vitkit.cli.options import print_table

    row = ("best.score", "run/" * 80, "12.50%")
    print_table(("differs", "a", "b"), [row])
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "best.score" in line] == [list(row)]
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "60", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    print_table(("differs", "a", "b"), [row])
    narrow = capsys.readouterr().out
    assert "\u2026" not in narrow
    assert narrow.count("/") == 80
    assert "best.score" in narrow
    assert "12.50%" in narrow
