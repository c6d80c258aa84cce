"""One rank of a contest: every system that it is part of, a step of each in turns."""

import platform
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

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

from fivefold.bench.comparison import ALONE, HUGGING_FACE, OURS, Contest, Result, layout_of
from fivefold.bench.pipelining_stage import Placed
from fivefold.data.batch import Batch
from fivefold.job.config import Job
from fivefold.launch.cores import cores
from fivefold.launch.ranks import Rank
from fivefold.layout.layout import Layout
from fivefold.layout.stages import stages_of
from fivefold.model.decoder import Decoder
from fivefold.model.hf import to_hf
from fivefold.model.ops import LocalOps
from fivefold.model.positions import TokenPositions
from fivefold.parallel.mesh import Mesh
from fivefold.train.engine import Engine
from fivefold.verify.batches import plain_batch

_CPU = torch.device("cpu")
_RATE = 1e-3
State = dict[str, Tensor]


class System(Protocol):
    def step(self) -> float:
        """A training step; the mean loss of this rank's part of the batch, or of all of it."""


@dataclass(frozen=True)
class Part:
    """What one rank of a system trains on."""

    samples: list[tuple[Tensor, Tensor]]  # tokens and targets of each microbatch
    count: int  # target tokens of the global batch

    @classmethod
    def of(cls, batch: Batch, layout: Layout, rank: int = 0) -> "Part":
        mine = batch.split(layout.dp)[rank].split(layout.microbatches)
        pairs = [(torch.from_numpy(one.tokens), torch.from_numpy(one.targets)) for one in mine]
        return cls(pairs, batch.loss_tokens)


class Ours:
    def __init__(self, job: Job, layout: Layout, batch: Batch):
        self.engine, self.batch = Engine(structs.replace(job, layout=layout), Mesh.of(layout, _CPU)), batch

    def step(self) -> float:
        loss = self.engine.accumulate(self.batch)
        self.engine.step(_RATE, self.engine.gradient_norm())
        self.engine.weights.ready()
        return loss.item()


class Called(LocalOps):
    """The head as a module that is called: what others wrap is the module."""

    def logits(self, x: Tensor, table: nn.Linear | nn.Embedding) -> Tensor:
        return table(x)


class Loop:
    """A training loop as one writes it, around a model that makes logits of tokens."""

    def __init__(self, model: nn.Module, part: Part, job: Job, scale: float = 1.0):
        """`scale`: what wrappers that average over ranks divide by, and sums have not."""
        self.model, self.part, self.job, self.scale = model, part, job, scale
        config = job.optimizer
        settings = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
        every = list(model.parameters())  # plain tensors and DTensors do not meet in one kernel
        split = [[p for p in every if isinstance(p, DTensor) == kind] for kind in (False, True)]
        self.groups = [group for group in split if group]
        groups = [{"params": group} for group in self.groups]
        self.optimizer = torch.optim.AdamW(groups, lr=_RATE, fused=True, **settings)  # type: ignore[arg-type]

    def step(self) -> float:
        total = 0.0
        for number, (tokens, targets) in enumerate(self.part.samples, start=1):
            with self.syncing(number == len(self.part.samples)):
                logits = self.logits(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / self.part.count
                (loss * self.scale).backward()
            total += loss.item()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
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

    def syncing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()


def plain(job: Job, state: State) -> Decoder:
    model = Decoder(job.model, ops=Called())
    model.load_state_dict(state)
    return model


class HuggingFace(Loop):
    def __init__(self, job: Job, state: State, part: Part):
        from transformers import AutoModelForCausalLM, LlamaConfig

        from fivefold.spec.hf_config import to_hf_config

        config = LlamaConfig(
            **{**to_hf_config(job.model, "float32"), "attn_implementation": "sdpa", "use_cache": False}
        )
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(to_hf(job.model, state))
        super().__init__(model, part, job)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


class DataParallel(Loop):
    def __init__(self, job: Job, state: State, part: Part):
        self.ddp = DistributedDataParallel(plain(job, state), gradient_as_bucket_view=True)
        super().__init__(self.ddp, part, job, scale=dist.get_world_size())

    def syncing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.ddp.no_sync()


class Sharded(Loop):
    """FSDP2, a block at a time; gradients are reduced with every microbatch, as ours are: so they stay sharded."""

    def __init__(self, job: Job, state: State, part: Part):
        model, mesh = plain(job, state), init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(model, part, job, scale=dist.get_world_size())


class TensorParallels(Loop):
    """`parallelize_module` with the plan of the documentation's Llama, the loss over logits that stay sharded."""

    def __init__(self, job: Job, state: State, part: Part):
        model, mesh = plain(job, state), init_device_mesh("cpu", (dist.get_world_size(),))
        columns, rows = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ("attention.o", "mlp.down")
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {
            name: RowwiseParallel() for name in rows
        }
        for block in model.layers.values():
            parallelize_module(block, mesh, plan)
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh, ends)
        super().__init__(model, part, job)

    def syncing(self, last: bool) -> AbstractContextManager[Any]:
        return loss_parallel()


