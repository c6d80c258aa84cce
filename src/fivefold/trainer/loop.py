"""The training loop: reads batches, runs the engine's steps, and passes a record of each to the listeners.

Every rank runs it, and all ranks get the same numbers of a step.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from fivefold.data.batch import Batch, DpShare
from fivefold.data.order import windows
from fivefold.data.rows import Splits
from fivefold.job.config import Job
from fivefold.launch import faults, heartbeat
from fivefold.launch.device import peak_flops, peak_memory
from fivefold.launch.waits import timed_wait
from fivefold.launch.watchdog import BUILD_TIMEOUT
from fivefold.optim.lr_schedule import learning_rate
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.same_collectives import same_calls
from fivefold.support.errors import PeerLost, TrainingError
from fivefold.support.plugins import is_plugin
from fivefold.support.progress import prefetch
from fivefold.tracing.records import Trace
from fivefold.tracing.tracer import make_tracer
from fivefold.trainer.corruption import Corrupt, CorruptionChecks
from fivefold.trainer.data_guard import STOP_FOR_DATA, DataGuard
from fivefold.trainer.engine import Engine
from fivefold.trainer.ledger import Counted
from fivefold.trainer.parameter_digests import ParameterDigests
from fivefold.trainer.records import Deciding, Digesting, Digests, Evaluation, Listener, Step, StepDecision
from fivefold.trainer.spikes import Account, Policy, StepNumbers
from fivefold.trainer.stragglers import Phases, SlowWatch

if TYPE_CHECKING:
    from fivefold.trainer.checkpointing import Checkpoints

_NAMED = 4  # parameters of a sentence


class Stopped(Exception):
    """All ranks stop after a step, because one of them got a signal to."""

    def __init__(self, step: int, directory: Path = Path()):
        self.step, self.directory = step, directory
        super().__init__(f"stopped after step {step}")


class Trainer:
    """Trains a job: its engine, its data, and what watches both."""

    def __init__(self, job: Job, sources: Splits, mesh: Mesh):
        self.job, self.sources, self.mesh = job, sources, mesh
        self.tracer = make_tracer(mesh, job.trace.after, job.trace.steps)
        self.phases = Phases(mesh.device, self.tracer.watch)
        self.engine = Engine(job, mesh, self.phases.watch)
        self.slow = SlowWatch(job, mesh, self.phases)
        if self.tracer.part is not None:
            self.engine.ops.dispatch.watch = self.tracer.part
        self.guard = DataGuard(job, sources)
        self.counted = Counted(self.engine, mesh, job.train.count, job.train.steps)
        self.policy = Policy(job.watch, job.optimizer.name if is_plugin(job.optimizer.name) else "")
        self.account = Account()
        self.corruption = CorruptionChecks(self.engine, mesh, self.account)
        self.corruption.data_failed = lambda: bool(self.guard.unread)
        self.parameter_digests = ParameterDigests(self.engine, mesh) if job.train.digest else None
        self.digests: Digests | None = None  # after the last step, on rank 0
        self.decision: StepDecision | None = None  # about the last step
        self.done = 0  # steps of the whole run, including those before the checkpoint that it resumed from
        self.samples = 0  # the samples of the data order that those steps used
        self.stopping: Callable[[], bool] = lambda: False  # whether this rank got a signal to stop
        self.checkpointing: Checkpoints | None = None
        self.stopped = False  # whether any rank got one, so that all stop after this step
        self.printed_once: set[str] = set()  # kinds of messages that are printed once
        peak = peak_flops(mesh.device, job.train.dtype)
        self.peak = peak * mesh.world.size if peak else None

    def run(
        self,
        listeners: list[Listener],
        on_trace: Callable[[Trace], None] | None = None,
        checkpointing: "Checkpoints | None" = None,
    ) -> Evaluation | None:
        """Runs all steps that are left. Returns the last evaluation on held-out data, if there is any.

        On rank 0 `on_trace` is called with the trace of the steps that the job traces.
        """
        self.checkpointing = checkpointing
        try:
            return self._run(listeners, on_trace)
        except TrainingError as error:
            if checkpointing is not None and not isinstance(error, PeerLost):  # all ranks raise it alike
                checkpointing.end()
                if isinstance(error, Corrupt):
                    checkpointing.quarantine(error.suspect)
            raise
        finally:
            self.guard.close()

    def _run(self, listeners: list[Listener], on_trace: Callable[[Trace], None] | None) -> Evaluation | None:
        if self.checkpointing is not None:
            self.checkpointing.prepare()
        steps, evaluation, numbers = self.job.train.steps, None, itertools.count(1)
        self.guard.begin(self.done, self.samples)
        if self.parameter_digests is not None and not self.done:  # the weights that a run starts from
            self.digests = self.parameter_digests.after(0)
            self._tell_digests(listeners)
        while self.done < steps:  # once, and once more after each rollback
            with closing(prefetch(self.reads())) as batches:
                while self.done < steps:
                    with self.phases.of("data"):
                        batch = next(batches)
                    trace = self._next_step(batch, next(numbers), listeners)
                    if trace is not None and on_trace is not None:
                        on_trace(trace)
                    if self._apply_decision(listeners):
                        break
                    evaluation = self._after_step(listeners) or evaluation
        if not self.engine.optimizer.updates:  # of the whole run, including earlier starts
            raise TrainingError(
                f"in all {steps} steps no target carried loss: every token of {self.sources.where} is masked"
            )
        return evaluation

    def _next_step(self, batch: DpShare, number: int, listeners: list[Listener]) -> Trace | None:
        """Runs the next step, the `number`-th of this start, and returns the trace, if this step completes it.

        Listeners get no record of a step that is about to be rolled back.
        """
        step, first = self.done + 1, number == 1
        heartbeat.enter(f"step {step}", least=BUILD_TIMEOUT if first else 0.0)
        compared = same_calls(self.mesh) if first and not self.engine.compiled else nullcontext()
        with compared, self.tracer.step(number), self.counted.step(number), self.phases.whole(step):
            record = self.step(step, batch)
        if first:
            self._tell_unlearned()
        self.done, self.samples = step, int(batch.samples[-1]) + 1
        self.account.step(record.seconds)
        rolls_back = self.decision is not None and self.decision.action == "rollback"
        if math.isfinite(record.loss or 0.0) and math.isfinite(record.grad_norm) and not rolls_back:
            for listener in listeners:
                listener.on_step(record)
            self._tell_digests(listeners)
        return self.tracer.gather(number, self.engine.schedule)

    def _tell_digests(self, listeners: list[Listener]) -> None:
        if self.digests is not None:
            for listener in listeners:
                if isinstance(listener, Digesting):
                    listener.on_digests(self.digests)

    def _tell_unlearned(self) -> None:
        """Says which parameters of plugins' blocks got no gradient in the first step, on any rank. Collective."""
        kinds = [kind for kind in self.job.model.branches if is_plugin(kind.name)]
        if self.checkpointing is None or not kinds:
            return
        of_ranks = self.checkpointing.control.all_gather_values(self.engine.foreign_gradients or {}, dict[str, bool])
        learned = {name for gradients in of_ranks for name, came in gradients.items() if came}
        if without := sorted({name for gradients in of_ranks for name in gradients} - learned):
            who = ", ".join(kind.name for kind in kinds if any(f".{kind.place}." in name for name in without))
            named = ", ".join(without[:_NAMED]) + f" and {len(without) - _NAMED} more" * (len(without) > _NAMED)
            self.policy.say(
                f"{who}: no gradient came to {named} in step {self.done + 1}, so they do not learn: a result is "
                "detached, or the module does not read them"
            )

    def _apply_decision(self, listeners: list[Listener]) -> bool:
        """Applies the decision about the last step; whether it rolled the run back.

        A rollback becomes a skip where no checkpoint is old enough.
        """
        decision, checkpoint = self.decision, None
        if decision is None:
            return False
        if decision.action == "rollback":
            latest = decision.step - 1 - self.job.watch.rollback
            checkpoint = self.checkpointing.newest_until(latest) if self.checkpointing is not None else None
            if checkpoint is None:
                self.policy.say(
                    f"step {decision.step}: there is no checkpoint of step {latest} or before to go back to"
                )
                decision = msgspec.structs.replace(decision, action="skip")
            else:
                manifest = checkpoint.manifest
                decision = msgspec.structs.replace(decision, back=manifest.step, back_samples=manifest.samples)
        self.policy.settle(decision)
        if checkpoint is not None and self.checkpointing is not None:
            self.checkpointing.go_back(checkpoint)
            self.samples = decision.samples
            self.guard.moved(self.done, self.samples)
        for listener in listeners:
            if isinstance(listener, Deciding):
                listener.on_decision(decision)
        return checkpoint is not None

    def _after_step(self, listeners: list[Listener]) -> Evaluation | None:
        """Evaluates and saves where that is due; raises `Stopped` if a rank got a signal to stop."""
        step, steps, eval_every = self.done, self.job.train.steps, self.job.train.eval_every
        evaluation = None
        if step == steps or (eval_every and step % eval_every == 0 and not self.stopped):
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
            self.checkpointing.after(step, last=self.stopped or step == steps)
        if self.stopped and step < steps:
            raise Stopped(step)
        return evaluation

    def reads(self, *, full: bool = False) -> Iterator[partial[DpShare]]:
        """A function for each step that reads this rank's share of its global batch; with `full` reads all of it.

        Batches are consecutive samples, whatever the layout, without those that a rollback has left out.
        """
        size, dp, first = self.job.train.batch, self.mesh.batch, self.samples
        share = (1, 0) if full else (dp.size, dp.rank)
        for done in range(self.done, self.job.train.steps):
            first = self.policy.decisions.onward(done, first)  # behind samples that a rollback left out
            yield partial(self.guard.read, self.sources.train, range(first, first + size), *share)
            first += size

    def agree(self, sure: bool = False) -> None:
        """Ends all ranks with an error, if one of them has found the data damaged. Collective.

        `sure`: it is known that one has. The weights are those after `done` steps.
        """
        save = partial(self.checkpointing.after, last=True) if self.checkpointing is not None else None
        self.guard.agree(self.done, self.samples, save, sure)

    def step(self, step: int, batch: Batch | DpShare) -> Step:
        """Trains on a batch as step number `step`, from 1. A batch in which no target carries loss changes nothing."""
        try:
            return self._step(step, batch)
        except PeerLost as error:
            raise PeerLost(f"step {step}: {error}") from error.__cause__

    def _step(self, step: int, batch: Batch | DpShare) -> Step:
        start, read_share_of = time.perf_counter(), partial(self._share_of, batch)
        self.corruption.before_forward(step, read_share_of)
        loss = self.engine.forward_backward(batch)
        first, samples = int(batch.samples.min()), int(batch.samples.max()) + 1
        loss = self._inject_fault(loss, step, first // len(batch.samples) + 1)
        self.corruption.before_update(step, read_share_of)
        with self.tracer.update("norm"):
            # One all-reduce sums the stop flags, and gives all ranks the loss of rank 0, so that all decide alike.
            shared = torch.stack((torch.full_like(loss, float(self.stopping()) + self.guard.stop_flag), loss))
            shared[1] *= self.mesh.world.rank == 0
            with self.account.of("slow ranks"):
                table = self.slow.table(step)
            norm = self.engine.gradient_norm(shared, *([] if table is None else [table]))
            loads = self.engine.expert_loads
            figures = torch.cat((norm[None], shared) if loads is None else (norm[None], shared, loads.sums))
            norm_value, stop_sum, mean, *sums = timed_wait(figures.tolist)  # the step's one wait for the device
        if stop_sum >= STOP_FOR_DATA:
            self.agree(sure=True)
        with self.account.of("slow ranks"):
            self.slow.look(step, table, self.policy.say)
        self.account.add("slow ranks", self.phases.cost())
        with self.account.of("spikes"):
            has_loss = batch.loss_tokens or not math.isfinite(mean)
            self.decision = self.policy.look(step, first, samples, StepNumbers(mean, norm_value)) if has_loss else None
        updates = batch.loss_tokens and not (self.decision is not None and self.decision.changes)
        lr = learning_rate(self.job.optimizer, step - 1, self.job.train.steps)
        with self.tracer.update("STEP"), self.phases.of("optimizer"):
            self.engine.step(lr if updates else None, norm)
        self.corruption.after_update(step)
        if self.parameter_digests is not None:
            with self.account.of("parameter digests"):
                self.digests = self.parameter_digests.after(step)
        seconds = time.perf_counter() - start
        tokens = len(batch.samples) * self.job.data.seq
        achieved = tokens * self.job.model.flops_per_token(self.job.data.seq) / seconds
        self.stopped = stop_sum > 0
        if not batch.loss_tokens:
            self._print_once(
                f"step {step}: none of its target tokens carries loss (samples {first} to {samples - 1}): it has no "
                "loss and makes no update; further steps like it are not reported",
                "step",
            )
        return Step(
            step=step,
            loss=mean if has_loss else None,
            grad_norm=norm_value,
            lr=lr,
            tokens=tokens,
            loss_tokens=batch.loss_tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            mfu=achieved / self.peak if self.peak else None,
            memory=peak_memory(self.mesh.device),
            load=None if loads is None else loads.record(sums, by_expert=self.logs(step)),
            samples=samples,
        )

    def _share_of(self, batch: Batch | DpShare, number: int) -> DpShare:
        """The share of a step's global batch that dp rank `number` has."""
        return self.guard.read(self.sources.train, batch.samples.tolist(), self.mesh.batch.size, number)

    def _inject_fault(self, loss: torch.Tensor, step: int, batch: int) -> torch.Tensor:
        """Makes gradients NaN, or them and the returned loss too large, if FIVEFOLD_FAULT asks for it."""
        kind = faults.strike("step", step=step) or faults.strike("batch", step=batch)
        gradients = (p.grad for p in self.engine.weights.masters.values() if p.grad is not None)
        if kind == "nan":
            next(gradients).fill_(math.nan)
        if kind == "spike":
            for gradient in gradients:
                gradient.mul_(faults.SPIKE_FACTOR)
            return loss * faults.SPIKE_FACTOR
        return loss

    def _print_once(self, sentence: str, kind: str) -> None:
        if kind not in self.printed_once:
            self.printed_once.add(kind)
            self.policy.say(sentence)

    def logs(self, step: int) -> bool:
        """Whether a line is printed for a step, where there is no terminal."""
        train = self.job.train
        return step in (1, train.steps) or step % train.log_every == 0

    def evaluate(self, step: int) -> Evaluation | None:
        """The held-out loss over the first `eval_samples` sequences of the held-out order: always the same ones."""
        seq, train, valid = self.job.data.seq, self.job.train, self.sources.valid
        if valid is None:
            return None
        heartbeat.enter(f"the evaluation after step {step}", least=BUILD_TIMEOUT if self.engine.compiled else 0.0)
        samples = min(train.eval_samples, windows(valid.tokens, seq))
        size = max(1, train.batch // self.job.layout.microbatches)
        total, count = 0.0, 0
        for first in range(0, samples, size):
            batch = self.guard.read(valid, range(first, min(samples, first + size))).mine
            total += self.engine.evaluate(batch)
            count += batch.loss_tokens
        self.agree()
        if not math.isfinite(total):
            raise TrainingError(f"the held-out loss after step {step} is {total}: the weights have diverged")
        if not count:
            self._print_once(
                f"none of the first {samples} held-out samples has a target that carries loss: there is no held-out "
                f"loss; train.eval_samples={train.eval_samples} says how many are read",
                "evaluation",
            )
            return None
        return Evaluation(step=step, held_out_loss=total / count, samples=samples, loss_tokens=count)
