"""Hugging Face transformers with PyTorch's DDP, FSDP2 and HSDP: copy this file, and change what is yours.

A Llama with tied embeddings and two heads of k and v, AdamW with clipping, gradient accumulation, transformers' own
loss, numbers of targets that differ from sample to sample and are none in the last two, and documents of unequal length
packed into each sample; in huggingface:padded samples of unequal length, with a mask of their padding, instead.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.loss import loss_utils

LAYOUTS = ["dp=2", "dp=2,accumulate=2", "fsdp=2", "fsdp=2,accumulate=2", "dp=2,fsdp=2"]

SAMPLES, SEQ = 8, 16
CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=SEQ, tie_word_embeddings=True, attn_implementation="eager",
)  # fmt: skip


def batch(step):
    """The global batch, the same in every layout."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(CONFIG.vocab_size, (SAMPLES, SEQ + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for sample in range(SAMPLES):
        labels[sample, : 2 * sample % 9] = -100  # unequal numbers of targets: a mean of means would show
    labels[-2:] = -100  # and none on the last of four ranks
    positions = torch.stack([torch.cat([torch.arange(4 + n), torch.arange(SEQ - 4 - n)]) for n in range(SAMPLES)])
    return {"input_ids": tokens[:, :-1], "position_ids": positions, "labels": labels}


def padded_batch(step):
    """Samples of unequal length, filled up at their ends."""
    full = batch(step)
    lengths = torch.tensor([SEQ - sample % 5 for sample in range(SAMPLES)])
    there = torch.arange(SEQ) < lengths[:, None]
    labels = full["labels"].masked_fill(~there, -100)
    return {"input_ids": full["input_ids"], "attention_mask": there.long(), "labels": labels}


def KNOWN(layout):
    """Numbers that a factor may be named after."""
    return {"microbatches": layout.get("accumulate", 1)}


def build(layout, device):
    model = AutoModelForCausalLM.from_config(CONFIG).to(device)
    dp, fsdp = layout.get("dp", 1), layout.get("fsdp", 1)
    if fsdp > 1:
        mesh = init_device_mesh(device, (dp, fsdp), mesh_dim_names=("dp", "fsdp"))
        mesh = mesh if dp > 1 else mesh["fsdp"]
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif dp > 1:
        model = DistributedDataParallel(model)
    model.accumulate = layout.get("accumulate", 1)
    model.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return model


def step(model, batch):
    """This rank's samples, forward and backward. The loss is a mean over all targets of the global batch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    targets = (batch["labels"] != -100).sum()
    own = {name: tensor.chunk(world)[rank] for name, tensor in batch.items()}
    total = torch.zeros((), device=targets.device)
    for part in range(model.accumulate):
        last = part == model.accumulate - 1
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = last
        elif hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        micro = {name: tensor.chunk(model.accumulate)[part] for name, tensor in own.items()}
        labels = micro.pop("labels").flatten()
        logits = model(**micro).logits.flatten(0, 1)
        loss = loss_utils.fixed_cross_entropy(logits, labels, num_items_in_batch=targets)
        (loss * world).backward()  # DDP and FSDP take the mean over ranks
        total += loss.detach()
    dist.all_reduce(total)
    return {"loss": total}


def update(model):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    model.optimizer.step()
    return {"grad_norm": norm.full_tensor() if hasattr(norm, "full_tensor") else norm}


padded = SimpleNamespace(LAYOUTS=["dp=2", "fsdp=2"], batch=padded_batch, build=build, step=step, update=update)
