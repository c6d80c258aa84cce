"""What one device computes: the plain decoder, stock autograd, torch's AdamW, the whole global batch at once.

Nothing here comes from `parallel/`, nor from the engine and the optimizer that are being judged.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from fivefold.data.batch import Batch
from fivefold.job.config import Job
from fivefold.job.learning_rate import learning_rate
from fivefold.launch.device import DTYPES, choose_device
from fivefold.launch.ranks import Rank
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.loss import loss_sum
from fivefold.model.positions import TokenPositions
from fivefold.verify.batches import make_batch
from fivefold.verify.compare import zeros


@dataclass(frozen=True)
class Step:
    loss: float
    norm: float
    gradients: dict[str, Tensor]  # in full precision, before clipping


@dataclass(frozen=True)
class Reference:
    steps: list[Step]
    parameters: dict[str, Tensor]  # after the last step, in full precision
    zeros: set[str] = field(default_factory=set)  # gradients that are zero in theory

    def save(self, path: Path) -> None:
        rows = [(step.loss, step.norm, step.gradients) for step in self.steps]
        torch.save((rows, self.parameters, sorted(self.zeros)), path)

    @classmethod
    def load(cls, path: Path) -> "Reference":
        rows, parameters, names = torch.load(path, mmap=True)
        return cls([Step(*row) for row in rows], parameters, set(names))


def write_reference(rank: Rank, job: Job, path: Path) -> None:
    device = choose_device(job.train.device, rank.number)
    reference = run_reference(job, device)
    exact = replace(job, train=replace(job.train, dtype="float64", steps=1))
    reference.zeros.update(zeros(run_reference(exact, torch.device("cpu")).steps[0].gradients))
    reference.save(path)


def run_reference(job: Job, device: torch.device) -> Reference:
    """Train the job on one device; of its layout only dp is read, which chooses the data's empty masks."""
    compute = DTYPES[job.train.dtype]
    full = torch.float64 if compute == torch.float64 else torch.float32
    model = Decoder(job.model, seed=job.train.seed).to(device, full)
    initialise(model, job.model, job.train.seed)
    weights = dict(model.named_parameters())
    masters = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    model.to(compute)
    adam = _adam(job, masters)
    steps = []
    for number in range(job.train.steps):
        batch = make_batch(job, number)
        loss = _loss(job, model, batch, device) / max(1, batch.loss_tokens)
        model.zero_grad()
        loss.backward()
        for name, master in masters.items():
            gradient = weights[name].grad
            master.grad = None if gradient is None else gradient.to(full)
        before = {name: m.grad.cpu().clone() for name, m in masters.items() if m.grad is not None}
        norm = nn.utils.clip_grad_norm_(masters.values(), job.optimizer.clip or torch.inf)
        for group in adam.param_groups:
            group["lr"] = learning_rate(job.optimizer, number, job.train.steps)
        if batch.loss_tokens:
            adam.step()
        with torch.no_grad():
            for name, master in masters.items():
                weights[name].copy_(master)
        steps.append(Step(loss.item(), norm.item(), before))
    return Reference(steps, {name: master.detach().cpu() for name, master in masters.items()})


def _adam(job: Job, masters: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    settings = job.optimizer
    decayed = {parameter.name for parameter in job.model.parameters() if parameter.kind == "linear"}
    groups = [
        {"params": [p for name, p in masters.items() if (name in decayed) == linear], "weight_decay": decay}
        for linear, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, foreach=False)


def _loss(job: Job, model: Decoder, batch: Batch, device: torch.device) -> Tensor:
    """The loss sum of a whole batch."""
    tokens, targets, mask, samples, documents = (
        torch.from_numpy(array).to(device)
        for array in (batch.tokens, batch.targets, batch.loss_mask, batch.samples, batch.documents)
    )
    whole = TokenPositions.of(tokens)
    place = TokenPositions(whole.positions, samples, whole.length, documents if job.data.document_mask else None)
    return loss_sum(model(tokens, place), targets, mask, job.train.label_smoothing, job.train.z_loss)
