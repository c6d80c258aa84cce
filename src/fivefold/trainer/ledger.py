"""Ledger: what memory holds, moment by moment, and how much is computed. It reads shapes, never data.

    ledger = Ledger(engine, counter)
    with ledger:
        engine.forward_backward(batch)
    ledger.peak, ledger.moments, ledger.flops

It stands in the dispatcher: the memory behind every new tensor is entered when it appears, and struck out when its last
reader lets go of it. So it counts what an allocator would be asked for, on real tensors and on fake ones alike.
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
from fivefold.parallel.traffic import TrafficCounter
from fivefold.render.blocks import Block, Table, Text
from fivefold.support.text import bytes_text
from fivefold.trainer.engine import Engine

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_SDPA = ("flash_attention_for_cpu", "flash_attention", "cudnn_attention", "efficient_attention")
_ATTENTION = {getattr(_aten, f"_scaled_dot_product_{kernel}") for kernel in _SDPA} | {_aten._flash_attention_forward}
_ATTENTION_BACKWARD = {getattr(_aten, f"_scaled_dot_product_{kernel}_backward") for kernel in _SDPA}
_ATTENTION_BACKWARD.add(_aten._flash_attention_backward)


class LedgerSpan(NamedTuple):
    """A stretch of the step: what it reached at most, and what was held when it ended."""

    name: str  # "F0.3", "optimizer"
    peak: int  # bytes
    held: int
    parameters: int  # of what was held at its end, like the next two
    gradients: int
    optimizer: int
    gradients_at_peak: int = 0

    @property
    def activations(self) -> int:
        """Everything that is not state: what backward needs, and what is on its way."""
        return self.held - self.parameters - self.gradients - self.optimizer


class Ledger(TorchDispatchMode):
    """Counts while it is entered. `engine` is told of first, since its tensors are there already."""

    def __init__(self, engine: Engine, counter: TrafficCounter | None = None):
        """`counter` is told of every operator, too: two dispatchers, one in the other, would take twice the time."""
        super().__init__()
        self.engine, self.counter = engine, counter
        self.held = self.peak = self.peak_here = 0
        self.flops = 0.0
        self.moments: list[LedgerSpan] = []
        self.peak_moment = self._name = "before the step"
        self._sizes: dict[int, int] = {}  # bytes by piece of memory
        self._readers: dict[int, weakref.ref[Any]] = {}
        self._entered: dict[int, int] = {}  # in which order they came
        self._entries = self._entries_at_peak = 0
        self._take_all(_state_of(engine))
        self.state = self.held

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs a third of a dry run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _DEVICE:  # where a fake tensor is: half of all that is asked
            results = (result,) if isinstance(result, Tensor) else tree_leaves(result)
            self._take_all(leaf for leaf in results if isinstance(leaf, Tensor))
            self.flops += flops_of(func, args, kwargs or {}, result)
            if self.counter is not None:
                self.counter.count_op(func, args, kwargs, result)
        return result

    def _take_all(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            memory = tensor.untyped_storage()
            key = memory._cdata
            # A DTensor's own memory is a promise; its local part passes here by itself. To ask a fake tensor for its
            # device is an operator, and takes its time.
            if key in self._sizes or isinstance(tensor, DTensor):
                continue
            if not isinstance(tensor, FakeTensor) and tensor.is_meta:
                continue
            self._sizes[key] = 0
            self._entries += 1
            self._entered[key] = self._entries
            self._readers[key] = weakref.ref(memory, partial(self._strike, key))
            self._enter(key, memory.nbytes())

    def _enter(self, key: int, size: int) -> None:
        self.held += size - self._sizes[key]
        self._sizes[key] = size
        if self.held > self.peak_here:
            self.peak_here, self._entries_at_peak = self.held, self._entries
        if self.held > self.peak:
            self.peak, self.peak_moment = self.held, self._name

    def _strike(self, key: int, _: Any) -> None:
        self.held -= self._sizes.pop(key, 0)
        self._readers.pop(key, None)
        self._entered.pop(key, None)

    def __enter__(self) -> Any:
        """FSDP2 frees gathered weights by resizing their memory, which no operator shows."""
        self._resize = torch.UntypedStorage.resize_

        def resized(memory: Any, size: int) -> Any:
            done = self._resize(memory, size)
            if memory._cdata in self._sizes:
                self._enter(memory._cdata, size)
            return done

        torch.UntypedStorage.resize_ = resized  # type: ignore
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore
        super().__exit__(*error)

    @contextmanager
    def moment(self, name: object) -> Iterator[None]:
        """A named stretch; also a `Watch` of the pipeline's actions."""
        self._name, self.peak_here, self._entries_at_peak = str(name), self.held, self._entries
        yield
        resident = self.engine.weights.resident()
        optimizer = resident["masters"] + self.engine.optimizer.resident()
        state = (resident["parameters"], resident["gradients"], optimizer)
        # Of the gradients that are there now, those that were when this moment held the most.
        keys = {tensor.untyped_storage()._cdata for tensor in self.engine.weights.gradient_memory()}
        at_peak = sum(self._sizes[key] for key in keys if self._entered.get(key, 0) <= self._entries_at_peak)
        self.moments.append(LedgerSpan(self._name, self.peak_here, self.held, *state, at_peak))


