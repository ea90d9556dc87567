"""`vitkit data check`, `show`, `map` and `pack`: look at a set before training on it, and write it as shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option, Typer
from typer.core import TyperCommand

import vitkit
from vitkit.cli import curate
from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.errors import DataError
from vitkit.io import replacing
from vitkit.progress import Bar

if TYPE_CHECKING:
    from PIL import Image

    from vitkit.data.check import Report

app = Typer(help="Look at a set of images.", no_args_is_help=True, rich_markup_mode=None)
app.command()(curate.clean)
app.command()(curate.apply)
app.command()(curate.suggest)


@app.command()
def check(
    data: opt.Data,
    as_json: opt.Json = False,
    out: Annotated[Path | None, Option(help="Draw a contact sheet into this .png.")] = None,
    workers: Annotated[int | None, Option(min=0, help="Processes that decode; by default one per core.")] = None,
    target: opt.Target = None,
    classes_from: opt.ClassesFrom = "auto",
) -> None:
    """Count, decode and compare every image; exits with code 1 when something is wrong with the set."""
    from vitkit.data import check as checking
    from vitkit.data.sheet import contact_sheet

    with Bar() as progress:
        dataset = vitkit.open_data(data, progress, target=target or (), classes_from=classes_from)
        report = checking.check(dataset, opt.workers_for(dataset.samples, workers), progress)
    if out is not None:
        _save(contact_sheet(dataset.split("all")), out)
    opt.print_json(report.to_dict()) if as_json else _print_report(report)
    if out is not None and not as_json:
        echo(f"contact sheet: {out}")
    if report.bad or report.lost or any(d.leaks or d.contradicts for d in report.duplicates):
        raise Exit(1)


def _print_report(report: Report) -> None:
    splits = list(report.splits)
    rows = []
    for name, counts in (*report.classes.items(), ("all images", report.splits)):
        rows.append((opt.one_line(name), *(f"{counts[s]:,}" for s in splits), f"{sum(counts.values()):,}"))
    opt.print_table(("class", *splits, "all"), rows)
    sizes = ", ".join(f"{word} {w}x{h}" for word, (w, h) in report.sizes.items())
    echo(f"sizes (width x height): {sizes or 'none'}")
    echo(f"formats: {_tally(report.formats)}; modes: {_tally(report.modes)}")
    if report.multi_label:
        echo("an image may have several labels")
        if odd := next((name for name in report.classes if ";" in name or "," in name), None):
            echo(f"a label is {opt.one_line(odd)!r}: several labels are joined with |, not with commas or semicolons")
    if report.empty_classes:
        echo(f"folders without an image: {', '.join(map(opt.one_line, report.empty_classes))}")
    empty = {name: [s for s, n in counts.items() if not n] for name, counts in report.classes.items()}
    missing = [f"{name}: none in {', '.join(splits)}" for name, splits in empty.items() if splits]
    opt.print_some("classes that a split says nothing about (add images, or sort them into train, val, test)", missing)
    opt.print_some(f"{len(report.bad)} unreadable", [f"{b.path}: {b.reason}" for b in report.bad])
    if report.bad:
        echo("training takes other images for those that cannot be read, and lists them")
    groups = {
        "the same image in different splits (leakage)": [d for d in report.duplicates if d.leaks],
        "the same image with different labels": [d for d in report.duplicates if d.contradicts and not d.leaks],
        "exact duplicates": [d for d in report.duplicates if not d.leaks and not d.contradicts],
    }
    for what, found in groups.items():
        lines = [" = ".join(f"{p} ({s})" for p, s in zip(d.paths, d.splits, strict=True)) for d in found]
        opt.print_some(f"{len(found)} x {what}", lines)
    opt.print_some("left out", report.lost)
    if not report.bad and not report.duplicates and not report.lost:
        echo("no unreadable images, no duplicates")


def _tally(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in counts.items()) or "none"


class _BareAugment(TyperCommand):
    """Lets `--augment` stand alone, for the preset that is used most."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--augment" in args:
            at = args.index("--augment")
            if at + 1 == len(args) or args[at + 1].startswith("-"):
                args = [*args[: at + 1], "medium", *args[at + 1 :]]
        return super().parse_args(ctx, args)


