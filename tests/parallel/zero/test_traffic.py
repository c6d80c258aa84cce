"""What travels, counted: calls and payload of every stage are the closed forms."""

import pytest
import torch

from fivefold.layout.bucket_plan import BucketParams, buckets
from fivefold.layout.layout import Layout
from fivefold.layout.sharding import local_params
from fivefold.parallel.optimizer import Optimizer
from fivefold.parallel.traffic_counter import TrafficCounter
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import preset
from tests.parallel.zero.world import CONFIG, SMALL, each, forward_backward, make, microbatches
from tests.ranks import run_ranks

UNEVEN = preset("tiny", layers=3, hidden=10, heads=1, kv_heads=1, head_dim=10, ffn=7, vocab=257)
MIN_BUCKET_ELEMENTS, WIDE = 1000, 4  # elements of a bucket in these tests; bytes of float32

Rows = dict[tuple[str, str], tuple[int, int]]  # (axis, kind) -> calls, payload


def count(rank: int, world: int, spec: ModelSpec, layout: Layout, dtype: torch.dtype) -> list[Rows]:
    """The traffic of two steps, from the forward of one to the arrival of its weights."""
    model, ops, weights, mesh = make(spec, layout, dtype, MIN_BUCKET_ELEMENTS)
    optimizer = Optimizer(weights, spec, CONFIG, mesh)
    seen = []
    for step in range(2):
        with TrafficCounter(mesh) as counter:
            parts, targets = microbatches(spec, mesh, step, 8, ())
            forward_backward(model, ops, weights, parts, targets)
            optimizer.step(1e-3, optimizer.gradient_norm())
            weights.wait_params()
        seen.append({(row.axis, row.kind): (row.calls, row.payload) for row in counter.rows()})
    return seen


def expected(spec: ModelSpec, layout: Layout, narrow: int) -> Rows:
    """`narrow`: bytes of a weight in the compute dtype. The norm is a float64, with one beside it."""
    parts, m = layout.dp, layout.microbatches
    groups = buckets(
        local_params(spec, layout).values(), MIN_BUCKET_ELEMENTS, low_precision=layout.zero > 0 and narrow < WIDE
    )
    exact = [group for group in groups if group.full_precision]
    calls, padded = len(groups), sum(group.padded(parts) for group in groups)
    whole = sum(group.padded(parts) for group in exact)
    if layout.zero == 0:
        return {("dp", "all-reduce"): (calls + 1, sum(group.size() for group in groups) * WIDE + 24)}
    norm: Rows = {("dp", "all-reduce"): (1, 24)}
    if layout.zero < 3:
        reductions = m if layout.zero == 2 else 1
        scatter = ("dp", "reduce-scatter"), (calls * reductions, padded * WIDE * reductions)
        return norm | dict([scatter]) | {("dp", "all-gather"): (calls, (padded - whole) * narrow + whole * WIDE)}
    units, padded = spec.layers + 1, padded - whole
    norm = {("dp", "all-reduce"): (1 + len(exact), 24 + WIDE * sum(group.size() for group in exact))}
    gather = ("dp", "all-gather"), (2 * units * m, 2 * padded * narrow * m)
    return norm | dict([gather]) | {("dp", "reduce-scatter"): (units * m, padded * WIDE * m)}


@pytest.mark.slow
def test_every_stage_with_one_and_two_microbatches() -> None:
    layouts = [Layout(dp=2, zero=stage, microbatches=m) for stage in range(4) for m in (1, 2)]
    for rank in run_ranks(2, each, count, [(UNEVEN, layout, torch.bfloat16) for layout in layouts]):
        for layout, (first, second) in zip(layouts, rank, strict=True):
            assert first == second == expected(UNEVEN, layout, narrow=2), layout


def test_padding_over_four_ranks() -> None:
    layout = Layout(dp=4, zero=1)
    groups: list[BucketParams] = buckets(local_params(UNEVEN, layout).values(), MIN_BUCKET_ELEMENTS)
    assert sum(group.padded(4) for group in groups) > UNEVEN.parameter_count
    assert len(groups) == 3  # the head, three blocks, the embedding
    for first, _ in run_ranks(4, count, UNEVEN, layout, torch.float32):
        assert first == expected(UNEVEN, layout, narrow=4)


def test_copies_sum_their_shards_once_a_step() -> None:
    layout = Layout(dp=4, zero=3, replicate=2, microbatches=2)
    padded = sum(group.padded(2) for group in buckets(local_params(SMALL, layout).values(), MIN_BUCKET_ELEMENTS))
    for first, second in run_ranks(4, count, SMALL, layout, torch.float32):
        units = SMALL.layers + 1
        assert first == second
        assert first["replicate", "all-reduce"] == (units, padded // 2 * 4)
        assert first["fsdp", "reduce-scatter"] == (2 * units, 2 * padded * 4)
        assert first["fsdp", "all-gather"] == (4 * units, 4 * padded * 4)


def test_partial_gradients_are_summed_over_tp() -> None:
    """Stages 0 to 2: the shard, once a step. FSDP2: every parameter whole, every microbatch, in the compute dtype."""
    layouts = [Layout(dp=2, tp=2, sp=True, zero=stage, microbatches=2) for stage in range(4)]
    norms = [one for one in local_params(SMALL, layouts[0]).values() if one.tp.partial]
    size = 4 * sum(one.size for one in norms)
    own = {0: (1, size), 1: (1, size // 2), 2: (1, size // 2), 3: (2 * len(norms), 2 * size)}
    for rank in run_ranks(4, each, count, [(SMALL, layout, torch.float32) for layout in layouts]):
        found = [first["tp", "all-reduce"] for first, _ in rank]
        # The loss over a vocabulary in parts takes all-reduces too, the same in every stage.
        loss = {tuple(a - b for a, b in zip(found[stage], own[stage], strict=True)) for stage in range(4)}
        assert len(loss) == 1
