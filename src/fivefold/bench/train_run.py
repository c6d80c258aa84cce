"""One turn of `fivefold bench train`, in a process of its own."""

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch.nn import functional as F

from fivefold.bench.profile import Profile
from fivefold.bench.train import CPU, More, Saved, Timed
from fivefold.checkpoint.store import Store
from fivefold.data.batch import Batch, read_batch
from fivefold.data.prefetch import prefetch
from fivefold.data.tokens import TokenStore
from fivefold.job.config import Job
from fivefold.job.preflight import Sources
from fivefold.launch.device import DTYPES, check_bfloat16, choose_device, compiles, make_repeatable, peak_memory
from fivefold.launch.ranks import Rank
from fivefold.model.compiled import compilation
from fivefold.model.hf import source
from fivefold.model.init import draw
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.spec.hf_config import to_hf_config
from fivefold.support.errors import UserError
from fivefold.train.checkpointing import Checkpoints
from fivefold.train.listeners import Listener, MetricsFile
from fivefold.train.loop import Stopped, Trainer
from fivefold.train.records import Evaluation, Step
from fivefold.verify.batches import write_tokens

_WARM = 5  # steps: kernels are compiled and chosen, the allocator finds its blocks, the clocks settle
_BATCHES = 4  # of different tokens
_PROFILED = 2  # steps


def run(rank: Rank, job: Job, hugging_face: bool, steps: int, more: More, path: Path) -> Timed:
    device = choose_device(job.train.device)
    if slow := check_bfloat16(device, job.train.dtype):
        raise UserError(f"nothing is measured: {slow}")
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    make_repeatable(job.train)
    # As many steps as it takes: the run is stopped, and its learning rate is that of a long one.
    job = structs.replace(job, train=structs.replace(job.train, steps=1_000_000))
    watch = Watch(_WARM + steps)
    saved: Saved | None = None
    kernels: list[dict[str, Any]] = []
    sources = made_up(path / "tokens", job)
    if hugging_face:
        _hugging_face(job, sources, device, watch)
    else:
        saved, kernels = _ours(job, sources, device, watch, path, more)
    times, (graphs, breaks) = watch.times, compilation()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{CPU}, threads: {torch.get_num_threads()}"
    return Timed(
        device=name,
        torch=str(torch.__version__),
        seconds=times[_WARM : watch.wanted],
        memory=peak_memory(device),
        first=times[0],
        loss=watch.loss,
        graphs=graphs,
        breaks=breaks,
        parameters=_kinds(job.train.dtype, hugging_face),
        saved=saved,
        kernels=kernels,
    )


def made_up(path: Path, job: Job) -> Sources:
    path.mkdir()
    write_tokens(path, job.model.vocab, _BATCHES * job.train.batch * job.data.seq + 1)
    return Sources(TokenStore.open(path).split("train"), None, path)


def _kinds(dtype: str, hugging_face: bool) -> str:
    if dtype != "bfloat16":
        return dtype
    return "bf16, no masters" if hugging_face else "bf16, float32 masters"


def _ours(
    job: Job, sources: Sources, device: torch.device, watch: "Watch", path: Path, more: More
) -> tuple[Saved | None, list[dict[str, Any]]]:
    """The loop of `fivefold train`, with its metrics; and if wished with a checkpoint, and a profile after all else."""
    trainer = Trainer(job, sources, Mesh.of(job.layout, device))
    metrics, checkpointing = (
        MetricsFile(path / "metrics.jsonl"),
        Once(path, trainer, watch) if more.checkpoint else None,
    )
    _until(trainer, checkpointing.written if checkpointing else watch.done, [metrics, watch], checkpointing)
    saved = checkpointing.cost(watch.times[watch.wanted :]) if checkpointing else None
    if not more.profile:
        return saved, []
    profile = Profile(trainer.done + 1, _PROFILED, device)
    _until(trainer, profile.done, [metrics, profile])
    return saved, profile.kernels


def _until(
    trainer: Trainer, done: Callable[[], bool], listeners: list[Listener], checkpointing: Checkpoints | None = None
) -> None:
    trainer.stopping = done
    with suppress(Stopped):
        trainer.run(listeners, checkpointing=checkpointing)


class Watch:
    """A listener with a stopwatch."""

    def __init__(self, wanted: int):
        self.wanted, self.ends = wanted, [time.perf_counter()]
        self.loss = math.nan  # of the first step

    def on_step(self, record: Step) -> None:
        self.tick(record.loss)

    def tick(self, loss: float) -> None:
        self.loss = loss if len(self.ends) == 1 else self.loss
        self.ends.append(time.perf_counter())

    def on_evaluation(self, record: Evaluation) -> None: ...

    def close(self) -> None: ...

    def done(self) -> bool:
        """Asked in the middle of a step, which counts."""
        return len(self.ends) >= self.wanted

    @property
    def times(self) -> list[float]:
        return [after - before for before, after in pairwise(self.ends)]


class Once(Checkpoints):
    """One checkpoint, when the usual steps are over; steps go on until it is written."""

    def __init__(self, path: Path, trainer: Trainer, watch: Watch):
        super().__init__(Store(path / "checkpoints"), Control(trainer.mesh), trainer, lambda _: None)
        self.watch, self.snapshot, self.begun, self.writing = watch, 0.0, 0.0, 0.0

    def prepare(self) -> None:
        """As in a run that saves every so many steps, whatever the job says."""
        self.saver.staging.prepare(self.pieces())

    def after(self, step: int, must: bool) -> None:
        if step != self.watch.wanted:
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
        self.saver.finish()
        size = sum(file.bytes for file in self.store.complete()[0].manifest.files)
        return Saved(size, self.snapshot, self.writing, beside)


def _hugging_face(job: Job, sources: Sources, device: torch.device, watch: Watch) -> None:
    """As its users would: sdpa, compiled where ours is, fused AdamW, parameters in the compute dtype."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    settings = to_hf_config(job.model, job.train.dtype) | {"attn_implementation": "sdpa", "use_cache": False}
    config, dtype = LlamaConfig(**settings), DTYPES[job.train.dtype]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = model.state_dict()
    for parameter in job.model.parameters():  # ours, so that its first loss is ours, too
        draw(job.model, parameter, weights[source(job.model, parameter.name).name], job.train.seed)
    called = torch.compile(model) if compiles(job.train, device) else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=job.optimizer.betas, fused=True)
    size, data = job.train.batch, job.data

    def read(number: int) -> Batch:
        return read_batch(sources.train, data.seq, data.seed, range(number * size, (number + 1) * size))

    with closing(prefetch(partial(read, number) for number in range(watch.wanted))) as batches:
        for batch in batches:
            total = 0.0
            for part in batch.split(job.layout.microbatches):
                tokens, targets = (torch.from_numpy(one).to(device) for one in (part.tokens, part.targets))
                logits = called(tokens).logits.flatten(0, 1).float()
                loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / batch.loss_tokens
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.clip)
            optimizer.step()
            optimizer.zero_grad()
            watch.tick(total)
