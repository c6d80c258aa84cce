"""Which layout a job takes on the ranks that are there: its own, or the fastest that the planner finds for them.

choice = choose(job, ranks=6, per_node=8)
choice.job.layout          # dp=2,pp=3,...: the same global batch, and so the same data order and loss curve
choice.spares              # ranks that it leaves out: [4, 5]

A pure function of its arguments: under torchrun and Slurm every rank chooses for itself, and all choose the same.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from fivefold.cost.moe import imbalance_for
from fivefold.hardware.accelerators import Accelerator, find_accelerator
from fivefold.hardware.cluster import Cluster, Group
from fivefold.job.config import Job
from fivefold.launch.local import gpus_here
from fivefold.layout.layout import Layout
from fivefold.planner.explain import simplest
from fivefold.planner.plan import fixed_choices, workload_of
from fivefold.planner.search import FIXED, Option, TooLarge, search
from fivefold.support.errors import UserError

# ---- here -----------------------------------------------------------------------------------------------------------
# What a job runs on, in the planner's words: the cluster that the job names, or the devices of this machine.


def cluster_of(job: Job, nodes: int, per_node: int) -> Cluster:
    return Cluster((Group(nodes, per_node, _device(job)),))


def _device(job: Job) -> Accelerator:
    if job.run.cluster:
        (group, *others) = Cluster.read(job.run.cluster).groups
        if any(other.accelerator != group.accelerator for other in others):
            raise UserError(
                f"run.cluster={job.run.cluster} has several kinds of devices, and elastic runs re-plan for one kind"
            )
        return group.accelerator
    names = [] if job.train.device == "cpu" else gpus_here()
    if not names:
        return find_accelerator("CPU")
    try:
        return find_accelerator(names[0])
    except UserError as error:
        hint = "run.cluster, such as 8xH100, says what this machine is to be planned as"
        raise UserError(error.framed(after=f"; {hint}")) from None


# ---- choose ---------------------------------------------------------------------------------------------------------


_TRIED = 4  # numbers of ranks of which layouts are searched: with fewer ranks steps only become longer
_WORTH = 0.97  # a layout that leaves ranks out is taken if it needs less than this of another's time


@dataclass(frozen=True)
class ElasticLayout:
    job: Job  # with the layout that was chosen
    ranks: int  # that are there
    why: str
    took: float = 0.0  # seconds

    @property
    def spares(self) -> list[int]:
        return list(range(self.job.layout.world, self.ranks))

    def __str__(self) -> str:
        layout = self.job.layout
        left = f"; {_ranks(self.spares)} {'is' if len(self.spares) == 1 else 'are'} spare" if self.spares else ""
        return f"layout {layout} on {layout.world} of {self.ranks} ranks: {self.why}{left}"


def choose(job: Job, ranks: int, per_node: int) -> ElasticLayout:
    """`per_node`: of those ranks, how many share a machine. UserError if no layout within the job's bounds is left."""
    own = Layout.parse(job.elastic.whole) if job.elastic.whole else job.layout
    _check(job, own)
    if ranks == own.world:
        return ElasticLayout(msgspec.structs.replace(job, layout=own), ranks, "the job's own")
    begin = time.monotonic()
    least = job.elastic.least
    if ranks < least:
        raise UserError(
            f"{ranks} ranks are left, and elastic.least={least} asks for more; the run resumes when they are back, or "
            f"with elastic.least={ranks}"
        )
    options, problems, large = list[Option](), list[str](), 0
    for count, nodes in _sizes(ranks, per_node, least):
        try:
            options.append(_fastest(job, count, nodes))
        except UserError as error:
            problems = problems or error.coded
            large += isinstance(error, TooLarge)
        if len(options) == _TRIED or large == _TRIED:  # fewer ranks have more to hold
            break
    if not options:
        bound = f" with elastic.fixed={job.elastic.fixed!r}" if job.elastic.fixed else ""
        raise UserError(f"no layout of {job.model.name} runs on {ranks} ranks{bound}: {problems[0]}")
    best = options[0]
    for option in options[1:]:  # fewer and fewer ranks
        best = option if option.seconds < _WORTH * best.seconds else best
    noted = msgspec.structs.replace(job.elastic, whole=str(own))  # for who goes on with the directory of this run
    chosen = msgspec.structs.replace(job, layout=best.layout, elastic=noted)
    return ElasticLayout(chosen, ranks, _why(best, ranks, options), time.monotonic() - begin)


def _check(job: Job, layout: Layout) -> None:
    """What every layout keeps, the job's own has as well; and it has enough ranks."""
    if job.elastic.least > layout.world:
        raise UserError(
            f"elastic.least={job.elastic.least} is more than the {layout.world} ranks of layout {layout}; nearest: "
            f"elastic.least={layout.world}"
        )
    try:
        fixed = fixed_choices(job.elastic.fixed)
    except UserError as error:
        raise UserError(error.framed(f"elastic.fixed={job.elastic.fixed!r}: ")) from None
    own = {key: getattr(layout, key) for key in fixed if key in FIXED and key != "samples"}
    if other := [f"{key}={value}" for key, value in own.items() if fixed[key] != value]:
        raise UserError(f"elastic.fixed={job.elastic.fixed!r} is for every layout, and the job's own has {other[0]}")


def _why(best: Option, ranks: int, options: list[Option]) -> str:
    expected = f"the fastest by the plan, {_time(best)} a step"
    if best.layout.world == ranks:
        return expected
    on_all = next((option for option in options if option.layout.world == ranks), None)
    others = f"{_time(on_all)} with all of them" if on_all else "no layout uses all of them"
    return f"{expected}; {others}"


def _time(option: Option) -> str:
    return f"{option.seconds:.3g} s" if option.seconds >= 1 else f"{option.seconds * 1e3:.3g} ms"


def _sizes(ranks: int, per_node: int, least: int) -> Iterator[tuple[int, int]]:
    """How many ranks a layout may use, the most first, and of how many nodes: of several nodes, whole ones first."""
    nodes, rest = divmod(ranks, per_node)
    if nodes > 1 and not rest:
        yield from ((count * per_node, count) for count in range(nodes, 1, -1) if count * per_node >= least)
        ranks = per_node
    yield from ((count, 1) for count in range(ranks, max(1, least) - 1, -1))


def _fastest(job: Job, ranks: int, nodes: int) -> Option:
    workload = workload_of(msgspec.structs.replace(job, layout=Layout()), cluster_of(job, nodes, ranks // nodes))
    return simplest(
        search(replace(workload, imbalance=imbalance_for(workload.spec)), **fixed_choices(job.elastic.fixed)).options
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"
