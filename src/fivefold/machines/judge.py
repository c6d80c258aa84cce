"""Finds outliers among ranks, nodes and links: compares what ranks measured with their peers and with the planner.

    findings(examination)      # a sentence for each outlier

A figure is an outlier if it is below a stated share of the median of its peers, or of what the planner expects. Where
only two differ, the outlier cannot be determined. Each sentence names ranks and nodes, both figures, and the threshold.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TypeVar

import msgspec

from fivefold.cost.collective_time import Topology
from fivefold.cost.kernels import Device
from fivefold.cost.model_state import checkpoint_bytes
from fivefold.hardware.accelerators import Accelerator, find_accelerator
from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.launch.handshake import ranks_text, short
from fivefold.support.errors import UserError
from fivefold.support.text import bytes_text

# ---- reports --------------------------------------------------------------------------------------------------------
# The measurements of one rank: its own, those of its node and of its links. Ranks send them to rank 0.


class Disk(msgspec.Struct, frozen=True):
    """The disk of run.dir, measured by the first rank of each node, all at once."""

    write: float = 0.0  # bytes/s, until they are on the disk
    read: float = 0.0  # bytes/s
    sync: float = 0.0  # seconds until a small file is on the disk
    free: int = 0  # bytes
    error: str = ""  # why it could not be written


class Gpu(msgspec.Struct, frozen=True):
    """A GPU's state as its driver reports it, right after the matmuls."""

    clock: int  # MHz
    most: int  # MHz: the highest it may have
    temperature: int  # Celsius
    power: float  # W
    limit: float  # W
    slowed: list[str]  # why the driver holds the clock back
    errors: int  # ECC errors that were not corrected, since the driver was loaded


class RingReport(msgspec.Struct, frozen=True):
    """Collectives of one group of an axis, measured in all groups of the axis at once."""

    axis: str
    ranks: list[int]
    latency: float  # seconds of the smallest all-reduce
    reduce: float  # bytes/s that a rank passes on in the largest all-reduce
    gather: float  # bytes/s that a rank passes on in the largest all-gather
    seconds: list[tuple[str, int, float]]  # all timings: kind, payload in bytes, seconds


class Send(msgspec.Struct, frozen=True):
    """A large message from one rank of a group to the next, and back."""

    axis: str
    ranks: tuple[int, int]
    bandwidth: float  # bytes/s


class RankReport(msgspec.Struct, frozen=True):
    rank: int
    node: str
    cpu: bool  # the device is a CPU
    device: str
    precision: str  # of the matmuls, as the planner names it
    rate: float  # FLOP/s
    versions: dict[str, str]
    amounts: dict[str, float]  # memory, cores and limits (`node.amounts`), of the node or of this rank's share of it
    ahead: float = 0.0  # seconds by which its node's clock is ahead of rank 0's
    unsure: float = 0.0  # seconds by which that may be wrong
    disk: Disk | None = None
    gpu: Gpu | None = None
    gpu_id: str = ""  # the GPU's UUID: ranks that have the same one share it
    host_id: str = ""  # NCCL_HOSTID, unless our launcher has set it for ranks that share a GPU
    rings: list[RingReport] = []  # of the groups whose first rank it is
    sends: list[Send] = []  # from it


# ---- examination ----------------------------------------------------------------------------------------------------
# The reports of all ranks, sorted by node and by axis, with what the planner expects of them.


T = TypeVar("T")
_MAX_LISTED = 4  # nodes, or groups, in one sentence


