"""The engine: a model and its optimizer over the ranks of a mesh, one global batch at a time.

global batch -> this dp rank's samples -> microbatches -> this cp rank's tokens
      -> loss sums, each divided once by the global count of target tokens -> backward -> one sum over dp x cp
      -> gradient norm -> AdamW step
"""

import torch
from torch import Tensor

from fivefold.data.batch import Batch
from fivefold.model.decoder import Decoder
from fivefold.model.place import Place
from fivefold.parallel.collectives import all_reduce, wait
from fivefold.parallel.context import Context
from fivefold.parallel.data import spread
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import TensorParallel
from fivefold.parallel.verbs import verbs_of
from fivefold.train.config import Job
from fivefold.train.device import DTYPES
from fivefold.train.optimizer import Optimizer


class Engine:
    def __init__(self, job: Job, mesh: Mesh):
        self.job, self.mesh = job, mesh
        self.context = Context(mesh)
        self.verbs = verbs_of(job.model, mesh)
        with torch.device("meta"):  # no weights are drawn that would be thrown away
            self.model = Decoder(job.model, job.layout.recompute, job.train.seed, self.verbs)
        if isinstance(self.verbs, TensorParallel):
            self.verbs.shard(self.model)
        self.weights = spread([self.model], job.model, mesh, DTYPES[job.train.dtype], job.train.seed)
        self.optimizer = Optimizer(self.weights, job.model, job.optimizer, mesh)

    def accumulate(self, batch: Batch) -> Tensor:
        """The mean loss of a global batch, equal on all ranks, and its gradient where the optimizer looks for it."""
        count = max(1, batch.loss_tokens)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        microbatches = batch.split(self.mesh.dp.size)[self.mesh.dp.rank].split(self.job.layout.microbatches)
        for number, microbatch in enumerate(microbatches, start=1):
            with self.weights.microbatch(last=number == len(microbatches)):
                loss = self.loss(microbatch, training=True)
                (loss / count).backward()
            total += loss.detach()
        self.weights.finish()
        return wait(all_reduce(total, self.mesh.data)) / count

    def loss(self, batch: Batch, training: bool) -> Tensor:
        """The loss sum of one microbatch, over this cp rank's tokens. Held-out loss is the plain cross-entropy."""
        share = self.context.share(batch)
        tokens, targets, mask, positions, samples = (
            torch.from_numpy(array).to(self.mesh.device, non_blocking=True)
            for array in (share.tokens, share.targets, share.loss_mask, share.positions, batch.samples)
        )
        place = Place(positions, samples, batch.tokens.shape[1])
        if self.job.data.document_mask:
            place = share.with_documents(place)
        smoothing, z_loss = (self.job.train.label_smoothing, self.job.train.z_loss) if training else (0.0, 0.0)
        return self.verbs.loss_sum(self.model(tokens, place), targets, mask, smoothing, z_loss)

    def gradient_norm(self) -> Tensor:
        return self.optimizer.gradient_norm()

    def step(self, rate: float | None, norm: Tensor) -> None:
        self.optimizer.step(rate, norm)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The loss sum of a global batch without gradients, equal on all ranks."""
        mine = batch.padded(self.mesh.dp.size).split(self.mesh.dp.size)[self.mesh.dp.rank]
        self.model.eval()
        total = self.loss(mine, training=False).double()
        self.model.train()
        return float(wait(all_reduce(total, self.mesh.data)))

    # ---- the whole of what ranks hold in parts -----------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        """Full-precision weights by global name: DTensors where they are sharded."""
        return {name: self.weights.globally(name, master.detach()) for name, master in self.weights.masters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Final gradients, between `accumulate` and `step`."""
        masters = self.weights.masters.items()
        return {name: self.weights.globally(name, master.grad) for name, master in masters if master.grad is not None}
