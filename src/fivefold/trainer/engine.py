"""The network is a job's model on this rank. The engine adds its optimizer and runs one global batch at a time.

global batch -> this dp rank's samples -> microbatches -> this cp rank's tokens -> the schedule's actions on this pp
      rank's stages -> loss sums, each divided once by the global count of target tokens -> gradients, summed once
      over dp x cp -> gradient norm -> the optimizer's step
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fivefold.data.batch import Batch, DpShare
from fivefold.job.config import Job
from fivefold.launch.device import DTYPES, compiles
from fivefold.launch.waits import timed_wait
from fivefold.layout.stages import schedule_of, stages_of
from fivefold.model.decoder import Decoder
from fivefold.model.layers import TokenPositions, accum_dtype
from fivefold.model.linear_cross_entropy import Targets
from fivefold.model.moe import Balance, MoE, update_expert_bias
from fivefold.model.ops import AttentionOps
from fivefold.model.router import Router
from fivefold.parallel.collectives import all_reduce, wait, waiting
from fivefold.parallel.context import ContextParallel
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.optimizer import Optimizer, shard_model
from fivefold.parallel.pipeline import Channels, Microbatch, Pipeline, Watch
from fivefold.parallel.tensor import ops_of
from fivefold.parallel.wgrad import WeightGradQueue
from fivefold.schedules.text import to_text
from fivefold.trainer.records import Load

# ---- load -----------------------------------------------------------------------------------------------------------
# The load of experts in a step: counted where tokens are routed, summed over all ranks, and followed by biases.
#
# Every rank counts the tokens that it routes, in every microbatch of its layers; a recomputation and an evaluation
# count none. The sums over the world travel with the gradient norm, in float64, which is exact for whole numbers: so
# experts add no collective to a step, but 8 bytes for each of [layers with experts x experts] and for the two losses
# to that one. A step that is skipped, or fails, moves no bias.


def mixtures(stages: Iterable[Decoder]) -> dict[int, MoE]:
    """By the number of their layer."""
    blocks = (item for model in stages for item in model.layers.items())
    return {int(layer): block.mlp for layer, block in blocks if isinstance(block.mlp, MoE)}


def routers(stages: Iterable[Decoder]) -> dict[int, Router]:
    return {layer: mixture.router for layer, mixture in mixtures(stages).items()}


class Loads:
    """Of the layers with experts, on this rank and then on all."""

    def __init__(self, job: Job, stages: Iterable[Decoder], device: torch.device):
        assert job.model.experts is not None
        self.train, self.first, self.device = job.train, job.model.dense_layers, device
        self.shape = job.model.layers - self.first, job.model.experts.count
        self.due = job.train.batch * job.data.seq * job.model.experts.top_k
        self.mixtures = mixtures(stages)
        self.sums = self._empty()

    def _empty(self) -> Tensor:
        """Tokens by layer and expert, then the sums over layers of the balance loss and the z loss."""
        return torch.zeros(math.prod(self.shape) + 2, dtype=torch.float64, device=self.device)

    def begin(self) -> None:
        """A step begins."""
        for mixture in self.mixtures.values():
            mixture.router.tokens_per_expert = mixture.losses = None

    def counted(self) -> Tensor:
        """What this rank has counted since; whoever adds up the ranks' does so in place."""
        self.sums = self._empty()
        tokens, losses = self.tokens, self.sums[-2:]
        for layer, mixture in self.mixtures.items():
            if mixture.router.tokens_per_expert is not None:
                tokens[layer - self.first] = mixture.router.tokens_per_expert
            if mixture.losses is not None:
                losses += mixture.losses
        return self.sums

    @property
    def tokens(self) -> Tensor:
        """By layer and expert."""
        return self.sums[:-2].view(self.shape)

    def follow(self) -> None:
        """Move the biases; every rank has the sums, and moves its own alike."""
        for layer, mixture in self.mixtures.items():
            if mixture.router.balance is not None and self.train.balance_rate:
                load = self.tokens[layer - self.first].to(torch.int64)
                update_expert_bias(mixture.router.balance, load, self.train.balance_rate)

    def record(self, sums: list[float], *, by_expert: bool) -> Load:
        """Of a step whose sums have reached the host; `by_expert`: with the tokens of each."""
        layers, experts = self.shape
        tokens = [[round(total) for total in sums[at * experts : (at + 1) * experts]] for at in range(layers)]
        balance, z = (total / layers for total in sums[-2:])
        return Load.of(
            tokens,
            self.due,
            balance_loss=balance if self.train.balance_loss else None,
            z_loss=z if self.train.router_z_loss else None,
            by_expert=by_expert,
        )


# ---- engine ---------------------------------------------------------------------------------------------------------


