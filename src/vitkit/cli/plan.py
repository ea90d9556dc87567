"""`vitkit plan`: memory, steps, hours and money of a training run, before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from vitkit.cli import options as opt
from vitkit.cli.options import echo

if TYPE_CHECKING:
    from vitkit.plan import Plan, Scale

_OPTIMIZERS = opt.keys_of("vitkit.training.optim", "OPTIMIZERS")


def plan(
    model: opt.Model,
    images: Annotated[int, Option(help="Images to train on.")] = 1_281_167,
    gpus: Annotated[int, Option(help="Devices, over all machines.")] = 1,
    device: Annotated[str, Option(help="h100, a100, l4, rtx3090, or cpu: this machine, measured.")] = "cpu",
    epochs: Annotated[float, Option(help="Passes over the images.")] = 90.0,
    batch_size: Annotated[int, Option(help="Over all devices; 1024 on GPUs, 64 on a CPU.")] = 0,
    image_size: opt.ImageSize = None,
    classes: opt.Classes = None,
    accumulate: Annotated[int, Option(help="Parts that a batch is computed in.")] = 1,
    checkpointing: Annotated[
        bool, Option("--checkpointing", help="Compute blocks again in the backward pass instead of keeping them.")
    ] = False,
    shard: Annotated[bool, Option("--shard", help="Share weights among devices (FSDP).")] = False,
    optimizer: Annotated[
        str, Option(help="As in `vitkit train --set optimizer=NAME`.", autocompletion=_OPTIMIZERS)
    ] = "adamw",
    precision: Annotated[str, Option(help="bf16 or fp32; default: bf16 where that is faster.")] = "",
    per_machine: Annotated[int, Option(help="GPUs in one machine.")] = 8,
    price: Annotated[float | None, Option(help="Dollars for an hour of one device.")] = None,
    mfu: Annotated[float | None, Option(help="Share of the device's compute that is reached, if known.")] = None,
    freeze: Annotated[str, Option(help="'backbone' (linear probe) or a number of blocks.")] = "",
    lora: Annotated[int, Option(help="Rank of low-rank updates; all else is frozen.")] = 0,
    augment: Annotated[str, Option(help="none, light, medium or strong; none: frozen blocks run once.")] = "",
    simulate: Annotated[
        bool, Option("--simulate", help="Simulate the loading of images and failures of nodes, event by event.")
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Say what a training run needs: memory of each device, steps, hours, cost and data.

    Several machines: also what flows over the network and from storage, checkpoints, failures; days and cost as ranges.
    """
    from vitkit import plan as planning

    sizes = (model, images, gpus, device, epochs, batch_size, image_size, classes)
    how = (accumulate, checkpointing, shard, optimizer, precision, per_machine, price, mfu)
    made = planning.plan(planning.Setup(*sizes, *how, freeze=freeze, lora=lora, augment=augment))
    many = planning.scale(made, simulate=simulate) if made.machines > 1 or simulate else None
    if as_json:
        return opt.print_json({**made.to_dict(), **({"scale": many.to_dict()} if many else {})})
    _print(made)
    return _print_scale(made, many) if many else None


