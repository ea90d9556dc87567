"""`vitkit completion`: the lines that let a shell complete commands, options and names of models."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Shell(str, Enum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print the script that completes vitkit's commands in a shell.

    bash: eval "$(vitkit completion bash)" in ~/.bashrc; zsh: the same with zsh in ~/.zshrc;
    fish: vitkit completion fish > ~/.config/fish/completions/vitkit.fish
    """
    from typer.completion import get_completion_script

    typer.echo(get_completion_script(prog_name="vitkit", complete_var="_VITKIT_COMPLETE", shell=shell.value))


def model_names(incomplete: str) -> list[str]:
    """Names of the zoo that begin so; files are completed by the shell itself."""
    from vitkit.model.zoo import ZOO

    return [name for name in ZOO if name.startswith(incomplete)]
