"""The steps of `fivefold bench train`, in a process of their own."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional as F

from fivefold.data.batch import Batch
from fivefold.hf_config import to_hf_config
from fivefold.model.compiled import compilation
from fivefold.parallel.mesh import Mesh
from fivefold.prove.bench_train import Timed
from fivefold.prove.ranks import Rank
from fivefold.train.config import Job
from fivefold.train.device import DTYPES, choose_device, make_repeatable, peak_memory
from fivefold.train.loop import Trainer
from fivefold.train.preflight import Sources

_WARM = 5  # steps: kernels are compiled and chosen, the allocator finds its blocks, the clocks settle


def run(rank: Rank, job: Job, system: str, steps: int) -> Timed:
    device = choose_device(job.train.device)
    make_repeatable(job.train)
    batches = [_made_up(job, seed) for seed in range(2)]
    step, kinds = (_ours if system == "fivefold" else _hugging_face)(job, device)
    ends = [time.perf_counter()]
    for number in range(_WARM + steps):
        step(number, batches[number % 2])
        ends.append(time.perf_counter())
    times = [after - before for before, after in pairwise(ends)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    graphs, breaks = compilation()
    memory = peak_memory(device)
    return Timed(system, name, str(torch.__version__), times[_WARM:], memory, times[0], graphs, breaks, kinds)


def _ours(job: Job, device: torch.device) -> tuple[Callable[[int, Batch], Any], str]:
    trainer = Trainer(job, cast(Sources, None), Mesh.of(job.layout, device))  # batches come from here: it reads none
    kinds = "bf16, float32 masters" if job.train.dtype == "bfloat16" else job.train.dtype
    last = job.train.steps
    return lambda number, batch: trainer.step(min(number + 1, last), batch), kinds


def _hugging_face(job: Job, device: torch.device) -> tuple[Callable[[int, Batch], Any], str]:
    """As its users would: sdpa, compiled, fused AdamW, parameters in the compute dtype."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    settings = to_hf_config(job.model, "bfloat16") | {"attn_implementation": "sdpa", "use_cache": False}
    config, dtype = LlamaConfig(**settings), DTYPES[job.train.dtype]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    called = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=job.optimizer.betas, fused=True)

    def step(number: int, batch: Batch) -> float:
        total = 0.0
        for part in batch.split(job.layout.microbatches):
            tokens, targets = (torch.from_numpy(one).to(device) for one in (part.tokens, part.targets))
            logits = called(tokens).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / batch.loss_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, f"{job.train.dtype.replace('bfloat16', 'bf16')}, no masters"


def _made_up(job: Job, seed: int) -> Batch:
    """Tokens from all of the vocabulary: few different ones would crowd the embedding's gradient."""
    random, shape = np.random.default_rng(seed), (job.train.batch, job.data.seq)
    tokens, targets = (random.integers(0, job.model.vocab, shape) for _ in range(2))
    return Batch(np.arange(shape[0]), tokens, targets, np.ones(shape, bool), np.zeros(shape, np.int32))
