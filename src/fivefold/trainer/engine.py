"""`RankModel` is a job's model on this rank; `Engine` adds the optimizer and runs one global batch at a time.

global batch -> this dp rank's samples -> microbatches -> this cp rank's tokens -> the schedule's actions on this pp
      rank's stages -> loss sums, each divided once by the global count of target tokens -> gradients, summed once
      over dp x cp -> gradient norm -> the optimizer's step
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.data.batch import Batch, DpShare
from fivefold.job.config import Job
from fivefold.launch.device import TORCH_DTYPES, compiles
from fivefold.launch.waits import timed_wait
from fivefold.layout.stages import schedule_of, stages_of
from fivefold.losses.base import Loss
from fivefold.losses.cross_entropy import PLAIN
from fivefold.model.decoder import Decoder
from fivefold.model.layers import TokenPositions, accum_dtype
from fivefold.model.linear_cross_entropy import Targets
from fivefold.model.load_balancing import Balance, update_expert_bias
from fivefold.model.moe import MoE
from fivefold.model.ops import AttentionOps
from fivefold.model.router import Router
from fivefold.parallel.collectives import all_reduce, wait, waiting
from fivefold.parallel.context import ContextParallel
from fivefold.parallel.data_parallel import shard_model
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.optimizer import Optimizer
from fivefold.parallel.pipeline import Channels, Microbatch, Pipeline, Watch
from fivefold.parallel.tensor import ops_of
from fivefold.parallel.wgrad import WeightGradQueue
from fivefold.schedules.text import to_text
from fivefold.trainer.records import Load

# ---- load -----------------------------------------------------------------------------------------------------------
# The load of experts in a step: counted where tokens are routed, summed over all ranks, and evened out by biases.
#
# Every rank counts the tokens that it routes, in every microbatch of its layers; recomputation and evaluation do not
# count. The counts are all-reduced with the gradient norm, in float64, which is exact for whole numbers: so experts add
# no collective to a step, only 8 bytes for each of [MoE layers x experts] and for the two losses. A step that is
# skipped, or fails, moves no bias.


def moe_layers(stages: Iterable[Decoder]) -> dict[int, MoE]:
    """{layer number: its MoE}, of the layers that have experts."""
    return {layer: block.mixture for layer, block in blocks_of(stages) if block.mixture is not None}


def blocks_of(stages: Iterable[Decoder]) -> Iterator[tuple[int, Any]]:
    for model in stages:
        yield from ((int(layer), block) for layer, block in model.layers.items())


def routers(stages: Iterable[Decoder]) -> dict[int, Router]:
    return {layer: moe.router for layer, moe in moe_layers(stages).items()}


class ExpertLoads:
    """Counts the tokens per expert, and the routers' losses, of the MoE layers: on this rank, then over all ranks."""

    def __init__(self, job: Job, stages: Iterable[Decoder], device: torch.device):
        assert job.model.experts is not None
        self.train, self.device = job.train, device
        self.rows = {layer: row for row, layer in enumerate(job.model.routed_layers)}
        self.shape = len(self.rows), job.model.experts.count
        self.expected_visits = job.train.batch * job.data.seq * job.model.experts.top_k
        self.moe_layers = moe_layers(stages)
        self.sums = self._empty()

    def _empty(self) -> Tensor:
        """Zeros for the tokens by layer and expert, then the sums over layers of the balance loss and the z loss."""
        return torch.zeros(math.prod(self.shape) + 2, dtype=torch.float64, device=self.device)

    def reset(self) -> None:
        """Clears the last step's counts."""
        for moe in self.moe_layers.values():
            moe.router.tokens_per_expert = moe.losses = None

    def collect(self) -> Tensor:
        """This rank's counts since `reset`, in a buffer that the caller all-reduces in place."""
        self.sums = self._empty()
        tokens, losses = self.tokens, self.sums[-2:]
        for layer, moe in self.moe_layers.items():
            if moe.router.tokens_per_expert is not None:
                tokens[self.rows[layer]] = moe.router.tokens_per_expert
            if moe.losses is not None:
                losses += moe.losses
        return self.sums

    @property
    def tokens(self) -> Tensor:
        """[MoE layers, experts]"""
        return self.sums[:-2].view(self.shape)

    def update_biases(self) -> None:
        """Moves the routers' biases. Every rank has the same sums, so replicas of a bias stay equal."""
        for layer, moe in self.moe_layers.items():
            if moe.router.balance is not None and self.train.balance_rate:
                load = self.tokens[self.rows[layer]].to(torch.int64)
                update_expert_bias(moe.router.balance, load, self.train.balance_rate)

    def record(self, sums: list[float], *, by_expert: bool) -> Load:
        """The record of a step, from sums that have reached the host; `by_expert`: with each expert's tokens."""
        layers, experts = self.shape
        tokens = [[round(total) for total in sums[row * experts : (row + 1) * experts]] for row in range(layers)]
        balance, z = (total / layers for total in sums[-2:])
        return Load.of(
            tokens,
            self.expected_visits,
            balance_loss=balance if self.train.balance_loss else None,
            z_loss=z if self.train.router_z_loss else None,
            by_expert=by_expert,
        )


