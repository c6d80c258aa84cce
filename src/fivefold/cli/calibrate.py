"""`fivefold calibrate`: what the device at hand reaches, as a file for the planner."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from fivefold.cli.progress import counting_bar
from fivefold.cli.train import check_ranks
from fivefold.render.blocks import check_writable, show
from fivefold.support.errors import UserError
from fivefold.support.files import write

SHORT = "Measure this device for the planner.  [dim]fivefold calibrate -o mine.toml[/]"


def calibrate(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write an accelerator file here; with --ranks a cluster.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, less sure.")] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="What to measure.")] = "auto",
    each: Annotated[
        bool, typer.Option("--ranks", help="Measure every rank's own speed, while all of them run.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(help="With --ranks: processes to start on this machine; default: one for each GPU, or core."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what kernels and collectives reach here, as shares of the maker's ceilings.

    Matmuls in the three layouts of training, attention, element-wise kernels,
    launches, and collectives between the devices of this machine. The constants
    are those with which the planner's formulas give the measured times best; the
    last two columns say how well. A cluster then names the file like a device.

    With --ranks, all ranks are measured at once, by themselves or as torchrun
    or srun started them. Ranks whose speeds agree within the noise form a
    group, the slow ones are named, and the file is a cluster of these groups.

    [dim]Examples:[/]

      fivefold calibrate

      fivefold calibrate -o mine.toml

      fivefold calibrate --quick --json

      fivefold calibrate --ranks --nproc 4 -o ranks.toml

      srun -N4 --ntasks-per-node=8 fivefold calibrate --ranks -o ranks.toml
    """
    check_writable(output, ".toml")
    if each:
        _ranks(output, quick, device, nproc, as_json)
        return
    if nproc is not None:
        raise UserError(f"--nproc {nproc} is for --ranks; without it calibrate starts its own ranks")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "calibrate starts its own ranks, one for each GPU of this machine; run it without a launcher, or with "
            "--ranks to measure each of the launcher's"
        )
    from fivefold.machines.calibrate import calibrate as measure
    from fivefold.machines.result import to_toml

    with counting_bar() as progress:
        found = measure(device, quick, progress)
    if output is not None:
        host = f"host: {found.host * 1e3:.3f} ms to launch one block's forward pass"
        write(output, to_toml(found.accelerator, [_made_by(), host]))
    show(found, as_json)
    if output is not None and not as_json:
        typer.echo(f"written to {output}; a cluster of them is for example 8x{output}")


def _ranks(output: Path | None, quick: bool, device: str, nproc: int | None, as_json: bool) -> None:
    """Every rank of this machine, or of the launcher that started this one; rank 0 shows and writes."""
    from fivefold.launch.world import current_world

    world = current_world()
    check_ranks(nproc, world)
    from fivefold.machines.calibrate import calibrate_ranks, joined
    from fivefold.machines.result import speeds_to_toml

    found = joined(world, device, quick) if world.joined else calibrate_ranks(device, nproc, quick)
    if found is None:
        return
    if output is not None:
        write(output, speeds_to_toml(found.cluster, [_made_by(), found.sentence]))
    show(found, as_json)
    if output is not None and not as_json:
        typer.echo(f"written to {output}; plan for it with: fivefold plan MODEL --cluster {output}")


def _made_by() -> str:
    return f"Made by: {' '.join(['fivefold', *sys.argv[1:]])}"
