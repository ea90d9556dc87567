"""What the user names -> files opened: a file, a folder, a run directory, hf:owner/name[@revision], timm:name.

The last two use huggingface_hub with its cache and its offline mode; only files that a checkpoint can need are fetched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vitkit.checkpoints.families import ENDINGS
from vitkit.checkpoints.family import COMPANIONS, Opened, read_json
from vitkit.checkpoints.files import open_tensors
from vitkit.checkpoints.tensors import LazyTensors
from vitkit.errors import CheckpointError, Denied, MissingPackage, NotThere, did_you_mean
from vitkit.model import zoo
from vitkit.storage import fetched_folder, fetched_with, is_url, last_name, local, search_above, suffix

_INDEX = "model.safetensors.index.json"  # of a model in several files
# Of a repository on the hub the first that it has is fetched, the others are not.
HUB_WEIGHTS = ["model.safetensors", _INDEX, "open_clip_model.safetensors"]
HUB_WEIGHTS += ["pytorch_model.bin", "open_clip_pytorch_model.bin"]
# The files of a folder that may hold the weights, best first: of a run, of the hub, others.
WEIGHTS = ("best.safetensors", "last.safetensors", *HUB_WEIGHTS, "model.pth", "model.npz")
_TRAINED = "a file, a folder, a run directory, hf:owner/name, timm:name"
_SOURCE = f"{_TRAINED}, or a name of `vitkit zoo`"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


def on_hub(source: str | Path) -> bool:
    return isinstance(source, str) and source.startswith(("hf:", "timm:"))


def locate(source: str | Path, more: Sequence[str] = ()) -> Path:
    """The path of what is named; from the hub `more` files are fetched as well, where there are."""
    if on_hub(source):
        return _from_hub(str(source), more)
    if is_url(source):
        return _from_url(str(source), more)
    path = Path(source).expanduser()
    try:
        if path.exists():
            return path
    except OSError as e:  # a name too long for the file system, say
        raise CheckpointError(f"{str(source)[:200]!r} cannot be opened ({e.strerror}); give {_SOURCE}") from e
    if str(source) in zoo.ZOO:
        raise CheckpointError(
            f"{source} is a name of the zoo and has no trained weights, as needed here; give {_TRAINED}"
        )
    in_folder = path.parent.is_dir() and path.parent != Path()
    known = [p.name for p in path.parent.iterdir()] if in_folder else zoo.ZOO
    near = did_you_mean(path.name if in_folder else str(source), known)
    raise CheckpointError(f"{str(source)!r} is neither an existing path nor a known model.{near} Give {_SOURCE}")


def _from_url(url: str, more: Sequence[str]) -> Path:
    """A file, with what belongs to it where its name says that it is part of a folder; or a folder."""
    names = {*COMPANIONS, *more, *WEIGHTS}
    if suffix(url) not in ENDINGS:
        return fetched_folder(url, lambda name: name in names or (suffix(name) in ENDINGS and "/" not in name))
    try:
        path = local(url)
    except (Denied, NotThere):
        if (published := search_above(url)) is None:
            raise
        return local(published)
    return fetched_with(url, COMPANIONS) if last_name(url) in WEIGHTS else path


def _from_hub(source: str, more: Sequence[str]) -> Path:
    """The folder with the files of a model on the hub."""
    kind, _, name = source.partition(":")
    if not _NAME.fullmatch(name) or (kind == "hf" and "/" not in name.split("@")[0]):
        wanted = "hf:owner/name[@revision]" if kind == "hf" else "timm:name, such as timm:vit_base_patch16_224"
        raise CheckpointError(f"{source!r} is not a name on the hub; write {wanted}")
    repo, _, revision = name.partition("@")
    repo = repo if "/" in repo else f"timm/{repo}"
    try:
        import huggingface_hub.errors as errors
    except ImportError as e:
        raise MissingPackage("huggingface_hub", f"fetching {source}", "hub") from e
    offline = "it is not in the cache and the hub cannot be reached (offline?)"
    problems = {
        errors.RevisionNotFoundError: f"{repo} has no revision {revision!r}; leave it out for the newest",
        errors.RepositoryNotFoundError: f"the hub has no {repo!r}, or it is private: check the name, or log in",
        errors.LocalEntryNotFoundError: f"{offline}: fetch it once while online, or give a local folder",
        errors.EntryNotFoundError: f"{repo} holds none of {', '.join(HUB_WEIGHTS)}; fetch its weights by hand",
    }
    try:
        return _fetch(repo, revision or None, more)
    except (errors.HfHubHTTPError, errors.EntryNotFoundError, OSError, ValueError, RuntimeError) as e:
        failed = f"the hub did not deliver ({str(e).splitlines()[0]}); try again later"
        problem = next((words for kind, words in problems.items() if isinstance(e, kind)), failed)
        raise CheckpointError(f"{source}: {problem}") from e


def _fetch(repo: str, revision: str | None, more: Sequence[str]) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    absent, unreachable = list[Exception](), list[Exception]()

    def get(file: str) -> Path | None:
        """None when the repository does not have the file, or the cache does not and the hub is out of reach."""
        try:
            return Path(hf_hub_download(repo, file, revision=revision, local_files_only=bool(unreachable)))
        except EntryNotFoundError as e:
            (unreachable if isinstance(e, LocalEntryNotFoundError) else absent).append(e)
            return None

    for file in (*COMPANIONS, *more):
        get(file)
    path = next(filter(None, map(get, HUB_WEIGHTS)), None)
    if path is None:
        raise [*unreachable, *absent][0]
    for shard in sorted(set(_shards(path).values())) if path.name == _INDEX else ():
        get(shard)
    return path.parent


def open_path(path: Path, as_named: bool = False) -> Opened:
    """`as_named` leaves the names of a state dict as they are; otherwise what training puts before them goes."""
    if not path.is_dir():  # by its name, it may be part of a folder
        return _open_file(path, path.parent if path.name in WEIGHTS else None, as_named)
    known = [path / name for name in WEIGHTS if (path / name).is_file()]
    found = known[:1] or sorted(p for p in path.iterdir() if p.suffix in ENDINGS)
    if len(found) == 1:
        return _open_file(found[0], path, as_named)
    if found:
        raise CheckpointError(f"{path} holds {len(found)} files of weights; give one of them, such as {found[0]}")
    raise CheckpointError(f"{path} holds no weights ({', '.join(WEIGHTS[:3])}, ...); give the folder that does")


def _open_file(path: Path, folder: Path | None, as_named: bool) -> Opened:
    tensors, header = (_open_shards(path), {}) if path.name == _INDEX else open_tensors(path)
    if "vitkit" in header:
        return Opened(tensors, path, header)
    notes: list[str] = []
    container, tensors = _unwrapped(tensors, notes, as_named)
    beside = {name: read_json(folder / name) for name in COMPANIONS if folder and (folder / name).is_file()}
    return Opened(tensors, path, header, beside, notes, container)


def _shards(index: Path) -> dict[str, str]:
    """Of a large model in several files: tensor -> file."""
    where = {name: str(file) for name, file in read_json(index).table("weight_map").items()}
    if not where or any(Path(file).name != file for file in where.values()):
        raise CheckpointError(f"{index} has no usable weight_map; fetch it again")
    return where


def _open_shards(index: Path) -> LazyTensors:
    where = _shards(index)
    files = {name: index.with_name(name) for name in where.values()}
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        raise CheckpointError(f"{missing[0]} is missing, although the index names it; fetch it too")
    opened = {name: open_tensors(file)[0] for name, file in files.items()}
    for name, file in where.items():
        if name not in opened[file]:
            raise CheckpointError(f"{file} does not hold {name!r}, although the index says so; fetch it again")
    return LazyTensors({n: opened[f].outlines[n] for n, f in where.items()}, lambda n: opened[where[n]][n])


# Where a state dict may be inside a training checkpoint, and what may stand before its names.
CONTAINERS = ("teacher", "model_ema", "state_dict_ema", "ema", "model", "module", "state_dict", "weights", "encoder")
PREFIXES = ["module.", "model_ema.", "backbone.", "_orig_mod.", "encoder.", "visual.trunk.", "model."]
PREFIXES += ["student.", "teacher."]
_ANCHORS = ("to_patch_embedding.1.weight", "patch_embed.proj.weight", "conv_proj.weight", "conv1.weight")


def _unwrapped(tensors: LazyTensors, notes: list[str], as_named: bool, container: str = "") -> tuple[str, LazyTensors]:
    """The state dict inside a training checkpoint, without prefixes; and in which container it was."""
    top = {name.split("/", 1)[0] for name in tensors if "/" in name}
    if inside := next((c for c in CONTAINERS if c in top), None):
        others = ", ".join(sorted(top - {inside})[:4])
        notes.append(f"read from {inside!r} inside the file" + (f" (beside {others})" if others else ""))
        return _unwrapped(tensors.within(f"{inside}/"), notes, as_named, container or inside)
    while not as_named and (prefix := _common_prefix(tensors)):
        kept = {name: name.removeprefix(prefix) for name in tensors if name.startswith(prefix) or "head" in name}
        tensors = tensors.renamed(kept.get, notes, f"outside {prefix!r}")
    return container, tensors


def _common_prefix(tensors: LazyTensors) -> str | None:
    """The prefix before 'patch_embed.proj.weight' and its like, when there is one to take off."""
    wanted = ((prefix, anchor) for anchor in _ANCHORS if anchor not in tensors for prefix in PREFIXES)
    return next((p for p, a in wanted if any(n.startswith(p) and n.endswith(a) for n in tensors)), None)
