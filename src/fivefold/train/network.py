"""A job's model on this rank: its stages, their weights, and the pipeline that runs them."""

import torch

from fivefold.job.config import Job
from fivefold.launch.device import DTYPES, compiles
from fivefold.layout.stages import schedule_of, stages_of
from fivefold.model.decoder import Decoder
from fivefold.model.ops import AttentionOps
from fivefold.parallel.channels import Channels
from fivefold.parallel.deferred_wgrad import WeightGradQueue
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.ops import ops_of
from fivefold.parallel.pipeline import Pipeline, Watch
from fivefold.parallel.zero import spread


class Network:
    """`watch` surrounds every action of the pipeline; `attention` replaces the layout's."""

    def __init__(self, job: Job, mesh: Mesh, watch: Watch | None = None, attention: AttentionOps | None = None):
        self.job, self.mesh = job, mesh
        layout, compute = job.layout, DTYPES[job.train.dtype]
        self.compiled = compiles(job.train, mesh.device)
        self.schedule = schedule_of(job.model, layout, job.data.seq)
        later, split = WeightGradQueue(), self.schedule.splits
        put_off, fp8 = later if split else None, job.train.fp8
        self.ops = ops_of(job.model, mesh, put_off, attention=attention, compiled=self.compiled, fp8=fp8)
        self.stages = self._stages()
        self.weights = spread(list(self.stages.values()), job.model, mesh, compute, job.train.seed, split)
        later.report = self.weights.add
        channels = Channels(self.schedule, mesh, compute)
        self.pipeline = Pipeline(self.schedule, mesh.pp.rank, self.stages, self.weights, later, channels, watch)

    def _stages(self) -> dict[int, Decoder]:
        """This rank's, on the meta device: no weights are drawn that would be thrown away."""
        job = self.job
        every = stages_of(job.model, job.layout, job.data.seq)
        mine = [every[number] for number in self.schedule.placement.of_rank[self.mesh.pp.rank]]
        with torch.device("meta"):
            made = {
                stage.index: Decoder(job.model, job.layout.recompute, job.train.seed, self.ops, stage, self.compiled)
                for stage in mine
            }
        if job.model.tied and len(mine) > 1 and mine[0].first and mine[-1].last:
            made[mine[-1].index].embedding = made[mine[0].index].embedding  # both ends are here: one weight
        for model in made.values():
            self.ops.adopt(model)
        return made

    @property
    def model(self) -> Decoder:
        """The whole model, where one stage is all of it."""
        (model,) = self.stages.values()
        return model