@app.command(cls=_BareAugment)
def show(
    data: opt.Data,
    augment: Annotated[
        str, Option(metavar="[PRESET]", help="none, light, medium or strong; alone it means medium.")
    ] = "none",
    out: Annotated[Path, Option(help="The .png to draw.")] = Path("show.png"),
    split: Annotated[str, Option(help="train, val, test, another split of the set, or all.")] = "train",
    size: Annotated[str | None, Option(help="224, or 224x448 (height x width).")] = None,
    rows: Annotated[int, Option(min=1, max=50, help="Samples to draw.")] = 6,
    seed: Annotated[int, Option(help="Another seed draws other samples and other variations.")] = 0,
    target: opt.Target = None,
    classes_from: opt.ClassesFrom = "auto",
    as_json: opt.Json = False,
) -> None:
    """Draw what training will see of a few samples, epoch after epoch."""
    from vitkit.data import drop_unsafe_flip, preset
    from vitkit.data.sheet import training_sheet
    from vitkit.model.config import as_size

    chosen = preset(augment)
    with Bar() as progress:
        source = vitkit.open_data(data, progress, target=target or (), classes_from=classes_from).split(split)
    chosen = drop_unsafe_flip(chosen, source.flip_safe)
    own = (224, 224) if source.pixels is None else (source.pixels.shape[-2], source.pixels.shape[-1])
    pre = vitkit.Preprocessing(size=own if size is None else as_size(size, "--size"), fit="crop")
    about = f"augmentation {augment}, seed {seed}; the first column is the evaluation view, then one epoch per column"
    if chosen.mixup or chosen.cutmix:
        about += "; mixup blends in another image"
    _save(training_sheet(source, pre, chosen, rows, seed=seed, about=about), out)
    opt.print_json({"drawn": str(out)}) if as_json else echo(f"drawn: {out}")


@app.command()
def pack(
    data: opt.Data,
    out: Annotated[str, Argument(metavar="OUT", help="The folder or URL to write: new, empty or an unfinished pack.")],
    to: Annotated[str, Option(help="shards (WebDataset tar files and their index) or parquet.")] = "shards",
    size: Annotated[int | None, Option(min=1, help="Shrink images to this shorter side, as JPEG.")] = None,
    quality: Annotated[int | None, Option(min=1, max=100, help="Encode every image as JPEG; 90 with --size.")] = None,
    shard_size: Annotated[str, Option(help="About how large a file becomes.")] = "1GB",
    workers: Annotated[int | None, Option(min=0, help="Processes; by default one per core.")] = None,
    max_bad: Annotated[str, Option(help="Unreadable images that are allowed: a share or a number.")] = "5%",
    unlabelled: Annotated[bool, Option("--unlabelled", help="Images alone are enough.")] = False,
    target: opt.Target = None,
    classes_from: opt.ClassesFrom = "auto",
    as_json: opt.Json = False,
) -> None:
    """Write any set as tar shards or Parquet, verified; the same command continues after a kill.

    Images are copied byte for byte unless --size or --quality is given. Unreadable ones are in OUT/bad-files.csv.
    """
    from vitkit.data.pack import pack as packing

    with Bar() as progress:
        dataset = vitkit.open_data(
            data, progress, target=target or (), classes_from=classes_from, labelled=not unlabelled
        )
        packed = packing(
            dataset,
            out,
            to,
            size=size,
            quality=quality,
            shard_size=shard_size,
            workers=opt.workers_for(dataset.samples, workers),
            max_bad=max_bad,
            progress=progress,
        )
    if as_json:
        return opt.print_json(packed.to_dict())
    for note in packed.notes:
        echo(note)
    splits = ", ".join(f"{split} {count:,}" for split, count in packed.splits.items())
    bad = f"; {packed.bad:,} unreadable, listed in {out}/bad-files.csv" if packed.bad else ""
    return echo(f"packed and verified: {splits} in {packed.files:,} files, {packed.bytes / 1e6:,.1f} MB{bad}: {out}")


@app.command("map")
def map_(
    index: Annotated[Path, Argument(metavar="INDEX", help="What `vitkit index` has written.")],
    out: Annotated[Path, Option(help="The .html file to write.")] = Path("map.html"),
    data: Annotated[str | None, Option(help="Where the images of the index are now.")] = None,
    issues: Annotated[Path | None, Option(help="Fixes to review: issues.csv of `vitkit data clean`.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Write a map of all images as one HTML file, for sharing; it needs no server and no network.

    `vitkit serve --index INDEX` shows the same map with the images in full, and searches by image.
    """
    from vitkit.curation.view import open_view
    from vitkit.web.share import write_page

    with Bar() as progress:
        view, _ = open_view(index, data, issues, progress)
        size = write_page(view, out)
    if as_json:
        return opt.print_json({"images": len(view.index), "method": view.map.method, "bytes": size, "out": str(out)})
    return echo(f"{len(view.index):,} images, laid out by {view.map.method}, {size / 2**20:.1f} MB: {out}")


def _save(image: Image.Image, path: Path) -> None:
    from PIL.Image import registered_extensions

    if (format := registered_extensions().get(path.suffix.lower())) is None:
        raise DataError(f"{path} is no name of an image; give --out a path ending in .png")
    with replacing(path) as file:
        image.save(file, format)
