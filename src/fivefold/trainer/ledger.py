"""Counts the bytes of live tensors over a step, and the FLOPs of its operators. It reads shapes, never data.

    ledger = Ledger(engine, counter)
    with ledger:
        engine.forward_backward(batch)
    ledger.peak, ledger.moments, ledger.flops

It is a dispatch mode of PyTorch: the storage of every new tensor is added when it appears, and removed when its last
reference goes. So it counts what an allocator would be asked for, on real tensors and on fake ones alike.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic_counter import TrafficCounter
from fivefold.render.blocks import Block, Table, Text
from fivefold.support.text import bytes_text
from fivefold.trainer.engine import Engine

_aten = torch.ops.aten
_DEVICE_OP = torch.ops.prim.device.default
_SDPA_KERNELS = ("flash_attention_for_cpu", "flash_attention", "cudnn_attention", "efficient_attention")
_ATTENTION_OPS = {getattr(_aten, f"_scaled_dot_product_{kernel}") for kernel in _SDPA_KERNELS} | {
    _aten._flash_attention_forward
}
_ATTENTION_BACKWARD = {getattr(_aten, f"_scaled_dot_product_{kernel}_backward") for kernel in _SDPA_KERNELS}
_ATTENTION_BACKWARD.add(_aten._flash_attention_backward)


class LedgerSpan(NamedTuple):
    """The bytes of live tensors in one moment of a step: an action of the pipeline, the optimizer's update."""

    name: str  # "F0.3", "optimizer"
    peak: int
    held: int  # when it ended; the next three are parts of it
    parameters: int
    gradients: int
    optimizer: int
    gradients_at_peak: int = 0

    @property
    def activations(self) -> int:
        """Everything that is not state: activations saved for backward, and buffers of messages."""
        return self.held - self.parameters - self.gradients - self.optimizer


