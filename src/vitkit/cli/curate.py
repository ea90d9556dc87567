"""`vitkit index` and `search`; `vitkit data clean`, `apply` and `suggest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.errors import ConfigError
from vitkit.progress import Bar


def index(
    data: opt.Data,
    model: Annotated[
        str | None, Option(help="A checkpoint or a run; default: a descriptor of edges and colours, without weights.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder of the index; default: DATA.index.")] = None,
    batch_size: opt.Batch = None,
    device: opt.Device = None,
    classes_from: opt.ClassesFrom = "auto",
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Compute the features of every image of a set, for `search`, `data clean` and the map.

    Run it again after the set changed, or after a kill: only what is new or changed is computed.
    """
    from vitkit.curation import build_index

    with Bar() as progress:
        made = build_index(
            data, model, out, progress, device=device, classes_from=classes_from, batch_size=batch_size, force=force
        )
    about = made.about
    if as_json:
        return opt.print_json({**about, "out": str(made.path)})
    by = "the descriptor of edges and colours (no weights)" if model is None else f"{about['features']} of {model}"
    echo(f"{len(made):,} images, {about['width']} features each by {by}: {made.path}")
    return opt.print_some(f"{len(about['bad'])} unreadable", [f"{b['path']}: {b['reason']}" for b in about["bad"]])


def search(
    index: Annotated[Path, Argument(metavar="INDEX", help="A folder that `vitkit index` made.")],
    image: Annotated[Path, Argument(metavar="IMAGE", help="The image to look for.")],
    top: Annotated[int, Option(min=1, help="Images to find.")] = 20,
    box: Annotated[str | None, Option(metavar="LEFT,TOP,RIGHT,BOTTOM", help="Search by this part, in pixels.")] = None,
    out: Annotated[Path | None, Option(help="Write a sheet (.png), .json or .csv instead of printing.")] = None,
    engine: Annotated[str, Option(help="auto, exact or faiss; auto takes faiss beyond a million images.")] = "auto",
    model: Annotated[str | None, Option(help="Where the checkpoint of the index is now, if it was moved.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Find the images of a set that are nearest to an image, or to a part of it."""
    from vitkit.curation import open_index
    from vitkit.curation.query import SUFFIXES, write_hits

    if out is not None and out.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out {out} must end with {', '.join(SUFFIXES)}")
    opened = open_index(index)
    hits = opened.search(image, top, box=_box(box), engine=engine, model=model)
    if out is not None:
        write_hits(opened, hits, out, f"nearest to {image.name}")
        return opt.print_json({"out": str(out)}) if as_json else echo(f"{len(hits)} images: {out}")
    if as_json:
        return opt.print_json([vars(hit) for hit in hits])
    return opt.print_table(
        ("image", "label", "split", "cosine"), [(h.path, h.label, h.split, f"{h.score:.4f}") for h in hits], 3
    )


def _box(text: str | None) -> tuple[int, int, int, int] | None:
    if text is None:
        return None
    try:
        left, top, right, bottom = (int(n) for n in text.split(","))
    except ValueError:
        raise ConfigError(f"--box {text} must be four whole numbers: LEFT,TOP,RIGHT,BOTTOM in pixels") from None
    return left, top, right, bottom


def clean(
    data: opt.Data,
    index: Annotated[Path | None, Option(help="Its index; default: DATA.index, made or updated if need be.")] = None,
    out: Annotated[Path, Option(help="Folder for report.html and issues.csv.")] = Path("cleaned"),
    workers: opt.Workers = None,
    classes_from: opt.ClassesFrom = "auto",
    as_json: opt.Json = False,
) -> None:
    """Find leaks, duplicates, wrong labels, junk and outliers; nothing is changed.

    Exits with code 1 when something was found. Go through issues.csv, then `vitkit data apply` it.
    """
    from vitkit.curation import build_index, open_index
    from vitkit.curation.apply import write_cleaning
    from vitkit.curation.clean import clean as run
    from vitkit.curation.report import write_report

    with Bar() as progress:
        if index is None:
            opened = build_index(data, progress=progress, classes_from=classes_from)
        else:
            opened = open_index(index)
            opened.catalogue(progress, data)
        looks = opened.looks(progress, opt.workers_for(opened.catalogue().source, workers))
        found = run(opened, looks, progress)
        write_report(out / "report.html", found, opened, looks)
        write_cleaning(out, found, opened.about["classes_from"])
    if as_json:
        opt.print_json({"counts": found.counts(), "notes": found.notes, "out": str(out)})
    else:
        echo(
            f"{found.images:,} images, features by {opened.about['model']}: {out / 'report.html'}, {out / 'issues.csv'}"
        )
        opt.print_table(("issue", "rows"), [(kind, f"{n:,}") for kind, n in found.counts().items()])
        for note in found.notes:
            echo(note)
    raise Exit(1 if found.issues else 0)


def apply(
    issues: Annotated[Path, Argument(metavar="ISSUES", help="issues.csv of `vitkit data clean`, gone through.")],
    to: Annotated[Path, Option(help="The list to write, a .csv that `vitkit train` takes.")],
    data: Annotated[str | None, Option(help="The set, if clean.json is no longer beside ISSUES.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Write a list of the set without what was dropped, with corrected labels; the images stay as they are.

    Rows left in ISSUES count; where there is a column `action`, those that say accept.
    """
    from vitkit.curation.apply import apply as run

    with Bar() as progress:
        done = run(issues, to, data, progress)
    if as_json:
        return opt.print_json({**vars(done), "out": str(to)})
    return echo(f"{done.kept:,} images, {done.dropped:,} left out, {done.relabelled:,} with a new label: {to}")


def suggest(
    data: opt.Data,
    count: Annotated[int, Option(min=1, help="Images to label next.")] = 100,
    index: Annotated[Path | None, Option(help="Its index; default: DATA.index, made or updated if need be.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Say which images to label first: typical ones that differ from each other (TypiClust)."""
    from vitkit.curation import build_index, open_index
    from vitkit.curation.suggest import suggest as run

    with Bar() as progress:
        opened = build_index(data, progress=progress) if index is None else open_index(index)
        opened.catalogue(progress, data)
        paths = [opened.paths[row] for row in run(opened.features, count, progress)]
    if as_json:
        return opt.print_json({"paths": paths})
    return echo("\n".join(paths))
