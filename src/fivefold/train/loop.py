"""The training loop: batches in, steps of the engine, records for the listeners.

Every rank runs it, and all ranks report the same numbers of a step.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fivefold.data.batch import Batch, Share
from fivefold.data.order import windows
from fivefold.data.prefetch import prefetch
from fivefold.job.config import Job
from fivefold.job.learning_rate import learning_rate
from fivefold.job.preflight import Sources
from fivefold.launch import faults, heartbeat
from fivefold.launch.device import peak_flops, peak_memory
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.same_calls import same_calls
from fivefold.support.errors import PeerLost, TrainingError
from fivefold.trace.records import Trace
from fivefold.trace.tracer import tracer_of
from fivefold.train.data_guard import WISH, DataGuard
from fivefold.train.engine import Engine
from fivefold.train.memory_ledger import Counted
from fivefold.train.records import Evaluation, Listener, Step

if TYPE_CHECKING:
    from fivefold.train.checkpointing import Checkpoints


class Stopped(Exception):
    """All ranks have agreed to stop after a step, because one was asked to."""

    def __init__(self, step: int, directory: Path = Path()):
        self.step, self.directory = step, directory
        super().__init__(f"stopped after step {step}")


class Trainer:
    """A job's engine and data."""

    def __init__(self, job: Job, sources: Sources, mesh: Mesh):
        self.job, self.sources, self.mesh = job, sources, mesh
        self.tracer = tracer_of(mesh, job.trace.after, job.trace.steps)
        self.engine = Engine(job, mesh, self.tracer.watch)
        if self.tracer.part is not None:
            self.engine.ops.dispatch.watch = self.tracer.part
        self.guard = DataGuard(job, sources)
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
                checkpointing.finish(then="")
            raise
        finally:
            self.guard.close()

    def _run(self, listeners: list[Listener], on_trace: Callable[[Trace], None] | None) -> Evaluation | None:
        if self.checkpointing is not None:
            self.checkpointing.prepare()
        every, steps, first = self.job.train.eval_every, self.job.train.steps, self.done + 1
        evaluation = None
        self.guard.begin(self.done, self.samples)
        with closing(prefetch(self.reads())) as batches:
            for step, batch in enumerate(batches, start=first):
                heartbeat.enter(f"step {step}", least=heartbeat.LONG if step == first else 0.0)
                compared = same_calls(self.mesh) if step == first and not self.engine.compiled else nullcontext()
                with compared, self.tracer.step(step - first + 1), self.counted.step(step - first + 1):
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
                if step == steps:
                    heartbeat.enter("the hashing of data")
                    self.guard.finish()
                    self.agree()
                    heartbeat.enter(f"step {step}")
                if self.checkpointing is not None:
                    self.checkpointing.after(step, must=self.stopped or step == steps)
                if self.stopped and step < steps:
                    raise Stopped(step)
        if not self.engine.optimizer.updates:  # of the whole run, also before the checkpoint that this start resumes
            raise TrainingError(
                f"in all {steps} steps no target carried loss: every token of {self.sources.path} is masked"
            )
        return evaluation

    def reads(self, whole: bool = False) -> Iterator[partial[Share]]:
        """One call per step that reads this rank's share of its global batch, or all of it: the samples after those
        before, whatever the layout."""
        size, left, dp = self.job.train.batch, self.job.train.steps - self.done, self.mesh.batch
        share = (1, 0) if whole else (dp.size, dp.rank)
        for first in range(self.samples, self.samples + left * size, size):
            yield partial(self.guard.read, self.sources.train, range(first, first + size), *share)

    def agree(self, sure: bool = False) -> None:
        """Collective: if a rank has found the data damaged, all end. The weights are those after `done` steps."""
        self.guard.agree(self.done, self.samples, self.checkpointing, sure)

    def step(self, step: int, batch: Batch | Share) -> Step:
        """Step number `step`, counted from 1. A batch in which no target carries loss changes nothing."""
        try:
            return self._step(step, batch)
        except PeerLost as error:
            raise PeerLost(f"step {step}: {error}") from error.__cause__

    def _step(self, step: int, batch: Batch | Share) -> Step:
        start = time.perf_counter()
        loss = self.engine.accumulate(batch)
        if faults.strike("step", step=step) == "nan":
            next(p.grad for p in self.engine.weights.masters.values() if p.grad is not None).fill_(math.nan)
        with self.tracer.update("norm"):
            wish = torch.full((), float(self.stopping()), dtype=torch.float64, device=self.mesh.device)
            wish += self.guard.wish
            norm = self.engine.gradient_norm(wish)
            loads = self.engine.loads
            found = torch.stack((loss, norm, wish))
            found = found if loads is None else torch.cat((found, loads.sums))
            mean, norm_value, wishes, *sums = found.tolist()  # the step's one wait for the device
        if wishes >= WISH:
            self.agree(sure=True)
        if not (math.isfinite(mean) and math.isfinite(norm_value)):
            raise TrainingError(
                f"step {step}: loss {mean} and gradient norm {norm_value} are not both finite; samples "
                f"{batch.samples[0]} to {batch.samples[-1]}; the weights were not touched"
            )
        rate = learning_rate(self.job.optimizer, step - 1, self.job.train.steps)
        with self.tracer.update("STEP"):
            self.engine.step(rate if batch.loss_tokens else None, norm)
        seconds = time.perf_counter() - start
        tokens = len(batch.samples) * self.job.data.seq
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
            load=None if loads is None else loads.record(sums, whole=self.logs(step)),
        )

    def logs(self, step: int) -> bool:
        """Whether a line is printed of a step, where there is no terminal."""
        train = self.job.train
        return step in (1, train.steps) or step % train.log_every == 0

    def evaluate(self, step: int) -> Evaluation | None:
        """The held-out loss over the first `eval_samples` sequences of the held-out order: always the same ones."""
        seq, train, valid = self.job.data.seq, self.job.train, self.sources.valid
        if valid is None:
            return None
        heartbeat.enter(f"the evaluation after step {step}", least=heartbeat.LONG if self.engine.compiled else 0.0)
        samples = min(train.eval_samples, windows(valid.tokens, seq))
        size = max(1, train.batch // self.job.layout.microbatches)
        total, count = 0.0, 0
        for first in range(0, samples, size):
            wanted = range(first, min(samples, first + size))
            batch = self.guard.read(valid, wanted).mine
            total += self.engine.evaluate(batch)
            count += batch.loss_tokens
        self.agree()
        if not math.isfinite(total):
            raise TrainingError(f"the held-out loss after step {step} is {total}: the weights are no longer of use")
        return Evaluation(step=step, held_out_loss=total / count, samples=samples, loss_tokens=count) if count else None
