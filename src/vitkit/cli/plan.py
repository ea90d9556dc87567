"""`vitkit plan`: memory, steps, hours and money of a training run, before it is begun."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from vitkit.cli.completion import model_names
from vitkit.cli.output import JsonOption, open_table, print_json

if TYPE_CHECKING:
    from vitkit.plan import Plan


class Optimizer(str, Enum):
    adamw = "adamw"
    muon = "muon"
    sgd = "sgd"


class Precision(str, Enum):
    bf16 = "bf16"
    fp32 = "fp32"


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A name of `vitkit zoo`, or a checkpoint.", autocompletion=model_names),
    ],
    images: Annotated[int, typer.Option(help="Pictures to train on.")] = 1_281_167,
    gpus: Annotated[int, typer.Option(help="Devices, over all machines.")] = 1,
    device: Annotated[str, typer.Option(help="h100, a100, l4, rtx3090, or cpu: this machine, measured.")] = "cpu",
    epochs: Annotated[float, typer.Option(help="Passes over the pictures.")] = 90.0,
    batch_size: Annotated[int, typer.Option(help="Over all devices; 1024 on GPUs, 64 on a CPU.")] = 0,
    image_size: Annotated[str | None, typer.Option(help="384, or 224x448 (height x width).")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes; the model's own when left out.")] = None,
    accumulate: Annotated[int, typer.Option(help="Parts that a batch is computed in.")] = 1,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute blocks again in the backward pass instead of keeping them.")
    ] = False,
    shard: Annotated[bool, typer.Option("--shard", help="Share weights among devices (FSDP).")] = False,
    optimizer: Annotated[Optimizer, typer.Option(help="What updates the weights.")] = Optimizer.adamw,
    precision: Annotated[Precision | None, typer.Option(help="bf16 on GPUs and fp32 on a CPU when left out.")] = None,
    per_machine: Annotated[int, typer.Option(help="GPUs in one machine.")] = 8,
    price: Annotated[float | None, typer.Option(help="Dollars for an hour of one device.")] = None,
    mfu: Annotated[float | None, typer.Option(help="Share of the device's compute that is reached, if known.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a training run needs: memory of each device, steps, hours, cost and data."""
    from vitkit.plan import Setup
    from vitkit.plan import plan as make

    made = make(
        Setup(
            model=model,
            images=images,
            gpus=gpus,
            device=device,
            epochs=epochs,
            batch_size=batch_size,
            image_size=image_size,
            classes=classes,
            accumulate=accumulate,
            checkpointing=checkpointing,
            shard=shard,
            optimizer=optimizer.value,
            precision=precision.value if precision is not None else "",
            per_machine=per_machine,
            price=price,
            mfu=mfu,
        )
    )
    return print_json(made.to_dict()) if as_json else _print(made)


def _print(made: Plan) -> None:
    setup, memory, step = made.setup, made.memory, made.step
    count = f"{setup.gpus} x {made.device.name}" if setup.gpus > 1 else made.device.name
    typer.echo(
        f"{setup.model} ({made.parameters / 1e6:,.1f} M parameters) on {setup.images:,} pictures for {setup.epochs:g} "
        f"epochs\n{count}, {setup.precision}, {setup.optimizer}, batches of {setup.batch_size:,}, "
        f"{made.pictures:,} pictures at a time on each device\n"
    )
    print_, table = open_table("memory of each device", "GB")
    parts = {"parameters": memory.parameters, "gradients": memory.gradients, "optimiser": memory.optimizer}
    parts |= {"activations": memory.activations, "workspace of the backward pass": memory.workspace}
    if memory.gathered:
        parts["gathered from other devices" if setup.shard else "buckets to exchange gradients"] = memory.gathered
    for name, size in parts.items():
        table.add_row(name, f"{size / 1e9:,.2f}")
    have = f" of {made.device.memory / 1e9:.0f}" if made.device.memory else ""
    table.add_row("peak (gradients come as activations go)", f"{memory.peak / 1e9:,.2f}{have}")
    print_(table)
    print_, table = open_table("time and money", "")
    table.add_row("a step", _duration(step.total))
    table.add_row("pictures a second", f"{made.images_per_second:,.{0 if made.images_per_second >= 10 else 2}f}")
    table.add_row("steps", f"{made.steps:,}")
    table.add_row("all steps", _duration(made.hours * 3600))
    if setup.price:
        table.add_row(f"cost at ${setup.price:g} an hour and device", f"${made.cost:,.0f}")
    print_(table)
    print_, table = open_table("data", "")
    table.add_row("size", _size(setup.images * setup.picture_bytes))
    table.add_row("shards of about a gigabyte", f"{made.shards:,}")
    table.add_row("cores to decode, in each machine", f"{made.cores:,}")
    print_(table)
    for line in made.advice:
        typer.echo(f"note: {line}")


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{1e3 * seconds:,.0f} ms"


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e6:,.1f} MB"
