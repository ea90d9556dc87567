"""What commands share: arguments and options, one spelling and one help text each; JSON and plain tables out.

`takes_model` gives a command all of MODEL_OPTIONS, so that they are the same wherever a model is read, and hands
them over as one typed `ModelOptions`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option
from typer import echo as write_out

from vitkit.checkpoints.options import ModelOptions
from vitkit.errors import ConfigError, printable
from vitkit.io import json_text
from vitkit.model.merge_plan import MergePlan
from vitkit.runtime.table import RUNTIMES

if TYPE_CHECKING:
    from vitkit.data import Source


def keys_of(module: str, table: str) -> Callable[[str], list[str]]:
    """What completes a name: keys of a table, imported only when a shell asks. Files are completed by the shell."""
    return lambda incomplete: [key for key in getattr(import_module(module), table) if key.startswith(incomplete)]


def _set_cache(folder: str | None) -> str | None:
    """For this command and the processes that it starts."""
    if folder is not None:
        os.environ["VITKIT_CACHE"] = folder
    return folder


def _merge_spec(text: str) -> int | str:
    return MergePlan.of(text).spec


_LISTED = 10  # lines of a long list
_ENDLESS = 100_000  # characters; a table is no wider than its content
model_names = keys_of("vitkit.model.zoo", "ZOO")
_MODEL = "A checkpoint, a run directory, a URL of either, hf:owner/name, timm:name, or a name of `vitkit zoo`."
DATA_HELP = (
    "digits, mnist, fashion-mnist, cifar10; a folder of classes; a .csv, .jsonl, .parquet or .txt list; "
    ".npz arrays; Parquet with images; shards/train-{0000..0099}.tar; or the URL of any of them (s3://, https:// ...)."
)
Model = Annotated[str, Argument(metavar="MODEL", help=_MODEL, autocompletion=model_names)]
Data = Annotated[str, Argument(metavar="DATA", help=DATA_HELP)]
ClassesFrom = Annotated[
    str, Option(metavar="auto|top|leaf|LEVEL", help="Which of nested folders are the classes; LEVEL counts from 1.")
]
Map = Annotated[
    list[str] | None,
    Option("--map", metavar="DATA=MODEL|FILE.json", help="What a class of DATA is called in the model; repeatable."),
]
Target = Annotated[
    list[str] | None, Option(metavar="NAME", help="Predict the numbers of this column; may be repeated.")
]
_CACHE = "Where copies of what is behind URLs are kept; default: VITKIT_CACHE, or ~/.cache/vitkit."
CacheDir = Annotated[str | None, Option(metavar="FOLDER", help=_CACHE, callback=_set_cache)]
Images = Annotated[list[str], Argument(metavar="IMAGE|FOLDER|DATA...", help="Images, folders of images, or data sets.")]
Json = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[str | None, Option(help="cpu, cuda or mps; default: the fastest here.")]
Split = Annotated[str | None, Option(help="Split of the data set: train, val, test, several as val+test, or all.")]
Batch = Annotated[int | None, Option(min=1, help="Images per batch; default: by their size.")]
Workers = Annotated[int | None, Option(min=0, help="Processes that decode; default: one per core for files.")]
Runtime = Annotated[str, Option(help=f"auto (what `vitkit tune` chose, else eager), {', '.join(RUNTIMES)}.")]
Merge = Annotated[
    str,
    Option(
        metavar="[METHOD:]R[:SCHEDULE]",
        callback=_merge_spec,
        help="Tokens that vanish per block: faster, less accurate. tome, pitome or prune; constant, late or early.",
    ),
]
Resume = Annotated[bool, Option("--resume", help="Resume a job that was stopped.")]
Engine = Annotated[
    str | None, Option(metavar="ray", help="Share the work through Ray; default: this process, or those of torchrun.")
]
Address = Annotated[
    str | None,
    Option(envvar="RAY_ADDRESS", help="Of a Ray cluster: auto or HOST:PORT; default: a Ray on this machine."),
]
Processes = Annotated[
    int | None, Option(min=1, help="Processes of --engine; default: one per GPU of the cluster, else per core.")
]
Trust = Annotated[
    str | None, Option(metavar="SHA256", help="Open this .pt2, which may run code; without it the digest is printed.")
]
Force = Annotated[bool, Option("--force", help="Overwrite what exists and restart.")]
HangLimit = Annotated[
    float, Option(help="Seconds without a step after which a hung process dumps all stacks and ends; 0: never.")
]
ImageSize = Annotated[str | None, Option(metavar="SIZE", help="384, or 224x448 (height x width).")]
Heads = Annotated[int | None, Option(help="Attention heads, where the file does not say.")]
Classes = Annotated[int | None, Option(help="Replace the classifier by a new one; 0 for none.")]

_NAME_MAP = "A .toml file with the tensor names of a home-made ViT (docs/checkpoints.md)."
NameMap = Annotated[str | None, Option("--name-map", metavar="FILE", help=_NAME_MAP)]
NameMapOrMap = Annotated[str | None, Option("--name-map", "--map", metavar="FILE", help=_NAME_MAP)]
MODEL_OPTIONS: dict[str, object] = {  # field of ModelOptions -> its option, in the order of --help
    "image_size": ImageSize,
    "patch_size": Annotated[str | None, Option(help="Resize the patch embedding (FlexiViT).")],
    "channels": Annotated[int | None, Option(help="Adapt the first filters to this many input channels.")],
    "classes": Classes,
    "heads": Heads,
    "activation": Annotated[
        str | None, Option(help="gelu, gelu-tanh, quick-gelu or swiglu, where the file does not say.")
    ],
    "resize": Annotated[str | None, Option(help="How positions are resized: official, timm, ...; default: by family.")],
    "dtype": Annotated[str | None, Option(help="float32, float16, bfloat16 or float64; default: as in the file.")],
    "map": NameMapOrMap,
    "fields": Annotated[
        list[str] | None,
        Option("--set", metavar="FIELD=VALUE", help="Any other field of the model's config; repeatable."),
    ],
}


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Adds MODEL_OPTIONS to a command, which gets them as the argument `options: ModelOptions`."""
    signature = inspect.signature(command, eval_str=True)
    kinds = MODEL_OPTIONS | (
        {"map": NameMap} if "class_map" in signature.parameters else {}
    )  # it has a --map of its own
    every = []
    for own in signature.parameters.values():
        shared = [own.replace(name=name, default=None, annotation=kind) for name, kind in kinds.items()]
        every += shared if own.name == "options" else [own]
    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in every]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        texts = {name: values.pop(name) for name in MODEL_OPTIONS}
        command(options=ModelOptions.parse(**texts), **values)

    with_options.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    return with_options


