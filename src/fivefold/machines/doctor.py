"""`fivefold doctor`: every rank of a job measures its device, its links and its node, and outliers are reported."""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from fivefold.clusters.torchrun import HOST, PORT
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.job.preflight import run_directory_problems
from fivefold.job.reading import read_job
from fivefold.launch import processes
from fivefold.launch.handshake import ranks_text
from fivefold.launch.host import cores
from fivefold.launch.world import World
from fivefold.machines.judge import Examination, findings, flops_text, rate_text
from fivefold.render.blocks import Block, Result, Row, Table, Text
from fivefold.support.errors import UserError
from fivefold.support.parsing import path_of
from fivefold.support.text import bytes_text, plural

# ---- result ---------------------------------------------------------------------------------------------------------
# An examination as tables, and as sentences about its outliers.


_SHOWN = 16  # rows of a table


@dataclass(frozen=True)
class DoctorResult(Result):
    exam: Examination
    seconds: float

    @cached_property
    def findings(self) -> list[str]:
        return findings(self.exam)

    @property
    def ok(self) -> bool:  # type: ignore[override]
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "findings": self.findings,
            "seconds": self.seconds,
            "layout": str(self.exam.job.layout),
            "expected": {
                "matmul": [self.exam.expected_rate(report) for report in self.exam.reports],
                "links": {axis: self.exam.expected_link(axis) for axis in self.exam.rings},
            },
            "ranks": [_finite(msgspec.to_builtins(report)) for report in self.exam.reports],
        }

    def blocks(self) -> Iterator[Block]:
        nodes, ranks = self.exam.nodes, self.exam.reports
        yield Text(f"{plural(len(ranks), 'rank')} on {plural(len(nodes), 'node')}, {self.exam.job.layout}", "bold")
        versions = {name: version for report in ranks for name, version in report.versions.items()}
        yield Text(", ".join(f"{name} {version}" for name, version in versions.items()), "dim")
        if shared := self.exam.sharing:
            yield Text(
                f"{self.exam.located(shared)} share a GPU: compared with each other, not with the planner", "dim"
            )
        yield self._devices()
        yield self._limits()
        if any(report.disk and not report.disk.error for report in ranks):
            yield self._disks()
        if any(report.gpu for report in ranks):
            yield self._gpus()
        if self.exam.rings:
            yield self._axes()
        for sentence in self.findings:
            yield Text(sentence, "bad")
        verdict = f"{plural(len(self.findings), 'outlier')} found"
        yield Text(f"{verdict if self.findings else 'all is well'}; {self.seconds:.0f} s", "" if self.ok else "bold")

    def _devices(self) -> Table:
        rows = []
        for node, ranks in self.exam.nodes.items():
            rates, first = [report.rate for report in ranks], ranks[0]
            expected = self.exam.expected_rate(first)
            rows.append([
                node, ranks_text([report.rank for report in ranks]).split(" ", 1)[1], first.device,
                flops_text(min(rates)), flops_text(max(rates)), f"{min(rates) / expected:.0%}" if expected else "-",
                "rank 0" if first is self.exam.reports[0] else f"{1e3 * first.ahead:+.1f} ms",
            ])  # fmt: skip
        heads = ["node", "~ranks", "~device", ">slowest rank", ">fastest", ">of plan", ">clock"]
        return _table(heads, rows, f"matmuls in {self.exam.reports[0].precision}")

    def _limits(self) -> Table:
        rows = []
        for node, (first, *_) in self.exam.nodes.items():
            amounts = first.amounts
            rows.append([
                node, bytes_text(amounts["memory"]), f"{amounts['cores']:.0f}",
                _limit_text(amounts["open files"], "{:.0f}".format),
                _limit_text(amounts["locked memory"], bytes_text), bytes_text(amounts.get("/dev/shm", 0)),
            ])  # fmt: skip
        return _table(["node", ">memory free", ">cores", ">open files", ">locked memory", ">/dev/shm"], rows)

    def _disks(self) -> Table:
        disks = {report.node: report.disk for report in self.exam.reports if report.disk and not report.disk.error}
        rows = [
            [node, rate_text(disk.write), rate_text(disk.read), f"{1e3 * disk.sync:.1f} ms", bytes_text(disk.free)]
            for node, disk in disks.items()
        ]
        return _table(["node", ">disk write", ">read", ">fsync", ">free"], rows, "of run.dir, all nodes at once")

    def _gpus(self) -> Table:
        rows = [
            [str(report.rank), report.node, f"{gpu.clock} of {gpu.most} MHz", f"{gpu.temperature} C",
             f"{gpu.power:.0f} of {gpu.limit:.0f} W", ", ".join(gpu.slowed) or "-", str(gpu.errors)]
            for report in self.exam.reports if (gpu := report.gpu)
        ]  # fmt: skip
        return _table([">rank", "node", ">clock", ">heat", ">power", "~held back by", ">ECC errors"], rows)

    def _axes(self) -> Table:
        rows = []
        sends = [send for report in self.exam.reports for send in report.sends]
        for axis, rings in self.exam.rings.items():
            expected = self.exam.expected_link(axis)
            for ring in sorted(rings, key=lambda ring: ring.reduce):
                members = set(ring.ranks)
                own = [send.bandwidth for send in sends if send.axis == axis and members.issuperset(send.ranks)]
                rows.append([
                    axis, self.exam.located(ring.ranks), f"{1e6 * ring.latency:.0f} us", rate_text(ring.reduce),
                    rate_text(ring.gather), rate_text(min(own)) if own else "-",
                    rate_text(expected) if expected else "-",
                ])  # fmt: skip
        heads = ["axis", "~group", ">latency", ">all-reduce", ">all-gather", ">send", ">planner"]
        return _table(heads, rows, "what a rank passes on; of each axis the slowest group first")


