"""bfloat16 gradients of many microbatches: what is added up is added up in float32."""

import pytest
import torch
from torch import Tensor

from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.layers import TokenPositions
from fivefold.model.linear_cross_entropy import Targets
from fivefold.parallel.mesh import Mesh
from fivefold.verifier.cases import make_batch
from fivefold.verifier.compare import tolerance_of
from tests.parallel.pipelines import CPU, alone, job, run
from tests.ranks import run_ranks

M = 64
SCHEDULES = ("1f1b", "zb-h1")


def one_by_one(case: Job) -> dict[str, list[Tensor]]:
    """The gradients of each microbatch by itself, as the plain decoder makes them in bfloat16."""
    model = Decoder(case.model).double()
    initialise(model, case.model, case.train.seed)
    exact = {one.name for one in case.model.parameters() if one.full_precision}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in exact else torch.bfloat16)
    batch = make_batch(case, 0)
    found: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for part in batch.split(M):
        tokens, targets, mask, samples, documents = map(
            torch.from_numpy, (part.tokens, part.targets, part.loss_mask, part.samples, part.documents)
        )
        place = TokenPositions(TokenPositions.of(tokens).position_ids, samples, tokens.shape[1], documents)
        model.zero_grad()
        (model(tokens, place, Targets(targets, mask)) / batch.loss_tokens).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[name].append(parameter.grad.clone())
    return found


def in_a_pipeline(rank: int, world: int, cases: list[Job]) -> list[dict[str, Tensor]]:
    return [run(case, Mesh.of(case.layout, CPU)).gradients for case in cases]


@pytest.mark.slow
def test_64_microbatches_in_bfloat16_add_up_as_float32_does_and_match_one() -> None:
    """Adding m numbers g_i one after another in float32 is off by at most (m - 1) u sum|g_i|, u = 2^-24 (Higham,
    Accuracy and Stability, 4.2; to first order, which is why m and not m - 1 stands below). bfloat16 sums, u = 2^-8,
    are far beyond that."""
    cases = [job(Layout(pp=2, schedule=name, microbatches=M), "bfloat16") for name in SCHEDULES]
    parts = one_by_one(cases[0])
    whole = alone(job(Layout(), "bfloat16", batch=M, layers=2)).gradients  # one microbatch of all samples
    near = tolerance_of(cases[0])
    for ranks in zip(*run_ranks(2, in_a_pipeline, cases), strict=True):
        found = ranks[0] | ranks[1]
        assert found.keys() == parts.keys() == whole.keys()
        for name, gradients in parts.items():
            exact = torch.stack(gradients).double()
            bound = M * 2.0**-24 * exact.abs().sum(0)
            assert found[name].dtype == torch.float32
            assert ((found[name].double() - exact.sum(0)).abs() <= bound).all(), name
            rough = gradients[0].clone()
            for gradient in gradients[1:]:
                rough += gradient
            if rough.dtype == torch.bfloat16:
                assert ((rough.double() - exact.sum(0)).abs() > bound).any(), name  # so the bound can tell
            assert (found[name] - whole[name]).abs().max() <= near * whole[name].abs().max(), name
