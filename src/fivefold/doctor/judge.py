"""Which rank, node or link is the odd one: what ranks have measured, against their peers and against the planner.

    findings(examination)      # a sentence for each; none where all is well

A figure is odd if it is worse than a stated share of the median of its peers' or of what the planner expects. Of two,
neither can be called the odd one: they differ. Each sentence names ranks and nodes, both figures, and the threshold.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from statistics import median
from typing import TypeVar

from fivefold.doctor.examination import Examination, flops_text, known, rate_text, some
from fivefold.job.config import Job
from fivefold.launch.statement import short
from fivefold.plan.cost.memory import wide_bytes
from fivefold.support.formatting import bytes_text

K = TypeVar("K", bound=Hashable)
RATE = 0.7  # of matmuls: the least share of the median of the peers, and of what the planner expects
CORE = 0.5  # the same of CPUs: a core may share its units with another, which is busy or not
LINK = 0.5  # of bandwidths
DISK = 0.5
LATE = 3.0  # times the median of the peers: the longest latency
_LATER = 200e-6  # seconds that it must be longer, too
SKEW = 1.0  # seconds between clocks
_FILES = 8  # open files for each rank of the world: gloo keeps connections to all, in several groups
_SHARED = 1 << 30  # bytes of /dev/shm, through which GPUs of a node may exchange
_LOCKED = 1 << 30  # bytes of memory that RDMA may pin
_NEITHER = "of two, neither can be called the odd one"


def findings(all_: Examination) -> list[str]:
    return [
        *_versions(all_),
        *slow_ranks(all_),
        *_slow_for_the_planner(all_),
        *_gpus(all_),
        *clocks(all_),
        *_disks(all_),
        *_links(all_),
        *_limits(all_),
        *_other_cluster(all_),
        *host_ids(all_),
    ]


def host_ids(all_: Examination) -> Iterator[str]:
    told = [one for one in all_.reports if one.host_id]
    if told:
        values, where = ", ".join(dict.fromkeys(short(one.host_id) for one in told)), [one.rank for one in told]
        yield (
            f"NCCL_HOSTID is set ({values}) on {all_.who(where)}: by it NCCL tells hosts apart; ranks of a node that "
            "differ in it use neither NVLink nor shared memory, and nodes that share it are taken for one; unset it"
        )


def odd(values: Mapping[K, float], share: float) -> dict[K, float]:
    """Those below `share` of the median of the others, each with that median."""
    found = {}
    for key, value in values.items():
        peers = [other for one, other in values.items() if one != key]
        if peers and value < share * median(peers):
            found[key] = median(peers)
    return found


def slow_ranks(all_: Examination) -> Iterator[str]:
    share = CORE if all_.reports[0].cpu else RATE
    yield from _slow(all_, "matmuls", {one.rank: one.rate for one in all_.reports}, share, flops_text)


def _slow(
    all_: Examination, what: str, values: Mapping[int, float], share: float, text: Callable[[float], str]
) -> Iterator[str]:
    """Of ranks; those of a node are named together."""
    slow = odd(values, share)
    if not slow:
        return
    if len(values) == 2:
        parts = [f"{all_.who([rank])} reaches {text(value)}" for rank, value in values.items()]
        yield f"{what}: {' and '.join(parts)}; {_NEITHER}"
        return
    worst = min(slow, key=lambda rank: values[rank])
    reach = "reaches" if len(slow) == 1 else "reach as little as"
    yield (
        f"{what}: {all_.who(slow)} {reach} {text(values[worst])}, {values[worst] / slow[worst]:.0%} of the median of "
        f"the others, {text(slow[worst])} (odd below {share:.0%})"
    )


def _versions(all_: Examination) -> Iterator[str]:
    facts = {one.rank: one.versions | {"device": one.device} for one in all_.reports}
    for name in dict.fromkeys(name for mine in facts.values() for name in mine):
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, mine in facts.items():
            by_value[mine.get(name, "none")].append(rank)
        (usual, most), *others = sorted(by_value.items(), key=lambda item: -len(item[1]))
        if len(others) == 1 and len(others[0][1]) == len(most):
            parts = [f"{short(value)} on {all_.who(ranks)}" for value, ranks in by_value.items()]
            yield f"versions: {name} is {' and '.join(parts)}; neither can be called the odd one"
            continue
        for value, ranks in others:
            yield f"versions: {name} is {short(value)} on {all_.who(ranks)}, and {short(usual)} on most"


def clocks(all_: Examination) -> Iterator[str]:
    for node, (first, *_) in all_.nodes.items():
        if abs(first.ahead) - first.unsure > SKEW:
            way = "ahead of" if first.ahead > 0 else "behind"
            yield (
                f"clocks: that of node {short(node)} is {abs(first.ahead):.3f} s {way} that of rank 0 on "
                f"{short(all_.reports[0].node)} (odd above {SKEW:g} s)"
            )


def _disks(all_: Examination) -> Iterator[str]:
    found = {one.rank: one.disk for one in all_.reports if one.disk}
    for rank, disk in found.items():
        if disk.error:
            yield f"disk: run.dir={all_.job.run.dir} cannot be written on {all_.who([rank])}: {disk.error}"
    well = {rank: disk for rank, disk in found.items() if not disk.error}
    job, each = all_.job, checkpoint_bytes(all_.job)
    needed = (job.checkpoint.keep + 1) * each if job.checkpoint.save and not job.checkpoint.url else 0
    if well and (free := min(disk.free for disk in well.values())) < needed:
        yield (
            f"disk: {bytes_text(free)} are free under run.dir={job.run.dir}, and checkpoint.keep={job.checkpoint.keep} "
            f"with the one being written take {bytes_text(needed)}"
        )
    for what, way in (("writes to run.dir", "write"), ("reads from run.dir", "read")):
        yield from _slow(
            all_, f"disk: {what}", {rank: getattr(one, way) for rank, one in well.items()}, DISK, rate_text
        )


def checkpoint_bytes(job: Job) -> int:
    """Of one checkpoint: masters and the optimizer's states."""
    return job.model.parameter_count * wide_bytes(job.train.dtype) * (1 + len(job.optimizer.states))


