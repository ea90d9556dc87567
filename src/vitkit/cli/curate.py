"""`vitkit index` and `search`; `vitkit data clean`, `apply` and `suggest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from vitkit.checkpoints.options import ModelOptions
from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.errors import ConfigError, shell_word
from vitkit.io import adding_to_folder
from vitkit.progress import Bar


@opt.takes_model
def index(
    data: opt.Data,
    options: ModelOptions,
    model: Annotated[
        str | None, Option(help="A checkpoint or a run; default: a descriptor of edges and colours, without weights.")
    ] = None,
    out: Annotated[str | None, Option(help="Folder of the index, or its URL; default: DATA.index.")] = None,
    batch_size: opt.Batch = None,
    device: opt.Device = None,
    classes_from: opt.ClassesFrom = "auto",
    force: opt.Force = False,
    cache_dir: opt.CacheDir = None,
    as_json: opt.Json = False,
) -> None:
    """Compute the features of every image of a set, for `search`, `data clean` and the map.

    Run it again after the set changed, or after a kill: only what is new or changed is computed.
    """
    from vitkit.curation import build_index
    from vitkit.curation.index import stated_options

    if model is None and (stated := stated_options(options)):
        raise ConfigError(f"--{next(iter(stated)).replace('_', '-')} is for a model; name one with --model CHECKPOINT")
    with Bar() as progress:
        made = build_index(
            data,
            model,
            out,
            progress,
            device=device,
            classes_from=classes_from,
            batch_size=batch_size,
            force=force,
            options=options,
        )
    about = made.about
    if as_json:
        return opt.print_json({**about, "out": out or str(made.path)})
    by = "the descriptor of edges and colours (no weights)" if model is None else f"{about['features']} of {model}"
    echo(f"{len(made):,} images, {about['width']} features each by {by}: {out or made.path}")
    return opt.print_some(f"{len(about['bad'])} unreadable", [f"{b['path']}: {b['reason']}" for b in about["bad"]])


def search(
    index: Annotated[str, Argument(metavar="INDEX", help="A folder that `vitkit index` made, or its URL.")],
    image: Annotated[str | None, Argument(metavar="[IMAGE]", help="The image to look for, or its URL.")] = None,
    text: Annotated[str | None, Option(help="Words to look for, where the checkpoint has a text tower.")] = None,
    top: Annotated[int, Option(min=1, help="Images to find.")] = 20,
    box: Annotated[str | None, Option(metavar="LEFT,TOP,RIGHT,BOTTOM", help="Search by this part, in pixels.")] = None,
    patch: Annotated[str | None, Option(metavar="ROW,COLUMN", help="Search by this patch of the ViT, from 0.")] = None,
    out: Annotated[Path | None, Option(help="Write a sheet (.png), .json or .csv instead of printing.")] = None,
    engine: Annotated[str, Option(help="auto, exact or faiss; auto takes faiss beyond a million images.")] = "auto",
    model: Annotated[str | None, Option(help="Where the checkpoint of the index is now, if it was moved.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Find the images of a set that are nearest to an image, to a part of it, or to words."""
    from vitkit.curation import open_index
    from vitkit.curation.query import SUFFIXES, write_hits

    if out is not None and out.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out {out} must end with {', '.join(SUFFIXES)}")
    if (image is None) == (text is None):
        raise ConfigError("give either an IMAGE or --text WORDS to look for")
    if text is not None and (box or patch):
        raise ConfigError("--box and --patch name a part of an image; leave them out with --text")
    opened = open_index(index)
    if image is None:
        hits = opened.search_text(str(text), top, engine=engine, model=model)
    else:
        part = _whole_numbers(box, 4, "--box", "LEFT,TOP,RIGHT,BOTTOM in pixels")
        place = _whole_numbers(patch, 2, "--patch", "ROW,COLUMN, counted from 0")
        at = (place[0], place[1]) if place is not None else None
        hits = opened.search(image, top, box=part, patch=at, engine=engine, model=model)
    if out is not None:
        what = text if image is None else image.rsplit("/", 1)[-1]
        write_hits(opened, hits, out, f"nearest to {what}")
        return opt.print_json({"out": str(out)}) if as_json else echo(f"{len(hits)} images: {out}")
    if as_json:
        return opt.print_json([vars(hit) for hit in hits])
    return opt.print_table(
        ("image", "label", "split", "cosine"), [(h.path, h.label, h.split, f"{h.score:.4f}") for h in hits], 3
    )


def _whole_numbers(text: str | None, count: int, option: str, wanted: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        found = tuple(int(n) for n in text.split(","))
    except ValueError:
        found = ()
    if len(found) != count:
        raise ConfigError(f"{option} {text} must be {count} whole numbers: {wanted}")
    return found


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
    from vitkit.curation import open_index, update_index
    from vitkit.curation.apply import write_cleaning
    from vitkit.curation.clean import clean as run
    from vitkit.curation.looks import look_at
    from vitkit.curation.report import write_report

    with Bar() as progress:
        if index is None:
            opened = update_index(data, progress, classes_from)
        else:
            opened = open_index(index)
        source = opened.catalogue(progress, data).source
        looks = look_at(source, opened.path / "looks", opt.workers_for(source, workers), progress)
        found = run(opened, looks, progress)
        with adding_to_folder(out) as new:
            write_report(new / "report.html", found, opened, looks)
            write_cleaning(new, found, opened.about["classes_from"])
    if as_json:
        more = {"overlaps": [vars(o) for o in found.overlaps], "unbalanced": [vars(u) for u in found.unbalanced]}
        opt.print_json({"counts": found.counts(), "notes": found.notes, **more, "out": str(out)})
    else:
        echo(
            f"{found.images:,} images, features by {opened.about['model']}: {out / 'report.html'}, {out / 'issues.csv'}"
        )
        opt.print_table(("issue", "rows"), [(kind, f"{n:,}") for kind, n in found.counts().items()])
        shared = [f"{o.first} and {o.second}: {o.share:.0%} of their nearest images" for o in found.overlaps]
        opt.print_some("classes that overlap", shared, "report.html lists them all")
        apart = [f"{u.label} is {u.share:.0%} of {u.split}, {u.share_of_train:.0%} of train" for u in found.unbalanced]
        opt.print_some("unbalanced splits", apart, "report.html lists them all")
        for note in found.notes:
            echo(f"note: {note}")
        if found.issues:
            listed = out / "issues.csv"
            echo(f"Next: delete the rows of {listed} that you disagree with,")
            echo(f"then vitkit data apply {shell_word(listed)} --to new.csv")
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
    model: Annotated[str | None, Option(help="A classifier or a run: then those that it is least sure of.")] = None,
    device: opt.Device = None,
    as_json: opt.Json = False,
) -> None:
    """Say which images to label first: typical ones that differ from each other (TypiClust).

    With --model, images that the model is least sure of, and that differ from each other.
    """
    from vitkit.curation import open_index, update_index
    from vitkit.curation.suggest import margins, suggest_uncertain
    from vitkit.curation.suggest import suggest as typical

    with Bar() as progress:
        opened = update_index(data, progress) if index is None else open_index(index)
        source = opened.catalogue(progress, data).source
        if model is None:
            rows = typical(opened.features, count, progress)
        else:
            rows = suggest_uncertain(opened.features, margins(model, source, device, progress), count, progress)
        paths = [opened.paths[row] for row in rows]
    if as_json:
        return opt.print_json({"paths": paths})
    return echo("\n".join(paths))
