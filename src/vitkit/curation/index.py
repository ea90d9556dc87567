"""An index: the features of every image of a set in a folder, of which a kill or a changed file costs little.

    about.json     format, version, model, data, classes, bad files; sizes and SHA-256 of the others
    features.npy   N x D float32, rows of length 1
    samples.jsonl  path, label, split and key of each row

Only images whose key is not in the index yet are computed, in pieces that survive a kill (`prediction.job`); what
left the set leaves the index. The folder appears whole or not at all. Nothing in it is trusted before its sizes and
digests were checked, and nothing is pickled.

Shapes: N images, D width of the features.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.checkpoints.options import ModelOptions
from vitkit.curation.catalogue import Catalogue, differences, digest_of, open_catalogue, placed
from vitkit.curation.duplicates import Group, find_duplicates
from vitkit.curation.embedding import name_of, open_embedder
from vitkit.curation.labels import LabelError, find_label_errors
from vitkit.curation.looks import Looks, look_at
from vitkit.curation.patches import search_patch
from vitkit.curation.query import Hit, search, search_text
from vitkit.curation.stored import read_array
from vitkit.data import BadFile
from vitkit.errors import ConfigError, DataError, shell_word
from vitkit.io import parse_json, read_json, read_regular, replacing_folder, sha256, write_json
from vitkit.locks import only_one
from vitkit.prediction import Job, Opened
from vitkit.prediction.job import ALONE
from vitkit.prediction.opened import Loadable
from vitkit.prediction.tables import features_of
from vitkit.progress import SILENT, Progress
from vitkit.storage import Publisher, fetched_folder, is_url, last_name, named_in

FORMAT, VERSION = "vitkit index", 1
_ROWS_AT_ONCE = 4096
_OURS = ("about.json", "features.npy", "samples.jsonl", "looks", "leaks.json")  # a new index replaces these


@dataclass(frozen=True, eq=False)
class Index:
    """Row i of `features` belongs to `paths[i]`, `labels[i]` (-1: none), `splits[i]` and `keys[i]`."""

    path: Path
    features: np.ndarray  # N x D float32, rows of length 1
    paths: list[str]
    labels: np.ndarray
    splits: list[str]
    keys: list[str]
    classes: tuple[str, ...]
    about: dict[str, Any]
    origin: str = ""  # its URL, if it came from one

    def __len__(self) -> int:
        return len(self.paths)

    def label_name(self, row: int) -> str:
        return self.classes[self.labels[row]] if self.labels[row] >= 0 else ""

    def search(
        self, image: str | Path | Image.Image, top: int = 20, *, patch: tuple[int, int] | None = None, **how: Any
    ) -> list[Hit]:
        """The images nearest to another one; `how` as in `query.search`: box, engine, model.

        patch  row and column, from 0, of a patch of the index's ViT: search by what is there (`patches`)
        """
        if patch is None:
            return search(self, image, top, **how)
        if how.get("box") is not None:
            raise ConfigError("--box and --patch are two ways to name a part of the image; give one of them")
        return search_patch(self, image, patch, top, how.get("model"))

    def search_text(self, text: str, top: int = 20, **how: Any) -> list[Hit]:
        """The images nearest to words, where the checkpoint has a text tower; `how`: engine, model."""
        return search_text(self, text, top, **how)

    def duplicates(self, progress: Progress = SILENT) -> list[Group]:
        """Images that show the same, exactly or nearly, in groups; those across splits first."""
        groups = find_duplicates(self.features, self.splits, self.looks(progress), progress)
        return [replace(group, paths=tuple(self.paths[row] for row in group.rows)) for group in groups]

    def label_errors(self, progress: Progress = SILENT) -> list[LabelError]:
        """Labels that seem wrong, the surest first."""
        errors = find_label_errors(self.features, self.labels, self.classes, progress)
        names = [(self.paths[e.row], self.classes[e.label], self.classes[e.suggestion]) for e in errors]
        return [
            replace(e, path=path, label_name=label, suggested_name=suggested)
            for e, (path, label, suggested) in zip(errors, names, strict=True)
        ]

    def looks(self, progress: Progress = SILENT) -> Looks:
        return look_at(self.catalogue(progress).source, self.path / "looks", progress=progress)

    def catalogue(self, progress: Progress = SILENT, data: str | Path | None = None) -> Catalogue:
        """The set that the index was made of, opened again, row by row as here; an error where it is another now."""
        named = str(data or self._named("data"))
        now = open_catalogue(named, progress, self.about["classes_from"])
        bad = {b["key"] for b in self.about["bad"]}
        rows = [i for i, key in enumerate(now.keys) if key not in bad]
        kept = Catalogue(now.source.take(np.array(rows, dtype=np.int64)), [now.splits[i] for i in rows])
        changed = differences(self.keys, kept.keys)
        labels = "labels or splits changed"
        same = kept.splits == self.splits and kept.classes == self.classes and (kept.labels == self.labels).all()
        if changed or not same:
            what = f"the index {self.path} does not fit {named} as it is now: {changed or labels}"
            raise DataError(f"{what}. Update it: vitkit index {shell_word(named)} --out {shell_word(self.path)}")
        return kept

    def _named(self, what: str) -> str:
        """The data or the model that the index says it was made of; one from elsewhere may not lead elsewhere."""
        named = str(self.about[what])
        return named_in(self.origin, named) if self.origin and is_url(named) else named

    def model(self, model: Loadable | None = None) -> Loadable:
        """The checkpoint that made the features, or where it is now."""
        return model if model is not None else self._named("model")

    @property
    def options(self) -> ModelOptions | None:
        stated = self.about.get("options") or {}
        return ModelOptions.of(**stated) if stated else None

    def embedder(self, model: Loadable | None = None, device: str | None = None, progress: Progress = SILENT) -> Opened:
        """What made the features, opened again; `model` says where it is now, if it was moved."""
        opened = open_embedder(self.model(model), device, progress, self.options)
        if (opened.identity, opened.features) != (self.about["identity"], self.about["features"]):
            what = f"the index {self.path} was made with {self.about['model']}, not with these weights"
            raise DataError(f"{what}. Name that checkpoint with --model, or index again with another --out")
        return opened


def build_index(
    data: str | Path,
    model: Loadable | None = None,
    out: str | Path | None = None,
    progress: Progress = SILENT,
    *,
    device: str | None = None,
    classes_from: str | int = "auto",
    batch_size: int | None = None,
    force: bool = False,
    options: ModelOptions | None = None,
) -> Index:
    """Make or update the index of a data set.

    model  any checkpoint, run or model; None: a descriptor of edges and colours that needs no weights
    out    a folder; by default DATA.index in the working folder
    force  overwrite an index that was made with another model
    """
    if is_url(out):
        publisher = Publisher(str(out), progress)
        with publisher.claimed():
            made = build_index(
                data,
                model,
                publisher.folder,
                progress,
                device=device,
                classes_from=classes_from,
                batch_size=batch_size,
                force=force,
                options=options,
            )
            publisher.push()
            return made
    place = Path(out) if out is not None else default_place(data)
    with only_one(place.with_name(f".{place.name}.lock"), f"the index {place}", "choose another --out"):
        opened = open_embedder(model, device, progress, options)
        before = _before(place, opened, force)
        catalogue = open_catalogue(data, progress, classes_from)
        about: dict[str, object] = {"model": name_of(model), "identity": opened.identity, "features": opened.features}
        about |= {"options": stated_options(options)} if stated_options(options) else {}
        about |= {"data": placed(data), "classes_from": classes_from, "classes": list(catalogue.classes)}
        building = _Building(catalogue, opened, before, place, about)
        return building.run(batch_size, progress)


def update_index(data: str | Path, progress: Progress = SILENT, classes_from: str | int = "auto") -> Index:
    """The index DATA.index, brought up to date by the model that made it; a new one where there is none."""
    place = default_place(data)
    if not (place / "about.json").is_file():
        return build_index(data, progress=progress, classes_from=classes_from)
    before = open_index(place)
    model = None if before.about["model"] == name_of(None) else before.model()
    return build_index(data, model, progress=progress, classes_from=classes_from, options=before.options)


def stated_options(options: ModelOptions | None) -> dict[str, object]:
    """As JSON, for `ModelOptions.of`."""
    if options is None:
        return {}
    named = {name: value for name, value in vars(options).items() if name != "fields" and value is not None}
    return {**named, **options.fields}


def default_place(data: str | Path) -> Path:
    if is_url(data):
        return Path(f"{last_name(str(data))}.index")
    return Path(f"{Path(data).expanduser().resolve().name if Path(data).exists() else data}.index")


def _before(place: Path, opened: Opened, force: bool) -> Index | None:
    """The index that is there already, if it is by the same model."""
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return None
    if not (place / "about.json").is_file():
        raise DataError(f"{place} exists and is no index; choose another --out")
    if foreign := sorted(p.name for p in place.iterdir() if p.name not in _OURS and not p.name.startswith(".")):
        raise DataError(f"{place} holds files that are not of an index, such as {foreign[0]}; choose another --out")
    if force:
        return None
    before = open_index(place)
    if (before.about["identity"], before.about["features"]) != (opened.identity, opened.features):
        made = f"{place} was made with {before.about['model']}"
        raise DataError(f"{made}, which is another model; choose another --out, or overwrite it with --force")
    return before


class _Building:
    """Rows that are known already come from `before`, the others from a job."""

    def __init__(
        self, catalogue: Catalogue, opened: Opened, before: Index | None, place: Path, about: dict[str, object]
    ) -> None:
        self.catalogue, self.opened, self.before, self.place, self.about = catalogue, opened, before, place, about
        known = {key: row for row, key in enumerate(before.keys)} if before is not None else {}
        self.old = [known.get(key, -1) for key in catalogue.keys]  # row of `before`; -1: to be computed
        self.todo = [i for i, row in enumerate(self.old) if row < 0]

    def run(self, batch_size: int | None, progress: Progress) -> Index:
        source = self.catalogue.source.take(np.array(self.todo, dtype=np.int64))
        job = Job(self.opened, source, self.place.with_name(f"{self.place.name}.features"), batch_size)
        if self.todo:
            job.begin(resume=True, force=not job.waits)
            job.do_share(ALONE, progress)
        reasons = self._reasons(job)
        if len(reasons) == len(self.catalogue):
            first = f"{self.catalogue.paths[0]}: {reasons[0]}"
            raise DataError(f"no image of {self.about['data']} can be read, such as {first}; see `vitkit data check`")
        if (before := self._unchanged(reasons)) is None:
            self._write(job, reasons)
        job.remove()
        return before or open_index(self.place)

    def _reasons(self, job: Job) -> dict[int, str]:
        """Why images cannot be read, by their number."""
        errors = [row["error"] for rows in (job.read() if self.todo else ()) for row in rows]
        return {i: str(error) for i, error in zip(self.todo, errors, strict=True) if error is not None}

    def _unchanged(self, reasons: dict[int, str]) -> Index | None:
        """What is there already, with all that was found out about its images, if it would be written again."""
        before, of = self.before, self.catalogue
        if before is None or not self.about.items() <= before.about.items():
            return None
        good = [i for i in range(len(of)) if i not in reasons]
        now = [[column[i] for i in good] for column in (of.keys, of.paths, of.splits, of.labels.tolist())]
        then = [before.keys, before.paths, before.splits, before.labels.tolist()]
        return before if now == then and before.about["bad"] == self._bad(reasons) else None

    def _bad(self, reasons: dict[int, str]) -> list[dict[str, str]]:
        of = self.catalogue
        return [{"path": of.paths[i], "reason": reason, "key": of.keys[i]} for i, reason in reasons.items()]

    def _write(self, job: Job, reasons: dict[int, str]) -> None:
        good = [i for i in range(len(self.catalogue)) if i not in reasons]
        of, keys, labels = self.catalogue, self.catalogue.keys, self.catalogue.labels.tolist()
        with replacing_folder(self.place) as folder:
            width = _write_features(folder / "features.npy", self._blocks(job, good), len(good))
            with (folder / "samples.jsonl").open("w", encoding="ascii") as file:
                for i in good:
                    file.write(json.dumps([of.paths[i], labels[i], of.splits[i], keys[i]]) + "\n")
            made = [folder / name for name in ("features.npy", "samples.jsonl")]
            files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in made}
            digest = digest_of([keys[i] for i in good], self.opened.identity, self.opened.features)
            header = {"format": FORMAT, "version": VERSION, **self.about, "count": len(good), "width": width}
            header |= {"digest": digest, "bad": self._bad(reasons), "files": files}
            write_json(folder / "about.json", header)

    def _blocks(self, job: Job, good: list[int]) -> Iterator[np.ndarray]:
        """Features of the good rows in order, a few at a time."""
        new = (f for rows in (job.read() if self.todo else ()) for f in map(features_of, rows) if f is not None)
        for low in range(0, len(good), _ROWS_AT_ONCE):
            block = []
            for i in good[low : low + _ROWS_AT_ONCE]:
                known = self.old[i]
                vector = next(new) if known < 0 or self.before is None else self.before.features[known]
                block.append(vector if known >= 0 else _unit(vector, self.catalogue.paths[i]))
            yield np.stack(block).astype("<f4")


def _unit(vector: np.ndarray, path: str) -> np.ndarray:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not np.isfinite(length):
        raise DataError(f"the model gives no finite features for {path}; check it with `vitkit predict`")
    return (vector / length if length else vector).astype(np.float32)


def _write_features(path: Path, blocks: Iterator[np.ndarray], count: int) -> int:
    width = 0
    with path.open("wb") as file:
        for block in blocks:
            if not width:
                width = block.shape[1]
                header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(block.tobytes())
    return width


def open_index(path: str | Path) -> Index:
    """Open an index after checking its version, its sizes and its digests."""
    folder = fetched_folder(str(path), lambda name: True) if is_url(path) else Path(path).expanduser()
    again = f"make it again: vitkit index DATA --out {shell_word(folder)} --force"
    if not (folder / "about.json").is_file():
        raise DataError(f"{folder} is no index; make one: vitkit index DATA --out {shell_word(folder)}")
    try:
        about = read_json(folder / "about.json")
        if about["format"] != FORMAT or about["version"] != VERSION:
            version = f"{about['format']} of version {about['version']}"
            raise DataError(f"{folder} is a {version}, and this vitkit reads version {VERSION}; {again}")
        samples, features = (about["files"][name] for name in ("samples.jsonl", "features.npy"))
        content = read_regular(folder / "samples.jsonl")
        if {"bytes": len(content), "sha256": sha256(content)} != samples:
            raise ValueError("samples.jsonl is not as it was written")
        rows = [parse_json(line) for line in content.splitlines()]
        _check_fields(about, rows)
        paths, labels, splits, keys = map(list, zip(*rows, strict=True))
        shape, classes = (len(paths), int(about["width"])), tuple(map(str, about["classes"]))
        vectors = read_array(folder / "features.npy", np.dtype(np.float32), shape, str(features["sha256"]))
        numbers = np.array(labels, dtype=np.int64)
        if not all(np.isfinite(vectors[low : low + _ROWS_AT_ONCE]).all() for low in range(0, shape[0], _ROWS_AT_ONCE)):
            raise ValueError("features are no finite numbers")
        if numbers.min() < -1 or numbers.max() >= max(len(classes), 0):
            raise ValueError("labels are no numbers of its classes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
        why = f"about.json has no {e}" if isinstance(e, KeyError) else e
        raise DataError(f"the index {folder} is damaged ({why}); {again}") from e
    return Index(folder, vectors, paths, numbers, splits, keys, classes, about, str(path) if is_url(path) else "")


def _check_fields(about: Mapping[str, object], rows: Iterable[list[object]]) -> None:
    """Their types; a stranger may have written them."""
    words = all(isinstance(about[name], str) for name in ("model", "data", "digest", "identity", "features"))
    classes, bad = about["classes"], about["bad"]
    listed = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    refused = isinstance(bad, list) and all(isinstance(b[name], str) for b in bad for name in ("path", "reason", "key"))
    if not (words and listed and refused and isinstance(about["classes_from"], str | int)) or not isinstance(
        about.get("options", {}), dict
    ):
        raise ValueError("about.json holds something else than an index writes")
    if not all([type(cell) for cell in row] == [str, int, str, str] for row in rows):
        raise ValueError("samples.jsonl holds something else than path, label, split and key")


def bad_files(index: Index) -> list[BadFile]:
    """What could not be read when the index was made."""
    return [BadFile(b["path"], "", b["reason"]) for b in index.about["bad"]]
