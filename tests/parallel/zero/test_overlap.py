"""Collectives start while backward and forward go on, in one order on all ranks, and few buffers are alive."""

from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.layout.bucket_plan import buckets
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import local_params
from fivefold.model.linear_cross_entropy import Targets
from fivefold.parallel.optimizer import Optimizer
from fivefold.parallel.zero import ZeroBuckets
from fivefold.spec.operations import EMBEDDING_UNIT, HEAD_UNIT
from fivefold.spec.presets import preset
from tests.parallel.zero.world import CONFIG, each, forward_backward, full_tensor, make, microbatches
from tests.ranks import run_ranks

DEEP = preset("tiny", layers=4, hidden=16, heads=4, kv_heads=4, head_dim=4, ffn=32, vocab=48)


class Diary(TorchDispatchMode):
    """What happened, in order: collectives by their names, and what else the test writes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2].strip("_")
            self.lines.append(next(kind for kind in ("allreduce", "reduce_scatter", "allgather") if kind in name))
        return func(*args, **(kwargs or {}))


def diary(rank: int, world: int, stage: int) -> tuple[list[str], list[str], int]:
    """Of the backward pass of a last microbatch, and of the step and the forward after it; and most tables alive."""
    model, _, weights, mesh = make(DEEP, Layout(dp=world, zero=stage), torch.float32)
    assert isinstance(weights, ZeroBuckets)
    optimizer = Optimizer(weights, DEEP, CONFIG, mesh)
    alive = 0
    book = Diary()

    def written(layer: int):
        def hook(*_) -> None:
            book.lines.append(f"block {layer}")

        return hook

    def tables(*_) -> None:
        nonlocal alive
        alive = max(alive, sum(bucket.table is not None for bucket in weights.buckets))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(tables)
    for layer, block in ((int(number), block) for number, block in model.layers.items()):
        block.register_full_backward_pre_hook(written(layer))
        block.register_forward_hook(written(layer))
    [(tokens, targets, mask)], count = microbatches(DEEP, mesh, 0, 2 * world, ())
    with weights.microbatch(last=True):
        loss = model(tokens, targets=Targets(targets, mask)) / count
        with book:
            book.lines.clear()
            loss.backward()
            backward = list(book.lines)
    weights.finish_grad_sync()
    norm = optimizer.gradient_norm()
    with book:
        book.lines.clear()
        optimizer.step(1e-3, norm)
        model(tokens)
    return backward, book.lines, alive


@cache
def diaries() -> list[list[tuple[list[str], list[str], int]]]:
    return run_ranks(2, each, diary, [(stage,) for stage in range(3)])


@pytest.mark.alone
@pytest.mark.parametrize(("stage", "kind"), [(0, "allreduce"), (1, "reduce_scatter"), (2, "reduce_scatter")])
def test_a_reduction_starts_as_soon_as_its_bucket_is_final(stage: int, kind: str) -> None:
    """Head and last norm are too small for a bucket here and join the last block."""
    for rank in diaries():
        backward, _, most = rank[stage]
        assert backward == ["block 3", kind, "block 2", kind, "block 1", kind, "block 0", kind, kind]
        assert most == (5 if stage < 2 else 2)


@pytest.mark.alone
def test_new_weights_are_gathered_under_the_next_forward() -> None:
    for _, (_, first, _), (_, second, _) in diaries():
        assert first == ["allgather"] * 5 + [f"block {layer}" for layer in range(4)]
        gathered = ["allgather", "allgather", "allgather"]  # two at a time: in stage 2 each has a buffer of its own
        assert second == [*gathered, "allgather", "block 0", "allgather", "block 1", "block 2", "block 3"]


def absent(rank: int, world: int, stage: int) -> tuple[float, float]:
    """A second step in which rank 1 leaves out its middle blocks: norms of the own and of the summed gradient."""
    name = "layers.2.mlp.up.weight"
    model, ops, weights, mesh = make(DEEP, Layout(dp=world, zero=stage, microbatches=2), torch.float64)
    parts, count = microbatches(DEEP, mesh, 0, 4 * world, ())
    own = torch.zeros(DEEP.ffn, DEEP.hidden, dtype=torch.float64)
    for tokens, targets, mask in parts:
        loss = model(tokens, targets=Targets(targets, mask)) / count
        own += torch.autograd.grad(loss, model.get_parameter(name))[0]
    forward_backward(model, ops, weights, parts, count)
    weights.sync_params()
    if rank == 1:
        model.layers = torch.nn.ModuleDict({number: model.layers[number] for number in ("0", "3")})
    forward_backward(model, ops, weights, parts, count)
    summed = weights.masters[name].grad
    assert summed is not None
    return own.norm().item(), full_tensor(weights.as_dtensor(name, summed)).norm().item()


def test_parameters_without_a_gradient_on_one_rank_count_as_zero_and_nothing_hangs() -> None:
    first, second = run_ranks(2, each, absent, [(stage,) for stage in range(3)])
    for (own, a), (_, b) in zip(first, second, strict=True):
        assert own > 0
        assert a == b == pytest.approx(own, rel=1e-10)


def test_consecutive_units_join_until_a_bucket_is_large_enough() -> None:
    parts = list(local_params(DEEP, Layout()).values())
    block = sum(one.size for one in parts if one.parameter.layer == 0)
    assert [group.units for group in buckets(parts, 2 * block)] == [
        (HEAD_UNIT, 3, 2),
        (1, 0),
        (EMBEDDING_UNIT,),
    ]
    assert [unit for group in buckets(parts) for unit in group.units][-1] == EMBEDDING_UNIT
    assert sorted(name for group in buckets(parts, 1) for name in group.names) == sorted(one.name for one in parts)


def test_what_is_summed_over_tp_has_buckets_of_its_own() -> None:
    groups = buckets(local_params(DEEP, Layout(tp=2, sp=True)).values())
    assert [(group.partial, len(group.units)) for group in groups] == [(True, 5), (False, 6)]
    assert all(one.tp.partial == group.partial for group in groups for one in group.params)
