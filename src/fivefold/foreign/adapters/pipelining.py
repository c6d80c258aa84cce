"""PyTorch's own parallelism: DTensor tensor parallelism, FSDP2, and the schedules of torch.distributed.pipelining.

    fivefold verify --adapter pipelining
    fivefold verify --adapter pipelining pp=2,schedule=ZBVZeroBubble,microbatches=3 fsdp=2,tp=2,sp

The model is a small decoder whose head shares its weight with the embedding. No mask is like another: every sample
has another number of targets. What torch leaves to its user is done by hand here, and told where it is.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

LAYOUTS = [
    "tp=2", "tp=2,sp", "fsdp=2", "fsdp=2,tp=2,sp",
    "pp=2,schedule=1F1B", "pp=2,schedule=GPipe", "pp=2,schedule=Interleaved1F1B", "pp=2,schedule=LoopedBFS",
    "pp=2,schedule=InterleavedZeroBubble", "pp=2,schedule=ZBVZeroBubble", "pp=2,schedule=DualPipeV",
    "pp=4,schedule=GPipe,microbatches=2", "pp=4,schedule=Interleaved1F1B,microbatches=3",
    "pp=4,schedule=ZBVZeroBubble,microbatches=2", "pp=4,schedule=DualPipeV,microbatches=8",
    "tp=2,sp,pp=2,schedule=1F1B", "tp=2,sp,pp=2,schedule=InterleavedZeroBubble", "tp=2,pp=2,schedule=ZBVZeroBubble",
    "fsdp=2,pp=2,schedule=1F1B", "fsdp=2,pp=2,schedule=LoopedBFS", "fsdp=2,tp=2,sp,pp=2,schedule=Interleaved1F1B",
]  # fmt: skip
MICROBATCHES = 4
KNOWN = {"microbatches": MICROBATCHES}
SAMPLES, LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS = 24, 8, 20, 16, 4, 8
IGNORED = -100
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")  # rank 0 has the first stage and the last


# ---- one process ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """All of the model or a stage of it: some blocks, the embedding on the first, norm and head on the last."""

    def __init__(self, blocks, first=True, last=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.blocks = nn.ModuleDict({str(index): Block() for index in blocks})
        self.norm = nn.RMSNorm(WIDTH) if last else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    for sample in range(SAMPLES):
        labels[sample, : (5 * sample + step) % LENGTH] = IGNORED
    return inputs, labels


# ---- layouts --------------------------------------------------------------------------------------------------------


class Model(list):
    """The stages of this rank, and what a step needs to know beside them."""

    def __init__(self, layout, device):
        fsdp, tp, pp = (layout.get(axis, 1) for axis in ("fsdp", "tp", "pp"))
        self.mesh = init_device_mesh(device, (pp, fsdp, tp), mesh_dim_names=("pp", "fsdp", "tp"))
        self.pp, self.fsdp = self.mesh["pp"], self.mesh["fsdp"]
        name = layout.get("schedule", "1F1B")
        schedule = get_schedule_class(name)
        single = issubclass(schedule, PipelineScheduleSingle)
        count = pp if single else 2 * pp
        rank = self.pp.get_local_rank()
        own = [rank] if single else [rank, count - 1 - rank] if name in V_SCHEDULES else [rank, rank + pp]
        if pp == 1:
            count, own = 1, [0]
        each = LAYERS // count
        for index in own:
            blocks = range(index * each, (index + 1) * each)
            self.append(Decoder(blocks, first=index == 0, last=index == count - 1).to(device))
        self.embeddings = [stage.embedding for stage in self if stage.embedding is not None]
        self.heads = [stage.head for stage in self if stage.head is not None]
        for stage in self:
            if tp > 1:
                tensor_parallel(stage, self.mesh["tp"], "sp" in layout)
        if self.heads and self.embeddings:
            self.heads[0].weight = self.embeddings[0].weight
        if fsdp > 1:
            for stage in self:
                fully_shard(stage, mesh=self.fsdp)
        self.schedule = None
        if pp > 1:
            stages = [
                PipelineStage(stage, index, count, torch.device(device), group=self.pp.get_group())
                for index, stage in zip(own, self, strict=True)
            ]
            # The loss is a sum over targets, divided by their number: torch's own division by microbatches is not meant
            self.schedule = schedule(
                stages[0] if single else stages, layout.get("microbatches", MICROBATCHES), self.loss, scale_grads=False
            )
        # Stages that tie the embedding: every rank makes the groups of all
        line = self.mesh.mesh.flatten(1).T.tolist()
        groups = [dist.new_group([ranks[0], ranks[-1]]) for ranks in line] if pp > 1 else []
        column = self.mesh.get_local_rank("fsdp") * tp + self.mesh.get_local_rank("tp")
        self.tied = groups[column] if groups and bool(self.heads) != bool(self.embeddings) else None
        self.targets = 1.0
        self.optimizer = torch.optim.AdamW([parameter for _, parameter in named(self)], lr=1e-3)

    def loss(self, logits, labels):
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / self.targets * self.fsdp.size()  # FSDP takes the mean over its ranks


def tensor_parallel(stage, mesh, sp):
    """Megatron's cuts; with sp activations are cut along the sequence wherever no matrix is."""
    between = Shard(1) if sp else Replicate()
    gather = lambda: PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())  # noqa: E731
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
    plan |= {"norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate())}
    for index in stage.blocks:
        own = {
            "norm1": SequenceParallel(), "norm2": SequenceParallel(),
            "attention": gather(), "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(), "attention.out": RowwiseParallel(output_layouts=between),
            "up": ColwiseParallel(input_layouts=between), "down": RowwiseParallel(output_layouts=between),
        }  # fmt: skip
        plan |= {f"blocks.{index}.{name}": style for name, style in own.items()}
    if not sp:
        plan = {name: style for name, style in plan.items() if not isinstance(style, SequenceParallel)}
    present = {name: style for name, style in plan.items() if name.startswith("blocks") or getattr(stage, name)}
    parallelize_module(stage, mesh, present)


def build(layout, device):
    return Model(layout, device)


def named(model):
    """The head has the embedding's name: it is the same weight, or on the last stage of a pipeline a copy of it."""
    seen = set()
    for stage in model:
        for name, parameter in stage.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield name.replace("head.weight", "embedding.weight"), parameter


# ---- a step ---------------------------------------------------------------------------------------------------------


def step(model, batch):
    model.targets = float((batch[1] != IGNORED).sum())
    tokens, labels = (part.chunk(model.fsdp.size())[model.fsdp.get_local_rank()] for part in batch)
    losses = []
    if model.schedule is None:
        losses.append(model.loss(model[0](tokens), labels))
        losses[0].backward()
    else:
        inputs = [tokens] if model.embeddings else []
        model.schedule.step(*inputs, target=labels if model.heads else None, losses=losses, return_outputs=False)
    if model.tied is not None:  # the first and the last stage have a copy each, and half of its gradient
        tied = (model.heads or model.embeddings)[0].weight
        sharded = hasattr(tied, "placements")
        if sharded:  # the embedding's gradient comes whole, and the head's is cut
            tied.grad = tied.grad.redistribute(placements=tied.placements)
        dist.all_reduce(tied.grad.to_local() if sharded else tied.grad, group=model.tied)
    if not model.heads:
        return {"loss": None}
    loss = torch.stack(losses).detach().sum() / model.fsdp.size()
    dist.all_reduce(loss, group=model.fsdp.get_group())
    return {"loss": loss}


def update(model):
    """Clip over all stages and step. A stage knows its own norm; the tied weight counts on the first one alone."""
    copied = {"embedding.weight"} if model.tied and model.heads else set()
    norms = [p.grad.norm() for name, p in named(model) if name not in copied]
    squares = torch.stack([full(norm) for norm in norms]).square().sum()
    dist.all_reduce(squares, group=model.pp.get_group())
    norm = float(squares) ** 0.5
    for _, parameter in named(model):
        parameter.grad.mul_(min(1.0, 0.1 / norm))
    model.optimizer.step()
    return {"grad_norm": norm}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