@dataclass(frozen=True)
class Examination:
    job: Job
    reports: Sequence[RankReport]  # in the order of their ranks

    @cached_property
    def nodes(self) -> dict[str, list[RankReport]]:
        """The ranks of each node."""
        nodes: dict[str, list[RankReport]] = defaultdict(list)
        for report in self.reports:
            nodes[report.node].append(report)
        return dict(nodes)

    @cached_property
    def rings(self) -> dict[str, list[RingReport]]:
        """The groups of each axis."""
        rings: dict[str, list[RingReport]] = defaultdict(list)
        for report in self.reports:
            for ring in report.rings:
                rings[ring.axis].append(ring)
        return dict(rings)

    @cached_property
    def cluster(self) -> Cluster | None:
        return Cluster.read(self.job.run.cluster) if self.job.run.cluster else None

    @cached_property
    def sharing(self) -> list[int]:
        """The ranks that share a GPU with another rank."""
        count = Counter((report.node, report.gpu_id) for report in self.reports if report.gpu_id)
        return [report.rank for report in self.reports if count[report.node, report.gpu_id] > 1]

    def located(self, ranks: Iterable[int]) -> str:
        """The ranks and their nodes as text: 'node b (ranks 2, 3)' for all ranks of a node, else 'rank 3 on b'."""
        wanted, parts = set(ranks), []
        for node, reports in self.nodes.items():
            on_node = [report.rank for report in reports if report.rank in wanted]
            if on_node and len(on_node) == len(reports) and len(self.nodes) > 1:
                parts.append(f"node {short(node)} ({ranks_text(on_node)})")
            elif on_node:
                parts.append(f"{ranks_text(on_node)} on {short(node)}")
        return listed(parts, str)

    def accelerator(self, report: RankReport) -> Accelerator | None:
        """The planner's accelerator for a rank's device, to compare the rank with; None where there is none: ranks that
        share a GPU, a CPU that `fivefold calibrate` has not measured, a CPU where a GPU was planned or vice versa."""
        if report.rank in self.sharing:
            return None
        if self.cluster is None:
            return known(report.device)
        planned = self.planned(report)
        if planned is None or planned.is_cpu != report.cpu:
            return None
        return None if planned.is_cpu and planned.achieved is None else planned

    def planned(self, report: RankReport) -> Accelerator | None:
        """The accelerator that run.cluster has for a rank."""
        groups = self.cluster.groups if self.cluster else ()
        by_rank = [group.accelerator for group in groups for _ in range(group.world)]
        return by_rank[report.rank] if report.rank < len(by_rank) else None

    def expected_rate(self, report: RankReport) -> float | None:
        """FLOP/s of large matmuls, as the planner counts them."""
        accelerator = self.accelerator(report)
        try:
            return Device.of(accelerator).rate(report.precision) if accelerator else None
        except UserError:  # a device without that precision
            return None

    def expected_link(self, axis: str) -> float | None:
        """Bytes/s that a rank passes on in a large collective, as the planner counts them."""
        accelerator = self.accelerator(self.reports[0])
        if accelerator is None:
            return None
        return Topology(Device.of(accelerator), max(map(len, self.nodes.values())), self.job.layout).bandwidth(axis)


def known(device: str) -> Accelerator | None:
    """The catalogue's entry of a device, by torch's name for it; None if it has none."""
    try:
        return find_accelerator(device)
    except UserError:
        return None


def listed(things: Sequence[T], text: Callable[[T], str]) -> str:
    """The first few things as text, and how many more there are."""
    more = f" and {len(things) - _MAX_LISTED} more" if len(things) > _MAX_LISTED else ""
    return ", ".join(map(text, things[:_MAX_LISTED])) + more


