"""Write docs/commands.md from the commands' own --help: `make commands`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = "100"


def page() -> str:
    import click
    from typer.main import get_command

    from vitkit.cli.main import app

    parts = ["# Commands\n\nEvery command answers `--help`. This page is made from those answers (`make commands`).\n"]

    def add(command: Any, name: str) -> None:
        with click.Context(command, info_name=name, max_content_width=100, terminal_width=100) as context:
            text = command.get_help(context)
        parts.append(f"## `{name}`\n\n```text\n{text.rstrip()}\n```\n")
        for child, inner in sorted(getattr(command, "commands", {}).items()):
            add(inner, f"{name} {child}")

    add(get_command(app), "vitkit")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(page(), encoding="utf-8")
