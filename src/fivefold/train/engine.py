"""The engine: a model and its optimizer over the ranks of a mesh, one global batch at a time.

global batch -> this dp rank's samples -> microbatches -> this cp rank's tokens -> the schedule's actions on this pp
      rank's stages -> loss sums, each divided once by the global count of target tokens -> gradients, summed once
      over dp x cp -> gradient norm -> AdamW step
"""

import torch
from torch import Tensor

from fivefold.data.batch import Batch
from fivefold.model.decoder import Decoder
from fivefold.model.place import Place
from fivefold.parallel.channels import Channels
from fivefold.parallel.collectives import all_reduce, wait
from fivefold.parallel.context import Context
from fivefold.parallel.data import spread
from fivefold.parallel.later import Later
from fivefold.parallel.lost import waiting
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Microbatch, Pipeline, Watch
from fivefold.parallel.verbs import verbs_of
from fivefold.schedule.actions import WEIGHT_GRAD
from fivefold.schedule.catalogue import build
from fivefold.stages import stages_of
from fivefold.train.config import Job
from fivefold.train.device import DTYPES
from fivefold.train.optimizer import Optimizer


class Engine:
    def __init__(self, job: Job, mesh: Mesh, watch: Watch | None = None):
        self.job, self.mesh = job, mesh
        layout, compute = job.layout, DTYPES[job.train.dtype]
        self.schedule = build(layout.schedule, layout.pp, layout.microbatches, chunks=layout.chunks)
        later, split = Later(), self.schedule.count(WEIGHT_GRAD) > 0
        self.context = Context(mesh)
        self.verbs = verbs_of(job.model, mesh, later if split else None)
        self.stages = self._stages()
        self.weights = spread(list(self.stages.values()), job.model, mesh, compute, job.train.seed, split)
        later.report = self.weights.add
        channels = Channels(self.schedule, mesh, compute)
        self.pipeline = Pipeline(self.schedule, mesh.pp.rank, self.stages, self.weights, later, channels, watch)
        self.optimizer = Optimizer(self.weights, job.model, job.optimizer, mesh)

    def _stages(self) -> dict[int, Decoder]:
        """This rank's, on the meta device: no weights are drawn that would be thrown away."""
        job = self.job
        every = stages_of(job.model, job.layout, job.data.seq)
        mine = [every[number] for number in self.schedule.placement.of_rank[self.mesh.pp.rank]]
        with torch.device("meta"):
            made = {
                stage.index: Decoder(job.model, job.layout.recompute, job.train.seed, self.verbs, stage)
                for stage in mine
            }
        if job.model.tied and len(mine) > 1 and mine[0].first and mine[-1].last:
            made[mine[-1].index].embedding = made[mine[0].index].embedding  # both ends are here: one weight
        for model in made.values():
            self.verbs.adopt(model)
        return made

    @property
    def model(self) -> Decoder:
        """The whole model, where one stage is all of it."""
        (model,) = self.stages.values()
        return model

    def accumulate(self, batch: Batch) -> Tensor:
        """The mean loss of a global batch, equal on all ranks, and its gradient where the optimizer looks for it."""
        count = max(1, batch.loss_tokens)
        mine = batch.split(self.mesh.dp.size)[self.mesh.dp.rank].split(self.job.layout.microbatches)
        train = self.job.train

        def loss_of(logits: Tensor, microbatch: Microbatch) -> Tensor:
            total = self._loss_sum(logits, microbatch, train.label_smoothing, train.z_loss)
            sums.append(total.detach())
            return total / count

        sums: list[Tensor] = []
        self.pipeline.run([self._microbatch(part) for part in mine], loss_of)
        with waiting("the sum of gradients", self.mesh, self.mesh.data, self.mesh.tp, self.mesh.ends):
            self.weights.finish()
        return self._everywhere(sums) / count

    def _microbatch(self, batch: Batch) -> Microbatch:
        share = self.context.share(batch)
        tokens, targets, mask, positions, samples = (
            torch.from_numpy(array).to(self.mesh.device, non_blocking=True)
            for array in (share.tokens, share.targets, share.loss_mask, share.positions, batch.samples)
        )
        place = Place(positions, samples, batch.tokens.shape[1])
        if self.job.data.document_mask:
            place = share.with_documents(place)
        return Microbatch(tokens, targets, mask, place)

    def _loss_sum(self, logits: Tensor, microbatch: Microbatch, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
        return self.verbs.loss_sum(logits, microbatch.targets, microbatch.mask, smoothing, z_loss)

    def _everywhere(self, sums: list[Tensor]) -> Tensor:
        """Loss sums, which the last stage's ranks have of their own tokens, added up on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for one in sums:
            total += one
        for axis in (self.mesh.data, self.mesh.pp):
            with waiting("the sum of losses", self.mesh, axis):
                total = wait(all_reduce(total, axis), axis)
        return total

    def gradient_norm(self) -> Tensor:
        with waiting("the gradient norm", self.mesh, self.mesh.world):
            return self.optimizer.gradient_norm()

    def step(self, rate: float | None, norm: Tensor) -> None:
        self.optimizer.step(rate, norm)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The loss sum of a global batch without gradients, equal on all ranks: plain cross-entropy, no dropout."""
        mine = batch.padded(self.mesh.dp.size).split(self.mesh.dp.size)[self.mesh.dp.rank]
        for model in self.stages.values():
            model.eval()
        loss = self.pipeline.look(self._microbatch(mine), self._loss_sum)
        for model in self.stages.values():
            model.train()
        return float(self._everywhere([] if loss is None else [loss]))

    # ---- the whole of what ranks hold in parts -----------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        """Full-precision weights of this rank's stages by global name: DTensors where they are sharded."""
        return {name: self.weights.globally(name, master.detach()) for name, master in self.weights.masters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Final gradients, between `accumulate` and `step`."""
        masters = self.weights.masters.items()
        return {name: self.weights.globally(name, master.grad) for name, master in masters if master.grad is not None}
