"""A world of any size in one process: PyTorch's fake process group, and tensors that have shapes and no data.

    with pretending(job, rank=9001) as mesh:
        engine = Engine(job, mesh)          # the one that trains

Tensors are fake CPU ones. A fake GPU would need a CUDA build of torch, and its attention would fall to the kernel that
stores all scores; on the CPU the flash kernel runs, which saves the same tensors for backward as the GPU's. Two CPU
operations that save other tensors than CUDA's are replaced by stand-ins that save the same: the RMSNorm, and a product
that is added to a float32 sum.
"""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fivefold.job.config import Job
from fivefold.model import linear_cross_entropy
from fivefold.model.dispatch import Host
from fivefold.model.grouped import Groups
from fivefold.parallel.mesh import Mesh

# ---- cached fake mode -----------------------------------------------------------------------------------------------
# A quicker fake mode, which computes the results' shapes once for each operator and shapes of arguments.
#
# PyTorch's fake mode has a cache, too, but its keys have so much of each argument that a hit takes a quarter of a
# millisecond; a rank of a 70B model calls fifty thousand operators. Here the key of a tensor is its type, shape,
# strides and offset, which is all that the operators of a dense model depend on.


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SPACES = ("aten", "_c10d_functional")


class QuickFakeMode(FakeTensorMode):
    """A FakeTensorMode with a quicker cache."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.recipes: dict[Any, _Recipes | None] = {}  # None: not to be cached
        self.attributes: dict[torch.device, dict[str, Any]] = {}  # of a FakeTensor on each device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if (replacement := _REPLACEMENTS.get(func)) is not None:
            return replacement(*args, **(kwargs or {}))
        key = _key(func, args, kwargs)
        recipes = self.recipes.get(key) if key is not None else None
        if recipes is None:
            result = super().__torch_dispatch__(func, types, args, kwargs or {})
            if key is not None and key not in self.recipes:
                self.recipes[key] = _recipes(args, result)
            return result
        results = [self._make(recipe, args) for recipe in recipes.recipes]
        return results[0] if recipes.container is None else recipes.container(results)

    def _make(self, recipe: "_Recipe", args: Any) -> Tensor:
        """A fake tensor by its recipe."""
        if recipe.same:
            return args[recipe.base]
        if recipe.base is None:
            empty = torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device="meta")
        else:
            empty = torch.empty((0,), dtype=recipe.dtype, device="meta")
            empty.set_(args[recipe.base].untyped_storage(), recipe.offset, recipe.shape, recipe.stride)
        # The same as FakeTensor's own constructor, but with all attributes copied at once.
        device = recipe.device
        if device not in self.attributes:
            self.attributes[device] = dict(FakeTensor(self, torch.empty((0,), device="meta"), device).__dict__)
        made = Tensor._make_subclass(FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self.attributes[device])
        return made


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """[minlength], as all numbers are below it: PyTorch's own fake cannot know, as it depends on the data."""
    return x.new_empty((minlength,), dtype=torch.int64)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, *others: Any) -> Tensor:
    """[N, I], [G, I, O] -> [N, O]; [O, N], [N, I] -> [G, O, I]. PyTorch's own fake only takes bfloat16."""
    return a.new_empty((a.shape[0], b.shape[2]) if b.ndim == 3 else (len(offs), a.shape[0], b.shape[1]))


# Operators whose fake results are made here.
_REPLACEMENTS: dict[Any, Any] = {
    torch.ops.aten.bincount.default: _bincount,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
}


