"""Mesh: the ranks of a layout, as axes. It is passed to whoever communicates; there is no global one.

Order of the axes, fastest last: (dp, pp, cp, tp). Ranks that talk most sit next to each other, inside a node.
"""

import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from fivefold.layout.layout import Layout


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, as seen from one rank."""

    name: str
    size: int = 1
    rank: int = 0  # this process's place along the axis
    mesh: DeviceMesh | None = None  # one-dimensional; None where there is no process group at all
    staged: bool = False  # tensors are on a GPU and gloo moves them: see `parallel.staging`
    bare: dist.ProcessGroup | None = None  # where the ranks are no axis of the DeviceMesh
    patience: timedelta = timedelta(0)  # for a message between two ranks; zero: the group's own

    @property
    def group(self) -> dist.ProcessGroup:
        if self.bare is not None:
            return self.bare
        assert self.mesh is not None, f"the {self.name} axis has one rank and no process group"
        return self.mesh.get_group()

    @property
    def group_name(self) -> str:
        return self.group.group_name

    @property
    def ranks(self) -> list[int]:
        """Their numbers in the world."""
        return [0] if self.size == 1 else dist.get_process_group_ranks(self.group)


@dataclass(frozen=True)
class Mesh:
    """The axes of a layout, and those that are made of them.

    data   dp x cp: the ranks that hold the same weights and other tokens
    zero   what ZeRO shards over: data, or with hybrid sharding dp/replicate x cp
    world  all
    ends   the two pipeline ranks with the first and the last stage, which share a tied embedding
    """

    layout: Layout
    device: torch.device
    dp: Axis = Axis("dp")
    pp: Axis = Axis("pp")
    cp: Axis = Axis("cp")
    tp: Axis = Axis("tp")
    replicate: Axis = Axis("replicate")
    data: Axis = Axis("data")
    zero: Axis = Axis("zero")
    world: Axis = Axis("world")
    ends: Axis = Axis("ends")
    root: DeviceMesh | None = None
    lanes: tuple[dist.ProcessGroup, ...] = ()  # NCCL: communicators for the pipeline's messages

    @classmethod
    def of(cls, layout: Layout, device: torch.device, timeout: float | None = None) -> Self:
        """The mesh of `layout` over the process group, which all its ranks have joined.

        `timeout`: seconds after which a collective or message that a peer does not take part in is an error.
        """
        if layout.world == 1:
            return cls(layout, device)
        sizes = {"dp": layout.dp, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}
        if layout.replicate > 1:
            del sizes["dp"]
            sizes = {"replicate": layout.replicate, "shard": layout.dp // layout.replicate} | sizes
        ranks = torch.arange(layout.world).reshape(*sizes.values()).movedim(list(sizes).index("pp"), 0)
        names = ("pp", *(name for name in sizes if name != "pp"))  # pp first: torch 2.11 joins neighbours only
        root = DeviceMesh(device.type, ranks, mesh_dim_names=names)
        meshes = {name: root[name] for name in sizes}
        if layout.replicate > 1:
            meshes["zero"] = root["shard", "cp"]._flatten("zero")
            meshes["data"] = root["replicate", "shard", "cp"]._flatten("data")
            meshes["dp"] = root["replicate", "shard"]._flatten("dp")
            del meshes["shard"]
        else:
            meshes["zero"] = meshes["data"] = root["dp", "cp"]._flatten("zero")
        staged = device.type == "cuda" and dist.get_backend() == "gloo"
        axes = {name: Axis(name, mesh.size(), mesh.get_local_rank(), mesh, staged) for name, mesh in meshes.items()}
        axes["world"] = Axis("world", layout.world, dist.get_rank(), staged=staged, bare=dist.group.WORLD)
        lines = ranks.movedim(0, -1).reshape(-1, layout.pp).tolist()
        axes["ends"] = _ends(layout, axes["pp"], lines)
        lanes = _groups(lines, _channels(layout)) if layout.pp > 1 and dist.get_backend() == "nccl" else ()
        if timeout is not None:
            axes = _limited(axes, lanes, timedelta(seconds=timeout))
        return cls(layout, device, root=root, lanes=lanes, **axes)

    def lane(self, number: int) -> dist.ProcessGroup:
        """The group for the messages of one channel: NCCL matches in order, gloo by tag."""
        return self.lanes[number] if self.lanes else self.pp.group

    def plane(self, *names: str) -> DeviceMesh:
        """Several axes as one DeviceMesh, for DTensors that are sharded over all of them."""
        assert self.root is not None
        with warnings.catch_warnings():  # flattened axes are sliced by name in 2.11 and 2.13, and warned of in 2.13
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.root[names] if len(names) > 1 else getattr(self, names[0]).mesh


def _limited(axes: dict[str, Axis], lanes: tuple[dist.ProcessGroup, ...], timeout: timedelta) -> dict[str, Axis]:
    """A DeviceMesh gives its groups torch's default of many minutes, whatever the world's is."""
    for group in [*lanes, *(axis.group for axis in axes.values() if axis.size > 1)]:
        _set_pg_timeout(timeout, group)
    if dist.get_backend() == "nccl":  # its watchdog goes by the group's; a wait with one of its own blocks the host
        return axes
    return {name: replace(axis, patience=timeout) for name, axis in axes.items()}


def _ends(layout: Layout, pp: Axis, lines: list[list[int]]) -> Axis:
    last = layout.placement.owner[-1]
    if last == 0:
        return Axis("ends")
    if layout.pp == 2:
        return replace(pp, name="ends")
    (group,) = _groups([[line[0], line[last]] for line in lines], 1)
    if pp.rank not in (0, last):
        return Axis("ends")
    return Axis("ends", 2, int(pp.rank == last), staged=pp.staged, bare=group)


def _channels(layout: Layout) -> int:
    return len(layout.placement.channels)


def _groups(lists: list[list[int]], count: int) -> tuple[dist.ProcessGroup, ...]:
    """`count` communicators over the list that this rank is in. All ranks make all of them, in one order."""
    return tuple(dist.new_subgroups_by_enumeration(lists)[0] for _ in range(count))


def backend(device: torch.device, local_ranks: int) -> str:
    """NCCL where every rank of a node has a GPU of its own; gloo on CPUs, and where ranks share one GPU."""
    return "nccl" if device.type == "cuda" and local_ranks <= torch.cuda.device_count() else "gloo"
