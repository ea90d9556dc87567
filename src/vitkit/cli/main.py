"""The command `vitkit`: its list of commands, and what happens when one fails.

Nothing here imports torch, so that `vitkit --help` answers at once; each command imports what it
needs when it runs.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from vitkit import __version__
from vitkit.cli import (
    checkpoints,
    completion,
    data,
    demo,
    doctor,
    embed,
    evaluate,
    explain,
    export,
    model,
    plan,
    predict,
    serve,
    study,
    train,
    tune,
)
from vitkit.errors import VitkitError

app = typer.Typer(
    name="vitkit",
    help="The Vision Transformer: build, train, look inside, serve.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,  # `vitkit completion` prints it, and writes into nobody's files
    epilog="Exit codes: 0 done, 1 a check found something wrong, 2 an error that says what to do next, 130 stopped. "
    "Add --debug anywhere to see the traceback.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vitkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("zoo")(model.zoo)
app.command("summary")(model.summary)
app.command("inspect")(checkpoints.inspect)
app.command("convert")(checkpoints.convert)
app.add_typer(data.app, name="data")
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("replay")(train.replay)
app.command("evaluate")(evaluate.evaluate)
app.command("explain")(explain.explain)
app.command("predict")(predict.predict)
app.command("embed")(embed.embed)
app.command("export")(export.export)
app.command("tune")(tune.tune)
app.command("study")(study.study)
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)
app.command("completion")(completion.completion)


def run() -> None:
    """Entry point: vitkit's own errors become one or two lines and exit code 2, never a traceback."""
    if "_VITKIT_COMPLETE" in os.environ:  # a shell asks what could come next
        from typer.completion import completion_init

        completion_init()
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        app(args=arguments, prog_name="vitkit")
    except VitkitError as e:
        if debug:
            traceback.print_exc()
        stopped = getattr(e, "exit_code", 2) == 130  # all is saved: that is no error
        typer.echo(f"{e}" if stopped else f"error: {e}", err=True)
        raise SystemExit(getattr(e, "exit_code", 2)) from None
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has gone
        sys.stderr.close()
        raise SystemExit(0) from None
    except OSError as e:  # a disk that is full, a folder that may not be written, a file where a folder should be
        if debug:
            traceback.print_exc()
        where = "" if e.filename is None else f"{e.filename}: "
        told = f"{where}{e.strerror or e}; choose another path, or make room and rights for it"
        typer.echo(f"error: {told}", err=True)
        raise SystemExit(2) from None
