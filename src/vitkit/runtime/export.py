"""A model as a file that runs without vitkit, kept only after it has been compared with the model.

What the file says about itself are five pieces of JSON that need no vitkit to be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from vitkit import __version__
from vitkit.checkpoints.native import KINDS
from vitkit.data import Source
from vitkit.display import Part, Shown
from vitkit.errors import ConfigError
from vitkit.io import move, parse_json, sha256, working_folder
from vitkit.model.base import Outputs, VisionModel
from vitkit.model.config import AnyConfig
from vitkit.progress import SILENT, Progress
from vitkit.runtime.base import Calibration, Runtime, Spec, prepared
from vitkit.runtime.table import FORMATS, METADATA, find, need_format
from vitkit.runtime.verify import Check, Images, check_top, compare, compare_sizes, images_of

_COMPARED = 256  # images of a data set, at most


@dataclass(frozen=True)
class Export(Shown):
    """What was written, and how it compares with the model."""

    path: Path
    bytes: int
    check: Check
    sha256: str = ""  # of the file `path`

    def parts(self) -> Iterable[Part]:
        yield f"{self.path}: {self.bytes / 1e6:.1f} MB. {self.check.summary()}"


@dataclass(frozen=True)
class About:
    """What `vitkit predict` needs to know of an exported file."""

    config: AnyConfig
    outputs: Outputs
    raw: bool


def export(
    model: VisionModel,
    to: str,
    out: str | Path,
    compared: Images | Source | None = None,
    int8: bool = False,
    merge: int | str = 0,
    raw: bool = False,
    calibration: Calibration | None = None,
    progress: Progress = SILENT,
    dynamic_size: bool = False,
    top: int = 0,
) -> Export:
    """Write `model` to `out`, compare both (on made-up images when none are given), and leave no file when they differ.

    With int8 and merge the comparison is with the model as it is, and is reported; only what cannot be
    rounding is an error. Without them top-1 must be the same and probabilities within 1e-4. With `dynamic_size` the
    file takes images of any size, and is compared on several, in batches of several sizes.
    """
    path, spec = check_target(to, Path(out), int8), Spec(int8, merge, raw, calibration, dynamic_size, top)
    check_spec(spec)
    images = compared
    if not isinstance(images, Images):
        images = images_of(model, images, 32 if images is None else _COMPARED, raw)
    with working_folder(path) as folder:
        progress.note(f"writing {path.name} ...")
        files = written(model, to, folder / path.name, spec)
        progress.note("comparing it with the model ...")
        runtime, _ = open_exported(folder / path.name, trust=sha256(folder / path.name))
        check = compare(model, runtime, images, raw=raw, exact=not int8 and not merge)
        if dynamic_size:
            check = compare_sizes(model, runtime, check)
        if top:
            check_top(runtime, images, model, raw)
        del runtime
        check.insist(path)
        size, digest = sum(file.stat().st_size for file in files), sha256(folder / path.name)
        if len(files) > 1:
            path.unlink(missing_ok=True)  # a kill may leave no model, but never the old one with new weights
        for file in files:
            move(file, path.with_name(file.name))
        return Export(path, size, check, digest)


def check_spec(spec: Spec) -> None:
    """What does not go together."""
    if not spec.dynamic_size:
        return
    for name, wanted, why in (
        ("--raw", spec.raw, "brings images of any size to the model's own"),
        ("--merge", bool(spec.merge), "merges so many tokens of one number of patches"),
        ("--calibrate", spec.calibration is not None, "measures ranges at one size"),
    ):
        if wanted:
            raise ConfigError(f"--dynamic-size and {name} do not go together: {name} {why}; leave one of them out")


def check_target(to: str, out: Path, int8: bool = False) -> Path:
    """Before the work, not after it."""
    row = find("format", to, FORMATS)
    if out.suffix != row.suffix:
        raise ConfigError(f"--out {out} must end with {row.suffix} for --to {to}")
    if not out.parent.is_dir():
        raise ConfigError(f"the folder of --out {out} does not exist; make it, or give another")
    row.load(f"--to {to}", int8)
    return out


def written(model: VisionModel, to: str, path: Path, spec: Spec) -> list[Path]:
    """Write into a folder of its own, without comparing; the files, `path` the last of them."""
    config = model.config
    kind = next(name for name, of in KINDS.items() if isinstance(config, of))
    about = {"version": __version__, "kind": kind, "raw": spec.raw, "int8": spec.int8, "merge": spec.merge}
    about |= {"dynamic_size": spec.dynamic_size, "top": spec.top, "scale": spec.scale}
    classes = None if model.class_names is None else list(model.class_names)
    values = (about, config.to_dict(), config.preprocessing.to_dict(), classes, model.outputs.to_dict())
    metadata = {key: json.dumps(value, sort_keys=True) for key, value in zip(METADATA, values, strict=True)}
    with torch.no_grad():
        FORMATS[to].load(f"--to {to}", spec.int8).write(prepared(model, spec), path, metadata, spec)
    return sorted(path.parent.iterdir(), key=lambda file: file == path)


def open_exported(path: str | Path, trust: str | None = None) -> tuple[Runtime, About]:
    """A file that `export` has written, ready to run, and what it says about itself.

    trust  the SHA-256 of the file, for a format whose files may run code
    """
    kind = need_format(path)
    row, trusted = FORMATS[kind], {"trust": trust} if FORMATS[kind].runs_code else {}
    runtime: Runtime = row.load(f"running {path}", making=False).open_file(Path(path), kind, **trusted)
    texts = runtime.metadata
    try:
        about, names = parse_json(texts["vitkit"]), parse_json(texts["classes"])
        config = KINDS[about["kind"]].from_json(texts["config"])
        # Files of version 0.1 have no "outputs": theirs are classes.
        outputs = Outputs.from_json(texts["outputs"]) if "outputs" in texts else Outputs(names=names or ())
        return runtime, About(config, outputs, bool(about.get("raw")))
    except (KeyError, ValueError, TypeError) as e:
        raise ConfigError(f"{path} does not say what model it is; it was not written by `vitkit export`") from e
