"""Mesh: the axes of a layout as torch's process groups, from the view of one rank.

Code that communicates takes the mesh as an argument; there is no global one.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from fivefold.job.config import Job
from fivefold.layout.axes import EXPERT_AXES, EXPERT_GRID
from fivefold.layout.layout import Layout
from fivefold.layout.stages import schedule_of
from fivefold.spec.model import ModelSpec

_WATCHDOG = 1.5  # the timeout of NCCL's watchdog, as a multiple of the ranks' own


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, from the view of one rank."""

    name: str
    size: int = 1
    rank: int = 0  # position along the axis
    mesh: DeviceMesh | None = None  # one-dimensional; None where there is no process group at all
    staged: bool = False  # tensors are on a GPU and the backend is gloo: see "host staging" in `collectives.py`
    process_group: dist.ProcessGroup | None = None  # for ranks that are not an axis of the DeviceMesh
    timeout: timedelta = timedelta(0)  # for a message between two ranks; zero: the group's own

    @property
    def group(self) -> dist.ProcessGroup:
        if self.process_group is not None:
            return self.process_group
        assert self.mesh is not None, f"the {self.name} axis has one rank and no process group"
        return self.mesh.get_group()

    @property
    def group_name(self) -> str:
        return self.group.group_name

    @property
    def ranks(self) -> list[int]:
        """The ranks of the axis, numbered as in the world."""
        return [0] if self.size == 1 else dist.get_process_group_ranks(self.group)


