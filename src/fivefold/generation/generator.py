"""Generates tokens with a model over the ranks of a layout: a forward pass through the pipeline for each token."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fivefold.checkpoint.hf_files import HuggingFace
from fivefold.checkpoint.load import load
from fivefold.checkpoint.manifest import MANIFEST, Checkpoint
from fivefold.checkpoint.shards import saveable_tensors, stored_buffers
from fivefold.generation.sampling import Sampler, Sampling
from fivefold.job.config import Job
from fivefold.launch.device import choose_backend, choose_device
from fivefold.launch.processes import Rank
from fivefold.launch.waits import timed_wait
from fivefold.model.kernels import by_definition
from fivefold.model.layers import TokenPositions
from fivefold.parallel.collectives import all_gather, wait
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Microbatch
from fivefold.support.storage_place import Place
from fivefold.trainer.engine import RankModel


class LaterQueries:
    """Attention of tokens that follow others: of their queries to the keys of all tokens up to them."""

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, *, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> int:
        """The window, in place of a mask."""
        return window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """The last keys are those of the queries' own tokens; `mask` is the window."""
        new, old = q.shape[2], k.shape[2] - q.shape[2]
        grouped = k.shape[1] < q.shape[1]
        if sinks is None and not mask and (new == 1 or not old):
            return F.scaled_dot_product_attention(q, k, v, is_causal=not old, enable_gqa=grouped)
        distance = torch.arange(old, old + new, device=q.device)[:, None] - torch.arange(old + new, device=q.device)
        visible = (distance >= 0) & (distance < mask) if mask else distance >= 0
        if sinks is not None:
            return by_definition(q, k, v, visible, sinks)
        return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=grouped)


class Generator:
    """A model with its weights, which generates text with the other ranks of its layout."""

    def __init__(self, job: Job, mesh: Mesh, weights: Place, length: int):
        """`weights`: a checkpoint, or a Hugging Face directory. `length`: the tokens at most, prompt and answer."""
        self.mesh, self.length, self.vocab = mesh, length, job.model.vocab
        self.network = RankModel(job, mesh, attention=LaterQueries())
        shapes = {parameter.name: parameter.shape for parameter in job.model.parameters()}
        tensors_of = partial(saveable_tensors, self.network.weights, shapes, None)
        if not isinstance(weights, Path) or (weights / MANIFEST).exists():
            checkpoint = Checkpoint(weights)
            load(checkpoint, tensors_of(stored_buffers(self.network.buffers, checkpoint)))
        else:
            source = HuggingFace(weights)
            buffers = {name: buffer for name, buffer in self.network.buffers.items() if name in source.sources}
            source.fill(tensors_of(buffers))
        self.network.weights.sync_params()
        self.network.weights.wait_params()
        for stage in self.network.stages.values():
            stage.eval()

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int, sample: Sampler, ends: set[int]) -> Iterator[int]:
        """Up to `count` tokens, the same on every rank; stops after one of `ends`."""
        for stage in self.network.stages.values():
            stage.begin_text(self.length)
        tokens, first_position = prompt, 0
        for _ in range(count):
            token = self._sample_token(self._next_logits(tokens, first_position), sample)
            yield token
            if token in ends:
                return
            tokens, first_position = [token], first_position + len(tokens)

    def _next_logits(self, tokens: list[int], first_position: int) -> Tensor | None:
        """The logits [V] of the next token, after `tokens` that begin at `first_position`.

        With tp, a rank has its share of the vocabulary. None on ranks without the last stage.
        """
        device = self.mesh.device
        ids = torch.tensor([tokens], device=device)
        position_ids = torch.arange(first_position, first_position + len(tokens), device=device)[None]
        positions = TokenPositions(position_ids, torch.zeros(1, dtype=torch.int64, device=device), self.length)
        logits = self.network.pipeline.forward_only(Microbatch(ids, positions))
        return None if logits is None else logits[0, -1]

    def _sample_token(self, logits: Tensor | None, sample: Sampler) -> int:
        """The next token: the ranks with the last stage sample it, all alike, and broadcast it along their pipeline."""
        pp, tp = self.mesh.pp, self.mesh.tp
        token = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        if logits is not None:
            if tp.size > 1:  # each has a share of the vocabulary, the last ones may have a shorter one
                share = -(-self.vocab // tp.size)
                padded = torch.nn.functional.pad(logits, (0, share - len(logits)))
                logits = wait(all_gather(padded, tp), tp)[: self.vocab]
            token.fill_(sample(logits.float()))
        if pp.size > 1:
            dist.broadcast(token, src=pp.ranks[self.mesh.layout.last_stage], group=pp.group)
        return int(timed_wait(token.item))


def generate_rank(
    rank: Rank, job: Job, weights: Place, prompts: list[list[int]], count: int, sampling: Sampling, ends: set[int]
) -> list[list[int]]:
    """One of the ranks that generate together; returns the generated tokens of each prompt."""
    device = choose_device(job.train.device, rank.number)
    rank.join(choose_backend(device, rank.world, job.train, rank.number))
    mesh = Mesh.of_job(job, device)
    generator = Generator(job, mesh, weights, max(map(len, prompts)) + count)
    return [list(generator.generate(prompt, count, Sampler(sampling), ends)) for prompt in prompts]


def single_process_generator(job: Job, weights: Place, length: int) -> Generator:
    return Generator(job, Mesh(job.layout, choose_device(job.train.device)), weights, length)
