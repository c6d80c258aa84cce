"""Hugging Face transformers with PyTorch's DDP, FSDP2 and HSDP: copy this file, and change what is yours.

A Llama with tied embeddings and two heads of k and v, AdamW with clipping, gradient accumulation, numbers of targets
that differ from sample to sample, and documents of unequal length packed into each sample.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

LAYOUTS = ["dp=2", "dp=2,accumulate=2", "fsdp=2", "fsdp=2,accumulate=2", "dp=2,fsdp=2"]
KNOWN = {"microbatches": 2}

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
    positions = torch.stack([torch.cat([torch.arange(4 + n), torch.arange(SEQ - 4 - n)]) for n in range(SAMPLES)])
    return {"input_ids": tokens[:, :-1], "position_ids": positions, "labels": labels}


def build(layout):
    model = AutoModelForCausalLM.from_config(CONFIG)
    dp, fsdp = layout.get("dp", 1), layout.get("fsdp", 1)
    if fsdp > 1:
        mesh = init_device_mesh("cpu", (dp, fsdp), mesh_dim_names=("dp", "fsdp"))
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
    total = torch.zeros(())
    for part in range(model.accumulate):
        last = part == model.accumulate - 1
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = last
        elif hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        micro = {name: tensor.chunk(model.accumulate)[part] for name, tensor in own.items()}
        logits = model(input_ids=micro["input_ids"], position_ids=micro["position_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro["labels"].flatten(), reduction="sum")
        (loss / targets * world).backward()  # DDP and FSDP take the mean over ranks
        total += loss.detach() / targets
    dist.all_reduce(total)
    return {"loss": total}


def update(model):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    model.optimizer.step()
    return {"grad_norm": norm.full_tensor() if hasattr(norm, "full_tensor") else norm}