# ---- links -----------------------------------------------------------------------------------------------------------


def _links(all_: Examination) -> Iterator[str]:
    for axis, rings in all_.rings.items():
        for what, way in (("all-reduces", "reduce"), ("all-gathers", "gather")):
            values = {tuple(ring.ranks): getattr(ring, way) for ring in rings}
            slow = odd(values, LINK)
            if slow and len(values) == 2:
                parts = [f"{rate_text(value)} among {all_.who(ranks)}" for ranks, value in values.items()]
                yield f"{axis}: {what} reach {' and '.join(parts)}; {_NEITHER}"
            elif slow:
                worst = min(slow, key=lambda ranks: values[ranks])
                yield (
                    f"{axis}: {what} among {some(list(slow), all_.who)} reach {rate_text(values[worst])}, and "
                    f"{rate_text(slow[worst])} in the median of the other groups (odd below {LINK:.0%})"
                )
        late = odd({tuple(ring.ranks): 1 / ring.latency for ring in rings}, 1 / LATE)
        for ring in rings:
            usual = 1 / late.get(tuple(ring.ranks), 1 / ring.latency)
            if len(rings) > 2 and ring.latency > usual + _LATER:
                yield (
                    f"{axis}: a small all-reduce among {all_.who(ring.ranks)} takes {1e6 * ring.latency:.0f} us, and "
                    f"{1e6 * usual:.0f} us in the median of the other groups (odd above {LATE:g} times that)"
                )
        yield from _sends(all_, axis)
        expected = all_.expected_link(axis)
        if expected and (few := [ring for ring in rings if ring.reduce < LINK * expected]):
            yield (
                f"{axis}: all-reduces among {some([ring.ranks for ring in few], all_.who)} reach "
                f"{rate_text(min(ring.reduce for ring in few))}, and the planner expects {rate_text(expected)} "
                f"(odd below {LINK:.0%})"
            )


