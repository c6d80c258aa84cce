"""A world of any size in one process: PyTorch's fake process group, and tensors that have shapes and no data.

    with pretending(job, rank=9001) as mesh:
        engine = Engine(job, mesh)          # the one that trains

Tensors are fake CPU ones. A fake GPU would need a CUDA build of torch, and its attention would fall to the kernel that
stores all scores; on the CPU the flash kernel runs, and keeps what the GPU's keeps. Where CPU kernels keep something
else than CUDA's, a stand-in keeps what CUDA's does: the RMSNorm, and a product that is added to a float32 sum.
"""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fivefold.dryrun.fast_fake import QuickFakeMode
from fivefold.job.config import Job
from fivefold.model import head
from fivefold.parallel.mesh import Mesh

Kernels = Literal["cuda", "cpu"]


@contextmanager
def pretending(job: Job, rank: int, kernels: Kernels = "cuda") -> Iterator[Mesh]:
    """The mesh as `rank` of the job's world sees it. Everything inside is fake.

    `kernels`: whose memory is to be kept for backward; "cpu" is for comparison with runs on CPUs.
    """
    layout = job.layout
    if layout.world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    # Memory is counted by references, and nothing here waits in a cycle; to look for cycles takes a tenth of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        mesh = Mesh.of(layout, torch.device("cpu"), spec=job.model)
        stand_ins = _kernels_of_cuda() if kernels == "cuda" else nullcontext()
        with QuickFakeMode(), _real_meshes(), stand_ins:
            yield mesh
    finally:
        if collects:
            gc.enable()
        if layout.world > 1:
            dist.destroy_process_group()


@contextmanager
def _real_meshes() -> Iterator[None]:
    """A mesh is made of numbers that are looked at; FSDP2 makes some of its own."""
    names = [name for name in ("__init__", "__getitem__", "_flatten", "_concatenate") if hasattr(DeviceMesh, name)]
    plain = {name: DeviceMesh.__dict__[name] for name in names}

    def real(method: Any) -> Any:
        function = method.__func__ if isinstance(method, staticmethod | classmethod) else method

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return type(method)(run) if isinstance(method, staticmethod | classmethod) else run

    for name, method in plain.items():
        setattr(DeviceMesh, name, real(method))
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(DeviceMesh, name, method)


@contextmanager
def _kernels_of_cuda() -> Iterator[None]:
    """CUDA has one kernel for an RMSNorm, which keeps its input; the CPU computes it in steps, and keeps each. And
    CUDA adds a product to a float32 sum without a copy of it in between."""
    real, product = F.rms_norm, head.add_product

    def stand_in(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return _FusedNorm.apply(x, weight) if weight is not None else real(x, shape, weight, eps)

    def sum_in_place(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
        product = grad.T @ x  # counted, and not kept: the sum is
        return product.to(torch.float32) if total is None else total

    head.add_product = sum_in_place
    F.rms_norm = stand_in  # type: ignore[assignment]  # by name: recompute calls it again from autograd's own thread
    try:
        yield
    finally:
        F.rms_norm, head.add_product = real, product


class _FusedNorm(torch.autograd.Function):
    """The memory of `aten._fused_rms_norm`: input, weight, and one float32 number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
