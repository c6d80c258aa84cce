"""A model over the ranks of a layout that continues a prompt: forward through the pipeline, one token at a time."""

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
from fivefold.checkpoint.shards import saveable_tensors, stored_buffers
from fivefold.checkpoint.store import MANIFEST, Checkpoint
from fivefold.generation.request import Sampling
from fivefold.job.config import Job
from fivefold.launch.device import choose_backend, choose_device
from fivefold.launch.processes import Rank
from fivefold.launch.waits import timed_wait
from fivefold.model.kernels import by_definition
from fivefold.model.layers import TokenPositions
from fivefold.parallel.collectives import all_gather, wait
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Microbatch
from fivefold.support.places import Place
from fivefold.trainer.engine import RankModel


class Cache:
    """Attention that keeps what it reads of earlier tokens, so that each new one costs one token's work.

    That is keys and values, of a layer with a window no more than it holds; or of MLA the latents, kv_rank + rope_dim
    numbers a token, of which keys and values are made anew. Blocks attend in turn, always in the same order.
    """

    def __init__(self, length: int):
        """`length` is the most tokens, prompt and answer."""
        self.length = length
        self.kept: list[tuple[Tensor, ...]] = []
        self.turn, self.first = 0, 0

    def forget(self) -> None:
        self.kept = []

    def attention_mask(
        self, positions: TokenPositions, window: int = 0, sinks: bool = False, dtype: torch.dtype = torch.float32
    ) -> int:
        """The window."""
        self.turn, self.first = 0, int(positions.position_ids[0, 0])
        return window

    def extend_kv(self, *tensors: Tensor, window: int = 0) -> tuple[Tensor, ...]:
        first, last = self.first, self.first + tensors[0].shape[2]
        if self.turn == len(self.kept):
            self.kept.append(
                tuple(x.new_empty(*x.shape[:2], 0 if window else self.length, x.shape[3]) for x in tensors)
            )
        before, turn = self.kept[self.turn], self.turn
        self.turn += 1
        if window:
            extended = tuple(torch.cat(pair, dim=2) for pair in zip(before, tensors, strict=True))
            self.kept[turn] = tuple(x[:, :, max(0, x.shape[2] - window + 1) :] for x in extended)
            return extended
        for room, new in zip(before, tensors, strict=True):
            room[:, :, first:last] = new
        return tuple(room[:, :, :last] for room in before)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """The keys are of the tokens up to the last query's."""
        new, old = q.shape[2], k.shape[2] - q.shape[2]
        grouped = k.shape[1] < q.shape[1]
        if sinks is None and not mask and (new == 1 or not old):
            return F.scaled_dot_product_attention(q, k, v, is_causal=not old, enable_gqa=grouped)
        distance = torch.arange(old, old + new, device=q.device)[:, None] - torch.arange(old + new, device=q.device)
        seen = (distance >= 0) & (distance < mask) if mask else distance >= 0
        if sinks is not None:
            return by_definition(q, k, v, seen, sinks)
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=grouped)


class Chooser:
    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self.random = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """A token from logits [V]. The same logits and seed choose the same token on every rank."""
        sampling = self.sampling
        if sampling.temperature == 0:
            return int(logits.argmax())
        chances = torch.softmax(logits.double().cpu() / sampling.temperature, dim=0)
        sorted_chances, order = chances.sort(descending=True, stable=True)
        if sampling.top_k:
            sorted_chances[sampling.top_k :] = 0.0
        before = sorted_chances.cumsum(0) - sorted_chances
        sorted_chances[before >= sampling.top_p * sorted_chances.sum()] = 0.0
        return int(order[torch.multinomial(sorted_chances, 1, generator=self.random)])


class Generator:
    def __init__(self, job: Job, mesh: Mesh, weights: Place, length: int):
        """`weights`: a checkpoint, or a directory of Hugging Face's. `length`: the most tokens, prompt and answer."""
        self.mesh, self.length, self.vocab = mesh, length, job.model.vocab
        self.cache = Cache(length)
        self.network = RankModel(job, mesh, attention=self.cache)
        shapes = {parameter.name: parameter.shape for parameter in job.model.parameters()}
        tensors_of = partial(saveable_tensors, self.network.weights, shapes, None)
        if not isinstance(weights, Path) or (weights / MANIFEST).exists():
            checkpoint = Checkpoint(weights)
            load(checkpoint, tensors_of(stored_buffers(self.network.buffers, checkpoint)))
        else:
            theirs = HuggingFace(weights)
            theirs.fill(
                tensors_of({name: buffer for name, buffer in self.network.buffers.items() if name in theirs.sources})
            )
        self.network.weights.sync_params()
        self.network.weights.wait_params()
        for stage in self.network.stages.values():
            stage.eval()

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int, choose: Chooser, ends: set[int]) -> Iterator[int]:
        """Up to `count` tokens, the same on every rank; one of `ends` is the last, if it comes."""
        self.cache.forget()
        tokens, before = prompt, 0
        for _ in range(count):
            token = self._broadcast(self._next(tokens, before), choose)
            yield token
            if token in ends:
                return
            tokens, before = [token], before + len(tokens)

    def _next(self, tokens: list[int], before: int) -> Tensor | None:
        """The logits [V] after `tokens`, which follow on `before` others; on the ranks with the last stage."""
        device = self.mesh.device
        ids = torch.tensor([tokens], device=device)
        position_ids = torch.arange(before, before + len(tokens), device=device)[None]
        positions = TokenPositions(position_ids, torch.zeros(1, dtype=torch.int64, device=device), self.length)
        logits = self.network.pipeline.forward_only(Microbatch(ids, positions))
        return None if logits is None else logits[0, -1]

    def _broadcast(self, logits: Tensor | None, choose: Chooser) -> int:
        """The ranks with the last stage choose, all alike, and tell the others of their pipeline."""
        pp, tp = self.mesh.pp, self.mesh.tp
        token = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        if logits is not None:
            if tp.size > 1:  # each has a share of the vocabulary, the last ones perhaps a shorter one
                most = -(-self.vocab // tp.size)
                padded = torch.nn.functional.pad(logits, (0, most - len(logits)))
                logits = wait(all_gather(padded, tp), tp)[: self.vocab]
            token.fill_(choose(logits.float()))
        if pp.size > 1:
            dist.broadcast(token, src=pp.ranks[self.mesh.layout.last_stage], group=pp.group)
        return int(timed_wait(token.item))


def generate_rank(
    rank: Rank, job: Job, weights: Place, prompts: list[list[int]], count: int, sampling: Sampling, ends: set[int]
) -> list[list[int]]:
    """One of several ranks that generate together."""
    device = choose_device(job.train.device, rank.number)
    rank.join(choose_backend(device, rank.world, job.train, rank.number))
    mesh = Mesh.of_job(job, device)
    generator = Generator(job, mesh, weights, max(map(len, prompts)) + count)
    return [list(generator.generate(prompt, count, Chooser(sampling), ends)) for prompt in prompts]


def alone(job: Job, weights: Place, length: int) -> Generator:
    return Generator(job, Mesh(job.layout, choose_device(job.train.device)), weights, length)
