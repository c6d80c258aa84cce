"""`fivefold context`: the ways to share a sequence, compared for one layer."""

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fivefold.support.errors import UserError
from fivefold.support.formatting import either

if TYPE_CHECKING:
    from fivefold.hardware.cluster import Cluster
    from fivefold.plan.context.methods import Case
    from fivefold.spec.model import ModelSpec

SHORT = "Compare ring, all-gather and Ulysses.  [dim]fivefold context --seq 131072 --cp 16[/]"
MODEL = "llama3-405b"


def context(
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")],
    cp: Annotated[int, typer.Option(help="Ranks that share it.")],
    model: Annotated[str | None, typer.Option(help=f"Whose heads; default: {MODEL}.", show_default=False)] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, in place of a model's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads; default: as many as heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; default: 128.")] = None,
    tp: Annotated[
        int | None, typer.Option(help="Ranks that share the heads; default: a node's GPUs, if heads and cluster allow.")
    ] = None,
    cluster: Annotated[str, typer.Option(help="Nodes x GPUs x accelerator.")] = "16x8xH100",
    software: Annotated[str, typer.Option(help="Whose kernels: fivefold, nemo, torchtitan, megatron.")] = "fivefold",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Compare the ways to share a sequence over cp ranks, for one layer and one sequence.

    First how the tokens are dealt out: contiguous, in a zigzag, in stripes. Then
    who gets to see whose keys: ring, all-gather, Ulysses. Bytes are what runs;
    seconds and crossovers come from the planner's model of kernels and links. The
    kernels matter: torch's fastest gives no log-sum-exp, which ring and all-gather
    need to merge partial results, so that they run on a slower one.

    [dim]Examples:[/]

      fivefold context --seq 131072 --cp 16

      fivefold context --seq 131072 --cp 16 --software nemo

      fivefold context --seq 32768 --cp 4 --model llama3-8b --tp 1 --cluster 2x4xA100-80

      fivefold context --seq 1048576 --cp 8 --heads 32 --kv-heads 32 --head-dim 64 --tp 1 --json
    """
    from dataclasses import replace

    from fivefold.hardware.cluster import Cluster
    from fivefold.plan.context import report
    from fivefold.plan.cost.software import software_of

    spec, machines = _spec(model, heads, kv_heads, head_dim), Cluster.parse(cluster)
    stack = software_of(software)
    partial = stack.cp_attention or stack.attention
    case = replace(_case(spec, machines, seq, cp, tp), kernel=stack.attention, partial=partial)
    most = machines.world // case.wires.layout.tp
    if as_json:
        typer.echo(json.dumps({"model": spec.name, "cluster": str(machines)} | report.answer(case, most)))
        return
    console = Console(highlight=False)
    console.print(f"one layer of {spec.name} on {machines}: {report.summary(case)}\n")
    console.print(report.split_table(case), report.SPLITS, "", report.method_table(case), report.METHODS, "", sep="\n")
    for sentence in report.sentences(case, most):
        console.print(sentence)


def _spec(model: str | None, heads: int | None, kv_heads: int | None, head_dim: int | None) -> "ModelSpec":
    from fivefold.spec.model import ModelSpec
    from fivefold.spec.presets import preset

    name = model or MODEL
    if heads is None:
        parts = {"--kv-heads": kv_heads, "--head-dim": head_dim}
        loose = " ".join(f"{option} {value}" for option, value in parts.items() if value is not None)
        if loose:
            raise UserError(f"{loose} says nothing without --heads; add it, or leave all of them to --model {name}")
        return preset(name)
    if model is not None:
        raise UserError(f"--model {model} has heads of its own, and --heads {heads} is given; leave one of them out")
    kv, width = heads if kv_heads is None else kv_heads, 128 if head_dim is None else head_dim
    given = {"--heads": heads, "--kv-heads": kv, "--head-dim": width}
    small = [f"{option} {value} must be at least 1" for option, value in given.items() if value < 1]
    if small:
        raise UserError(small)
    # The width of the feed-forward part is one that no tp minds which divides the heads.
    name, hidden = f"a model of {heads} heads", heads * width
    return ModelSpec(name=name, layers=1, hidden=hidden, heads=heads, kv_heads=kv, head_dim=width, ffn=heads, vocab=2)


def _case(spec: "ModelSpec", machines: "Cluster", seq: int, cp: int, tp: int | None) -> "Case":
    """Every problem at once."""
    from fivefold.layout.layout import Layout, tp_fits
    from fivefold.layout.sharding import kv_head
    from fivefold.plan.context.methods import Case
    from fivefold.plan.cost.kernels import Device
    from fivefold.plan.cost.links import Wires

    found, group = spec.problems(), machines.groups[0]
    if len(machines.groups) > 1:
        found.append(f"{machines} has unlike nodes, and one cp group runs on like ones; nearest: --cluster {group}")
    if seq < 1:
        found.append(f"--seq {seq} must be at least 1")
    if cp < 2:
        found.append(f"--cp {cp} leaves nobody to share a sequence with; nearest: --cp 2")
    if found:
        raise UserError(found)
    if tp is None:
        legal = [n for n in range(1, group.gpus + 1) if group.gpus % n == 0 and tp_fits(spec, n)]
        tp = max(n for n in legal if n == 1 or n * cp <= machines.world)
    layout = Layout(tp=tp, cp=cp)
    found = layout.problems(spec, seq=seq)
    if layout.world > machines.world:
        fits = [n for n in range(2, cp) if max(1, tp) * n <= machines.world and seq % (2 * n) == 0]
        larger = f"--cluster {-(-layout.world // group.gpus)}x{group.gpus}x{group.accelerator.name}"
        found.append(
            f"tp={tp} x cp={cp} needs {layout.world} GPUs, and {machines} has {machines.world}; nearest: "
            + either([*(f"--cp {n}" for n in fits[-1:]), larger])
        )
    if found:
        raise UserError(found)
    device = Device.of(group.accelerator)
    wires = Wires(device, group.gpus, layout)
    return Case(seq, spec.heads // tp, len(kv_head(spec, layout, 0)), spec.head_dim, device, wires)
