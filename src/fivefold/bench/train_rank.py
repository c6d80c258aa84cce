"""One turn of `fivefold bench train`, or one case of `fivefold bench train --cases`, in a process of its own."""

import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from msgspec import structs
from torch.profiler import ProfilerActivity, profile

from fivefold.bench.baselines import HuggingFaceSystem, RankBatch
from fivefold.bench.harness import HUGGING_FACE
from fivefold.bench.steps import MIN_WARM_UP_STEPS, StepCase, Timed
from fivefold.bench.torchtitan import TorchtitanSystem
from fivefold.bench.train import CPU, PEERS, TORCHTITAN, Extras, Saved, TrainTurn
from fivefold.checkpoint.store import Store
from fivefold.data.batch import Batch, read_batch
from fivefold.data.rows import Splits
from fivefold.data.tokens import TokenStore
from fivefold.job.config import Job
from fivefold.launch.device import check_bfloat16, choose_device, make_repeatable, peak_memory
from fivefold.launch.processes import Rank
from fivefold.model.compiler import compilation
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import UserError
from fivefold.support.progress import prefetch
from fivefold.trainer.checkpointing import Checkpoints
from fivefold.trainer.loop import Stopped, Trainer
from fivefold.trainer.records import METRICS_FILE, Evaluation, Listener, MetricsFile, Step
from fivefold.verifier.cases import write_tokens

_WARM_UP_STEPS = (
    5  # steps of a turn before the timed ones: kernels are compiled and chosen, memory is allocated, clocks settle
)
_PEER_LR = 1e-4  # of other systems, whose steps take as long with any
_BATCH_COUNT = 4  # with different tokens
_PROFILED_STEPS = 2  # steps
# The kind of a kernel: that of the first pattern that matches its name.
KERNEL_KINDS = {
    "attention": r"sdpa|fmha|flash|attention|dot_do_o|dq_to|convert_dq",
    "products of experts": r"GroupProblemShape|grouped_gemm|GroupedGemm",
    "products": r"nvjet|gemm|cutlass|xmma|cublas|::(add)?mm\b|::bmm\b|scaled_mm",
    "AdamW": r"^_update|adam",
    "the gradient norm": r"LpNorm|lpnorm|foreach_norm|^_squares",
    "gradients widened, weights rounded": r"multi_tensor_apply|foreach_copy",
    "fused by the compiler": r"^triton_",
    "embedding": r"embedding|indexing_backward|index_select|index_put",
    "copies": r"[Mm]emcpy|[Mm]emset|copy|CatArray",
}


def run(rank: Rank, job: Job, system: str, steps: int, extras: Extras, path: Path) -> TrainTurn:
    device = choose_device(job.train.device)
    if slow := check_bfloat16(device, job.train.dtype):
        raise UserError(f"nothing is measured: {slow}", "bench.dtype")
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    make_repeatable(job.train)
    watch = Watch(_WARM_UP_STEPS, steps)
    if system not in PEERS:
        return ours(job, device, watch, path, extras)
    sources, batches = write_random_tokens(path, job), _WARM_UP_STEPS + steps
    masters = system == TORCHTITAN
    if system == HUGGING_FACE:
        loop: HuggingFaceSystem | TorchtitanSystem = HuggingFaceSystem(job, RankBatch([], 0), device, lr=_PEER_LR)
    else:
        loop = TorchtitanSystem(job, device, masters=masters, lr=_PEER_LR)
    _peer(loop, job, sources, device, watch, batches)
    return watch.turn(device, "float32, autocast" if masters else _parameters(job, "no masters"))


def one_case(rank: Rank, case: StepCase, wanted: str, dtype: str, steps: int, warm: float) -> Timed:
    """Time the steps of a case, with all that a trainer does between them; no seconds if the memory is not enough."""
    device = choose_device(wanted)
    on_gpu = device.type == "cuda"
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu else "float32"
    name = torch.cuda.get_device_name(device) if on_gpu else CPU
    without_seconds = Timed(case, name, str(torch.__version__), dtype, steps)
    try:
        with tempfile.TemporaryDirectory(prefix="fivefold-") as path:
            turn = ours(case.job(dtype), device, Watch(MIN_WARM_UP_STEPS, steps, warm), Path(path), Extras())
    except torch.OutOfMemoryError:
        return without_seconds
    middle, fastest, slowest = (round(statistic(turn.seconds), 6) for statistic in (median, min, max))
    return replace(without_seconds, seconds=middle, fastest=fastest, slowest=slowest, memory=turn.memory)


def write_random_tokens(path: Path, job: Job) -> Splits:
    """Random tokens, written below `path`, as the job's data."""
    tokens = path / "tokens"
    tokens.mkdir()
    write_tokens(tokens, job.model.vocab, _BATCH_COUNT * job.train.batch * job.data.seq + 1)
    return TokenStore.open(tokens).splits()


