"""Lets training code that was written for CUDA run on CPU processes over gloo, in float64: for adapters.

    install()       # before that code is imported, and its process group is gloo's
    only_float64()  # instead, on a GPU: devices are what they are, and float64 stays

What is made on "cuda" is made on the CPU, streams and events are there and do nothing, CUDA's generator is the CPU's,
and what asks for float32 or narrower gets float64, so that a difference is one of arithmetic, and not of rounding.
Kernels are not replaced: a library that calls its own fails loudly. A bug in the use of streams, or in a dtype, can
not be seen this way.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fivefold.foreign.torch_modes import within

_NARROWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = (Tensor.float, Tensor.bfloat16, Tensor.half)
_installed: list[Any] = []


def install() -> None:
    """Once for the whole process: it is never undone."""
    if _installed:
        return
    nothing = _Nothing()
    cuda: Any = torch.cuda
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
        setattr(cuda, name, lambda *args, **kwargs: nothing)
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.current_device = lambda: torch.device("cpu")
    cuda._lazy_call = lambda function, **kwargs: function()
    cuda.default_generators = defaultdict(lambda: torch.default_generator)
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device="cuda": torch.get_rng_state()
        module.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    collectives: Any = dist
    collectives.all_to_all_single = _with_lists(dist.all_to_all_single)
    collectives.all_gather = _of_unequal_sizes(dist.all_gather, _gather_unequal)
    collectives.reduce_scatter = _of_unequal_sizes(dist.reduce_scatter, _scatter_unequal)
    _enter(_CpuAndFloat64())


def only_float64() -> None:
    """Once for the whole process, on a GPU: what asks for float32 or narrower gets float64."""
    if not _installed:
        _enter(_Float64())


def _enter(mode: TorchFunctionMode) -> None:
    _installed.append(mode)
    mode.__enter__()
    autograd: Any = torch.autograd
    autograd._engine_run_backward = within(mode, autograd._engine_run_backward)


class _Nothing:
    """A stream or an event: all is done when the next line runs, so there is nothing to wait for."""

    def __getattr__(self, name: str) -> Callable[..., "_Nothing"]:
        return lambda *args, **kwargs: self

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *args: object) -> None:
        return None


class _Float64(TorchFunctionMode):
    """Each call of torch, with float64 for whatever is narrower."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if function in _CASTS:
            return args[0].double()
        if function is Tensor.type and len(args) == 1 and not options and args[0].dtype == torch.float64:
            return "torch.cuda.FloatTensor"  # by which optimizers tell what they may step
        if options.get("dtype") in _NARROWER:
            options["dtype"] = torch.float64
        return self.call(function, tuple(torch.float64 if _narrower(value) else value for value in args), options)

    def call(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return function(*args, **options)


class _CpuAndFloat64(_Float64):
    """On the CPU, too."""

    def call(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if function is Tensor.cuda:
            return args[0]
        if options.get("device") is not None:
            options["device"] = _device(options["device"])
        if function is Tensor.to:
            args = (args[0], *map(_device, args[1:]))
        return function(*args, **options)


def _narrower(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROWER


def _device(value: Any) -> Any:
    """The CPU, if it is a CUDA device in any of the ways to write one."""
    names_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if names_cuda or type(value) is int else value


# ---- what NCCL takes, and gloo does not -----------------------------------------------------------------------------


def _with_lists(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Sizes may be tensors or arrays."""

    def call(output: Tensor, source: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
             group: Any = None, async_op: bool = False) -> Any:  # fmt: skip
        sizes = [None if given is None else [int(size) for size in given]
                 for given in (output_split_sizes, input_split_sizes)]  # fmt: skip
        return all_to_all(output, source, *sizes, group=group, async_op=async_op)

    return call


def _of_unequal_sizes(equal: Callable[..., Any], unequal: Callable[..., None]) -> Callable[..., Any]:
    def call(first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = first if isinstance(first, list) else second
        if len({tensor.shape for tensor in tensors}) == 1:
            return equal(first, second, *args, **kwargs)
        return unequal(first, second, kwargs.get("group"))

    return call


def _gather_unequal(outputs: Sequence[Tensor], source: Tensor, group: Any) -> None:
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(source)
        dist.broadcast(output, group=group, group_src=rank)


def _scatter_unequal(output: Tensor, sources: Sequence[Tensor], group: Any) -> None:
    for rank, source in enumerate(sources):
        total = source.clone()
        dist.all_reduce(total, group=group)
        if rank == dist.get_rank(group):
            output.copy_(total)