class RankModel:
    """A job's model on this rank: its stages, their weights and buffers, and the pipeline that runs them.

    `watch` surrounds every action of the pipeline; `attention` replaces the layout's.
    """

    def __init__(self, job: Job, mesh: Mesh, watch: Watch | None = None, attention: AttentionOps | None = None):
        self.job, self.mesh = job, mesh
        layout, compute = job.layout, DTYPES[job.train.dtype]
        self.compiled = compiles(job.train, mesh.device)
        if mesh.device.type == "cuda":
            # Beside bfloat16 only routers multiply in float32. What they multiply forward was bfloat16, and is exact in
            # the tensor cores' own format; backward keeps 10 bits of the logits' gradients, where other linears keep 7.
            torch.backends.cuda.matmul.allow_tf32 = compute == torch.bfloat16
        self.schedule = schedule_of(job.model, layout, job.data.seq)
        later, split = WeightGradQueue(), self.schedule.splits
        narrow: Any = {"fp8": job.train.fp8, "fp8_experts": job.train.fp8_experts, "dtype": compute}
        defer_wgrad = later if split else None
        masked = job.data.document_mask
        self.ops = ops_of(
            job.model, mesh, defer_wgrad, attention=attention, compiled=self.compiled, documents=masked, **narrow
        )
        self.stages = self._stages()
        self.weights = shard_model(
            list(self.stages.values()), job.model, mesh, compute, job.train.seed, split_backward=split
        )
        self.buffers = self._buffers(accum_dtype(compute))
        later.report = self.weights.add
        channels = Channels(self.schedule, mesh, compute)
        self.pipeline = Pipeline(self.schedule, mesh.pp.rank, self.stages, self.weights, later, channels, watch)

    def _stages(self) -> dict[int, Decoder]:
        """This rank's, on the meta device: no weights are drawn that would be thrown away."""
        job = self.job
        stages = stages_of(job.model, job.layout, job.data.seq)
        local = [stages[number] for number in self.schedule.placement.of_rank[self.mesh.pp.rank]]
        losses = {"loss": job.train.balance_loss, "z_loss": job.train.router_z_loss}
        balance = Balance(**losses, rows=job.train.batch, tokens=job.train.batch * job.data.seq)
        how = (job.layout.recompute, job.train.seed, self.ops)
        with torch.device("meta"):
            made = {stage.index: Decoder(job.model, *how, stage, self.compiled, balance) for stage in local}
        if job.model.tied and len(local) > 1 and local[0].first and local[-1].last:
            made[local[-1].index].embedding = made[local[0].index].embedding  # both ends are here: one weight
        for model in made.values():
            self.ops.adopt(model)
        return made

    def _buffers(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The biases of routers by global name, which begin at zero; what the meta device had of them was nothing."""
        for router in routers(self.stages.values()).values():
            if router.balance is not None:
                router.balance = torch.zeros(router.balance.shape, dtype=dtype, device=self.mesh.device)
        return {name: buffer for model in self.stages.values() for name, buffer in model.named_buffers()}

    @property
    def order(self) -> str:
        """What this rank starts in a step that others take part in: its schedule's actions, and the buckets it sums."""
        sums = (" ".join(group.names) for _, group in self.weights.reducer.groups)
        return "\n".join([to_text(self.schedule), *sums])

    @property
    def model(self) -> Decoder:
        """The whole model, where one stage is all of it."""
        (model,) = self.stages.values()
        return model


class Engine(RankModel):
    def __init__(self, job: Job, mesh: Mesh, watch: Watch | None = None):
        super().__init__(job, mesh, watch)
        self.context = ContextParallel(mesh)
        self.position_ids: dict[tuple[int, ...], Tensor] = {}
        self.optimizer = Optimizer(self.weights, job.model, job.optimizer, mesh)
        self.loads = Loads(job, self.stages.values(), mesh.device) if job.model.experts else None
        # Stages that are still to be compiled: all ranks do that at once, before a message is on its way. In the first
        # step each would begin when the one before it is done, and have posted receives on its device.
        self.cold = self.compiled and mesh.pp.size > 1
        # When a snapshot of masters and moments has been copied: only `step` changes them. (Where masters are the
        # model's weights, gathering those writes the same bits over them.)
        self.copied: torch.cuda.Event | None = None

    def forward_backward(self, batch: Batch | DpShare) -> Tensor:
        """The mean loss of a global batch, equal on all ranks, and its gradient where the optimizer looks for it.

        The batch is given whole, or as this rank's share of it."""
        dp, count = self.mesh.batch, max(1, batch.loss_tokens)
        share = batch if isinstance(batch, DpShare) else batch.share(dp.size, dp.rank)
        microbatches = share.mine.split(self.job.layout.microbatches)

        def loss_of(total: Tensor) -> Tensor:
            sums.append(total.detach())
            return self._share(total, count)

        if self.cold:
            self.cold = False
            with self.pipeline.without_messages():
                self.replay_microbatch(share)
        sums: list[Tensor] = []
        if self.loads is not None:
            self.loads.begin()
        self.pipeline.run([self._microbatch(part, **self._extras()) for part in microbatches], loss_of)
        ends = [self.mesh.embedding] if self.job.model.tied else []
        with waiting("the sum of gradients", self.mesh, self.mesh.dp_cp, self.mesh.tp, *ends, *self.mesh.expert_axes()):
            self.weights.finish_grad_sync()
        return self._everywhere(sums) / count

    def replay_microbatch(self, share: DpShare) -> None:
        """Forward and backward passes of a share's first microbatch, before a step: `weights.grad_hook` is told of its
        gradients, and nothing else is changed by them."""
        first, count = share.mine.split(self.job.layout.microbatches)[0], max(1, share.loss_tokens)
        with self.weights.replay_context():
            microbatch = self._microbatch(first, **self._extras())
            self.pipeline.run([microbatch], lambda total: self._share(total, count), only_first=True)

    def _extras(self) -> dict[str, float]:
        return {"smoothing": self.job.train.label_smoothing, "z_loss": self.job.train.z_loss}

    def _microbatch(self, batch: Batch, **extras: float) -> Microbatch:
        """`extras` belong to training's loss, and not to the plain one."""
        share = self.context.share(batch)
        tokens, targets, mask, samples = (
            torch.from_numpy(array).to(self.mesh.device, non_blocking=True)
            for array in (share.tokens, share.targets, share.loss_mask, batch.samples)
        )
        # All microbatches stand at the same position_ids: one tensor of them, and so one rotation, serves the run.
        if (position_ids := self.position_ids.get(share.tokens.shape)) is None:
            position_ids = torch.from_numpy(share.positions).to(self.mesh.device)
            self.position_ids[share.tokens.shape] = position_ids
        positions = TokenPositions(position_ids, samples, batch.tokens.shape[1])
        if self.job.data.document_mask:
            positions = share.with_documents(positions)
        return Microbatch(tokens, positions, Targets(targets, mask, **extras))

    def _share(self, total: Tensor, count: int) -> Tensor:
        """A microbatch's part of the mean over all target tokens of the global batch."""
        return total / count

    def _everywhere(self, sums: list[Tensor]) -> Tensor:
        """Loss sums, which the last stage's ranks have of their own tokens, added up on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for part in sums:
            total += part
        for axis in (self.mesh.dp_cp, self.mesh.pp):
            with waiting("the sum of losses", self.mesh, axis):
                total = wait(all_reduce(total, axis), axis)
        return total

    def gradient_norm(self, extra_scalars: Tensor | None = None, *also: Tensor) -> Tensor:
        """Of all parameters. The load of experts goes the same way, and is known on every rank from here on; and so do
        `also`, which become sums over all ranks."""
        loads = [] if self.loads is None else [self.loads.counted()]
        with waiting("the gradient norm", self.mesh, self.mesh.world):
            return self.optimizer.gradient_norm(extra_scalars, *loads, *also)

    def step(self, rate: float | None, norm: Tensor) -> None:
        if self.copied is not None:  # on the device: the host does not wait
            self.copied.wait()
            self.copied = None
        self.optimizer.step(rate, norm)
        if self.loads is not None and rate is not None:
            self.loads.follow()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The loss sum of a global batch without gradients, equal on all ranks: plain cross-entropy, no dropout."""
        dp = self.mesh.batch
        local = batch.padded(dp.size).split(dp.size)[dp.rank]
        microbatch = self._microbatch(local)
        real = len(batch.samples) - dp.rank * len(local.samples)
        if real < len(local.samples):
            microbatch = replace(microbatch, positions=replace(microbatch.positions, real=max(0, real)))
        for model in self.stages.values():
            model.eval()
        loss = self.pipeline.forward_only(microbatch)
        for model in self.stages.values():
            model.train()
        return timed_wait(self._everywhere([] if loss is None else [loss]).item)

    # ---- the whole of what ranks hold in parts -----------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        """Full-precision weights of this rank's stages by global name: DTensors where they are sharded."""
        return {name: self.weights.as_dtensor(name, master.detach()) for name, master in self.weights.masters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Final gradients, between `forward_backward` and `step`."""
        masters = self.weights.masters.items()
        return {name: self.weights.as_dtensor(name, master.grad) for name, master in masters if master.grad is not None}