@dataclass(frozen=True)
class Mesh:
    """The axes of a layout as attributes: `mesh.tp`, `mesh.fsdp`. `layout/axes.py` lists them."""

    layout: Layout
    device: torch.device
    axes: Mapping[str, Axis] = field(default_factory=dict)  # an axis that is not in it has one rank
    roots: Mapping[tuple[str, ...], DeviceMesh] = field(default_factory=dict)  # by grid
    p2p_groups: tuple[dist.ProcessGroup, ...] = ()  # NCCL: for pipeline messages to higher ranks, and to lower ones
    submeshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict)  # a cache of `submesh`
    backward_ep: Axis | None = None  # a second group of ep, for backward passes that run beside forward ones

    def __getattr__(self, name: str) -> Axis:
        if name.startswith("__") or name not in self.layout.table:
            raise AttributeError(f"the mesh has no axis {name}")
        if name in EXPERT_AXES and self.axes and name not in self.axes:
            raise AttributeError(f"this mesh was made for a model without experts, and has no axis {name}")
        return self.axes.get(name) or Axis(name)

    @classmethod
    def of_job(cls, job: Job, device: torch.device, timeout: float | None = None) -> Self:
        """The mesh of a job's layout, with the axes that its model and its optimizer have."""
        return cls.of(job.layout, device, timeout, spec=job.model, whole_matrices=job.optimizer.unit == "matrix")

    @classmethod
    def of(
        cls,
        layout: Layout,
        device: torch.device,
        timeout: float | None = None,
        *,
        spec: ModelSpec | None = None,
        whole_matrices: bool = False,
    ) -> Self:
        """The mesh of `layout` over the default process group, which all its ranks have joined.

        `timeout`: seconds after which a collective or message without its peer is an error. `spec`: the model, if it
        has experts, which have axes of their own. `whole_matrices`: the optimizer reads these, so all ranks that have
        the same layers send each other parts of them.
        """
        if layout.world == 1:
            return cls(layout, device)
        dense = spec is None or spec.experts is None
        unused = set(EXPERT_AXES) if dense else set()
        if whole_matrices and layout.same_axis("stage", experts=False) == "stage":
            unused.discard("stage")
        roots = {grid: _root(layout, grid, device) for grid in layout.grids if grid != EXPERT_GRID or not dense}
        rank, staged = dist.get_rank(), device.type == "cuda" and dist.get_backend() == "gloo"
        axes = {"world": Axis("world", layout.world, rank, staged=staged, process_group=dist.group.WORLD)}
        flattened: dict[tuple[str, ...], DeviceMesh] = {}  # axes of the same dimensions share a group
        for name in sorted(
            layout.table, key=lambda name: name in layout.degrees
        ):  # all ranks create groups in one order
            if name in unused:
                continue
            root = roots[layout.grid_of(name)]
            names = tuple(factor for factor in layout.factors(name) if factor in (root.mesh_dim_names or ()))
            if name in ("world", "embedding") or not names:
                continue
            if names not in flattened:
                flattened[names] = root[names]._flatten(name) if len(names) > 1 else root[names]
            axes[name] = Axis(name, layout.size(name), layout.position(name, rank), flattened[names], staged)
        axes["embedding"] = _embedding_axis(layout, axes["pp"])
        if whole_matrices and "stage" not in axes:  # another axis has these ranks, and a group
            axes["stage"] = replace(axes[layout.same_axis("stage", experts=False)], name="stage")
        p2p_groups: tuple[dist.ProcessGroup, ...] = ()
        if layout.pp > 1 and dist.get_backend() == "nccl":
            p2p_groups = _groups(layout.groups("pp"), 2)
        backward_ep = None
        if not dense and layout.ep > 1 and _overlaps_pairs(spec, layout):
            (group,) = _groups(layout.groups("ep"), 1)
            backward_ep = replace(axes["ep"], mesh=None, process_group=group)
        if timeout is not None:
            limit = timedelta(seconds=timeout)
            axes = _with_timeout(axes, p2p_groups, limit)
            backward_ep = backward_ep and _with_timeout({"ep": backward_ep}, (), limit)["ep"]
        mesh = cls(layout, device, axes, roots, p2p_groups, backward_ep=backward_ep)
        if dist.get_backend() == "nccl":
            mesh._connect({"stage"} if whole_matrices else set())
        return mesh

    def _connect(self, all_to_all_axes: set[str]) -> None:
        """Use each NCCL communicator once, in one order: NCCL connects ranks at the first use.

        Otherwise they would connect in the middle of the first step, and an unreachable rank would look like a hang.
        First each group, with an all-to-all if it is used for that, and the ring of cp; then the groups of pipeline
        messages, neighbour by neighbour. (NCCL makes further connections for messages of other sizes, inside an action,
        which all ranks of the group run in one order.)
        """
        scalar = torch.zeros(1, device=self.device)
        all_to_all_axes |= {"ep", *(["cp"] if self.layout.cp_kind == "ulysses" else [])}
        used = [axis for name, axis in self.axes.items() if axis.size > 1 and name != "batch"]
        connected = set[str]()
        for axis in [*used, *([self.backward_ep] if self.backward_ep else [])]:
            if axis.group_name not in connected:
                connected.add(axis.group_name)
                dist.all_reduce(scalar, group=axis.group)
            if axis.name in all_to_all_axes:
                rows = scalar.repeat(axis.size)
                dist.all_to_all_single(torch.empty_like(rows), rows, group=axis.group)
            if axis.name == "cp" and self.layout.cp_kind == "ring":
                start_ring_exchange(scalar, axis)
            torch.cuda.synchronize(self.device)
        for downwards, group in enumerate(self.p2p_groups):
            for lower, upper in neighbours(self.layout.placement.owner):
                source, target = (upper, lower) if downwards else (lower, upper)
                if self.pp.rank == source:
                    dist.send(scalar, group=group, group_dst=target)
                elif self.pp.rank == target:
                    dist.recv(scalar, group=group, group_src=source)
                torch.cuda.synchronize(self.device)

    def expert_axes(self) -> list[Axis]:
        """The axes that only models with experts have."""
        return [self.axes[name] for name in EXPERT_AXES if name in self.axes]

    def p2p_group(self, source: int, target: int) -> dist.ProcessGroup:
        """The group for messages from one pipeline rank to another: gloo matches by tag, NCCL in order.

        On NCCL there are two, one for each direction, and torch creates a communicator and a stream for each pair of
        neighbours in them (without `device_id`; with it there would be one for a whole group): so a message only waits
        for earlier ones of the same pair in the same direction.
        """
        return self.p2p_groups[source > target] if self.p2p_groups else self.pp.group

    def submesh(self, *names: str) -> DeviceMesh:
        """Several axes as one DeviceMesh, for DTensors sharded over all of them."""
        if (
            len(names) > 1 and names not in self.submeshes
        ):  # a slice takes milliseconds, and every parameter asks for one
            with warnings.catch_warnings():  # flattened axes are sliced by name in 2.11 and 2.13, and warned of in 2.13
                warnings.filterwarnings("ignore", message="Slicing a flattened dim")
                self.submeshes[names] = self.roots[self.layout.grid_of(*names)][names]
        return self.submeshes[names] if len(names) > 1 else getattr(self, names[0]).mesh


