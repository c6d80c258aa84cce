"""Whether gloo's groups still need one worker thread instead of torch's two: python tools/gloo_race.py

Two ranks on this machine keep many all-gathers in flight on one group: first with the two worker threads that torch
gives it, until a rank dies or the time is over, and then with the one that Fivefold gives it (`one_gloo_worker` in
src/fivefold/launch/group.py). docs/gloo-race.md has the reason. Two threads meet only while two cores are free.

exit code 0: with two a rank died, with one none did; that is what the code assumes
          1: with two none died, either; that proves nothing by itself, as they race by chance, but somebody should look
          2: a rank died with one worker, too, or something else went wrong: the way around is none

With --cost: how long training steps take with one worker and with two, by turns in the same two ranks.
"""

import argparse
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.launch.exits import signal_name
from fivefold.launch.group import join, one_gloo_worker
from fivefold.launch.rendezvous import GLOO_INTERFACE_ENV, Rendezvous, stay_on_this_machine
from fivefold.launch.world import World
from fivefold.support.text import plural

RANKS = 2
IN_FLIGHT = 32  # all-gathers of one element: of what was tried, this dies soonest
STARTING = 120.0  # seconds in which ranks have imported torch and met
GRACE = 5.0  # seconds for the other rank, after the first has ended
COSTS = ("tiny dp=2,zero=1", "tiny dp=2,zero=2", "tiny dp=2,zero=3", "tiny tp=2,sp", "tiny cp=2", "tiny-moe dp=2,ep=2")
STEPS, WARM = 40, 4  # of each kind


class Seen(NamedTuple):
    rounds: int
    seconds: float
    died: list[str]  # "rank 0 of SIGSEGV"
    wrong: list[str]  # what is neither that nor a good end

    def __str__(self) -> str:
        how = ", ".join([f"died: {one}" for one in self.died] + self.wrong) or "all ranks lived"
        return f"{how}; {plural(self.rounds, 'round')} in {self.seconds:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="the most that each of the two takes; default: 60")
    parser.add_argument("--cost", action="store_true", help="measure what one worker costs; nothing dies")
    asked = parser.parse_args()
    torch = f"torch {version('torch')}"
    machine = f"{platform.system()} {platform.machine()}, {plural(os.cpu_count() or 1, 'core')}"
    if asked.cost:
        print(f"{torch}, {machine}; {RANKS} ranks, {STEPS} steps of each kind", flush=True)
        for case in COSTS:
            print(_cost(*case.split()), flush=True)
        return 0
    print(f"{torch}, {machine}; {RANKS} ranks, {IN_FLIGHT} all-gathers a round", flush=True)
    two = _watched(asked.seconds, one=False)
    print(f"two workers a group: {two}", flush=True)
    one = _watched(asked.seconds, one=True)
    print(f"one worker a group:  {one}", flush=True)
    if one.died or one.wrong or (two.wrong and not two.died):
        print(f"With {torch}, something else is wrong than what one worker a group keeps away.")
        return 2
    if two.died:
        print(f"With {torch}, one worker a group is still needed.")
        return 0
    print(
        f"With {torch}, no rank died. That proves nothing by itself: give it more --seconds, and read runLoop in this "
        "version's source (docs/gloo-race.md). If the name is written under the lock there, one_gloo_worker may go."
    )
    return 1


def _watched(seconds: float, one: bool) -> Seen:
    """How ranks ended that had so many seconds. None is left when this returns."""
    context = multiprocessing.get_context("spawn")
    rounds, begun = context.Value("q", 0), context.Value("d", 0.0)
    with tempfile.TemporaryDirectory() as home:
        given = [(number, str(Path(home, "store")), seconds, one, rounds, begun) for number in range(RANKS)]
        ranks = [context.Process(target=_rank, args=args, daemon=True) for args in given]
        try:
            for rank in ranks:
                rank.start()
            wait([rank.sentinel for rank in ranks], STARTING + seconds)
            took = time.monotonic() - begun.value if begun.value else 0.0
            for rank in ranks:
                rank.join(GRACE)
            codes = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                    rank.join()
    return _judged(codes, rounds.value, took)


