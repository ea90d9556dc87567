"""`vitkit push` and `vitkit pull`: models on a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vitkit.cli import options as opt
from vitkit.cli.options import echo

Repo = Annotated[str, Argument(metavar="OWNER/NAME", help="On the hub.")]


def push(
    run: Annotated[str, Argument(metavar="RUN", help="A run, or a checkpoint.")],
    repo: Repo,
    private: Annotated[bool | None, Option("--private/--public", help="Who can see a new repository.")] = None,
    message: Annotated[str, Option(help="Of the commit.")] = "Push a model of vitkit",
    as_json: opt.Json = False,
) -> None:
    """Upload a run with its model card; HF_TOKEN or `hf auth login` say who you are."""
    from vitkit.hub import push as upload

    url = upload(run, repo, private=private, message=message)
    opt.print_json({"repo": repo, "commit": url}) if as_json else echo(f"Pushed: {url}\nNext: vitkit load hf:{repo}")


def pull(
    repo: Repo,
    out: Annotated[Path | None, Option(help="A new folder; NAME when left out.")] = None,
    revision: Annotated[str | None, Option(help="A branch, tag or commit.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Fetch a model of the hub into a folder."""
    from vitkit.hub import pull as fetch

    folder = fetch(repo, out, revision=revision)
    opt.print_json({"folder": str(folder)}) if as_json else echo(f"Pulled: {folder}\nNext: vitkit load {folder}")
