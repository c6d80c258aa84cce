"""The systems that benchmarks compare: Fivefold's engine, a plain loop, Hugging Face's model, PyTorch's parallelisms.

`run` is one rank of a comparison: it takes steps of every system that it is part of, in turns.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fivefold.bench.comparison import BARE_LOOP, PYTORCH_PEERS, Comparison, ComparisonResult, layout_of
from fivefold.bench.harness import HUGGING_FACE, OURS
from fivefold.bench.rank_timing import CPU, join_ranks, machine, take_turns
from fivefold.data.batch import Batch
from fivefold.job.config import Job
from fivefold.launch.device import TORCH_DTYPES, compiles
from fivefold.launch.processes import Rank
from fivefold.layout.layout import Layout
from fivefold.layout.stages import stages_of
from fivefold.model.decoder import Decoder
from fivefold.model.hf_names import expert_format_in, sources
from fivefold.model.init import init_param, initialise
from fivefold.model.layers import TokenPositions
from fivefold.model.ops import LocalOps
from fivefold.parallel.control import all_gather_values
from fivefold.parallel.mesh import Mesh
from fivefold.spec.hf import to_hf_config
from fivefold.support.plugin_calls import ask
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import plain_batch

LR = 1e-3


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of the global batch."""

    samples: list[tuple[Tensor, Tensor]]  # tokens and targets of each microbatch
    count: int  # target tokens of the global batch

    @classmethod
    def of(cls, batch: Batch, layout: Layout, rank: int = 0, device: torch.device = CPU) -> "RankBatch":
        parts = batch.split(layout.dp)[rank].split(layout.microbatches)
        pairs = [
            (torch.from_numpy(part.tokens).to(device), torch.from_numpy(part.targets).to(device)) for part in parts
        ]
        return cls(pairs, batch.loss_tokens)


class FivefoldSystem:
    sums_losses = False  # whether a rank's loss is its part of the sum over the global batch; otherwise it is the mean

    def __init__(self, job: Job, layout: Layout, batch: Batch):
        job = structs.replace(job, layout=layout)
        self.engine, self.batch = Engine(job, Mesh.of_job(job, CPU)), batch

    def step(self) -> float:
        """Take a training step; return its loss."""
        loss = self.engine.forward_backward(self.batch)
        self.engine.step(LR, self.engine.gradient_norm())
        self.engine.weights.wait_params()
        return loss.item()

    @property
    def imbalance(self) -> float | None:
        """The most loaded rank's tokens over the mean in the last step, averaged over layers, as each layer waits for
        its most loaded rank. None where every rank has all experts."""
        loads, ep = self.engine.expert_loads, self.engine.mesh.layout.ep
        if loads is None or ep == 1:
            return None
        by_rank = loads.tokens.view(loads.shape[0], ep, -1).sum(2)
        return (by_rank.amax(1) / by_rank.mean(1)).mean().item()


class HeadModule(LocalOps):
    """Calls the head as a module, because wrappers of other systems wrap modules."""

    def logits(self, x: Tensor, table: nn.Linear | nn.Embedding) -> Tensor:
        return table(x)


def decoder(job: Job) -> Decoder:
    model = Decoder(job.model, ops=HeadModule())
    initialise(model, job.model, job.train.seed)
    return model


