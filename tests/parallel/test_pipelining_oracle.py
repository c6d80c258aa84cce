"""torch.distributed.pipelining, an implementation that is not ours, makes the same gradients of the same stages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining as theirs

from fivefold.layout.layout import Layout
from fivefold.layout.stages import stages_of
from fivefold.model.decoder import Decoder
from fivefold.model.layers import TokenPositions
from fivefold.model.linear_cross_entropy import loss_sum
from fivefold.parallel.mesh import Mesh
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import make_batch
from tests.parallel.pipelines import CPU, gradients_of, job
from tests.parallel.zero.world import each
from tests.ranks import run_ranks

M = 4
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
SCHEDULES = [
    ("gpipe", "ScheduleGPipe"),
    ("1f1b", "Schedule1F1B"),
    ("interleaved", "ScheduleInterleaved1F1B"),
    ("interleaved", "ScheduleInterleavedZeroBubble"),  # of the same stages on the same ranks
    ("bfs", "ScheduleLoopedBFS"),
    # Before 2.13 theirs sends to its own rank, which gloo refuses.
    *([] if OLD else [("zb-v", "ScheduleZBVZeroBubble"), ("dualpipe-v", "ScheduleDualPipeV")]),
]


class Part(nn.Module):
    """A stage of ours as they want it: a tensor in, a tensor out."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, TokenPositions.of(x[..., 0] if x.ndim == 3 else x))


def oracle(rank: int, layout: Layout, name: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of this rank's stages."""
    case = job(layout, documents=False)
    every, placed = stages_of(case.model, layout, case.data.seq), layout.placement
    parts, stages = [], []
    for number in placed.of_rank[rank]:
        decoder = Decoder(case.model, stage=every[number]).double()
        decoder.load_state_dict({key: weights[key] for key in decoder.state_dict()})
        parts.append(Part(decoder))
        stages.append(theirs.PipelineStage(parts[-1], number, placed.stages, CPU))
    batch = make_batch(case, 0)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return loss_sum(logits, target[..., 0], target[..., 1].bool()) / batch.loss_tokens

    kind: Callable[..., Any] = getattr(theirs.schedules, name)
    single = issubclass(kind, theirs.schedules.PipelineScheduleSingle)  # type: ignore[arg-type]
    schedule = kind(stages[0] if single else stages, M, loss_fn=loss, scale_grads=False)
    tokens, targets, mask = map(torch.from_numpy, (batch.tokens, batch.targets, batch.loss_mask))
    target, losses = torch.stack([targets, mask.long()], -1), []
    given = (tokens,) if 0 in placed.of_rank[rank] else ()
    if placed.owner[-1] == rank:
        schedule.step(*given, target=target, losses=losses)
    else:
        schedule.step(*given)
    return {
        name: parameter.grad
        for part in parts
        for name, parameter in part.decoder.named_parameters()
        if parameter.grad is not None
    }


def both(rank: int, world: int, ours: str, named: str) -> tuple[set[str], set[str], float]:
    layout = Layout(pp=2, schedule=ours, microbatches=M)
    case = job(layout, documents=False)
    engine = Engine(case, Mesh.of(layout, CPU))
    weights = {name: master.detach().clone() for name, master in engine.weights.masters.items()}
    engine.forward_backward(make_batch(case, 0))
    found, wanted = gradients_of(engine), oracle(rank, layout, named, weights)
    errors = [float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted]
    return set(found), set(wanted), max(errors)


def test_an_implementation_that_is_not_ours_makes_the_same_gradients() -> None:
    for (ours, named), *ranks in zip(SCHEDULES, *run_ranks(2, each, both, SCHEDULES), strict=True):
        for found, wanted, error in ranks:
            assert found == wanted, named
            assert error < 1e-10, named
        names = {name for found, *_ in ranks for name in found}
        assert names == {parameter.name for parameter in job(Layout(pp=2, schedule=ours)).model.parameters()}