def _state_of(engine: Engine) -> Iterator[Tensor]:
    """What exists between steps."""
    for model in engine.stages.values():
        for parameter in model.parameters():
            yield parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    yield from engine.weights.masters.values()
    for moments in engine.optimizer.states.values():
        yield from moments.values()
    yield from engine.weights.buffers()


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Of matmuls and attention, as executed: a causal mask leaves half of the scores."""
    packet = getattr(func, "overloadpacket", None)
    if packet in _ATTENTION or packet in _ATTENTION_BACKWARD:
        backward = packet in _ATTENTION_BACKWARD
        query, key = args[1:3] if backward else args[:2]  # the gradient of the output comes before them
        keys = key.shape[0 if key.ndim == 3 else 2]  # [B, H, S, D]; without a batch, [tokens, H, D]
        # The place of the causal flag differs from operator to operator. It is the only True there.
        seen = 0.5 if any(value is True for value in (*args[3:], kwargs.get("is_causal"))) else 1.0
        return (2.5 if backward else 1.0) * 4.0 * query.numel() * keys * seen  # two matmuls over all pairs of tokens
    if packet is _aten._grouped_mm:  # a [N, I] and b [G, I, O]; or, for the weights, a [O, N] and b [N, I]
        a, b = args[:2]
        return 2.0 * a.numel() * b.shape[-1]
    return float(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0.0


class Counted:
    """Counts the second step of a real run: `train.count=true`. The first step also allocates what later ones reuse.

    The counters are those of the dry run, and must agree with it.
    """

    def __init__(self, engine: Engine, mesh: Mesh, wanted: bool, steps: int):
        self.engine, self.mesh = engine, mesh
        self.which = min(2, steps) if wanted else 0
        self.ledger: Ledger | None = None
        self.counter: TrafficCounter | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, from 1."""
        if number != self.which:
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
            "step": self.which,
            "rank": self.mesh.world.rank,
            "state_bytes": self.ledger.state,
            "peak_bytes": self.ledger.peak,
            "flops": self.ledger.flops,
            "live": self.engine.pipeline.peak,
            "traffic": [row.to_dict() for row in self.counter.rows()],
        }

    def blocks(self) -> Iterator[Block]:
        """What was counted, if anything was."""
        if self.ledger is None or self.counter is None:
            return
        yield Text(
            f"step {self.which} of this rank: {bytes_text(self.ledger.state)} of state, {bytes_text(self.ledger.peak)} "
            f"at the peak, {self.ledger.flops / 1e9:,.1f} GFLOP"
        )
        rows = [
            [row.axis, row.kind, f"{row.calls:,}", bytes_text(row.payload), bytes_text(float(row.wire))]
            for row in self.counter.rows()
        ]
        if rows:
            yield Table(["axis", "collective", ">calls", ">payload", ">wire"], rows)
