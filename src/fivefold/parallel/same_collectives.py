"""Whether the ranks of a group call the same collectives: compared in the first step, before each call runs.

    same_order(control, mesh, engine.communication_order)   # before the step: what each rank is to start, in order
    with same_calls(mesh):
        engine.forward_backward(batch)

The first rank of a group that reaches its n-th collective puts a description in the store, and the others compare
theirs with it. So no rank waits, and of two ranks that disagree the later one raises `Mismatch`, which names both,
before a collective that would hang or compute nonsense. It reads shapes and no data. Messages between two ranks are
not compared: the schedule's proof covers them. Not for compiled steps: with a dispatch mode the compiler makes other
graphs, with other roundings.
"""

import hashlib
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.parallel.control import Control, kv_store
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic_counter import SPACES, group_of, kind_of, name_of, named_args, ranks_of

_BUDGET = 40_000  # calls of all ranks in groups of one kind: a store answers that many in about a second


class Mismatch(RuntimeError):
    """Two ranks of a group call different collectives: a bug at the place that the traceback shows."""


def same_order(control: Control, mesh: Mesh, order: str) -> None:
    """Collective. NCCL hangs silently if replicas start their messages or reductions in different orders."""
    if mesh.world.size == 1:
        return
    digest = hashlib.sha256(order.encode()).hexdigest()
    first: dict[int, tuple[int, str]] = {}  # by position along pp: the first rank there, and its order
    for rank, (place, theirs) in enumerate(control.all_gather_values((mesh.pp.rank, digest), tuple[int, str])):
        other, known = first.setdefault(place, (rank, theirs))
        if theirs != known:
            raise Mismatch(f"rank {rank} would start its messages and sums in another order than rank {other} does")


def same_calls(mesh: Mesh) -> AbstractContextManager[object]:
    return _Compare(mesh) if mesh.world.size > 1 else nullcontext()


class _Compare(TorchDispatchMode):
    def __init__(self, mesh: Mesh):
        super().__init__()
        self.rank, self.store, self.calls = mesh.world.rank, kv_store("calls"), Counter[str]()
        self.most = min(1000, max(4, _BUDGET // mesh.world.size))  # of one group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in SPACES and kind_of(func) not in (None, "send"):
            self._compare(func, named_args(func, args, kwargs))
        return func(*args, **(kwargs or {}))

    def _compare(self, func: Any, given: dict[str, Any]) -> None:
        ranks, group = ranks_of(given), group_of(given).group_name
        number = self.calls[group] = self.calls[group] + 1
        if len(ranks) == 1 or number > self.most:
            return
        uneven = kind_of(func) == "all-to-all"  # ranks may have different numbers of rows
        shapes = filter(None, (_shape(value, uneven) for value in given.values()))
        call = f"{name_of(func)} of {', '.join(shapes)}"
        known = self.store.put_if_absent(f"{group} {ranks[0]} {number}", f"{self.rank}|{call}".encode()).decode()
        rank, _, theirs = known.partition("|")
        if theirs != call:
            members = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
            raise Mismatch(
                f"collective {number} of the ranks {members} is {call} on rank {self.rank}, and {theirs} on rank {rank}"
            )


def _shape(value: Any, uneven: bool = False) -> str:
    """'float32[2, 3]' for a tensor, several for a list, '[*, 3]' if rows may differ; empty for anything else."""
    if isinstance(value, Tensor):
        sides = [*(["*"] if uneven and value.ndim else []), *map(str, value.shape[int(uneven) :])]
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sides)}]"
    inside = (_shape(inner, uneven) for inner in value) if isinstance(value, list | tuple) else ()
    return " ".join(filter(None, inside))
