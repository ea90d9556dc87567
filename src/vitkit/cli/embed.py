"""`vitkit embed`: pictures as vectors, for search, clustering or a classifier of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli import predict as shared
from vitkit.cli.output import JsonOption


def embed(
    model: shared.ModelArgument,
    images: shared.ImagesArgument,
    out: Annotated[Path, typer.Option(help="Write .npz, .parquet, .jsonl or .csv.")],
    features: Annotated[
        str, typer.Option(help="cls, mean or tokens (every patch); by default what the model's head reads.")
    ] = "",
    runtime: shared.RuntimeOption = "auto",
    merge: shared.MergeOption = 0,
    split: shared.SplitOption = None,
    image_size: shared.SizeOption = None,
    batch_size: shared.BatchOption = None,
    device: shared.DeviceOption = None,
    resume: shared.ResumeOption = False,
    force: shared.ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the features of pictures. torchrun shares them among processes and machines."""
    from vitkit.errors import ConfigError
    from vitkit.predict import Embed, Features, open_inputs
    from vitkit.ranks import joined
    from vitkit.runtime import open_runtime

    with joined() as (rank, world_size):
        loaded, config, _ = shared.open_model(model, image_size, device, runtime)
        if not hasattr(loaded, "parameters"):
            raise ConfigError(f"{model} is exported and gives classes only; give the checkpoint it was made from")
        source = open_inputs(images, split)
        wanted = Features(loaded, features)
        opened = open_runtime(wanted, runtime, merge=merge)
        about = {"command": "embed", "model": shared.identity(loaded, model), "features": wanted.kind}
        about["runtime"] = opened.name
        done = shared.run(Embed(opened), source, config, out, about, resume, force, rank, world_size, batch_size)
        if rank == 0:
            shared.report(done, out, about, as_json)
