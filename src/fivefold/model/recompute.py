"""Activation recompute: what a block saves for its backward pass, and what it computes again.

none       everything autograd saves
selective  the block's input and the outputs of matmuls and attention; norms, rotations, activation functions and
           residual sums, which are cheap to compute and large to keep, run again
full       the block's input alone; the whole forward pass runs again (a third more FLOPs)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fivefold.layout.layout import Recompute

_aten = torch.ops.aten
_EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.linear.default,
    _aten._scaled_mm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._flash_attention_forward.default,
}

_FLEX_OP = "flex_attention"  # by name: importing the operator would import the compiler, which takes seconds
_CUSTOM_OPS = ("fivefold.grouped_mm", "fivefold.fp8_grouped_mm")  # the experts' operators in graphs

# Reductions over ranks: in a compiled block `save_output` has no effect, and the policy saves them by operator.
_REDUCTIONS = {torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.reduce_scatter_tensor.default}

# The run of a selectively recomputed block: the first forward, or the recomputation in backward.
_selective_run: ContextVar[Literal["first", "again"] | None] = ContextVar("selective_run", default=None)
# True in the recomputation, selective or full.
_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)
# True while `save_output` passes its results to the store of saved tensors.
_saving: ContextVar[bool] = ContextVar("saving", default=False)


def save_output(compute: Callable[[], tuple[Tensor, ...]], count: int, stand_in: Tensor) -> tuple[Tensor, ...]:
    """The `count` tensors that `compute` returns, saved as a whole by selective recompute.

    For a result of several ops, among them collectives: the second run reads it from the store and runs none of them,
    and their intermediate results are not saved. `stand_in` is any tensor.
    """
    if torch.compiler.is_compiling():
        return compute()  # the compiler partitions the graph by the same policy
    match _selective_run.get():
        case None:
            return compute()
        case "first":
            with _pop_mode_temporarily():  # the store numbers the ops it sees, and must see the same ones in both runs
                results = compute()
        case "again":
            results = (stand_in,) * count  # never read: the store replaces them
    token = _saving.set(True)
    try:
        return tuple(_aten.alias.default(result) for result in results)
    finally:
        _saving.reset(token)


def not_saved(compute: Callable[[], Tensor], shape: tuple[int, ...], *saved: Tensor) -> Tensor:
    """The result of `compute`, if no backward pass reads it: selective recompute neither saves nor recomputes it.
    `saved` are the tensors that `compute` saves for its backward pass; the second run must also save them."""
    if torch.compiler.is_compiling() or _selective_run.get() is None:
        return compute()
    with unseen_by_checkpoint():
        return compute() if _selective_run.get() == "first" else _OnlySaved.apply(shape, *saved)


class _OnlySaved(Function):
    """Only saves tensors; the backward pass is the first run's."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return saved[0].new_empty(1).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise AssertionError("the graph of a second run is not walked")


@contextmanager
def unseen_by_checkpoint() -> Iterator[None]:
    """A context whose ops do not count as the block's: in its second run there may be more or fewer of them."""
    with nullcontext() if _selective_run.get() is None else _pop_mode_temporarily():
        yield


def is_recomputing() -> bool:
    """Whether this forward pass is a recomputation, so that nothing is to be counted again."""
    return _recomputing.get()


def recomputed(how: Recompute, *, compile: bool = False) -> Callable[..., Tensor]:
    """A function that calls steps(*inputs), and saves for backward what `how` says.

    The RNG state is not saved: nothing draws from it, and dropout masks are a function of position.
    """
    if how == "none":
        return _run_steps
    run: Callable[..., Tensor] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if how == "full":
        return run if compile else partial(run, context_fn=lambda: (nullcontext(), _marked_recomputing()))
    in_a_graph = partial(create_selective_checkpoint_contexts, _graph_policy)
    return partial(run, context_fn=in_a_graph if compile else _eager_contexts)


def _run_steps(steps: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """No recompute: autograd saves what it needs."""
    return steps(*inputs)


def _eager_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Which operators of an eager block are saved: results of collectives only by `save_output`."""
    saved = op in _EXPENSIVE or _saving.get() or str(op).startswith(_CUSTOM_OPS)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _graph_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Which operators of a compiled block are saved."""
    saved = op in _EXPENSIVE or op in _REDUCTIONS or str(op) == _FLEX_OP or str(op).startswith(_CUSTOM_OPS)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _eager_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a selectively recomputed block: of its first run, and of its second."""
    first, second = create_selective_checkpoint_contexts(_eager_policy)
    return _during("first", first), _during("again", second)


@contextmanager
def _marked_recomputing() -> Iterator[None]:
    """A context in which `is_recomputing`."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


@contextmanager
def _during(run: Literal["first", "again"], context: AbstractContextManager[Any]) -> Iterator[None]:
    """PyTorch's context of a run, in which it is known which run it is."""
    token = _selective_run.set(run)
    try:
        with context, _marked_recomputing() if run == "again" else nullcontext():
            yield
    finally:
        _selective_run.reset(token)
