"""`vitkit export`: a model as a file that runs without vitkit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.output import JsonOption, print_json
from vitkit.cli.predict import MergeOption, ModelArgument, SizeOption

if TYPE_CHECKING:
    from vitkit.runtime.export import Export

_CALIBRATE, _VERIFY = 128, 256  # pictures


def export(
    model: ModelArgument,
    to: Annotated[str, typer.Option(help="onnx, openvino or torch-export.")],
    out: Annotated[Path, typer.Option(help="The file to write: .onnx, .xml or .pt2.")],
    int8: Annotated[bool, typer.Option("--int8", help="8-bit matrix products; no data is needed.")] = False,
    calibrate: Annotated[
        str | None, typer.Option(metavar="DATA", help="int8 with ranges from the split train of this set.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Compare on this set, and tell the accuracy.")] = None,
    merge: MergeOption = 0,
    image_size: SizeOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Resize, crop and normalise inside the file: raw pixels in.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model for ONNX Runtime, OpenVINO or PyTorch without its code, after comparing both."""
    from vitkit.checkpoints.load import load
    from vitkit.cli.evaluate import open_evaluation
    from vitkit.errors import ConfigError
    from vitkit.runtime.export import check_target
    from vitkit.runtime.export import export as write
    from vitkit.runtime.verify import pictures_of

    check_target(to, out)
    if calibrate is not None and raw:
        raise ConfigError("--raw takes pictures of any size, and calibrating needs one; leave out --raw or --calibrate")
    loaded: Any = load(model, image_size=image_size)
    judged_on = data or calibrate
    judged = open_evaluation(judged_on) if judged_on else None
    pictures = pictures_of(judged, loaded.config, _VERIFY if judged else 32, raw, loaded)
    result = write(
        loaded,
        to,
        out,
        pictures,
        int8=int8 or calibrate is not None,
        merge=merge,
        raw=raw,
        calibration=_calibration(calibrate, loaded.config) if calibrate else None,
        say=lambda line: typer.echo(f"{line} ...", err=True),
    )
    report(result, as_json)


def _calibration(data: str, config: Any) -> list[Any]:
    from vitkit.data import open_data
    from vitkit.data.progress import bar
    from vitkit.runtime.verify import pictures_of

    return list(pictures_of(open_data(data, "train", bar), config, _CALIBRATE).batches(config, 8))


def report(result: Export, as_json: bool) -> None:
    check = result.check
    if as_json:
        return print_json({"out": str(result.path), "bytes": result.bytes, "check": asdict(check)})
    typer.echo(f"{result.path}: {result.bytes / 2**20:.1f} MB")
    typer.echo(
        f"compared on {check.pictures} pictures ({check.name}): largest difference {check.difference:.1e} "
        + (f"in a probability, the same first class for {check.agreement:.2%}" if check.classifies else "in an output")
    )
    if check.accuracy is not None and check.accuracy_before is not None:
        typer.echo(f"accuracy {check.accuracy_before:.2%} before, {check.accuracy:.2%} after")
    return None