class Watch:
    """A listener that times `steps` steps, after at least `warm` steps and `seconds`."""

    def __init__(self, warm: int, steps: int, seconds: float = 0.0):
        self.warm, self.steps, self.seconds = warm, steps, seconds
        self.ends = [time.perf_counter()]  # the start, and the end of each step
        self.first: int | None = None  # how many steps come before those that count
        self.loss = math.nan  # of the first step

    def on_step(self, record: Step) -> None:
        self.tick(math.nan if record.loss is None else record.loss)

    def tick(self, loss: float) -> None:
        self.loss = loss if len(self.ends) == 1 else self.loss
        self.ends.append(time.perf_counter())
        done = len(self.ends) - 1
        if self.first is None and done >= self.warm and self.ends[-1] - self.ends[0] >= self.seconds:
            self.first = done

    def on_evaluation(self, record: Evaluation) -> None: ...

    def close(self) -> None: ...

    @property
    def last(self) -> int | None:
        """The number of the last step that counts, as soon as it is known."""
        return None if self.first is None else self.first + self.steps

    def done(self) -> bool:
        """Whether enough steps are taken, with the one under way, in the middle of which the trainer asks."""
        return self.last is not None and len(self.ends) >= self.last

    @property
    def times(self) -> list[float]:
        """The seconds of every step."""
        return [after - before for before, after in pairwise(self.ends)]

    def turn(self, device: torch.device, parameters: str, **extras: Any) -> TrainTurn:
        graphs, breaks = compilation()
        on_gpu = device.type == "cuda"
        return TrainTurn(
            device=torch.cuda.get_device_name(device) if on_gpu else f"{CPU}, threads: {torch.get_num_threads()}",
            torch=str(torch.__version__),
            seconds=self.times[self.first : self.last],
            memory=peak_memory(device),
            first=self.times[0],
            loss=self.loss,
            graphs=graphs,
            breaks=breaks,
            parameters=parameters,
            **extras,
        )


def ours(job: Job, device: torch.device, watch: Watch, path: Path, extras: Extras) -> TrainTurn:
    """Run the loop of `fivefold train`, with its metrics; on request with a checkpoint, and a profile at the end."""
    # More steps than it takes: the run is stopped from outside.
    job = structs.replace(job, train=structs.replace(job.train, steps=1_000_000))
    trainer = Trainer(job, write_random_tokens(path, job), Mesh.of_job(job, device))
    metrics = MetricsFile(path / METRICS_FILE)
    checkpointing = OneCheckpoint(path, trainer, watch) if extras.checkpoint else None
    _until(trainer, checkpointing.written if checkpointing else watch.done, [metrics, watch], checkpointing)
    saved = checkpointing.cost(watch.times[watch.last :]) if checkpointing else None
    kernels: list[dict[str, Any]] = []
    if extras.profile:
        profiled = Profile(trainer.done + 1, _PROFILED_STEPS, device)
        _until(trainer, profiled.done, [metrics, profiled])
        kernels = profiled.kernels
    return watch.turn(device, _parameters(job, "float32 masters"), saved=saved, kernels=kernels)


def _parameters(job: Job, masters: str) -> str:
    return f"bf16, {masters}" if job.train.dtype == "bfloat16" else job.train.dtype


def _until(
    trainer: Trainer, done: Callable[[], bool], listeners: list[Listener], checkpointing: Checkpoints | None = None
) -> None:
    """Train until `done`."""
    trainer.stopping = done
    with suppress(Stopped):
        trainer.run(listeners, checkpointing=checkpointing)


class OneCheckpoint(Checkpoints):
    """Saves one checkpoint after the steps that count; steps continue until it is written."""

    def __init__(self, path: Path, trainer: Trainer, watch: Watch):
        super().__init__(Store(path / "checkpoints"), Control(trainer.mesh), trainer, lambda _: None)
        self.watch, self.snapshot, self.begun, self.writing = watch, 0.0, 0.0, 0.0

    def prepare(self) -> None:
        """Allocate staging memory, as a run that saves does, whatever the job's own settings are."""
        self.saver.staging.prepare(self.shards())

    def after(self, step: int, last: bool) -> None:
        if step != self.watch.last:
            return
        start = time.perf_counter()
        self.save(step)
        self.begun = time.perf_counter()
        self.snapshot = self.begun - start
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.saver.thread.join()
        self.writing = time.perf_counter() - self.begun

    def written(self) -> bool:
        return self.writing > 0

    def cost(self, beside: list[float]) -> Saved:
        self.ensure()
        size = sum(file.bytes for file in self.store.complete()[0].manifest.files)
        return Saved(size, self.snapshot, self.writing, beside)


class Profile:
    """A listener that profiles the kernels of `steps` steps, from the end of step `after` on."""

    def __init__(self, after: int, steps: int, device: torch.device):
        self.after, self.steps, self.device = after, steps, device
        self.on_gpu = device.type == "cuda"
        self.profiler = profile(activities=[ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU])
        self.kernels: list[dict[str, Any]] = []  # empty if the device's counters cannot be read
        self.over = False

    def on_step(self, record: Step) -> None:
        if record.step == self.after:
            self._settle()
            self.profiler.__enter__()
        if record.step == self.after + self.steps:
            self._settle()
            self.profiler.__exit__(None, None, None)
            self.kernels, self.over = self._read(), True

    def on_evaluation(self, record: Evaluation) -> None: ...

    def close(self) -> None: ...

    def done(self) -> bool:
        return self.over

    def _settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _read(self) -> list[dict[str, Any]]:
        kernels = []
        for row in self.profiler.key_averages():
            time = row.self_device_time_total if self.on_gpu else row.self_cpu_time_total
            if time > 0:
                kind = next((kind for kind, pattern in KERNEL_KINDS.items() if re.search(pattern, row.key)), "others")
                numbers = {"seconds": time / 1e6 / self.steps, "calls": row.count / self.steps}
                kernels.append({"name": row.key, "kind": kind} | numbers)
        return sorted(kernels, key=lambda kernel: -kernel["seconds"])


def _peer(
    loop: HuggingFaceSystem | TorchtitanSystem,
    job: Job,
    sources: Splits,
    device: torch.device,
    watch: Watch,
    steps: int,
) -> None:
    """Take `steps` steps of another system on the job's batches."""
    size, data = job.train.batch, job.data

    def read(number: int) -> Batch:
        return read_batch(sources.train, data.seq, data.seed, range(number * size, (number + 1) * size))

    with closing(prefetch(partial(read, number) for number in range(steps))) as batches:
        for batch in batches:
            loop.part = RankBatch.of(batch, job.layout, device=device)
            watch.tick(loop.step())