def _judged(codes: list[int | None], rounds: int, seconds: float) -> Seen:
    """What the exit codes of the ranks mean; None: it did not end."""
    died = [f"rank {number} of {signal_name(-code)}" for number, code in enumerate(codes) if code and code < 0]
    wrong = [f"rank {number} failed with exit code {code}" for number, code in enumerate(codes) if code and code > 0]
    if not died:  # else the other may well wait for it
        wrong += [f"rank {number} hung" for number, code in enumerate(codes) if code is None]
    if not (rounds or died or wrong):  # a rank takes every error for the other's end
        wrong.append("no round was made")
    return Seen(rounds, seconds, died, wrong)


def _rank(number: int, store: str, seconds: float, one: bool, rounds: Any, begun: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a death is what is looked for, and needs no file
    os.environ["GLOO_LOG_LEVEL"] = "ERROR"
    stay_on_this_machine()
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    if one:
        one_gloo_worker()
    patience = timedelta(seconds=STARTING)
    dist.init_process_group("gloo", store=FileStore(store, RANKS), rank=number, world_size=RANKS, timeout=patience)
    world: Any = dist.group.WORLD
    ops, group, x = torch.ops._c10d_functional, world.group_name, torch.ones(1)
    start = time.monotonic()
    if number == 0:
        begun.value = start
    with suppress(RuntimeError):  # the other rank has ended: its time was over a little sooner, or it died
        while time.monotonic() < start + seconds:
            for gathered in [ops.all_gather_into_tensor(x, RANKS, group) for _ in range(IN_FLIGHT)]:
                ops.wait_tensor(gathered)
            if number == 0:
                rounds.value += 1
    os._exit(0)  # not by way of the group, which waits for the other rank


def _cost(model: str, layout: str) -> str:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.TemporaryDirectory() as home:
        given = [(number, str(Path(home, "store")), model, layout, found) for number in range(RANKS)]
        ranks = [context.Process(target=_steps, args=args, daemon=True) for args in given]
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(STARTING + 600)
            one, two = found.get(timeout=GRACE)
        finally:
            for rank in ranks:
                rank.kill()
    low, middle, high = statistics.quantiles([a / b for a, b in zip(one, two, strict=True)], n=4)
    medians = f"one {1e3 * statistics.median(one):.0f} ms, two {1e3 * statistics.median(two):.0f} ms"
    return f"{model} {layout}: {medians}; one/two {middle:.3f}, half of the pairs of steps {low:.2f} to {high:.2f}"


def _steps(number: int, store: str, model: str, layout: str, found: Any) -> None:
    """Each group gets a second backend, with two workers, and steps take the one and the other by turns."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from fivefold.job.preflight import preflight
    from fivefold.job.reading import read_job
    from fivefold.parallel.mesh import Mesh
    from fivefold.trainer.loop import Trainer

    torch.set_num_threads(1)
    join(World(number, RANKS, number, RANKS, joined=True, meeting=Rendezvous(file=store, alone=True)), "gloo")
    words = [f"model={model}", f"layout={layout}", "train.device=cpu", "train.eval_samples=0", "train.steps=100000"]
    job, cpu = read_job(None, words), torch.device("cpu")
    trainer = Trainer(job, preflight(job, RANKS), Mesh.of(job.layout, cpu, spec=job.model))
    gloo: Any = dist.ProcessGroupGloo
    kinds: Any = dist.ProcessGroup.BackendType
    met = PrefixStore("two", dist.distributed_c10d._get_default_store())
    groups: dict[str, Any] = {axis.group_name: axis.group for axis in trainer.mesh.axes.values() if axis.size > 1}
    backends = []
    for name, group in groups.items():
        options = gloo._Options()
        options._devices, options._threads = [gloo.create_device(interface=os.environ[GLOO_INTERFACE_ENV])], 2
        two = gloo(PrefixStore(name, met), group.rank(), group.size(), options)
        backends.append((group, (kinds.GLOO, group._get_backend(cpu)), (kinds.CUSTOM, two)))
    times: tuple[list[float], list[float]] = ([], [])
    reads = enumerate(trainer.reads(), start=1)
    for turn in range(WARM + STEPS):
        for which in (0, 1) if turn % 2 else (1, 0):
            step, read = next(reads)
            batch = read()
            dist.barrier()
            for group, *both in backends:
                group._register_backend(cpu, *both[which])
            dist.barrier()
            start = time.perf_counter()
            trainer.step(step, batch)
            trainer.done = step
            times[which].append(time.perf_counter() - start)
    if number == 0:
        found.put([some[WARM:] for some in times])
        found.close()
        found.join_thread()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
