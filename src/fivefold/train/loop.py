"""The training loop: batches in, steps of the engine, records for the listeners.

Every rank runs it, and all ranks report the same numbers of a step.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import torch

from fivefold.data.batch import Batch, read_batch
from fivefold.data.order import windows
from fivefold.data.prefetch import prefetch
from fivefold.job.config import Job
from fivefold.job.learning_rate import learning_rate
from fivefold.job.preflight import Sources
from fivefold.launch import faults
from fivefold.launch.device import peak_flops, peak_memory
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import PeerLost, TrainingError
from fivefold.trace.records import Trace
from fivefold.trace.tracer import tracer_of
from fivefold.train.engine import Engine
from fivefold.train.memory_ledger import Counted
from fivefold.train.records import Evaluation, Listener, Step

if TYPE_CHECKING:
    from fivefold.train.checkpointing import Checkpoints


class Stopped(Exception):
    """All ranks have agreed to stop after a step, because one was asked to."""

    def __init__(self, step: int):
        self.step = step
        super().__init__(f"stopped after step {step}")


class Trainer:
    """A job's engine and data."""

    def __init__(self, job: Job, sources: Sources, mesh: Mesh):
        self.job, self.sources, self.mesh = job, sources, mesh
        self.tracer = tracer_of(mesh, job.trace.after, job.trace.steps)
        self.engine = Engine(job, mesh, self.tracer.watch)
        self.counted = Counted(self.engine, mesh, job.train.count, job.train.steps)
        self.done = 0  # steps of the whole run, with those of the checkpoint that it resumes
        self.samples = 0  # of the data order that they were trained on
        self.stopping: Callable[[], bool] = lambda: False  # whether this rank has been asked to stop
        self.checkpointing: Checkpoints | None = None
        self.stopped = False  # whether any has, and so all do, after this step
        peak = peak_flops(mesh.device, job.train.dtype)
        self.peak = peak * mesh.world.size if peak else None

    def run(
        self,
        listeners: list[Listener],
        on_trace: Callable[[Trace], None] | None = None,
        checkpointing: "Checkpoints | None" = None,
    ) -> Evaluation | None:
        """Do all steps that are left. Returns the last evaluation on held-out data, if there is any.

        On rank 0 `on_trace` gets the trace of the steps that the job asks to be traced.
        """
        self.checkpointing = checkpointing
        try:
            return self._run(listeners, on_trace)
        except TrainingError as error:
            if checkpointing is not None and not isinstance(error, PeerLost):  # all ranks have it, and end together
                checkpointing.saver.finish()
            raise

    def _run(self, listeners: list[Listener], on_trace: Callable[[Trace], None] | None) -> Evaluation | None:
        if self.checkpointing is not None:
            self.checkpointing.prepare()
        every, steps, first = self.job.train.eval_every, self.job.train.steps, self.done + 1
        evaluation = None
        with closing(prefetch(self.reads())) as batches:
            for step, batch in enumerate(batches, start=first):
                with self.tracer.step(step - first + 1), self.counted.step(step - first + 1):
                    record = self.step(step, batch)
                self.done, self.samples = step, self.samples + len(batch.samples)
                trace = self.tracer.after(step - first + 1, self.engine.schedule)
                if trace is not None and on_trace is not None:
                    on_trace(trace)
                for listener in listeners:
                    listener.on_step(record)
                if step == steps or (every and step % every == 0 and not self.stopped):
                    evaluation = self.evaluate(step)
                    if evaluation is not None:
                        for listener in listeners:
                            listener.on_evaluation(evaluation)
                if self.checkpointing is not None:
                    self.checkpointing.after(step, must=self.stopped or step == steps)
                if self.stopped and step < steps:
                    raise Stopped(step)
        if not self.engine.optimizer.updates:  # of the whole run, also before the checkpoint that this start resumes
            raise TrainingError(
                f"in all {steps} steps no target carried loss: every token of {self.sources.path} is masked"
            )
        return evaluation

    def reads(self) -> Iterator[partial[Batch]]:
        """One call per step that reads its global batch: the samples after those before, whatever the layout."""
        data, size, left = self.job.data, self.job.train.batch, self.job.train.steps - self.done
        for first in range(self.samples, self.samples + left * size, size):
            wanted = range(first, first + size)
            yield partial(read_batch, self.sources.train, data.seq, data.seed, wanted, self.job.model.vocab)

    def step(self, step: int, batch: Batch) -> Step:
        """Step number `step`, counted from 1. A batch in which no target carries loss changes nothing."""
        try:
            return self._step(step, batch)
        except PeerLost as error:
            raise PeerLost(f"step {step}: {error}") from error.__cause__

    def _step(self, step: int, batch: Batch) -> Step:
        start = time.perf_counter()
        loss = self.engine.accumulate(batch)
        if faults.strike("step", step=step):
            next(p.grad for p in self.engine.weights.masters.values() if p.grad is not None).fill_(math.nan)
        with self.tracer.update("norm"):
            asked = self.stopping() or (self.checkpointing is not None and self.checkpointing.saver.failed)
            wish = torch.full((), float(asked), dtype=torch.float64, device=self.mesh.device)
            norm = self.engine.gradient_norm(wish)
            mean, norm_value, wishes = torch.stack((loss, norm, wish)).tolist()  # the step's one wait for the device
        if not (math.isfinite(mean) and math.isfinite(norm_value)):
            raise TrainingError(
                f"step {step}: loss {mean} and gradient norm {norm_value} are not both finite; samples "
                f"{batch.samples[0]} to {batch.samples[-1]}; the weights were not touched"
            )
        rate = learning_rate(self.job.optimizer, step - 1, self.job.train.steps)
        with self.tracer.update("STEP"):
            self.engine.step(rate if batch.loss_tokens else None, norm)
        seconds = time.perf_counter() - start
        tokens = batch.tokens.size
        achieved = tokens * self.job.model.flops_per_token(self.job.data.seq) / seconds
        self.stopped = wishes > 0
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
            memory=peak_memory(self.mesh.device),
        )

    def evaluate(self, step: int) -> Evaluation | None:
        """The held-out loss over the first `eval_samples` sequences of the held-out order: always the same ones."""
        data, train, valid = self.job.data, self.job.train, self.sources.valid
        if valid is None:
            return None
        samples = min(train.eval_samples, windows(valid.tokens, data.seq))
        size = max(1, train.batch // self.job.layout.microbatches)
        total, count = 0.0, 0
        for first in range(0, samples, size):
            wanted = range(first, min(samples, first + size))
            batch = read_batch(valid, data.seq, data.seed, wanted, self.job.model.vocab)
            total += self.engine.evaluate(batch)
            count += batch.loss_tokens
        if not math.isfinite(total):
            raise TrainingError(f"the held-out loss after step {step} is {total}: the weights are no longer of use")
        return Evaluation(step=step, held_out_loss=total / count, samples=samples, loss_tokens=count) if count else None
