"""The whole of a tensor that ranks hold in parts, on the CPU of each of them; and its bits in short."""

import hashlib

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """A copy. Collective where the tensor is sharded: all its ranks must ask, in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu().clone()
    mesh = tensor.device_mesh
    if mesh.device_type != "cpu" and mesh.get_group(0).name() == "gloo":
        # gloo gathers host tensors only: the same ranks and groups, as a mesh of CPUs
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        names = mesh.mesh_dim_names
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
        tensor = DTensor.from_local(
            tensor.to_local().cpu(),
            mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.full_tensor().detach().cpu().clone()


def digest(tensor: Tensor) -> str:
    """Equal for equal bits. Of a float32 or float64 tensor on the CPU."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