class TrainingLoop:
    """A plain training loop around a model that maps tokens to logits."""

    sums_losses = False

    def __init__(self, model: nn.Module, part: RankBatch, job: Job, loss_scale: float = 1.0, lr: float = LR):
        """`loss_scale` is the number of ranks for wrappers that average gradients over ranks: the sum is wanted."""
        self.model, self.part, self.job, self.loss_scale = model, part, job, loss_scale
        params = list(model.parameters())  # one fused kernel cannot mix plain tensors and DTensors
        split = [[p for p in params if isinstance(p, DTensor) == is_dtensor] for is_dtensor in (False, True)]
        self.groups = [group for group in split if group]
        groups = [{"params": group, "weight_decay": job.optimizer.weight_decay} for group in self.groups]
        self.optimizer = ask(job.optimizer, "stock", groups, lr=lr, fused=True)

    def step(self) -> float:
        total = self.forward_backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def forward_backward(self) -> float:
        total = 0.0
        for number, (tokens, targets) in enumerate(self.part.samples, start=1):
            with self.grad_sync(number == len(self.part.samples)):
                loss = cross_entropy(self.logits(tokens), targets) / self.part.count
                (loss * self.loss_scale).backward()
            total += loss.item()
        return total

    def clip(self) -> None:
        if len(self.groups) == 1:
            torch.nn.utils.clip_grad_norm_(self.groups[0], self.job.optimizer.clip)
            return
        norms = []
        for group in self.groups:
            norm = get_total_norm([p.grad for p in group if p.grad is not None])
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        for group in self.groups:
            clip_grads_with_norm_(group, self.job.optimizer.clip, torch.stack(norms).norm())

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def grad_sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class HuggingFaceSystem(TrainingLoop):
    """Hugging Face's model as its users run it: sdpa, compiled where ours is, parameters in the compute dtype."""

    def __init__(self, job: Job, part: RankBatch, device: torch.device = CPU, lr: float = LR):
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = to_hf_config(job.model, job.train.dtype) | {"attn_implementation": "sdpa", "use_cache": False}
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**settings), dtype=TORCH_DTYPES[job.train.dtype]
            )
        weights = model.state_dict()
        expert_format = expert_format_in(job.model, weights)
        for parameter in job.model.parameters():  # our initial weights, so that the first losses agree
            full = torch.empty(parameter.shape, dtype=TORCH_DTYPES[job.train.dtype], device=device)
            init_param(job.model, parameter, full, job.train.seed)
            for source in sources(job.model, parameter, expert_format):
                source.view_of(weights[source.name]).copy_(full[source.rows.start : source.rows.stop])
        self.forward_fn = torch.compile(model) if compiles(job.train, device) else model
        super().__init__(model, part, job, lr=lr)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.forward_fn(tokens).logits.float()


class DataParallel(TrainingLoop):
    sums_losses = True

    def __init__(self, job: Job, part: RankBatch):
        self.ddp = DistributedDataParallel(decoder(job), gradient_as_bucket_view=True)
        super().__init__(self.ddp, part, job, loss_scale=dist.get_world_size())

    def grad_sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.ddp.no_sync()


class TorchFsdp(TrainingLoop):
    """FSDP2 around each block. Gradients are reduced with every microbatch, as ours are, so that they stay sharded."""

    sums_losses = True

    def __init__(self, job: Job, part: RankBatch):
        model, mesh = decoder(job), init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(model, part, job, loss_scale=dist.get_world_size())


class TorchTensorParallel(TrainingLoop):
    """`parallelize_module` with the plan of the documentation's Llama, the loss over logits that stay sharded."""

    def __init__(self, job: Job, part: RankBatch):
        model, mesh = decoder(job), init_device_mesh("cpu", (dist.get_world_size(),))
        columns, rows = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ("attention.o", "mlp.down")
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in rows}
        for block in model.layers.values():
            parallelize_module(block, mesh, plan)
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": head})
        super().__init__(model, part, job)

    def grad_sync(self, last: bool) -> AbstractContextManager[Any]:
        return loss_parallel()


class TorchStage(nn.Module):
    """A stage of the decoder for torch.distributed.pipelining, which passes tensors only: it keeps the positions."""

    def __init__(self, decoder: Decoder, positions: TokenPositions):
        super().__init__()
        self.decoder, self.positions = decoder, positions

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, self.positions)


class TorchPipeline:
    """A schedule of torch.distributed.pipelining, over the stages that Fivefold cuts."""

    def __init__(self, job: Job, batch: Batch, kind: str, loss: Callable[[Tensor, Tensor], Tensor], ops: LocalOps):
        layout, rank = job.layout, dist.get_rank()
        stages, owner = stages_of(job.model, layout, job.data.seq), layout.placement.owner
        first = torch.from_numpy(batch.split(layout.microbatches)[0].tokens)
        local = [stage for stage in stages if owner[stage.index] == rank]
        decoders = [Decoder(job.model, ops=ops, stage=stage) for stage in local]
        self.model = nn.ModuleList(TorchStage(decoder, TokenPositions.of(first)) for decoder in decoders)
        self.parameters = {name: param for decoder in decoders for name, param in decoder.named_parameters()}
        for parameter in job.model.parameters():
            if parameter.name in self.parameters:
                init_param(job.model, parameter, self.parameters[parameter.name], job.train.seed)
        pairs = zip(self.model, local, strict=True)
        parts = [PipelineStage(module, stage.index, len(stages), CPU) for module, stage in pairs]
        schedule_class, count = getattr(schedules, kind), batch.loss_tokens
        own = parts[0] if issubclass(schedule_class, schedules.PipelineScheduleSingle) else parts
        self.schedule = schedule_class(
            own, layout.microbatches, lambda output, target: loss(output, target) / count, scale_grads=False
        )
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        self.inputs = [tokens] if any(stage.first for stage in local) else []
        self.targets = targets if any(stage.last for stage in local) else None

    def step(self) -> float:
        losses: list[Tensor] = []
        self.schedule.step(*self.inputs, target=self.targets, losses=losses, return_outputs=False)
        return sum(loss.item() for loss in losses)