def _sends(all_: Examination, axis: str) -> Iterator[str]:
    """Links inside nodes are compared with each other, and so are those between nodes."""
    found = {send.ranks: send.bandwidth for one in all_.reports for send in one.sends if send.axis == axis}
    node = {one.rank: one.node for one in all_.reports}
    for where in ("inside a node", "between nodes"):
        values = {
            pair: value
            for pair, value in found.items()
            if (node[pair[0]] == node[pair[1]]) == (where == "inside a node")
        }
        slow = odd(values, LINK)
        if not slow or len(values) < 3:
            continue
        # Where all links of a rank are slow, and it has several, the rank is the cause.
        bad = Counter(rank for pair in slow for rank in pair)
        guilty = [rank for rank, count in bad.items() if 1 < count == sum(rank in pair for pair in values)]
        who = f"with {all_.who(guilty)}" if guilty else f"between {some(list(slow), all_.who)}"
        worst = min(slow, key=lambda pair: values[pair])
        yield (
            f"{axis}: messages {who} reach {rate_text(values[worst])}, and {rate_text(slow[worst])} in the median of "
            f"the other links {where} (odd below {LINK:.0%})"
        )


# ---- against what is known -------------------------------------------------------------------------------------------


def _slow_for_the_planner(all_: Examination) -> Iterator[str]:
    slow: dict[float, list[int]] = defaultdict(list)
    for one in all_.reports:
        expected = all_.expected_rate(one)
        if expected and one.rate < (CORE if one.cpu else RATE) * expected:
            slow[expected].append(one.rank)
    for expected, ranks in slow.items():
        worst = min(all_.reports[rank].rate for rank in ranks)
        yield (
            f"matmuls: {all_.who(ranks)}: {flops_text(worst)} in {all_.reports[ranks[0]].precision}, and the planner "
            f"expects {flops_text(expected)} (odd below {CORE if all_.reports[0].cpu else RATE:.0%})"
        )


def _gpus(all_: Examination) -> Iterator[str]:
    for one in all_.reports:
        if one.gpu and (why := [reason for reason in one.gpu.slowed if reason != "the power limit"]):
            yield f"GPU of {all_.who([one.rank])}: its clock is held back by {' and '.join(why)}"
        if one.gpu and one.gpu.errors:
            yield f"GPU of {all_.who([one.rank])}: {one.gpu.errors} memory errors that ECC could not correct"


def _limits(all_: Examination) -> Iterator[str]:
    world = len(all_.reports)
    for node, (first, *_) in all_.nodes.items():
        files, shared = first.amounts["open files"], first.amounts.get("/dev/shm", 0)
        if files < _FILES * world:
            yield (
                f"limits: node {short(node)} allows {files:.0f} open files, and {world} ranks may want "
                f"{_FILES * world}: raise it with ulimit -n"
            )
        if "RDMA adapters" in first.versions and first.amounts["locked memory"] < _LOCKED:
            yield (
                f"limits: node {short(node)} allows {bytes_text(first.amounts['locked memory'])} of locked memory, and "
                "RDMA pins what it sends: ulimit -l unlimited, or docker run --ulimit memlock=-1"
            )
        if first.gpu and shared < _SHARED:
            yield (
                f"limits: /dev/shm of node {short(node)} has {bytes_text(shared)}, and NCCL may want "
                f"{bytes_text(_SHARED)}: in a container, --shm-size or a memory volume at /dev/shm gives it more"
            )


def _other_cluster(all_: Examination) -> Iterator[str]:
    """Machines that are not those that the job was planned for."""
    if all_.cluster is None:
        return
    here = sorted(len(ranks) for ranks in all_.nodes.values())
    if here != sorted(group.gpus for group in all_.cluster.groups for _ in range(group.nodes)):
        sizes = " or ".join(map(str, sorted(set(here))))
        yield f"cluster: planned for run.cluster={all_.job.run.cluster}, run on nodes x ranks = {len(here)} x {sizes}"
    others: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in all_.reports:
        planned, is_it = all_.planned(one), known(one.device)
        if planned and (planned.is_cpu != one.cpu or (is_it and is_it.name != planned.name)):
            others["a CPU" if one.cpu else short(one.device), planned.name].append(one.rank)
    for (device, name), ranks in others.items():
        yield (
            f"cluster: {all_.who(ranks)} {'has' if len(ranks) == 1 else 'have'} {device}, and the job was planned for "
            f"{name}"
        )