def _print(made: Plan) -> None:
    setup, memory, step = made.setup, made.memory, made.step
    count = f"{setup.gpus} x {made.device.name}" if setup.gpus > 1 else made.device.name
    learns = f", {made.learning:,} learn" if setup.freeze or setup.lora else ""
    echo(
        f"{setup.model} ({made.parameters / 1e6:,.1f} M parameters{learns}) on {setup.images:,} images "
        f"for {setup.epochs:g} epochs\n{count}, {setup.precision}, {setup.optimizer}, batches of {setup.batch_size:,}, "
        f"{setup.at_once:,} images at a time on each device\n"
    )
    parts = {"parameters": memory.parameters, "gradients": memory.gradients, "optimiser": memory.optimizer}
    parts |= {"activations": memory.activations, "workspace of the backward pass": memory.workspace}
    if memory.gathered:
        parts["gathered from other devices" if setup.shard else "buckets to exchange gradients"] = memory.gathered
    rows = [(name, f"{size / 1e9:,.2f}") for name, size in parts.items()]
    have = f" of {made.device.memory / 1e9:.0f}" if made.device.memory else ""
    rows.append(("peak (gradients come as activations go)", f"{memory.peak / 1e9:,.2f}{have}"))
    opt.print_table(("memory of each device", "GB"), rows)
    throughput = f"{made.images_per_second:,.{0 if made.images_per_second >= 10 else 2}f}"
    rows = [("one step", _duration(step.total)), ("throughput, img/s", throughput)]
    rows += [("steps", f"{made.steps:,}"), ("all steps", _duration(made.steps * step.total))]
    if once := made.once:
        what = "features" if once.head else "states"
        rows = [("batches of the only pass", f"{made.steps:,}")] if once.head else rows
        rows += [(f"{what} of {once.images:,} images, computed once", _duration(once.seconds))]
        rows += [("  kept on disk", _bytes(once.bytes))]
        rows += [("head on them, on the host's processor", _duration(once.head))] if once.head else []
        rows += [("in all", _duration(made.hours * 3600))]
    if setup.price:
        rows.append((f"cost at ${setup.price:g} an hour and device", f"${made.cost:,.0f}"))
    opt.print_table(("time and money", ""), rows)
    rows = [("size", _bytes(setup.images * setup.image_bytes)), ("shards of about a gigabyte", f"{made.shards:,}")]
    opt.print_table(("data", ""), [*rows, ("cores to decode, in each machine", f"{made.cores:,}")])
    for line in made.advice:
        echo(f"note: {line}")


def _print_scale(made: Plan, many: Scale) -> None:
    rows = [
        ("out of a node over the network, each step", _bytes(many.network_bytes)),
        ("  on average", f"{_bytes(many.network_rate)}/s"),
        ("from storage into a node", f"{_bytes(many.storage_rate)}/s"),
        ("  in an epoch", _bytes(many.storage_bytes)),
        ("index of the shards, mapped once for a node", _bytes(many.index_bytes)),
        ("checkpoint", _bytes(many.checkpoint_bytes)),
    ]
    opt.print_table((f"{many.nodes:,} nodes", ""), rows)
    ranges = [
        ("checkpoint written in", *map(_duration, many.checkpoint_seconds)),
        ("between checkpoints", *map(_duration, many.interval)),
        ("failures of nodes", *(f"{n:,.1f}" for n in many.node_failures)),
        ("images delivered, of those needed", *(f"{share:.0%}" for share in many.fed)),
        ("time left by failures and checkpoints", *(f"{share:.1%}" for share in many.efficiency)),
        ("days", *(f"{days:,.2f}" for days in many.days)),
        ("cost", *(f"${cost:,.0f}" for cost in many.cost)),
    ]
    opt.print_table(("the whole run", "best", "likely", "worst"), ranges)
    if many.simulated:
        runs = many.simulated.values()
        found = [
            ("throughput, img/s", *(f"{run.images_per_second:,.0f}" for run in runs)),
            ("waits for images", *(f"{run.waits_for_data:.1%}" for run in runs)),
            ("waits for the slowest", *(f"{run.waits_for_others:.1%}" for run in runs)),
            ("failures", *(f"{run.failures:,.1f}" for run in runs)),
            ("time lost to them", *(f"{run.lost_share:.1%}" for run in runs)),
            ("days", *(f"{run.days:,.2f}" for run in runs)),
            ("  eight runs of ten", *(f"{run.days_first_tenth:,.2f} to {run.days_last_tenth:,.2f}" for run in runs)),
        ]
        opt.print_table(("simulated", *many.simulated), found)
    echo("What is taken for granted: docs/plan.md, or --json.")


def _bytes(count: float) -> str:
    units = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
    unit, size = next(((unit, size) for unit, size in units if count >= size), ("kB", 1e3))
    return f"{count / size:,.1f} {unit}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{1e3 * seconds:,.0f} ms"
