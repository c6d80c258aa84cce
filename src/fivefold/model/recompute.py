"""Activation recompute: what a block keeps for its backward pass, and what it computes again.

none       everything autograd saves
selective  the block's input and the outputs of matmuls and attention; norms, rotations, activation functions and
           residual sums, which are cheap to compute and large to keep, run again
full       the block's input alone; the whole forward pass runs again (a third more FLOPs)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, TypeVar

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

_TILED = "flex_attention"  # the operator itself comes with the compiler, whose import takes seconds
_OURS = ("fivefold.grouped_mm", "fivefold.fp8_grouped_mm")  # those of experts, in graphs

# Between ranks; a compiled block has no other way to keep them than by name.
_SUMS = {torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.reduce_scatter_tensor.default}

# Where a selectively recomputed block is: in its first run, or in the one that backward asks for.
_selective_run: ContextVar[Literal["first", "again"] | None] = ContextVar("selective_run", default=None)
# True in the run that backward asks for, of either kind of recomputation.
_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)
# True while `save_output` hands its results to the store.
_keeping: ContextVar[bool] = ContextVar("keeping", default=False)


def save_output(compute: Callable[[], tuple[Tensor, ...]], count: int, stand_in: Tensor) -> tuple[Tensor, ...]:
    """The `count` tensors that `compute` returns, kept as a whole by selective recompute.

    For a result that is made of several ops, among them collectives: the second run takes it from the store and runs
    none of them, and what they make on the way is not kept. `stand_in` is any tensor at hand.
    """
    if torch.compiler.is_compiling():
        return compute()  # the compiler's own partition of a graph goes by the same policy
    match _selective_run.get():
        case None:
            return compute()
        case "first":
            with _pop_mode_temporarily():  # the store numbers the ops it sees, and must see the same ones in both runs
                results = compute()
        case "again":
            results = (stand_in,) * count  # never looked at: the store answers
    token = _keeping.set(True)
    try:
        return tuple(_aten.alias.default(result) for result in results)
    finally:
        _keeping.reset(token)


def not_saved(compute: Callable[[], Tensor], shape: tuple[int, ...], *saved: Tensor) -> Tensor:
    """What `compute` returns, if no backward pass reads it: selective recompute neither keeps it nor makes it again.
    `saved` is what `compute` saves for its own backward pass, which the second run must have, too."""
    if torch.compiler.is_compiling() or _selective_run.get() is None:
        return compute()
    with unseen_by_checkpoint():
        return compute() if _selective_run.get() == "first" else _OnlySaved.apply(shape, *saved)


class _OnlySaved(Function):
    """Nothing but what it saves; its backward pass is that of the first run."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return saved[0].new_empty(1).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise AssertionError("the graph of a second run is not walked")


@contextmanager
def unseen_by_checkpoint() -> Iterator[None]:
    """What runs inside is no part of the block: in its second run there may be more or less of it."""
    with nullcontext() if _selective_run.get() is None else _pop_mode_temporarily():
        yield


def is_recomputing() -> bool:
    """Whether this is not the first forward pass of these inputs: what is counted has been."""
    return _recomputing.get()


def recomputed(how: Recompute, compile: bool = False) -> Callable[..., Tensor]:
    """A function that runs (steps, *inputs) and keeps what `how` says.

    The RNG state is not saved: nothing here draws from one, and dropout is a function of place.
    """
    if how == "none":
        return _plain
    run: Callable[..., Tensor] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if how == "full":
        return run if compile else partial(run, context_fn=lambda: (nullcontext(), _marked_recomputing()))
    in_a_graph = partial(create_selective_checkpoint_contexts, _graph_policy)
    return partial(run, context_fn=in_a_graph if compile else _contexts)


def _plain(steps: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return steps(*inputs)


def _eager_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in _EXPENSIVE or _keeping.get() or str(op).startswith(_OURS)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _graph_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in _EXPENSIVE or op in _SUMS or str(op) == _TILED or str(op).startswith(_OURS)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    first, second = create_selective_checkpoint_contexts(_eager_policy)
    return _during("first", first), _during("again", second)


@contextmanager
def _marked_recomputing() -> Iterator[None]:
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


@contextmanager
def _during(run: Literal["first", "again"], context: AbstractContextManager[Any]) -> Iterator[None]:
    token = _selective_run.set(run)
    try:
        with context, _marked_recomputing() if run == "again" else nullcontext():
            yield
    finally:
        _selective_run.reset(token)


# ---- compiled -------------------------------------------------------------------------------------------------------
# torch.compile, a block at a time: one graph serves all blocks of a stage, and what joins them stays in Python.
#
# Hooks stay outside (weights that arrive, FSDP2), and so do linears that can put off their weights' gradients: what
# they leave for later is no part of a graph. Tensor parallelism's collectives are inside.


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
BACKEND = "inductor"
_MOST = 512  # graphs of one function


def compiled(function: AnyFunction) -> AnyFunction:
    """Shapes are constants: a run has one shape of microbatch, and one more where it looks at held-out data.

    Dropout has a key for each layer, and so a graph. Should a function ever need more graphs than that, it is an error:
    PyTorch would run it uncompiled from then on, and say so in a log.
    """
    torch._dynamo.config.recompile_limit = _MOST
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False, backend=BACKEND)  # type: ignore[return-value]


def compilation() -> tuple[int, dict[str, int]]:
    """Of this process so far: graphs that were made, and the reasons for breaks between them, with their number."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), {str(why): int(n) for why, n in counters["graph_break"].items()}