class _Recipe(NamedTuple):
    """How to make a result: with new memory, or as a view of an argument."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    base: int | None = None  # the number of the argument; None: new memory
    same: bool = False  # whether the result is the argument itself


class _Recipes(NamedTuple):
    container: type | None  # list or tuple; None: the result is one tensor
    recipes: list[_Recipe]


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """The cache key of a call; None where it cannot be cached."""
    if func.namespace not in _SPACES or func._schema.is_mutable:
        return None
    parts: list[Any] = [func]
    for arg in args if not kwargs else (*args, *kwargs.keys(), *kwargs.values()):
        kind = type(arg)
        if kind is FakeTensor:
            parts += (arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.fake_device)
        elif kind is list:
            if any(type(item) is not int for item in arg):
                return None
            parts.append(tuple(arg))
        elif kind in _PLAIN or isinstance(arg, _PLAIN):
            parts.append((kind, arg))
        else:
            return None
    return tuple(parts)


def _recipes(args: Any, result: Any) -> _Recipes | None:
    container = type(result) if isinstance(result, list | tuple) else None
    recipes = [_recipe(args, output) for output in ((result,) if container is None else result)]
    if container not in (None, list, tuple) or None in recipes:
        return None
    return _Recipes(container, recipes)  # type: ignore[arg-type]


def _recipe(args: Any, result: Any) -> _Recipe | None:
    if type(result) is not FakeTensor or result.constant is not None:
        return None
    offset = int(result.storage_offset())
    fields = (result.dtype, result.fake_device, tuple(result.shape), result.stride(), offset)
    storage = result.untyped_storage()
    for number, arg in enumerate(args):
        if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == storage._cdata:
            return _Recipe(*fields, base=number, same=result is arg)
    empty = torch.empty_strided(tuple(result.shape), result.stride(), dtype=result.dtype, device="meta")
    if empty.untyped_storage().nbytes() != storage.nbytes() or offset:
        return None
    return _Recipe(*fields)


# ---- world ----------------------------------------------------------------------------------------------------------


Kernels = Literal["cuda", "cpu"]


@contextmanager
def pretending(job: Job, rank: int, kernels: Kernels = "cuda") -> Iterator[Mesh]:
    """The mesh of `rank` in the job's world. All tensors and groups inside are fake.

    `kernels`: those whose saved activations are counted; "cpu" is for comparison with runs on CPUs.
    """
    layout = job.layout
    if layout.world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    # Memory is freed by reference counts, and there are no cycles; garbage collection would take a tenth of the time.
    gc_enabled = gc.isenabled()
    gc.disable()
    try:
        mesh = Mesh.of_job(job, torch.device("cpu"))
        stand_ins = _kernels_of_cuda() if kernels == "cuda" else nullcontext()
        with QuickFakeMode(), _real_meshes(), stand_ins:
            yield mesh
    finally:
        if gc_enabled:
            gc.enable()
        if layout.world > 1:
            dist.destroy_process_group()


@contextmanager
def _real_meshes() -> Iterator[None]:
    """Makes device meshes of real tensors, since their values are read; FSDP2 makes some of its own."""
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
    """Replaces the RMSNorm, of which CUDA's one kernel saves the input, and the CPU's several steps save each result;
    and the product that is added to a float32 sum, which CUDA does without a copy in between."""
    real_rms_norm, real_add_product = F.rms_norm, linear_cross_entropy.add_product

    def fused_rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return _FusedNorm.apply(x, weight) if weight is not None else real_rms_norm(x, shape, weight, eps)

    def sum_in_place(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
        product = grad.T @ x  # its FLOPs are counted; only the sum keeps memory
        return product.to(torch.float32) if total is None else total

    linear_cross_entropy.add_product = sum_in_place
    F.rms_norm = fused_rms_norm  # type: ignore[assignment]  # by name: recompute calls it again from autograd's own thread
    try:
        yield
    finally:
        F.rms_norm, linear_cross_entropy.add_product = real_rms_norm, real_add_product


class _FusedNorm(torch.autograd.Function):
    """Saves what `aten._fused_rms_norm` saves: input, weight, and one float32 number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


# ---- routing --------------------------------------------------------------------------------------------------------
# The routing of a dry run: fake tensors have no scores, so the number of tokens for each rank is given.
#
# Every rank of ep sends the same number of rows. The rank that runs is the most loaded of its ep group: it receives
# `imbalance` times the mean, divided evenly over the ranks that send and over its experts; the others share the rest.


@dataclass(frozen=True)
class StatedRouting(Host):
    rank: int  # the rank that runs, in its ep group
    ranks: int  # of the ep group
    imbalance: float = 1.0  # the rows of the most loaded rank over the mean

    def groups(self, ends: Tensor, slots: int) -> Groups:
        return Groups.of(tuple(evenly(slots, len(ends))), ends.device)

    def by_expert(self, counts: Tensor, slots: int) -> list[int]:
        return evenly(self.received(slots), len(counts))

    def by_rank(self, going: Tensor, coming: Tensor, ranks: int, slots: int) -> tuple[list[list[int]], list[list[int]]]:
        experts, received = len(going) // ranks, evenly(self.received(slots), ranks)
        rest = iter(evenly(slots - received[self.rank], ranks - 1))
        sent = [received[self.rank] if rank == self.rank else next(rest) for rank in range(ranks)]
        return [evenly(rows, experts) for rows in sent], [evenly(rows, experts) for rows in received]

    def received(self, slots: int) -> int:
        """The rows that this rank's experts receive from all ranks."""
        return round(self.imbalance * slots) if self.ranks > 1 else slots


def evenly(rows: int, count: int) -> list[int]:
    """The rows divided into `count` numbers that differ by at most 1."""
    return [rows // count + (number < rows % count) for number in range(count)]