class Pipelined(TrainingLoop):
    """PyTorch's 1F1B, with a gradient norm over all stages."""

    sums_losses = True

    def __init__(self, job: Job, layout: Layout, batch: Batch):
        job = structs.replace(job, layout=layout)
        self.pipeline = TorchPipeline(job, batch, "Schedule1F1B", cross_entropy, HeadModule())
        super().__init__(self.pipeline.model, RankBatch.of(batch, layout), job)

    def forward_backward(self) -> float:
        return self.pipeline.step()

    def clip(self) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        total = torch.stack([grad.square().sum() for grad in gradients]).sum()
        dist.all_reduce(total)
        clip_coef = (self.job.optimizer.clip / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for grad in gradients:
            grad.mul_(clip_coef)


def run(rank: Rank, case: Comparison) -> ComparisonResult:
    """What each rank of a comparison runs."""
    join_ranks(rank, case.threads)
    job = case.job
    batch = plain_batch(job.model.vocab, job.train.batch, job.data.seq)
    built = {name: build(job, name, batch, rank.number) for name in case.systems}
    # The first two steps are also the warm-up.
    losses = {name: [_loss(system) for _ in range(2)] for name, system in built.items()}
    steps = {name: system.step if system else None for name, system in built.items()}
    imbalances: dict[str, list[float]] = {}  # by system, of each step

    def after(name: str) -> None:
        system = built[name]
        if isinstance(system, FivefoldSystem) and (imbalance := system.imbalance) is not None:
            imbalances.setdefault(name, []).append(imbalance)

    times = take_turns(steps, case.rounds, after=after)
    means = {name: fmean(values) for name, values in imbalances.items()}
    return ComparisonResult(case, times, losses, machine(), means)


def build(job: Job, name: str, batch: Batch, rank: int) -> FivefoldSystem | TrainingLoop | None:
    """The system of that name, None on ranks that it does not use. Collective over the ranks of the system."""
    layout = layout_of(job, name)
    if rank >= layout.world:
        return None
    part = RankBatch.of(batch, layout, rank % layout.dp)
    makers: dict[str, Callable[[], FivefoldSystem | TrainingLoop]] = {
        OURS: lambda: FivefoldSystem(job, layout, batch),
        BARE_LOOP: lambda: TrainingLoop(decoder(job), part, job),
        HUGGING_FACE: lambda: HuggingFaceSystem(job, part),
        PYTORCH_PEERS["dp"]: lambda: DataParallel(job, part),
        PYTORCH_PEERS["zero"]: lambda: TorchFsdp(job, part),
        PYTORCH_PEERS["tp"]: lambda: TorchTensorParallel(job, part),
        PYTORCH_PEERS["pp"]: lambda: Pipelined(job, layout, batch),
    }
    return makers[name if name in makers else name.partition(" ")[0]]()


def _loss(system: FivefoldSystem | TrainingLoop | None) -> float:
    """Take a step of the system; returns the loss of the global batch, on all ranks."""
    local = None if system is None else (system.step(), system.sums_losses)
    if not dist.is_initialized():
        assert local is not None
        loss, _ = local
        return loss
    by_rank = [part for part in all_gather_values(local, tuple[float, bool] | None) if part is not None]
    total, (_, sums_losses) = sum(loss for loss, _ in by_rank), by_rank[0]
    return total if sums_losses else total / len(by_rank)
