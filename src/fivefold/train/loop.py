"""The training loop on one rank.

batch -> microbatches -> loss sums, each divided once by the step's count of target tokens -> backward
      -> gradient norm -> AdamW step -> a record for the listeners
"""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

import torch
from torch import Tensor

from fivefold.data.batch import Batch, read_batch
from fivefold.data.order import windows
from fivefold.data.prefetch import prefetch
from fivefold.errors import TrainingError
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.model.loss import loss_sum
from fivefold.model.place import Place
from fivefold.train.config import Job
from fivefold.train.device import DTYPES, peak_flops, peak_memory
from fivefold.train.listeners import Listener
from fivefold.train.optimizer import Optimizer
from fivefold.train.preflight import Sources
from fivefold.train.rate import learning_rate
from fivefold.train.records import Evaluation, Step


class Trainer:
    """A job's model, optimizer and data on one device."""

    def __init__(self, job: Job, sources: Sources, device: torch.device):
        self.job, self.sources, self.device = job, sources, device
        compute = DTYPES[job.train.dtype]
        full = torch.float64 if compute == torch.float64 else torch.float32
        with torch.device("meta"):  # no weights are drawn that would be thrown away
            self.model = Decoder(job.model, job.layout.recompute, job.train.seed).to(full)
        self.model.to_empty(device=device)
        initialise(self.model, job.model, job.train.seed)
        self.optimizer = Optimizer(self.model, job.model, job.optimizer, compute)
        self.peak = peak_flops(device, job.train.dtype)

    def run(self, listeners: list[Listener]) -> Evaluation | None:
        """All steps; returns the last look at the held-out data, if there is any."""
        every, steps = self.job.train.eval_every, self.job.train.steps
        with ExitStack() as stack:
            batches = stack.enter_context(closing(prefetch(self._reads())))
            evaluation = None
            targets = 0
            for step, batch in enumerate(batches, start=1):
                record = self.step(step, batch)
                targets += record.loss_tokens
                for listener in listeners:
                    listener.on_step(record)
                if step == steps or (every and step % every == 0):
                    evaluation = self.evaluate(step)
                    if evaluation is not None:
                        for listener in listeners:
                            listener.on_evaluation(evaluation)
        if not targets:
            raise TrainingError(
                f"in all {steps} steps no target carried loss: every token of {self.sources.path} is masked"
            )
        return evaluation

    def _reads(self) -> Iterator[partial[Batch]]:
        """One call per step that reads its global batch: samples step x batch and on, whatever the layout."""
        data, size = self.job.data, self.job.train.batch
        for step in range(self.job.train.steps):
            wanted = range(step * size, (step + 1) * size)
            yield partial(read_batch, self.sources.train, data.seq, data.seed, wanted, self.job.model.vocab)

    def step(self, step: int, batch: Batch) -> Step:
        """Step number `step`, counted from 1. A batch in which no target carries loss changes nothing."""
        start = time.perf_counter()
        count = max(1, batch.loss_tokens)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for microbatch in batch.split(self.job.layout.microbatches):
            loss = self.loss(microbatch)
            (loss / count).backward()
            total += loss.detach()
        norm = self.optimizer.gradient_norm()
        mean, norm_value = (total / count).item(), norm.item()
        if not (math.isfinite(mean) and math.isfinite(norm_value)):
            raise TrainingError(
                f"step {step}: loss {mean} and gradient norm {norm_value} are not both finite; samples "
                f"{batch.samples[0]} to {batch.samples[-1]}; the weights were not touched"
            )
        rate = learning_rate(self.job.optimizer, step - 1, self.job.train.steps)
        self.optimizer.step(rate if batch.loss_tokens else None, norm)
        seconds = time.perf_counter() - start
        tokens = batch.tokens.size
        achieved = tokens * self.job.model.flops_per_token(self.job.data.seq) / seconds
        return Step(
            step=step,
            loss=mean,
            grad_norm=norm_value,
            lr=rate,
            tokens=tokens,
            loss_tokens=batch.loss_tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            mfu=achieved / self.peak if self.peak else None,
            memory=peak_memory(self.device),
        )

    def loss(self, batch: Batch) -> Tensor:
        """The loss sum of one microbatch."""
        tokens, targets, mask, samples = (
            torch.from_numpy(array).to(self.device, non_blocking=True)
            for array in (batch.tokens, batch.targets, batch.loss_mask, batch.samples)
        )
        documents = None
        if self.job.data.document_mask:
            documents = torch.from_numpy(batch.documents).to(self.device, non_blocking=True)
        whole = Place.of(tokens)
        place = Place(whole.positions, samples, whole.length, documents)
        return loss_sum(self.model(tokens, place), targets, mask)

    @torch.no_grad()
    def evaluate(self, step: int) -> Evaluation | None:
        """The held-out loss over the first `eval_samples` sequences of the held-out order: always the same ones."""
        data, train, valid = self.job.data, self.job.train, self.sources.valid
        if valid is None:
            return None
        samples = min(train.eval_samples, windows(valid.tokens, data.seq))
        self.model.eval()
        size = max(1, train.batch // self.job.layout.microbatches)
        total, count = 0.0, 0
        for first in range(0, samples, size):
            wanted = range(first, min(samples, first + size))
            batch = read_batch(valid, data.seq, data.seed, wanted, self.job.model.vocab)
            total += self.loss(batch).item()
            count += batch.loss_tokens
        self.model.train()
        if not math.isfinite(total):
            raise TrainingError(f"the held-out loss after step {step} is {total}: the weights are no longer of use")
        return Evaluation(step=step, held_out_loss=total / count, samples=samples, loss_tokens=count) if count else None