def _table(heads: Sequence[str], rows: Sequence[Row], caption: str = "") -> Table:
    more = f"{len(rows) - _SHOWN} more rows are in --json" if len(rows) > _SHOWN else ""
    return Table(heads, rows[:_SHOWN], caption="; ".join(filter(None, (caption, more))))


def _limit_text(value: float, text: Callable[[float], str]) -> str:
    return "no limit" if value == inf else text(value)


def _finite(value: Any) -> Any:
    """The value with None for infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if value == inf else value


# ---- doctor ---------------------------------------------------------------------------------------------------------


_LONGEST = 300.0  # seconds for ranks of this machine
_CROWD = 4  # ranks on a core: a job with more is meant for other machines
_FEW = 8  # ranks that any machine may start


def doctor(
    job: str | Path | Job | None = None, changes: Sequence[str] = (), *, nproc: int | None = None
) -> DoctorResult:
    """Examine this machine with `nproc` ranks of a `job` with `changes` (default: as many as its layout has).

        >>> len(ff.doctor(None, ["layout=dp=2"]).exam.reports)
        2

    Every rank measures matmuls in the job's dtype and collectives along each axis of its layout; the node's disk,
    limits, clock and versions are looked at, too. No data is read, and nothing is trained.
    """
    resolved = job if isinstance(job, Job) else read_job(job and str(job), list(changes))
    if isinstance(job, Job) and changes:
        raise UserError(
            f"{changes[0]!r} changes a job that is given as an object; change the object instead", "change.object"
        )
    words = ["JOB"] if isinstance(job, Job) else [*([str(job)] if job else []), *changes]
    return examine_here(resolved, nproc, words)


def examine_here(job: Job, nproc: int | None, words: Sequence[str]) -> DoctorResult:
    """Examine this machine; `words` name the job in a command line."""
    size = job.layout.world if nproc is None else nproc
    check(job, size)
    if nproc is None and (sentence := _elsewhere(job, shlex.join(words))):
        raise UserError(sentence, "doctor.elsewhere")
    start = time.monotonic()
    table = msgspec.to_builtins(job)
    reports = processes.run(size, "fivefold.machines.examine:local_rank_report", table, timeout=_LONGEST)
    return DoctorResult(Examination(job, reports), time.monotonic() - start)


def examine_launched_ranks(job: Job, world: World) -> DoctorResult | None:
    """Examine the machines of the ranks that another launcher has started, of which this process is one. Returns the
    result on rank 0, None on the others."""
    check(job, world.size)
    from fivefold.machines.examine import launched_rank_reports

    start = time.monotonic()
    reports = launched_rank_reports(job, world)
    return DoctorResult(Examination(job, reports), time.monotonic() - start) if reports else None


def check(job: Job, world: int) -> None:
    """Refuse a job that cannot run on so many ranks. Its data may be missing."""
    problems = job.problems(world)
    try:
        problems += run_directory_problems(path_of(job.run.dir))
        if job.run.cluster:
            Cluster.read(job.run.cluster)
    except UserError as error:
        problems += error.coded
    if problems:
        raise UserError(problems)


def _elsewhere(job: Job, words: str) -> str:
    """Why the ranks of a job should not all be started on this machine, and the commands that start them on theirs;
    empty if this machine may start them."""
    world, cluster = job.layout.world, Cluster.read(job.run.cluster) if job.run.cluster else None
    if cluster and cluster.nodes > 1 and world > max(group.gpus for group in cluster.groups):
        why = f"they are those of {cluster.nodes} nodes, run.cluster={job.run.cluster}"
    elif world > max(_FEW, _CROWD * cores()):
        why = f"this machine has {plural(cores(), 'core')}"
    else:
        return ""
    commands = [f"srun -n{world} fivefold doctor {words}"]
    if cluster and cluster.world == world and len({group.gpus for group in cluster.groups}) == 1:
        nodes, per_node = cluster.nodes, cluster.groups[0].gpus
        rendezvous = f" --rdzv-backend=c10d --rdzv-endpoint={HOST}:{PORT}" if nodes > 1 else ""
        commands = [
            f"srun -N{nodes} --ntasks-per-node={per_node} fivefold doctor {words}",
            f"on each node torchrun --nnodes={nodes} --nproc-per-node={per_node}{rendezvous} "
            f"-m fivefold doctor {words}",
        ]
    return (
        f"{world} ranks are too many for this machine alone: {why}; start it where the job will run: "
        f"{', or '.join(commands)} (--nproc {world} starts all of them here)"
    )