class Ledger(TorchDispatchMode):
    """Counts while it is entered, and begins with the tensors of the engine's state, which exist by then."""

    def __init__(self, engine: Engine, counter: TrafficCounter | None = None):
        """`counter` also counts every operator: two nested dispatch modes would take twice the time."""
        super().__init__()
        self.engine, self.counter = engine, counter
        self.held = self.peak = self.moment_peak = 0
        self.flops = 0.0
        self.moments: list[LedgerSpan] = []
        self.peak_moment = self._name = "before the step"
        # By address of a storage: its bytes, a weak reference, and its number in the order of appearance.
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._numbers: dict[int, int] = {}
        self._count = self._count_at_peak = 0  # of storages that have appeared
        self._add_tensors(_state_of(engine))
        self.state = self.held

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs a third of a dry run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _DEVICE_OP:  # half of all operators on fake tensors, and it makes no tensor
            results = (result,) if isinstance(result, Tensor) else tree_leaves(result)
            self._add_tensors(leaf for leaf in results if isinstance(leaf, Tensor))
            self.flops += flops_of(func, args, kwargs or {}, result)
            if self.counter is not None:
                self.counter.count_op(func, args, kwargs, result)
        return result

    def _add_tensors(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            # A DTensor's own storage is empty; its local tensor passes here by itself. Asking a fake tensor for its
            # device is an operator, and takes time.
            if key in self._sizes or isinstance(tensor, DTensor):
                continue
            if not isinstance(tensor, FakeTensor) and tensor.is_meta:
                continue
            self._sizes[key] = 0
            self._count += 1
            self._numbers[key] = self._count
            self._references[key] = weakref.ref(storage, partial(self._remove, key))
            self._set_size(key, storage.nbytes())

    def _set_size(self, key: int, size: int) -> None:
        self.held += size - self._sizes[key]
        self._sizes[key] = size
        if self.held > self.moment_peak:
            self.moment_peak, self._count_at_peak = self.held, self._count
        if self.held > self.peak:
            self.peak, self.peak_moment = self.held, self._name

    def _remove(self, key: int, _: Any) -> None:
        self.held -= self._sizes.pop(key, 0)
        self._references.pop(key, None)
        self._numbers.pop(key, None)

    def __enter__(self) -> Any:
        """Patches `resize_` of storages: FSDP2 frees gathered weights by it, which no operator shows."""
        self._resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: Any, size: int) -> Any:
            result = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set_size(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore
        super().__exit__(*error)

    @contextmanager
    def moment(self, name: object) -> Iterator[None]:
        """Counts a named moment; also a `Watch` of the pipeline's actions."""
        self._name, self.moment_peak, self._count_at_peak = str(name), self.held, self._count
        yield
        resident = self.engine.weights.resident()
        optimizer = resident["masters"] + self.engine.optimizer.resident()
        state = (resident["parameters"], resident["gradients"], optimizer)
        # Of the gradients that are there now, those that had appeared by the peak of this moment.
        keys = {tensor.untyped_storage()._cdata for tensor in self.engine.weights.gradient_memory()}
        at_peak = sum(self._sizes[key] for key in keys if self._numbers.get(key, 0) <= self._count_at_peak)
        self.moments.append(LedgerSpan(self._name, self.moment_peak, self.held, *state, at_peak))


def _state_of(engine: Engine) -> Iterator[Tensor]:
    """The tensors that exist between steps."""
    for model in engine.stages.values():
        for parameter in model.parameters():
            yield parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    yield from engine.weights.masters.values()
    for moments in engine.optimizer.states.values():
        yield from moments.values()
    yield from engine.weights.buffers()


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """The FLOPs of a matmul or attention, as executed: a causal mask leaves half of the scores. 0 for others."""
    packet = getattr(func, "overloadpacket", None)
    if packet in _ATTENTION_OPS or packet in _ATTENTION_BACKWARD:
        backward = packet in _ATTENTION_BACKWARD
        query, key = args[1:3] if backward else args[:2]  # the gradient of the output comes before them
        keys = key.shape[0 if key.ndim == 3 else 2]  # [B, H, S, D]; without a batch, [tokens, H, D]
        # The position of the causal flag differs from operator to operator. It is the only True among the arguments.
        unmasked = 0.5 if any(value is True for value in (*args[3:], kwargs.get("is_causal"))) else 1.0
        return (
            (2.5 if backward else 1.0) * 4.0 * query.numel() * keys * unmasked
        )  # two matmuls over all pairs of tokens
    if packet is _aten._grouped_mm:  # a [N, I] and b [G, I, O]; or, for the weights, a [O, N] and b [N, I]
        a, b = args[:2]
        return 2.0 * a.numel() * b.shape[-1]
    return float(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0.0


class Counted:
    """Counts memory, FLOPs and traffic in the second step of a run with `train.count=true`.

    The first step also allocates what later ones reuse.

    The dry run uses the same counters, and must agree.
    """

    def __init__(self, engine: Engine, mesh: Mesh, enabled: bool, steps: int):
        self.engine, self.mesh = engine, mesh
        self.counted_step = min(2, steps) if enabled else 0
        self.ledger: Ledger | None = None
        self.counter: TrafficCounter | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Counts if it is the step to count; `number` from 1."""
        if number != self.counted_step:
            yield
            return
        self.counter = TrafficCounter(self.mesh)
        self.ledger = Ledger(self.engine, self.counter)
        with self.ledger:
            yield

    def to_dict(self) -> dict[str, Any]:
        assert self.ledger is not None
        assert self.counter is not None
        return {
            "step": self.counted_step,
            "rank": self.mesh.world.rank,
            "state_bytes": self.ledger.state,
            "peak_bytes": self.ledger.peak,
            "flops": self.ledger.flops,
            "live": self.engine.pipeline.peak,
            "traffic": [row.to_dict() for row in self.counter.rows()],
        }

    def blocks(self) -> Iterator[Block]:
        """The counts as text and a table; nothing if no step was counted."""
        if self.ledger is None or self.counter is None:
            return
        state, peak = bytes_text(self.ledger.state), bytes_text(self.ledger.peak)
        gflop = f"{self.ledger.flops / 1e9:,.1f} GFLOP"
        yield Text(f"step {self.counted_step} of this rank: {state} of state, {peak} at the peak, {gflop}")
        rows = [
            [row.axis, row.kind, f"{row.calls:,}", bytes_text(row.payload), bytes_text(float(row.wire))]
            for row in self.counter.rows()
        ]
        if rows:
            yield Table(["axis", "collective", ">calls", ">payload", ">wire"], rows)
