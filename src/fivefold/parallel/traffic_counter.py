"""Counts all communication of this rank: each collective and send, by axis, in calls and bytes.

    with TrafficCounter(mesh) as counter:
        engine.forward_backward(batch)
    counter.rows()      # axis, kind, calls, payload, wire

It is a dispatch mode, so it sees the collectives of this project, of FSDP2 and of DTensor, also those of the backward
pass (autograd's threads inherit the dispatch modes of their caller). It reads shapes and no data, so it also counts on
fake tensors and fake process groups. An unknown operator is an error.

Receives, waits, barriers and groups of one rank are not counted.
"""

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.cost.collective_time import Kind, Traffic, total, wire
from fivefold.parallel.mesh import Mesh

SPACES = ("c10d", "_c10d_functional", "_dtensor")  # of the operators that communicate
_UNCOUNTED = ("recv", "irecv", "barrier", "monitoredbarrier", "waittensor", "wraptensorautograd", "checkfornan")
# The beginnings of the operators' names, without underscores and "_base", which tell variants of one thing apart.
_KINDS: dict[str, Kind | None] = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "sharddimalltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "isend": "send",
    **dict.fromkeys(_UNCOUNTED),
}


class TrafficEvent(NamedTuple):
    axis: str
    kind: Kind
    payload: int  # bytes
    size: int  # ranks of the group
    sent: int | None = None  # bytes to other ranks, of an all-to-all with a share of its own for each


class TrafficCounter(TorchDispatchMode):
    """Counts while entered; entering it again continues. `events` are in the order of the calls."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.events: list[TrafficEvent] = []
        self.axes: dict[tuple[int, ...], str] = {}
        for name in reversed(list(mesh.layout.table)):  # of axes with the same ranks, the first in the table wins
            axis = mesh.axes.get(name)
            if axis is not None and axis.size > 1:
                self.axes[_ranks(axis.group)] = name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check takes a third of a dry run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count_op(func, args, kwargs, result)
        return result

    def count_op(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an operator that has run."""
        if func.namespace in SPACES and (kind := kind_of(func)) is not None:
            given = named_args(func, args, kwargs)
            ranks = ranks_of(given)
            if len(ranks) > 1:
                payload = max(bytes_of(side) for side in (*given.values(), result))
                self.events.append(TrafficEvent(self.axis(ranks), kind, payload, len(ranks), _sent(given)))

    def axis(self, ranks: tuple[int, ...]) -> str:
        """The axis with these ranks; if there is none, their numbers as a name."""
        return self.axes.get(ranks) or "ranks " + "+".join(map(str, ranks))

    def rows(self) -> list[Traffic]:
        return total(Traffic(*e[:2], 1, e.payload, wire(e.kind, e.payload, e.size, e.sent)) for e in self.events)


def kind_of(func: Any) -> Kind | None:
    """The kind of a communication operator; None if it is not counted."""
    name = name_of(func)
    for beginning, kind in _KINDS.items():
        if name.startswith(beginning):
            return kind
    raise NotImplementedError(f"the traffic counter does not know the operator {name}")


def name_of(func: Any) -> str:
    """The name of an operator, without underscores, in which variants differ."""
    return func._schema.name.partition("::")[2].replace("_", "")


def named_args(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | (kwargs or {})


def ranks_of(given: dict[str, Any]) -> tuple[int, ...]:
    """The ranks of a call's group."""
    return _ranks(group_of(given))


def group_of(given: dict[str, Any]) -> dist.ProcessGroup:
    """The group of a call: functional collectives take its name, the others a ScriptObject of it."""
    if "group_name" in given:
        return _resolve_process_group(given["group_name"])
    return dist.ProcessGroup.unbox(given["process_group"])


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def bytes_of(side: Any) -> int:
    """Bytes of an argument or result: a tensor, a list of them, or (in old signatures) a list of lists."""
    if isinstance(side, Tensor):
        return side.numel() * side.element_size()
    return sum(map(bytes_of, side)) if isinstance(side, list | tuple) else 0


def _sent(given: dict[str, Any]) -> int | None:
    """Bytes for other ranks, of a call that is given a number of rows for each; None of all others."""
    rows = given.get("input_split_sizes")
    if not rows:
        return None
    others = sum(rows) - rows[group_of(given).rank()]
    return bytes_of(given["input"]) // max(1, sum(rows)) * others