# ---- engine ---------------------------------------------------------------------------------------------------------


def _on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy, for which the host does not wait: it would, for the device to get there, if the memory was not pinned."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class RankModel:
    """A job's model on this rank: its stages, their weights and buffers, and the pipeline that runs them.

    `watch` returns a context manager for every action of the pipeline; `attention` replaces the layout's.
    """

    def __init__(self, job: Job, mesh: Mesh, watch: Watch | None = None, attention: AttentionOps | None = None):
        self.job, self.mesh = job, mesh
        layout, compute = job.layout, TORCH_DTYPES[job.train.dtype]
        self.compiled = compiles(job.train, mesh.device)
        if mesh.device.type == "cuda":
            # In a bfloat16 model only routers multiply in float32. Their forward inputs were bfloat16, which TF32
            # represents exactly; in backward it keeps 10 bits of the logits' gradients, where other linears keep 7.
            torch.backends.cuda.matmul.allow_tf32 = compute == torch.bfloat16
        self.schedule = schedule_of(job.model, layout, job.data.seq)
        wgrad_queue, splits = WeightGradQueue(), self.schedule.splits
        precision: Any = {"fp8": job.train.fp8, "fp8_experts": job.train.fp8_experts, "dtype": compute}
        options: Any = {"attention": attention, "compiled": self.compiled, "documents": job.data.document_mask}
        self.ops = ops_of(job.model, mesh, wgrad_queue if splits else None, **options, **precision)
        self.stages = self._stages()
        self.weights = shard_model(
            list(self.stages.values()), job.model, mesh, compute, job.train.seed, split_backward=splits
        )
        self.buffers = self._buffers(accum_dtype(compute))
        wgrad_queue.report = self.weights.add
        channels = Channels(self.schedule, mesh, compute)
        self.pipeline = Pipeline(self.schedule, mesh.pp.rank, self.stages, self.weights, wgrad_queue, channels, watch)

    def _stages(self) -> dict[int, Decoder]:
        """This rank's stages, on the meta device: weights are drawn later, where they are sharded."""
        job = self.job
        stages = stages_of(job.model, job.layout, job.data.seq)
        local = [stages[number] for number in self.schedule.placement.of_rank[self.mesh.pp.rank]]
        losses = {"loss": job.train.balance_loss, "z_loss": job.train.router_z_loss}
        balance = Balance(**losses, rows=job.train.batch, tokens=job.train.batch * job.data.seq)
        decoder_args = (job.layout.recompute, job.train.seed, self.ops)
        with torch.device("meta"):
            decoders = {
                stage.index: Decoder(job.model, *decoder_args, stage, self.compiled, balance) for stage in local
            }
        if job.model.tied and len(local) > 1 and local[0].first and local[-1].last:
            first, last = decoders[local[0].index], decoders[local[-1].index]
            last.embedding = first.embedding  # embedding and head share a rank, and a weight
        for model in decoders.values():
            self.ops.shard_parameters(model)
        return decoders

    def _buffers(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The routers' biases by global name, zeros in place of the meta tensors."""
        for router in routers(self.stages.values()).values():
            if router.balance is not None:
                router.balance = torch.zeros(router.balance.shape, dtype=dtype, device=self.mesh.device)
        return {name: buffer for model in self.stages.values() for name, buffer in model.named_buffers()}

    @property
    def communication_order(self) -> str:
        """This rank's communication in a step as text: the schedule's actions in order, then the gradient buckets."""
        sums = (" ".join(group.names) for _, group in self.weights.reducer.groups)
        return "\n".join([to_text(self.schedule), *sums])

    @property
    def model(self) -> Decoder:
        """The whole model, if one stage holds all of it."""
        (model,) = self.stages.values()
        return model


class Engine(RankModel):
    def __init__(self, job: Job, mesh: Mesh, watch: Watch | None = None):
        super().__init__(job, mesh, watch)
        self.context = ContextParallel(mesh)
        self.position_ids: dict[tuple[int, ...], Tensor] = {}
        self.optimizer = Optimizer(self.weights, job.model, job.optimizer, mesh, TORCH_DTYPES[job.train.dtype])
        self.expert_loads = ExpertLoads(job, self.stages.values(), mesh.device) if job.model.experts else None
        # Whether stages are still to be compiled. All ranks do that at once, before any message is under way: in the
        # first step each would start only after the one before it, with receives already posted on its device.
        self.needs_warmup = self.compiled and mesh.pp.size > 1
        # Recorded behind the copies of a snapshot of masters and moments; `step`, which alone changes them, waits for
        # it. (Where masters are the model's weights, gathering those writes the same bits over them.)
        self.snapshot_copied: torch.cuda.Event | None = None
        # Of plugins' parameters on this rank, after the first passes: whether a gradient has come of each.
        self.foreign_gradients: dict[str, bool] | None = None

    def forward_backward(self, batch: Batch | DpShare) -> Tensor:
        """Returns the mean loss of a global batch, equal on all ranks, and leaves gradients for the optimizer.

        `batch`: all of it, or this rank's share.
        """
        dp, count = self.mesh.batch, max(1, batch.loss_tokens)
        share = batch if isinstance(batch, DpShare) else batch.share(dp.size, dp.rank)
        microbatches = share.mine.split(self.job.layout.microbatches)

        def loss_of(total: Tensor) -> Tensor:
            sums.append(total.detach())
            return self._scaled_loss(total, count)

        if self.needs_warmup:
            self.needs_warmup = False
            with self.pipeline.without_messages():
                self.replay_microbatch(share)
        sums: list[Tensor] = []
        if self.expert_loads is not None:
            self.expert_loads.reset()
        self.pipeline.run([self._microbatch(part, self.job.loss) for part in microbatches], loss_of)
        if self.foreign_gradients is None:
            self.foreign_gradients = {name: self.weights.has_gradient(name) for name in self._foreign_parameters()}
        ends = [self.mesh.embedding] if self.job.model.tied else []
        with waiting("the sum of gradients", self.mesh, self.mesh.dp_cp, self.mesh.tp, *ends, *self.mesh.expert_axes()):
            self.weights.finish_grad_sync()
        return self._sum_losses(sums) / count

    def _foreign_parameters(self) -> Iterator[str]:
        for layer, block in blocks_of(self.stages.values()):
            yield from block.foreign_parameters(layer)

    def replay_microbatch(self, share: DpShare) -> None:
        """Runs forward and backward on a share's first microbatch, before a step.

        `weights.grad_hook` is called with the gradients, and nothing else changes.
        """
        first, count = share.mine.split(self.job.layout.microbatches)[0], max(1, share.loss_tokens)
        with self.weights.replay_context():
            microbatch = self._microbatch(first, self.job.loss)
            self.pipeline.run([microbatch], lambda total: self._scaled_loss(total, count), only_first=True)

    def _microbatch(self, batch: Batch, loss: Loss = PLAIN) -> Microbatch:
        """This cp rank's share of the tokens, on its device."""
        share = self.context.share(batch)
        tokens, targets, mask, samples = (
            _on_device(array, self.mesh.device)
            for array in (share.tokens, share.targets, share.loss_mask, batch.samples)
        )
        # All microbatches have the same position_ids: one tensor of them, and so one rotation, serves the whole run.
        if (position_ids := self.position_ids.get(share.tokens.shape)) is None:
            position_ids = torch.from_numpy(share.positions).to(self.mesh.device)
            self.position_ids[share.tokens.shape] = position_ids
        positions = TokenPositions(position_ids, samples, batch.tokens.shape[1])
        if self.job.data.document_mask:
            positions = share.with_documents(positions)
        return Microbatch(tokens, positions, Targets(targets, mask, loss))

    def _scaled_loss(self, total: Tensor, count: int) -> Tensor:
        """A microbatch's part of the mean over all `count` target tokens of the global batch."""
        return total / count

    def _sum_losses(self, sums: list[Tensor]) -> Tensor:
        """The sum over all ranks of loss sums; ranks without the last stage have none to add."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for part in sums:
            total += part
        for axis in (self.mesh.dp_cp, self.mesh.pp):
            with waiting("the sum of losses", self.mesh, axis):
                total = wait(all_reduce(total, axis), axis)
        return total

    def gradient_norm(self, extra_scalars: Tensor | None = None, *extra_sums: Tensor) -> Tensor:
        """The norm over all parameters. `extra_sums` and the loads of experts are all-reduced with it, in place."""
        load_sums = [] if self.expert_loads is None else [self.expert_loads.collect()]
        with waiting("the gradient norm", self.mesh, self.mesh.world):
            return self.optimizer.gradient_norm(extra_scalars, *load_sums, *extra_sums)

    def step(self, lr: float | None, norm: Tensor) -> None:
        """Clips the gradients by their `norm` and updates the parameters; with lr None only releases the gradients."""
        if self.snapshot_copied is not None:  # on the device: the host does not wait
            self.snapshot_copied.wait()
            self.snapshot_copied = None
        self.optimizer.step(lr, norm)
        if self.expert_loads is not None and lr is not None:
            self.expert_loads.update_biases()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The loss sum of a global batch without gradients, equal on all ranks: plain cross-entropy, no dropout."""
        dp = self.mesh.batch
        local = batch.padded(dp.size).split(dp.size)[dp.rank]
        microbatch = self._microbatch(local)
        unpadded = len(batch.samples) - dp.rank * len(local.samples)
        if unpadded < len(local.samples):
            microbatch = replace(microbatch, positions=replace(microbatch.positions, real=max(0, unpadded)))
        for model in self.stages.values():
            model.eval()
        loss = self.pipeline.forward_only(microbatch)
        for model in self.stages.values():
            model.train()
        return timed_wait(self._sum_losses([] if loss is None else [loss]).item)

    # ---- sharded state -----------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        """Full-precision weights of this rank's stages by global name: DTensors where they are sharded."""
        return {name: self.weights.as_dtensor(name, master.detach()) for name, master in self.weights.masters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Final gradients, between `forward_backward` and `step`."""
        masters = self.weights.masters.items()
        return {name: self.weights.as_dtensor(name, master.grad) for name, master in masters if master.grad is not None}
