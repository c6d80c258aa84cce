"""A stage's name is a promise about bytes: they are measured between microbatches, and equal the table."""

import torch

from fivefold.layout.layout import Layout
from fivefold.model.linear_cross_entropy import Targets
from fivefold.parallel.optimizer import Optimizer
from tests.parallel.zero.world import CONFIG, EVEN, each, make, microbatches
from tests.ranks import run_ranks

P, N = EVEN.parameter_count, 2  # every dim 0 of EVEN divides by N
X = sum(one.size for one in EVEN.parameters() if one.full_precision)  # never rounded: the weight is the master
R = P - X


def held(rank: int, world: int, layout: Layout, dtype: torch.dtype) -> tuple[list[dict[str, int]], int]:
    """What a rank holds after each microbatch of two, and after the step; and its optimizer state."""
    model, _, weights, mesh = make(EVEN, layout, dtype)
    optimizer = Optimizer(weights, EVEN, CONFIG, mesh)
    seen = []
    parts, count = microbatches(EVEN, mesh, 0, 8, ())
    for number, (tokens, targets, mask) in enumerate(parts, start=1):
        with weights.microbatch(last=number == len(parts)):
            (model(tokens, targets=Targets(targets, mask)) / count).backward()
        seen.append(weights.resident())
    weights.finish_grad_sync()
    optimizer.step(1e-3, optimizer.gradient_norm())
    weights.wait_params()
    return [*seen, weights.resident()], optimizer.resident()


def table(parameters: int, gradients: int, masters: int) -> dict[str, int]:
    return {"parameters": parameters, "gradients": gradients, "masters": masters}


LAYOUTS = [Layout(dp=N, zero=stage, microbatches=2) for stage in range(4)]
BFLOAT16 = [
    (table(2 * R + 4 * X, 4 * P, 4 * R), 8 * P),
    (table(2 * R + 4 * X, 4 * P, 4 * R // N), 8 * P // N),
    (table(2 * R + 4 * X, 4 * P // N, 4 * R // N), 8 * P // N),
    (table(4 * R // N + 4 * X, 4 * R // N + 4 * X, 0), 8 * R // N + 8 * X),  # the masters are the parameters
]


def test_bfloat16() -> None:
    for rank in run_ranks(N, each, held, [(layout, torch.bfloat16) for layout in LAYOUTS]):
        for layout, (seen, state), (expected, moments) in zip(LAYOUTS, rank, BFLOAT16, strict=True):
            assert seen[:2] == [expected, expected]
            assert seen[2] == (expected | {"gradients": 4 * X} if layout.zero == 3 else expected)
            assert state == moments


def test_float32_weights_are_their_own_masters() -> None:
    for rank in run_ranks(N, each, held, [(layout, torch.float32) for layout in LAYOUTS]):
        for layout, (seen, _) in zip(LAYOUTS, rank, strict=True):
            assert {one["masters"] for one in seen} == {0}
            assert {one["parameters"] for one in seen} == {4 * P // (N if layout.zero == 3 else 1)}


def test_one_device_has_gradients_only_while_they_are_needed() -> None:
    seen, state = held(0, 1, Layout(microbatches=2), torch.float32)
    assert seen == [table(4 * P, 4 * P, 0), table(4 * P, 4 * P, 0), table(4 * P, 0, 0)]
    assert state == 8 * P
    seen, _ = held(0, 1, Layout(microbatches=2), torch.bfloat16)
    assert seen[0] == table(2 * R + 4 * X, 4 * P, 4 * R)


def test_copies_of_shards_hold_a_shard_of_gradients_between_microbatches() -> None:
    layout = Layout(dp=4, zero=3, replicate=2, microbatches=2)
    for seen, _ in run_ranks(4, held, layout, torch.bfloat16):
        assert seen[0] == table(2 * R + 4 * X, 2 * R + 4 * X, 0)
