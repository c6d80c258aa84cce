"""Mesh: the ranks of a layout, as axes. It is passed to whoever communicates; there is no global one.

Order of the axes, fastest last: (dp, pp, cp, tp). Ranks that talk most sit next to each other, inside a node.
"""

import warnings
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fivefold.layout import Layout


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, as seen from one rank."""

    name: str
    size: int = 1
    rank: int = 0  # this process's place along the axis
    mesh: DeviceMesh | None = None  # one-dimensional; None where there is no process group at all
    staged: bool = False  # tensors are on a GPU and gloo moves them: see `parallel.staging`

    @property
    def group(self) -> dist.ProcessGroup:
        assert self.mesh is not None, f"the {self.name} axis has one rank and no process group"
        return self.mesh.get_group()

    @property
    def group_name(self) -> str:
        return self.group.group_name


@dataclass(frozen=True)
class Mesh:
    """The axes of a layout, and three that are made of them.

    data   dp x cp: the ranks that hold the same weights and other tokens
    zero   what ZeRO shards over: data, or with hybrid sharding dp/replicate x cp
    world  all
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
    root: DeviceMesh | None = None

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Self:
        """The mesh of `layout` over the process group, which all its ranks have joined."""
        if layout.world == 1:
            return cls(layout, device)
        sizes = {"dp": layout.dp, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}
        if layout.replicate > 1:
            del sizes["dp"]
            sizes = {"replicate": layout.replicate, "shard": layout.dp // layout.replicate} | sizes
        root = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        meshes = {name: root[name] for name in sizes}
        if layout.replicate > 1:
            meshes["zero"] = root["shard", "cp"]._flatten("zero")
            meshes["data"] = root["replicate", "shard", "cp"]._flatten("data")
            meshes["dp"] = root["replicate", "shard"]._flatten("dp")
            del meshes["shard"]
        else:
            meshes["zero"] = meshes["data"] = root["dp", "cp"]._flatten("zero")
        meshes["world"] = root._flatten("world")
        staged = device.type == "cuda" and dist.get_backend() == "gloo"
        axes = {name: Axis(name, mesh.size(), mesh.get_local_rank(), mesh, staged) for name, mesh in meshes.items()}
        return cls(layout, device, root=root, **axes)

    def plane(self, *names: str) -> DeviceMesh:
        """Several axes as one DeviceMesh, for DTensors that are sharded over all of them."""
        assert self.root is not None
        with warnings.catch_warnings():  # flattened axes are sliced by name in 2.11 and 2.13, and warned of in 2.13
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.root[names] if len(names) > 1 else getattr(self, names[0]).mesh


def backend(device: torch.device, local_ranks: int) -> str:
    """NCCL where every rank of a node has a GPU of its own; gloo on CPUs, and where ranks share one GPU."""
    return "nccl" if device.type == "cuda" and local_ranks <= torch.cuda.device_count() else "gloo"
