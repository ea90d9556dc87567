"""What holds for the command as a whole: doctor, completion, --json everywhere, colours, exit codes, near misses."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vitkit.cli import doctor
from vitkit.cli.main import app

SILENT = {"serve", "completion", "demo"}  # they run on, print a script, or draw as they go
SILENT |= {"config schema"}  # is JSON


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for child, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, f"{name} {child}".strip())
    if not hasattr(command, "commands"):
        yield name, command


def vitkit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vitkit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def test_every_command_can_answer_in_json() -> None:
    without = {
        name for name, command in leaves(get_command(app)) if not any("--json" in p.opts for p in command.params)
    }
    assert without <= SILENT


def test_doctor_in_json() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert {"torch", "python", "vitkit"} <= found["versions"].keys()
    assert found["devices"][-1]["kind"] == "cpu"
    assert all(check["ok"] for check in found["checks"])
    assert {"scikit-learn", "pyarrow"} <= {p["package"] for p in found["optional"]}


def test_doctor_names_what_is_missing_and_fails_when_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    monkeypatch.setattr(doctor, "CHECKS", {"build": lambda: None, "train": broken})
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "pip install 'vitkit[data]'" in done.output
    assert "no such instruction" in done.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_the_command(shell: str) -> None:
    script = CliRunner().invoke(app, ["completion", shell]).stdout
    assert "_VITKIT_COMPLETE" in script
    assert shell in script


def test_a_shell_that_asks_is_told_commands_and_models() -> None:
    def asked(words: str) -> list[str]:
        count = str(len(words.split()) - 1)
        return vitkit(_VITKIT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count).stdout.split()

    assert asked("vitkit summ") == ["summary"]
    assert asked("vitkit summary vit-h") == ["vit-h/14"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_itself_completes(tmp_path: Path) -> None:
    """The printed script, evaluated by a real bash, whose completion function then asks the command."""
    (tmp_path / "vitkit").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vitkit "$@"\n')
    (tmp_path / "vitkit").chmod(0o755)
    script = """eval "$(vitkit completion bash)"
    name=$(complete -p vitkit | sed -E 's/.*-F ([^ ]+).*/\\1/')
    COMP_WORDS=(vitkit data che) COMP_CWORD=2
    $name vitkit; echo "${COMPREPLY[@]}" """
    where = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=where, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["check"], done.stderr


def test_colours_are_left_out_when_unwanted() -> None:
    assert "\x1b[3" not in vitkit("zoo", NO_COLOR="1", FORCE_COLOR="1").stdout
    assert "\x1b[" not in vitkit("zoo").stdout  # a pipe


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sumary", "mu"), "Did you mean 'summary'?"),
        (("data", "chek", "x"), "Did you mean 'check'?"),
        (("summary", "mu", "--clases", "3"), "--classes"),
        (("summary", "vit-b/61"), "Did you mean vit-b/16"),
        (("plan", "mu", "--device", "h10"), "Did you mean h100"),
    ],
)
def test_near_misses_are_named_and_exit_with_2(arguments: tuple[str, ...], words: str) -> None:
    done = vitkit(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_exit_codes_are_in_the_help() -> None:
    help_ = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "Exit codes: 0 done, 1 a check found something wrong, 2 an error" in help_
