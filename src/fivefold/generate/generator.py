"""A model over the ranks of a layout that goes on from a prompt: forward through the pipeline, a token at a time."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.checkpoint.hf import HuggingFace
from fivefold.checkpoint.load import load
from fivefold.checkpoint.state import held
from fivefold.checkpoint.store import MANIFEST, Checkpoint
from fivefold.generate.cache import Cache
from fivefold.generate.choose import Chooser
from fivefold.job.config import Job
from fivefold.model.positions import TokenPositions
from fivefold.parallel.collectives import all_gather, wait
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Microbatch
from fivefold.train.network import Network


class Generator:
    def __init__(self, job: Job, mesh: Mesh, weights: Path, length: int):
        """`weights`: a checkpoint, or a directory of Hugging Face's. `length`: the most tokens, prompt and answer."""
        self.mesh, self.length, self.vocab = mesh, length, job.model.vocab
        self.cache = Cache(length)
        self.network = Network(job, mesh, attention=self.cache)
        shapes = {parameter.name: parameter.shape for parameter in job.model.parameters()}
        pieces = held(self.network.weights, shapes, None)
        if (weights / MANIFEST).exists():
            load(Checkpoint(weights), pieces)
        else:
            HuggingFace(weights).fill(pieces)
        self.network.weights.publish()
        self.network.weights.ready()
        for stage in self.network.stages.values():
            stage.eval()

    @torch.no_grad()
    def speak(self, prompt: list[int], count: int, choose: Chooser, ends: set[int]) -> Iterator[int]:
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
            dist.broadcast(token, src=pp.ranks[-1], group=pp.group)
        return int(token)
