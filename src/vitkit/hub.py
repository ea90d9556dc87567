"""Models on a hub, by `huggingface_hub`: `push` a run or a model with its card, `pull` one into a folder.

Nothing that says where things lie on somebody's disk goes out: weights, a configuration of the model, the card, the
curves and what the run reached. `HF_TOKEN` and `HF_ENDPOINT` mean what they mean to huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from vitkit.checkpoints.load import load
from vitkit.checkpoints.native import save
from vitkit.checkpoints.source import locate
from vitkit.errors import CheckpointError, ConfigError, MissingPackage
from vitkit.io import replacing_folder, write_bytes, write_json, write_text
from vitkit.model.base import VisionModel
from vitkit.training.card import NAME as CARD
from vitkit.training.card import REPO, plain_card

WEIGHTS, CONFIG = "model.safetensors", "config.json"
BESIDE = ("result.json", "curves.png")  # of a run
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def push(
    model: VisionModel | str | Path,
    repo: str,
    *,
    private: bool | None = None,
    message: str = "Push a model of vitkit",
    token: str | None = None,
) -> str:
    """Upload a run, a checkpoint or a model to `owner/name`, with its card; the address of what was made.

    private  whether only you can see it; None: as your account has it. A repository that exists stays as it is
    token    None: that of HF_TOKEN or of `hf auth login`
    """
    _check_name(repo)
    with _in_words(repo), TemporaryDirectory() as folder:
        from huggingface_hub import CommitOperationAdd, HfApi

        files = write_files(model, Path(folder), repo)
        api = HfApi(token=token, library_name="vitkit")
        api.create_repo(repo, private=private, exist_ok=True)
        added = [CommitOperationAdd(file.name, file) for file in files]
        return str(api.create_commit(repo, added, commit_message=message).commit_url)


def pull(repo: str, out: str | Path | None = None, *, revision: str | None = None) -> Path:
    """Fetch a model into a folder, by default one of its name here; `vitkit.load` takes it."""
    _check_name(repo)
    target = Path(out) if out is not None else Path(repo.rpartition("/")[2])
    if target.exists():
        raise CheckpointError(f"{target} is there already; remove it, or choose another folder with --out")
    found = locate(f"hf:{repo}" + (f"@{revision}" if revision else ""), (CARD, CONFIG, *BESIDE))
    with replacing_folder(target) as folder:
        for file in sorted(path for path in found.iterdir() if path.is_file()):
            write_bytes(folder / file.name, file.read_bytes())
    return target


def write_files(model: VisionModel | str | Path, folder: Path, repo: str = "") -> list[Path]:
    """What is pushed: weights, configuration, card and, of a run, what it reached and its curves."""
    run = None if isinstance(model, VisionModel) else Path(model)
    loaded = model if isinstance(model, VisionModel) else load(model)
    if not isinstance(model, VisionModel) and not loaded.pretrained:
        raise ConfigError(f"{model} is a name of the zoo, with fresh weights; train it, or give a checkpoint")
    save(loaded, folder / WEIGHTS)
    about: Mapping[str, object] = loaded.config.to_dict()
    write_json(folder / CONFIG, {"library_name": "vitkit", "architecture": loaded.config.kind, "vitkit": about})
    name = repo.rpartition("/")[2] or "model"
    own = run / CARD if run is not None and (run / CARD).is_file() else None
    card = own.read_text(encoding="utf-8") if own is not None else plain_card(name, about, loaded.outputs.kind)
    write_text(folder / CARD, card.replace(REPO, repo or REPO))
    beside = [own.parent / file for file in BESIDE] if own is not None else []
    for file in beside:
        if file.is_file():
            write_bytes(folder / file.name, file.read_bytes())
    return sorted(folder.iterdir())


def _check_name(repo: str) -> None:
    if not _NAME.fullmatch(repo):
        raise ConfigError(f"{repo[:100]!r} is no name on the hub; write owner/name")


@contextmanager
def _in_words(repo: str) -> Iterator[None]:
    """What the client raises, as a sentence with the next action."""
    try:
        import huggingface_hub.errors as errors
    except ImportError as e:
        raise MissingPackage("huggingface_hub", f"pushing to {repo}", "hub") from e
    try:
        yield
    except errors.LocalTokenNotFoundError as e:
        raise CheckpointError(f"{repo}: nobody is logged in; run `hf auth login`, or set HF_TOKEN") from e
    except errors.OfflineModeIsEnabled as e:
        raise CheckpointError(f"{repo}: HF_HUB_OFFLINE is set; unset it to push") from e
    except errors.HfHubHTTPError as e:
        raise CheckpointError(f"{repo}: {_refusal(e)}") from e
    except OSError as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{repo}: the hub cannot be reached ({_first(e)}); check the network, try again") from e
    except Exception as e:
        if not type(e).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise
        raise CheckpointError(f"{repo}: the hub cannot be reached ({_first(e)}); check the network, try again") from e


def _refusal(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    known = {
        401: "the hub does not know this token, or there is none; run `hf auth login`, or set HF_TOKEN",
        403: "this token may not write there; choose another owner, or a token that may write",
        404: "there is no such owner, or you may not see it; check the name",
    }
    return known.get(status or 0, f"the hub refused ({_first(error)}); try again later")


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