def rate_text(value: float) -> str:
    """Bytes per second as text: 1.5e9 -> '1.5 GB/s'."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "GB/s"), (1e6, "MB/s")) if value >= size), (1e3, "kB/s"))
    return f"{value / size:.3g} {unit}"


def flops_text(value: float) -> str:
    """FLOPs per second as text: 9.9e14 -> '990 TFLOP/s'."""
    size, unit = (1e12, "T") if value >= 1e12 else (1e9, "G")
    return f"{value / size:.3g} {unit}FLOP/s"


# ---- judge ----------------------------------------------------------------------------------------------------------


K = TypeVar("K", bound=Hashable)
# A figure below this share of the median of its peers, or of what the planner expects, is an outlier.
MIN_GPU_RATE = 0.7  # FLOP/s of matmuls on a GPU
MIN_CORE_RATE = (
    0.5  # FLOP/s of matmuls on a CPU: two hyperthreads share the units of a core, and one of them may be idle
)
MIN_LINK = 0.5  # bandwidth
MIN_DISK_RATE = 0.5  # bandwidth of the disk
MAX_DELAY = 3.0  # times the median of its peers; above it a latency is an outlier
_MIN_EXTRA_LATENCY_S = 200e-6  # if it is also longer by this
MAX_CLOCK_SKEW_S = 1.0
_FILES_PER_RANK = 8  # open files for each rank of the world: gloo keeps connections to all ranks, in several groups
_MIN_SHM_BYTES = 1 << 30  # of /dev/shm, through which GPUs of a node may exchange
_MIN_LOCKED_BYTES = 1 << 30  # of memory that RDMA may pin
_TWO_PEERS_SENTENCE = "with only two, the outlier cannot be determined"


def findings(exam: Examination) -> list[str]:
    """A sentence for each outlier."""
    return [
        *_versions(exam),
        *slow_ranks(exam),
        *_slow_for_the_planner(exam),
        *_gpus(exam),
        *clocks(exam),
        *_disks(exam),
        *_links(exam),
        *_limits(exam),
        *_other_cluster(exam),
        *host_ids(exam),
    ]


def host_ids(exam: Examination) -> Iterator[str]:
    reports = [report for report in exam.reports if report.host_id]
    if reports:
        values, ranks = ", ".join(dict.fromkeys(short(r.host_id) for r in reports)), [r.rank for r in reports]
        yield (
            f"NCCL_HOSTID is set ({values}) on {exam.located(ranks)}: by it NCCL tells hosts apart; ranks of a node "
            "that differ in it use neither NVLink nor shared memory, and nodes that share it are taken for one; unset "
            "it"
        )


def below_peers(values: Mapping[K, float], share: float) -> dict[K, float]:
    """Returns {key: median of the other values} for each value below `share` of that median."""
    medians = {}
    for key, value in values.items():
        peers = [peer_value for peer, peer_value in values.items() if peer != key]
        if peers and value < share * median(peers):
            medians[key] = median(peers)
    return medians


def slow_ranks(exam: Examination) -> Iterator[str]:
    rates = {report.rank: report.rate for report in exam.reports}
    yield from _slow_ranks(exam, "matmuls", rates, _min_rate(exam), flops_text)


def _min_rate(exam: Examination) -> float:
    return MIN_CORE_RATE if exam.reports[0].cpu else MIN_GPU_RATE


def _slow_ranks(
    exam: Examination, what: str, values: Mapping[int, float], share: float, text: Callable[[float], str]
) -> Iterator[str]:
    """A sentence about the ranks whose values are outliers, by node."""
    medians = below_peers(values, share)
    if not medians:
        return
    if len(values) == 2:
        parts = [f"{exam.located([rank])} reaches {text(value)}" for rank, value in values.items()]
        yield f"{what}: {' and '.join(parts)}; {_TWO_PEERS_SENTENCE}"
        return
    slowest = min(medians, key=lambda rank: values[rank])
    value, middle = values[slowest], medians[slowest]
    reach = "reaches" if len(medians) == 1 else "reach as little as"
    yield (
        f"{what}: {exam.located(medians)} {reach} {text(value)}, {value / middle:.0%} of the median of the others, "
        f"{text(middle)} (outlier below {share:.0%})"
    )


def _versions(exam: Examination) -> Iterator[str]:
    versions = {report.rank: report.versions | {"device": report.device} for report in exam.reports}
    for name in dict.fromkeys(name for of_rank in versions.values() for name in of_rank):
        ranks_by_version: dict[str, list[int]] = defaultdict(list)
        for rank, of_rank in versions.items():
            ranks_by_version[of_rank.get(name, "none")].append(rank)
        (usual, usual_ranks), *others = sorted(ranks_by_version.items(), key=lambda item: -len(item[1]))
        if len(others) == 1 and len(others[0][1]) == len(usual_ranks):
            parts = [f"{short(version)} on {exam.located(ranks)}" for version, ranks in ranks_by_version.items()]
            yield f"versions: {name} is {' and '.join(parts)}; with two equal groups, the outlier cannot be determined"
            continue
        for version, ranks in others:
            yield f"versions: {name} is {short(version)} on {exam.located(ranks)}, and {short(usual)} on most"


def clocks(exam: Examination) -> Iterator[str]:
    for node, (first, *_) in exam.nodes.items():
        if abs(first.ahead) - first.unsure > MAX_CLOCK_SKEW_S:
            where = "ahead of" if first.ahead > 0 else "behind"
            yield (
                f"clocks: that of node {short(node)} is {abs(first.ahead):.3f} s {where} that of rank 0 on "
                f"{short(exam.reports[0].node)} (outlier above {MAX_CLOCK_SKEW_S:g} s)"
            )


def _disks(exam: Examination) -> Iterator[str]:
    disks = {report.rank: report.disk for report in exam.reports if report.disk}
    for rank, disk in disks.items():
        if disk.error:
            yield f"disk: run.dir={exam.job.run.dir} cannot be written on {exam.located([rank])}: {disk.error}"
    writable = {rank: disk for rank, disk in disks.items() if not disk.error}
    job = exam.job
    checkpoint = checkpoint_bytes(job.model, job.train.dtype, job.optimizer)
    needed = (job.checkpoint.keep + 1) * checkpoint if job.checkpoint.save and not job.checkpoint.url else 0
    if writable and (free := min(disk.free for disk in writable.values())) < needed:
        yield (
            f"disk: {bytes_text(free)} are free under run.dir={job.run.dir}, and checkpoint.keep={job.checkpoint.keep} "
            f"with the one being written take {bytes_text(needed)}"
        )
    writes = {rank: disk.write for rank, disk in writable.items()}
    reads = {rank: disk.read for rank, disk in writable.items()}
    yield from _slow_ranks(exam, "disk: writes to run.dir", writes, MIN_DISK_RATE, rate_text)
    yield from _slow_ranks(exam, "disk: reads from run.dir", reads, MIN_DISK_RATE, rate_text)


# ---- links -----------------------------------------------------------------------------------------------------------


def _links(exam: Examination) -> Iterator[str]:
    for axis, rings in exam.rings.items():
        for what, field in (("all-reduces", "reduce"), ("all-gathers", "gather")):
            values = {tuple(ring.ranks): getattr(ring, field) for ring in rings}
            medians = below_peers(values, MIN_LINK)
            if medians and len(values) == 2:
                parts = [f"{rate_text(value)} among {exam.located(ranks)}" for ranks, value in values.items()]
                yield f"{axis}: {what} reach {' and '.join(parts)}; {_TWO_PEERS_SENTENCE}"
            elif medians:
                slowest = min(medians, key=lambda ranks: values[ranks])
                yield (
                    f"{axis}: {what} among {listed(list(medians), exam.located)} reach {rate_text(values[slowest])}, "
                    f"and {rate_text(medians[slowest])} in the median of the other groups "
                    f"(outlier below {MIN_LINK:.0%})"
                )
        frequencies = {tuple(ring.ranks): 1 / ring.latency for ring in rings}  # a long latency is a low one
        medians = below_peers(frequencies, 1 / MAX_DELAY)
        for ring in rings:
            usual = 1 / medians.get(tuple(ring.ranks), 1 / ring.latency)
            if len(rings) > 2 and ring.latency > usual + _MIN_EXTRA_LATENCY_S:
                yield (
                    f"{axis}: a small all-reduce among {exam.located(ring.ranks)} takes {1e6 * ring.latency:.0f} us, "
                    f"and {1e6 * usual:.0f} us in the median of the other groups "
                    f"(outlier above {MAX_DELAY:g} times that)"
                )
        yield from _sends(exam, axis)
        expected = exam.expected_link(axis)
        if expected and (slow := [ring for ring in rings if ring.reduce < MIN_LINK * expected]):
            yield (
                f"{axis}: all-reduces among {listed([ring.ranks for ring in slow], exam.located)} reach "
                f"{rate_text(min(ring.reduce for ring in slow))}, and the planner expects {rate_text(expected)} "
                f"(outlier below {MIN_LINK:.0%})"
            )


def _sends(exam: Examination, axis: str) -> Iterator[str]:
    """Slow messages of an axis. Links inside nodes are compared with each other, and so are those between nodes."""
    bandwidths = {send.ranks: send.bandwidth for report in exam.reports for send in report.sends if send.axis == axis}
    node = {report.rank: report.node for report in exam.reports}
    for where in ("inside a node", "between nodes"):
        values = {
            pair: value
            for pair, value in bandwidths.items()
            if (node[pair[0]] == node[pair[1]]) == (where == "inside a node")
        }
        medians = below_peers(values, MIN_LINK)
        if not medians or len(values) < 3:
            continue
        # Where all links of a rank are slow, and it has several, the rank is the cause.
        slow_links = Counter(rank for pair in medians for rank in pair)
        guilty = [rank for rank, count in slow_links.items() if 1 < count == sum(rank in pair for pair in values)]
        who = f"with {exam.located(guilty)}" if guilty else f"between {listed(list(medians), exam.located)}"
        slowest = min(medians, key=lambda pair: values[pair])
        yield (
            f"{axis}: messages {who} reach {rate_text(values[slowest])}, and {rate_text(medians[slowest])} in the "
            f"median of the other links {where} (outlier below {MIN_LINK:.0%})"
        )


# ---- against the plan, the driver and the limits ---------------------------------------------------------------------


def _slow_for_the_planner(exam: Examination) -> Iterator[str]:
    ranks_by_expected: dict[float, list[int]] = defaultdict(list)
    for report in exam.reports:
        expected = exam.expected_rate(report)
        if expected and report.rate < (MIN_CORE_RATE if report.cpu else MIN_GPU_RATE) * expected:
            ranks_by_expected[expected].append(report.rank)
    for expected, ranks in ranks_by_expected.items():
        slowest = min(exam.reports[rank].rate for rank in ranks)
        yield (
            f"matmuls: {exam.located(ranks)}: {flops_text(slowest)} in {exam.reports[ranks[0]].precision}, and the "
            f"planner expects {flops_text(expected)} (outlier below {_min_rate(exam):.0%})"
        )


def _gpus(exam: Examination) -> Iterator[str]:
    for report in exam.reports:
        if report.gpu and (reasons := [reason for reason in report.gpu.slowed if reason != "the power limit"]):
            yield f"GPU of {exam.located([report.rank])}: its clock is held back by {' and '.join(reasons)}"
        if report.gpu and report.gpu.errors:
            yield f"GPU of {exam.located([report.rank])}: {report.gpu.errors} memory errors that ECC could not correct"


def _limits(exam: Examination) -> Iterator[str]:
    world = len(exam.reports)
    for node, (first, *_) in exam.nodes.items():
        files, shared = first.amounts["open files"], first.amounts.get("/dev/shm", 0)
        if files < _FILES_PER_RANK * world:
            yield (
                f"limits: node {short(node)} allows {files:.0f} open files, and {world} ranks may want "
                f"{_FILES_PER_RANK * world}: raise it with ulimit -n"
            )
        if "RDMA adapters" in first.versions and first.amounts["locked memory"] < _MIN_LOCKED_BYTES:
            yield (
                f"limits: node {short(node)} allows {bytes_text(first.amounts['locked memory'])} of locked memory, and "
                "RDMA pins what it sends: ulimit -l unlimited, or docker run --ulimit memlock=-1"
            )
        if first.gpu and shared < _MIN_SHM_BYTES:
            yield (
                f"limits: /dev/shm of node {short(node)} has {bytes_text(shared)}, and NCCL may want "
                f"{bytes_text(_MIN_SHM_BYTES)}: in a container, --shm-size or a memory volume at /dev/shm gives it more"
            )


def _other_cluster(exam: Examination) -> Iterator[str]:
    """Machines other than those that the job was planned for."""
    if exam.cluster is None:
        return
    sizes_here = sorted(len(ranks) for ranks in exam.nodes.values())
    if sizes_here != sorted(group.gpus for group in exam.cluster.groups for _ in range(group.nodes)):
        sizes = " or ".join(map(str, sorted(set(sizes_here))))
        nodes = f"nodes x ranks = {len(sizes_here)} x {sizes}"
        yield f"cluster: planned for run.cluster={exam.job.run.cluster}, run on {nodes}"
    ranks_by_devices: dict[tuple[str, str], list[int]] = defaultdict(list)  # by the actual and the planned device
    for report in exam.reports:
        planned, actual = exam.planned(report), known(report.device)
        if planned and (planned.is_cpu != report.cpu or (actual and actual.name != planned.name)):
            device = "a CPU" if report.cpu else short(report.device)
            ranks_by_devices[device, planned.name].append(report.rank)
    for (device, planned_name), ranks in ranks_by_devices.items():
        yield (
            f"cluster: {exam.located(ranks)} {'has' if len(ranks) == 1 else 'have'} {device}, and the job was planned "
            f"for {planned_name}"
        )
