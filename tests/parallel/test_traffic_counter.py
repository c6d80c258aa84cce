"""The counter sees every collective, whoever calls it, and nothing else."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from fivefold.layout.axes import AXES
from fivefold.layout.layout import Layout
from fivefold.parallel import collectives as c
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.traffic_counter import TrafficCounter
from fivefold.spec.presets import preset
from tests.parallel.zero.world import each
from tests.ranks import run_ranks

CPU = torch.device("cpu")
Events = list[tuple[str, str, int, int]]


def by_hand(rank: int, world: int) -> tuple[Events, list[float]]:
    mesh = Mesh.of(Layout(dp=2, tp=2), CPU)
    x = torch.ones(2, 6)  # 48 bytes
    with TrafficCounter(mesh) as counter:
        c.wait(c.all_reduce(x, mesh.tp), mesh.tp)
        c.wait(c.all_gather(x, mesh.dp), mesh.dp)
        c.wait(c.reduce_scatter(x, mesh.tp), mesh.tp)
        c.wait(c.all_to_all(x, mesh.tp), mesh.tp)
        here = mesh.tp.rank  # one row for the first rank, two for the second
        c.wait(c.all_to_all(torch.ones(3, 6), mesh.tp, [1, 2], [here + 1, here + 1]), mesh.tp)
        c.RingExchange(x, mesh.tp).wait()
        c.wait(c.all_reduce(x, mesh.cp), mesh.cp)  # one rank: nothing moves
        dist.barrier()
        dist.all_reduce(x.bfloat16(), group=mesh.world.group, async_op=True).wait()
    c.wait(c.all_reduce(x, mesh.tp), mesh.tp)  # the counter has been left
    exchanged = [float(row.wire) for row in counter.rows() if row.kind == "all-to-all"]
    return [tuple(event)[:4] for event in counter.events], exchanged


def test_payload_is_the_larger_side_and_waits_receives_and_barriers_are_free() -> None:
    for rank, (events, exchanged) in enumerate(run_ranks(4, by_hand)):
        assert events == [
            ("tp", "all-reduce", 48, 2),
            ("dp", "all-gather", 96, 2),
            ("tp", "reduce-scatter", 48, 2),
            ("tp", "all-to-all", 48, 2),
            ("tp", "all-to-all", (72, 96)[rank % 2], 2),
            ("tp", "send", 48, 2),
            ("world", "all-reduce", 24, 4),
        ]
        assert exchanged == [24 + (48, 24)[rank % 2]]  # one of two even shares, and what was for the other rank


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis):  # type: ignore[no-untyped-def]
        ctx.axis = axis
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        return c.wait(c.all_reduce(gradient, ctx.axis), ctx.axis), None


def by_others(rank: int, world: int) -> tuple[Events, Events, Events]:
    mesh = Mesh.of(Layout(dp=2), CPU)
    with TrafficCounter(mesh) as backward:
        Summed.apply(torch.ones(4, requires_grad=True), mesh.dp).sum().backward()
    linear = torch.nn.Linear(4, 4, bias=False)
    fully_shard(linear, mesh=mesh.submesh("fsdp"))
    linear.set_gradient_divide_factor(1.0)
    linear.set_force_sum_reduction_for_comms(True)
    with TrafficCounter(mesh) as fsdp:
        linear(torch.ones(2, 4)).sum().backward()
    with TrafficCounter(mesh) as dtensor:
        DTensor.from_local(torch.ones(4), mesh.dp.mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()
    return tuple([tuple(event)[:4] for event in counter.events] for counter in (backward, fsdp, dtensor))


def test_backward_passes_fsdp2_and_dtensor_are_counted_too() -> None:
    for backward, fsdp, dtensor in run_ranks(2, by_others):
        assert backward == [("dp", "all-reduce", 16, 2)]
        assert fsdp == [("dp", "all-gather", 64, 2), ("dp", "reduce-scatter", 64, 2)]
        assert dtensor == [("dp", "all-reduce", 16, 2)]


def names(rank: int, world: int, text: str) -> dict[str, str]:
    mesh = Mesh.of(Layout.parse(text), CPU, spec=preset("tiny-moe"))
    axes = {name: getattr(mesh, name) for name in AXES}
    counter = TrafficCounter(mesh)
    with counter:
        for axis in axes.values():
            c.wait(c.all_reduce(torch.ones(1), axis), axis)
    used = [name for name, axis in axes.items() if axis.size > 1]
    return dict(zip(used, [event.axis for event in counter.events], strict=True))


LAYOUTS = ["dp=4", "dp=2,cp=2", "cp=2,tp=2", "dp=4,zero=3,replicate=2", "pp=4", "dp=2,pp=2,ep=2", "pp=4,schedule=zb-v"]


def test_axes_of_the_same_ranks_have_the_name_that_the_closed_forms_give_them() -> None:
    for rank in run_ranks(4, each, names, [(layout,) for layout in LAYOUTS]):
        for layout, found in zip(LAYOUTS, rank, strict=True):
            assert found == {axis: Layout.parse(layout).same_axis(axis) for axis in found}, layout


def odd_group(rank: int, world: int) -> tuple[list[str], str]:
    mesh = Mesh.of(Layout(dp=2, tp=2), CPU)
    group = dist.new_group([0, 3])
    x = torch.ones(2)
    with TrafficCounter(mesh) as counter:
        if rank in (0, 3):
            dist.all_reduce(x, group=group)
    try:
        with TrafficCounter(mesh):
            dist.reduce(x, 0)
    except NotImplementedError as error:
        return [event.axis for event in counter.events], str(error)
    return [], ""


def test_what_the_counter_does_not_know_is_not_counted_as_nothing() -> None:
    found = run_ranks(4, odd_group)
    assert found[0] == (["ranks 0+3"], "the traffic counter does not know the operator reduce")


def without_data(rank: int, world: int) -> Events:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=5, world_size=64)
    mesh = Mesh.of(Layout(dp=8, tp=8), CPU)
    with FakeTensorMode(), TrafficCounter(mesh) as counter:
        x = torch.empty(1 << 20, 1 << 20)  # 4 TiB
        c.wait(c.all_gather(x, mesh.tp), mesh.tp)
        dist.all_reduce(x, group=mesh.dp.group)
    return [tuple(event)[:4] for event in counter.events]


def test_fake_tensors_on_a_fake_group_are_counted_without_their_data() -> None:
    [events] = run_ranks(1, without_data)
    assert events == [("tp", "all-gather", 8 << 42, 8), ("dp", "all-reduce", 4 << 40, 8)]