def neighbours(owner: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of pipeline ranks that exchange messages, lower rank first; `owner[stage]` is a rank."""
    return sorted({(min(pair), max(pair)) for pair in pairwise(owner) if pair[0] != pair[1]})


def start_ring_exchange(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, list[dist.Work]]:
    """Start to send x to the next rank of the ring. Returns the previous rank's, and the works to wait for."""
    received = torch.empty_like(x)
    target, source = ((axis.rank + step) % axis.size for step in (1, -1))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=axis.group, group_peer=target),
            dist.P2POp(dist.irecv, received, group=axis.group, group_peer=source),
        ]
    )
    return received, works


def _root(layout: Layout, grid: tuple[str, ...], device: torch.device) -> DeviceMesh:
    """A grid as a DeviceMesh. Hybrid sharding's dimension exists only where it is used."""
    names = tuple(factor for factor in grid if factor != "replicate" or layout.replicate > 1)
    ranks = torch.tensor(layout.by_stage()).reshape([getattr(layout, name) for name in names])
    return DeviceMesh(device.type, ranks, mesh_dim_names=names)


def _with_timeout(
    axes: dict[str, Axis], p2p_groups: tuple[dist.ProcessGroup, ...], timeout: timedelta
) -> dict[str, Axis]:
    """Set the timeout of all these groups: those of a DeviceMesh have torch's default of many minutes.

    On NCCL the host does not wait for messages, and the watchdog ends a process with pages of output. So its timeout is
    longer than that of `launch.heartbeat`, with which a rank says what it waits for; it is for ranks that cannot.
    """
    nccl = dist.get_backend() == "nccl"
    for group in [*p2p_groups, *(axis.group for axis in axes.values() if axis.size > 1)]:
        _set_pg_timeout(_WATCHDOG * timeout if nccl else timeout, group)
    if nccl:  # a wait with a timeout would block the host
        return axes
    return {name: replace(axis, timeout=timeout) for name, axis in axes.items()}


def _overlaps_pairs(spec: ModelSpec | None, layout: Layout) -> bool:
    """Whether its schedule overlaps forward and backward passes; one built from stage times does not."""
    if spec is None or layout.record.uses_stage_times:
        return False
    return any(action.joined for rank in schedule_of(spec, layout, spec.context).ranks for action in rank)


def _embedding_axis(layout: Layout, pp: Axis) -> Axis:
    """The pipeline ranks of the first and the last stage, which share a tied embedding."""
    if layout.size("embedding") == 1:
        return Axis("embedding")
    if layout.pp == 2:
        return replace(pp, name="embedding")
    (group,) = _groups(layout.groups("embedding"), 1)
    if pp.rank not in (0, layout.last_stage):
        return Axis("embedding")
    return Axis("embedding", 2, int(pp.rank > 0), staged=pp.staged, process_group=group)


def _groups(lists: list[list[int]], count: int) -> tuple[dist.ProcessGroup, ...]:
    """`count` groups over the list that this rank is in. All ranks create all groups, in one order."""
    return tuple(dist.new_subgroups_by_enumeration(lists)[0] for _ in range(count))
