"""The command `vitkit`: its list of commands, and what happens when one fails.

Nothing here imports torch, so that `vitkit --help` answers at once; each command imports what it needs when it runs.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from collections.abc import Callable
from enum import Enum
from typing import Annotated

from typer import Argument, Exit, Option, Typer

from vitkit import __version__
from vitkit.cli import (
    curate,
    data,
    doctor,
    evaluate,
    export,
    hub,
    model,
    plan,
    predict,
    pretrain,
    profile,
    runs,
    study,
    train,
)
from vitkit.cli.options import echo
from vitkit.errors import VitkitError

Shell = Enum("Shell", {"bash": "bash", "zsh": "zsh", "fish": "fish"})


def completion(shell: Annotated[Shell, Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print the script that completes vitkit's commands in a shell.

    bash: eval "$(vitkit completion bash)" in ~/.bashrc; zsh: the same with zsh in ~/.zshrc;
    fish: vitkit completion fish > ~/.config/fish/completions/vitkit.fish
    """
    from typer.completion import get_completion_script

    echo(get_completion_script(prog_name="vitkit", complete_var="_VITKIT_COMPLETE", shell=shell.value))


COMMANDS: dict[str, Callable[..., None] | Typer] = {
    "demo": train.demo,
    "zoo": model.zoo,
    "summary": model.summary,
    "inspect": model.inspect,
    "load": model.load,
    "verify": model.verify,
    "convert": model.convert,
    "zeroshot": model.zeroshot,
    "data": data.app,
    "index": curate.index,
    "search": curate.search,
    "plan": plan.plan,
    "train": train.train,
    "pretrain": pretrain.pretrain,
    "config": runs.config,
    "runs": runs.runs,
    "track": runs.track,
    "sweep": runs.sweep,
    "replay": train.replay,
    "evaluate": evaluate.evaluate,
    "explain": evaluate.explain,
    "predict": predict.predict,
    "embed": predict.embed,
    "export": export.export,
    "tune": export.tune,
    "profile": profile.profile,
    "study": study.study,
    "serve": predict.serve,
    "push": hub.push,
    "pull": hub.pull,
    "doctor": doctor.doctor,
    "completion": completion,
}

app = Typer(
    name="vitkit",
    help="The Vision Transformer: build, train, look inside, serve.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,  # `vitkit completion` prints it, and writes into nobody's files
    epilog="Exit codes: 0 done, 1 a check found something wrong, 2 an error that says what to do next, 130 stopped. "
    "Add --debug anywhere to see the traceback.",
)
for _name, _command in COMMANDS.items():
    if isinstance(_command, Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name)(_command)


def _print_version(wanted: bool) -> None:
    if wanted and "--json" in sys.argv[1:]:
        found = {name: doctor.version_of(name) for name in ("torch", "numpy", "pillow", "safetensors")}
        about = {"vitkit": __version__, "python": platform.python_version(), "platform": platform.platform(), **found}
        echo(json.dumps(about, indent=2))
        raise Exit
    if wanted:
        echo(f"vitkit {__version__}")
        raise Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit; --json: all."),
    ] = False,
    as_json: Annotated[bool, Option("--json", hidden=True)] = False,
) -> None:
    pass


TRAINS = ("train", "pretrain", "demo", "sweep", "study", "replay")


SPINS = "1000"  # turns of a loop, some microseconds


def spin_briefly(words: list[str]) -> None:
    """Threads of a training step that wait for each other spin for a moment, then sleep, unless the user decides.

    Sleeping at once costs a third of the speed where operations are short, as those of small models in bf16; spinning
    for long holds up a busy machine, where another process may have the core that is waited for.
    benchmarks/threads.py measures it. OpenMP reads it once, before torch is imported.
    """
    if words[:1] and words[0] in TRAINS and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def run() -> None:
    """Entry point: vitkit's own errors become one or two lines and exit code 2, never a traceback."""
    spin_briefly(sys.argv[1:])
    if "_VITKIT_COMPLETE" in os.environ:  # a shell asks what could come next
        from typer.completion import completion_init

        completion_init()
    try:
        app(args=[a for a in sys.argv[1:] if a != "--debug"], prog_name="vitkit")
    except KeyboardInterrupt:
        echo("stopped", err=True)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has gone
        sys.stderr.close()
        raise SystemExit(0) from None
    except (VitkitError, OSError) as e:
        if "--debug" in sys.argv:
            traceback.print_exc()
        code, words = e.exit_code if isinstance(e, VitkitError) else 2, str(e)
        if not isinstance(e, VitkitError):  # a full disk, a folder that may not be written, a file in its place
            where = "" if e.filename is None else f"{e.filename}: "
            words = f"{where}{e.strerror or e}; choose another path, free disk space, or change the permissions"
        echo(words if code == 130 else f"error: {words}", err=True)  # 130: all is saved, no error
        raise SystemExit(code) from None
