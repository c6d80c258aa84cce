"""What tensor and sequence parallelism send and hold: collectives per layer, overlap, activation bytes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.layout.layout import Layout
from fivefold.model.linear_cross_entropy import Targets
from fivefold.spec.presets import preset
from tests.parallel.test_tensor import B, S, data, parallel
from tests.parallel.zero.world import each
from tests.ranks import run_ranks

E = 32


class Ops(TorchDispatchMode):
    """The names of the ops that pass, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def counted(rank: int, world: int, layers: int, layout: Layout) -> tuple[Counter[str], Counter[str]]:
    spec = preset("tiny", layers=layers, hidden=E, heads=4, kv_heads=2, head_dim=8, ffn=24, vocab=37)
    model, _ = parallel(spec, layout)
    tokens, targets, mask, place = data(spec)
    with Ops() as forward:
        loss = model(tokens, place, Targets(targets, mask))
    with Ops() as backward:
        loss.backward()
    return tuple(Counter(name for name in ops.names if name in COLLECTIVES) for ops in (forward, backward))


PLAIN = ({"all_reduce": 2}, {"all_reduce": 2})
SP = (
    {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2},
    {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2},
)


COUNTS = {
    (False, "none"): PLAIN,
    (False, "selective"): PLAIN,
    (False, "full"): ({"all_reduce": 2}, {"all_reduce": 4}),
    (True, "none"): SP,
    (True, "selective"): SP,
    (True, "full"): (SP[0], {"all_gather_into_tensor": 6, "reduce_scatter_tensor": 4}),
}


def test_a_layer_has_these_collectives_and_no_more() -> None:
    layouts = [Layout.from_dict({"tp": 2, "sp": sp, "recompute": recompute}) for sp, recompute in COUNTS]
    for rank in run_ranks(2, each, counted, [(layers, layout) for layout in layouts for layers in (1, 3)]):
        for (case, want), few, many in zip(COUNTS.items(), rank[::2], rank[1::2], strict=True):
            for run in (0, 1):
                assert many[run] - few[run] == Counter({name: 2 * count for name, count in want[run].items()}), case


Interval = tuple[str, float, float]


def backward_of(rank: int, world: int, times: int) -> tuple[list[str], list[list[Interval]]]:
    spec = preset("tiny", layers=1, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=1024, vocab=37)
    model, _ = parallel(spec, Layout(tp=2))
    tokens = torch.zeros(4, 64, dtype=torch.long)
    everywhere = torch.ones_like(tokens, dtype=torch.bool)

    def loss() -> torch.Tensor:
        return model(tokens, targets=Targets(tokens, everywhere))

    with Ops() as ops:
        loss().backward()
    traces = []
    for _ in range(times):
        total = loss()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            total.backward()
        intervals = [(event.name, event.time_range.start, event.time_range.end) for event in trace.events()]
        traces.append([event for event in intervals if event[0] in ("gloo:all_reduce", "aten::mm")])
    return ops.names, traces


@pytest.mark.alone
def test_the_input_gradient_is_summed_while_the_weights_gradients_are_computed() -> None:
    for names, traces in run_ranks(2, backward_of, 6):
        # In order: the sum is started, every weight of the group gets its gradient, and only then is it waited for.
        start = [i for i, name in enumerate(names) if name == "all_reduce"][-2:]  # of gate and up, and of q, k and v
        for first, products in zip(start, (2, 3), strict=True):
            between = names[first : names.index("wait_tensor", first)]
            assert between.count("mm") == products
        # In time: a sum runs beside a product (not in every trace: a busy machine may run gloo's thread late).
        assert any(all(beside_a_product(trace)) for trace in traces)


def beside_a_product(trace: list[Interval]) -> list[bool]:
    sums = [event for event in trace if event[0] == "gloo:all_reduce"]  # the head's were in the forward pass
    matmuls = [event for event in trace if event[0] == "aten::mm"]
    assert len(sums) == 2
    return [any(m[1] < s[2] and s[1] < m[2] for m in matmuls) for s in sums]


def saved(rank: int, world: int, layout: Layout) -> int:
    """Bytes of the saved tensors of the residual stream's width: inputs of norms and of column linears."""
    spec = preset("tiny", layers=2, hidden=E, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=37)  # only E is E wide
    model, _ = parallel(spec, layout)
    tokens, targets, mask, place = data(spec)
    seen: dict[int, int] = {}
    weights = {parameter.to_local().untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        address = x.untyped_storage().data_ptr()
        if x.shape[-1] == E and x.dim() == 3 and address not in weights:
            assert x.shape in ((B, S, E), (B, S // 2, E))
            seen[address] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        model(tokens, place, Targets(targets, mask))
    return sum(seen.values())


def test_sp_divides_the_activations_of_norms_residual_and_column_inputs_by_tp() -> None:
    for whole, share in run_ranks(2, each, saved, [(Layout(tp=2),), (Layout(tp=2, sp=True),)]):
        assert whole >= 2 * 4 * B * S * E * 8  # two layers: two norms' inputs and two groups' inputs each, float64
        assert 2 * share == whole
