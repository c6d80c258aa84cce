"""An adapter of a small model in plain PyTorch with DDP or FSDP2, and with bugs to plant: `dp=2,bug=no_sync`."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LAYOUTS = ["dp=2", {"fsdp": 2}]
KNOWN = {"tokens of a sample": 12}
VOCAB, WIDTH, SEQ, SAMPLES = 50, 16, 12, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.drop = nn.Dropout(0.0)
        self.recompute = ""

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        if self.recompute:
            added = checkpoint(self.block, hidden, use_reentrant=self.recompute == "reentrant")
        else:
            added = self.block(hidden)
        return self.head(hidden + added)

    def block(self, hidden):
        return self.drop(self.down(F.gelu(self.up(self.norm(hidden)))))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, VOCAB, (2, SAMPLES, SEQ), generator=generator)
    for sample in range(SAMPLES):
        labels[sample, :sample] = -100
    return tokens, labels


def build(layout):
    return made(layout, 0.0)


def made(layout, dropout):
    """With dp and fsdp each rank has samples of its own; with tp alone all ranks do the same."""
    model, bug = Net(), layout.get("bug", "")
    model.drop.p = dropout
    if layout.get("dp", 1) > 1:
        if bug == "one_parameter":
            model._ddp_params_and_buffers_to_ignore = {"norm.bias"}
        model = DistributedDataParallel(model)
        if bug == "sum":
            model.register_comm_hook(None, lambda state, bucket: _summed(bucket))
    if layout.get("fsdp", 1) > 1:
        fully_shard(model)
    model.bug, model.optimizer = bug, None
    model.parts = 1 if layout.get("tp", 1) > 1 else dist.get_world_size()
    return model


def _summed(bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def step(model, batch):
    (tokens, labels), world, rank = batch, model.parts, dist.get_rank() % model.parts
    if model.bug == "unlike_masks":
        torch.manual_seed(dist.get_rank())
    own, targets = labels.chunk(world)[rank], (labels != -100).sum()
    with model.no_sync() if model.bug == "no_sync" else contextlib.nullcontext():
        loss = F.cross_entropy(model(tokens.chunk(world)[rank]).flatten(0, 1), own.flatten(), reduction="sum")
        divisor = (own != -100).sum() if model.bug == "mean_of_means" else targets / world
        (loss / divisor * (rank != 1 or model.bug != "lost_rank")).backward()
    if model.bug == "normalized_late":
        model.module.norm.weight.grad.mul_(1.5)
    result = loss.detach() / targets
    if model.bug == "local_loss":
        return {"loss": result}
    if world > 1:
        dist.all_reduce(result)
    return {"loss": result}


def update(model):
    parameters = list(model.parameters())
    if model.optimizer is None:
        taught = parameters[1:] if model.bug == "untaught" else parameters
        model.optimizer = torch.optim.AdamW(taught, lr=1e-2)
    here = sum(float((p.grad.to_local() ** 2).sum()) for p in parameters) ** 0.5 if model.bug == "local_norm" else None
    norm = nn.utils.clip_grad_norm_(parameters, 0.1)
    model.optimizer.step()
    if here is not None:
        return {"grad_norm": here}
    if getattr(model, "bug", "") == "unreduced":
        return {"grad_norm": norm}
    return {"grad_norm": norm.full_tensor() if hasattr(norm, "full_tensor") else norm}


class Dropout:
    """The same with random numbers."""

    LAYOUTS = ("dp=2", "tp=2", "tp=2,bug=unlike_masks", "dp=2,bug=sum")
    batch, step, update = staticmethod(batch), staticmethod(step), staticmethod(update)

    @staticmethod
    def build(layout):
        return made(layout, 0.5)


class Odd:
    """Legal, and easily taken for a bug: a buffer that is drawn in build(), a norm that is a DTensor of summands,
    layers that are computed again, a sample without a target. And two bugs that these could hide."""

    LAYOUTS = (
        "fsdp=2,bug=unreduced", "dp=2,recompute=reentrant", "dp=2,bug=mean_of_means",
        "dp=2,recompute=reentrant,bug=wrong_up", "dp=2,recompute=plain,bug=wrong_up",
    )  # fmt: skip
    step, update = staticmethod(step), staticmethod(update)

    @staticmethod
    def batch(step):
        tokens, labels = batch(step)
        labels[2] = -100
        return tokens, labels

    @staticmethod
    def build(layout):
        model = made({key: value for key, value in layout.items() if key != "recompute"}, 0.0)
        net = getattr(model, "module", model)
        net.register_buffer("shift", torch.randn(WIDTH))
        net.norm.register_forward_hook(lambda module, args, output: output + net.shift)
        net.recompute = layout.get("recompute", "")
        if layout.get("bug") == "wrong_up":
            net.up.register_forward_hook(lambda module, args, output: 1.5 * output)
        return model


class Narrow:
    """In float32, where the bound is measured."""

    LAYOUTS, DTYPE = ("dp=2", "dp=2,bug=sum"), "float32"
    batch, build, step, update = map(staticmethod, (batch, build, step, update))


class Coarse:
    """In bfloat16."""

    LAYOUTS, DTYPE = ("dp=2", "dp=2,bug=sum"), "bfloat16"
    batch, build, step, update = map(staticmethod, (batch, build, step, update))


class Lacking:
    """An adapter that lacks nearly everything."""

    LAYOUTS, DTYPE, TERMS, KNOWN = (), "int8", [], {"ranks": "two"}
    build, step = 3, staticmethod(lambda model: None)