class Pipelined(Loop):
    """torch.distributed.pipelining's 1F1B, over the stages that Fivefold cuts."""

    def __init__(self, job: Job, layout: Layout, state: State, batch: Batch):
        rank, part = dist.get_rank(), Part.of(batch, layout)
        stage = stages_of(job.model, layout, job.data.seq)[rank]
        decoder = Decoder(job.model, ops=Called(), stage=stage)
        decoder.load_state_dict({name: state[name] for name in decoder.state_dict()})
        module = Placed(decoder, TokenPositions.of(part.samples[0][0]))
        made = PipelineStage(module, rank, layout.pp, _CPU)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / part.count

        self.schedule = schedules.Schedule1F1B(made, layout.microbatches, loss, scale_grads=False)
        self.tokens, self.targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        self.first, self.last = stage.first, stage.last
        super().__init__(module, part, job)

    def step(self) -> float:
        losses: list[Tensor] = []
        given = [self.tokens] if self.first else []
        self.schedule.step(*given, target=self.targets if self.last else None, losses=losses, return_outputs=False)
        mine = torch.stack([p.grad.square().sum() for p in self.model.parameters() if p.grad is not None]).sum()
        dist.all_reduce(mine)
        scale = (self.job.optimizer.clip / (mine.sqrt() + 1e-6)).clamp(max=1.0)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(one.item() for one in losses)


def run(rank: Rank, contest: Contest) -> Result:
    torch.set_num_threads(contest.threads)
    if rank.world > 1:
        rank.join("gloo")
    job = contest.job
    batch = plain_batch(job.model.vocab, job.train.batch, job.data.seq)
    state = {} if all(name.startswith(OURS) for name in contest.systems) else weights(job)
    systems = {name: made for name in contest.systems if (made := build(contest, name, state, batch)) is not None}
    # The first two steps are also the warm-up.
    losses = {name: [_loss(systems.get(name)) for _ in range(2)] for name in contest.systems}
    seconds: dict[str, list[float]] = {name: [] for name in contest.systems}
    for number in range(contest.rounds):
        for name in contest.systems[:: -1 if number % 2 else 1]:  # what drifts meets first and last alike
            seconds[name].append(_time(systems.get(name)))
    return Result(seconds, losses, cores(), str(torch.__version__), machine())


def machine() -> str:
    """The processor's name, where the system tells it."""
    kind, told = f"{platform.machine()} {platform.system()}", Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {kind}" if names else kind


def build(contest: Contest, name: str, state: State, batch: Batch) -> System | None:
    """A system, on the ranks that it has; making one is collective, so all of its ranks make it now."""
    job, layout = contest.job, layout_of(contest.job, name)
    here = dist.get_rank() if dist.is_initialized() else 0
    if here >= layout.world:
        return None
    if name.startswith(OURS):
        return Ours(job, layout, batch)
    if name in ALONE:
        part = Part.of(batch, layout)
        return HuggingFace(job, state, part) if name == HUGGING_FACE else Loop(plain(job, state), part, job)
    kind = name.split()[0]
    if kind == "pipelining":
        return Pipelined(job, layout, state, batch)
    part = Part.of(batch, layout, here if layout.dp > 1 else 0)
    return {"DDP": DataParallel, "FSDP2": Sharded, "DTensor": TensorParallels}[kind](job, state, part)


def weights(job: Job) -> State:
    """Those that every layout of the job starts from."""
    alone = Engine(structs.replace(job, layout=Layout()), Mesh.of(Layout(), _CPU))
    return {name: parameter.detach().clone() for name, parameter in alone.model.named_parameters()}


def _loss(system: System | None) -> float:
    """The first loss, as all ranks together have it: parts of a sum, or the same number."""
    mine = float("nan") if system is None else system.step()
    if not dist.is_initialized():
        return mine
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    known = [one for one in found if one == one]
    parts = isinstance(system, DataParallel | Sharded | Pipelined)
    flags: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(flags, parts)
    return sum(known) if any(flags) else mean(known)


def _time(system: System | None) -> float:
    """Of one step, until the slowest rank is done."""
    if not dist.is_initialized():
        start = time.perf_counter()
        assert system is not None
        system.step()
        return time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    if system is not None:
        system.step()
    dist.barrier()
    return time.perf_counter() - start
