"""Ring, all-gather and Ulysses compared for one layer and one sequence, as one function."""

from pathlib import Path

from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout, tp_fits
from fivefold.layout.sharding import kv_head
from fivefold.plan.context.methods import LayerAttention
from fivefold.plan.context.result import ContextResult
from fivefold.plan.cost.kernels import Device
from fivefold.plan.cost.links import Wires
from fivefold.plan.cost.software import software_of
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from fivefold.support.formatting import either

MODEL = "llama3-405b"  # whose heads, where none are given
HEAD_DIM = 128


def context(
    seq: int,
    cp: int,
    *,
    model: str | ModelSpec | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tp: int | None = None,
    cluster: str | Path | Cluster = "16x8xH100",
    software: str = "fivefold",
) -> ContextResult:
    """Compare the kinds of context parallelism for a sequence of `seq` tokens over `cp` ranks.

    The heads are a model's, or given one by one. `tp` ranks share them; by default as many as a node has, if heads and
    cluster allow.
    """
    spec, machines, stack = _spec(model, heads, kv_heads, head_dim), Cluster.read(cluster), software_of(software)
    group = machines.groups[0]
    found = spec.problems()
    if len(machines.groups) > 1:
        found.append(f"{machines} has mixed nodes, and a cp group runs on nodes of one kind; nearest: cluster={group}")
    if seq < 1:
        found.append(f"seq={seq} must be at least 1")
    if cp < 2:
        found.append(f"cp={cp} does not divide a sequence; nearest: cp=2")
    if found:
        raise UserError(found)
    if tp is None:
        legal = [n for n in range(1, group.gpus + 1) if group.gpus % n == 0 and tp_fits(spec, n)]
        tp = max(n for n in legal if n == 1 or n * cp <= machines.world)
    layout = Layout(tp=tp, cp=cp)
    found = layout.problems(spec, seq=seq)
    if layout.world > machines.world:
        fits = [n for n in range(2, cp) if max(1, tp) * n <= machines.world and seq % (2 * n) == 0]
        larger = f"cluster={-(-layout.world // group.gpus)}x{group.gpus}x{group.accelerator.name}"
        found.append(
            f"tp={tp} x cp={cp} needs {layout.world} GPUs, and {machines} has {machines.world}; nearest: "
            + either([*(f"cp={n}" for n in fits[-1:]), larger])
        )
    if found:
        raise UserError(found)
    device = Device.of(group.accelerator)
    case = LayerAttention(
        seq,
        spec.heads // tp,
        len(kv_head(spec, layout, 0)),
        spec.head_dim,
        device,
        Wires(device, group.gpus, layout),
        kernel=stack.attention,
        partial=stack.cp_attention or stack.attention,
    )
    return ContextResult(spec.name, str(machines), case, machines.world // tp)


def _spec(model: str | ModelSpec | None, heads: int | None, kv_heads: int | None, head_dim: int | None) -> ModelSpec:
    """The model, or one with the given heads."""
    if heads is None:
        parts = {"kv_heads": kv_heads, "head_dim": head_dim}
        if loose := [f"{name}={value}" for name, value in parts.items() if value is not None]:
            raise UserError(f"{', '.join(loose)} needs heads; give heads too, or only a model")
        return model if isinstance(model, ModelSpec) else preset(model or MODEL)
    if model is not None:
        raise UserError(f"model={model} has heads of its own, and heads={heads} is given; leave one of them out")
    kv, width = heads if kv_heads is None else kv_heads, HEAD_DIM if head_dim is None else head_dim
    given = {"heads": heads, "kv_heads": kv, "head_dim": width}
    if small := [f"{name}={value} must be at least 1" for name, value in given.items() if value < 1]:
        raise UserError(small)
    # The feed-forward width is one that every tp divides which divides the heads.
    name, hidden = f"a model of {heads} heads", heads * width
    return ModelSpec(name=name, layers=1, hidden=hidden, heads=heads, kv_heads=kv, head_dim=width, ffn=heads, vocab=2)
