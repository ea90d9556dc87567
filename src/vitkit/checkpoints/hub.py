"""`hf:owner/name[@revision]` and `timm:name` -> a local folder, through huggingface_hub.

Its cache and its offline mode (HF_HUB_OFFLINE=1) are used as they are; only the files that a
checkpoint can need are fetched.
"""

from __future__ import annotations

import re
from pathlib import Path

from vitkit.checkpoints.files import read_json
from vitkit.errors import CheckpointError, MissingPackage

CONFIGS = ("config.json", "preprocessor_config.json", "open_clip_config.json")
# In this order: the first that the repository has is fetched, the others are not.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


def fetch(source: str) -> Path:
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
    try:
        return _fetch(repo, revision or None, source)
    except errors.RevisionNotFoundError as e:
        raise CheckpointError(f"{source}: {repo} has no revision {revision!r}; leave it out for the newest") from e
    except errors.RepositoryNotFoundError as e:
        raise CheckpointError(f"{source}: the hub has no {repo!r}, or it is private: check the name, or log in") from e
    except errors.LocalEntryNotFoundError as e:
        raise CheckpointError(
            f"{source} is not in the cache and the hub cannot be reached (offline?): fetch it once while online, "
            f"or give a local folder"
        ) from e
    except (errors.HfHubHTTPError, OSError, ValueError, RuntimeError) as e:
        raise CheckpointError(f"{source}: the hub did not deliver ({str(e).splitlines()[0]}); try again later") from e


def _fetch(repo: str, revision: str | None, source: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unreachable: list[LocalEntryNotFoundError] = []

    def get(file: str) -> Path | None:
        """None when the repository does not have the file, or the cache does not and the hub is out of reach."""
        try:
            return Path(hf_hub_download(repo, file, revision=revision, local_files_only=bool(unreachable)))
        except LocalEntryNotFoundError as e:
            unreachable.append(e)
        except EntryNotFoundError:
            pass
        return None

    for file in CONFIGS:
        get(file)
    for file in WEIGHTS:
        if (path := get(file)) is None:
            continue
        if file.endswith(".index.json"):
            for shard in sorted(set(read_json(path).get("weight_map", {}).values())):
                get(str(shard))
        return path.parent
    if unreachable:
        raise unreachable[0]
    raise CheckpointError(f"{source}: {repo} holds none of {', '.join(WEIGHTS)}; fetch its weights by hand")