def check_engine(engine: str | None, processes: int | None) -> bool:
    """Whether there is one."""
    if engine not in (None, "ray"):
        raise ConfigError(f"there is no engine {engine!r}; leave --engine out, or take ray")
    if engine is None and processes is not None:
        raise ConfigError("--processes needs --engine ray; without one, torchrun --nproc-per-node starts processes")
    return engine is not None


def workers_for(source: Source, wanted: int | None) -> int:
    """Sets in memory and small sets of files are not worth starting processes for."""
    if wanted is not None:
        return wanted
    return 0 if source.pixels is not None or len(source) < 1000 else os.cpu_count() or 1


def echo(text: str, err: bool = False) -> None:
    """Print lines; what names of files and classes hold besides text is shown with backslashes, never obeyed."""
    write_out(printable(text, keep="\n\t"), err=err)


def print_json(value: object) -> None:
    write_out(json_text(value, indent=2))


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> None:
    """The first `left` columns hold words, the others numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a file or a pipe has no width: a row is a line there, however long
        console.width = _ENDLESS
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(one_line, row))
    console.print(table)


def print_some(title: str, lines: list[str], all_of_them: str = "--json lists them all") -> None:
    """A title and the first lines under it; nothing when there are none."""
    if not lines:
        return
    echo(f"{title}:")
    for line in lines[:_LISTED]:
        echo(f"  {one_line(line)}")
    if len(lines) > _LISTED:
        echo(f"  ... and {len(lines) - _LISTED} more; {all_of_them}")


def one_line(text: str) -> str:
    """File names may hold line breaks, escape sequences and bytes that are no text."""
    return printable(text)
