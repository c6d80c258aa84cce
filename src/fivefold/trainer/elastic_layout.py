"""Elastic runs: the layout of a job on any number of ranks, its own or the fastest that the planner finds for them.

choice = choose(job, ranks=6, per_node=8)
choice.job.layout          # dp=2,pp=3,...: the same global batch, and so the same data order and loss curve
choice.spares              # ranks that the layout leaves out: [4, 5]

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
from fivefold.planner.option import Option
from fivefold.planner.plan import fixed_choices, workload_of
from fivefold.planner.search import FIXABLE, TooLarge, search
from fivefold.support.errors import UserError

# ---- the cluster ----------------------------------------------------------------------------------------------------
# The hardware that a job runs on, in the planner's terms: the cluster that the job names, or this machine's devices.


def cluster_of(job: Job, nodes: int, per_node: int) -> Cluster:
    return Cluster((Group(nodes, per_node, _device(job)),))


def _device(job: Job) -> Accelerator:
    if job.run.cluster:
        (group, *others) = Cluster.read(job.run.cluster).groups
        if any(other.accelerator != group.accelerator for other in others):
            raise UserError(
                f"run.cluster={job.run.cluster} has several kinds of devices, and elastic runs re-plan for one kind",
                "elastic.cluster",
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


_MAX_SIZES = 4  # how many numbers of ranks are searched: with fewer ranks steps only become longer
_SPARE_GAIN = 0.97  # a layout that leaves more ranks out must need less than this share of another's step time


@dataclass(frozen=True)
class ElasticLayout:
    job: Job  # with the layout that was chosen
    ranks: int  # available
    why: str
    search_seconds: float = 0.0

    @property
    def spares(self) -> list[int]:
        return list(range(self.job.layout.world, self.ranks))

    def __str__(self) -> str:
        layout = self.job.layout
        text = f"layout {layout} on {layout.world} of {self.ranks} ranks: {self.why}"
        if self.spares:
            text += f"; {_rank_list(self.spares)} {'is' if len(self.spares) == 1 else 'are'} spare"
        return text


def choose(job: Job, ranks: int, per_node: int) -> ElasticLayout:
    """The layout of the job on so many ranks, with `per_node` on each machine.

    Raises UserError if no layout is within `elastic.least` and `elastic.fixed`.
    """
    own = Layout.parse(job.elastic.whole) if job.elastic.whole else job.layout
    _check_settings(job, own)
    if ranks == own.world:
        return ElasticLayout(msgspec.structs.replace(job, layout=own), ranks, "the job's own")
    start = time.monotonic()
    least = job.elastic.least
    if ranks < least:
        raise UserError(
            f"{ranks} ranks are left, and elastic.least={least} asks for more; the run resumes when they are back, or "
            f"with elastic.least={ranks}",
            "elastic.left.ranks",
        )
    options, problems, too_large = list[Option](), list[str](), 0
    for count, nodes in _sizes(ranks, per_node, least):
        try:
            options.append(_fastest(job, count, nodes))
        except UserError as error:
            problems = problems or error.coded
            too_large += isinstance(error, TooLarge)
        if len(options) == _MAX_SIZES or too_large == _MAX_SIZES:  # on fewer ranks each holds more
            break
    if not options:
        condition = f" with elastic.fixed={job.elastic.fixed!r}" if job.elastic.fixed else ""
        raise UserError(
            f"no layout of {job.model.name} runs on {ranks} ranks{condition}: {problems[0]}", "elastic.left.layout"
        )
    best = options[0]
    for option in options[1:]:  # in order of fewer ranks
        if option.seconds < _SPARE_GAIN * best.seconds:
            best = option
    elastic = msgspec.structs.replace(job.elastic, whole=str(own))  # kept for later starts in the run's directory
    elastic_job = msgspec.structs.replace(job, layout=best.layout, elastic=elastic)
    return ElasticLayout(elastic_job, ranks, _why(best, ranks, options), time.monotonic() - start)


def _check_settings(job: Job, layout: Layout) -> None:
    """Raises UserError unless the job's own layout has `elastic.least` ranks and the values of `elastic.fixed`."""
    if job.elastic.least > layout.world:
        raise UserError(
            f"elastic.least={job.elastic.least} is more than the {layout.world} ranks of layout {layout}; nearest: "
            f"elastic.least={layout.world}",
            "elastic.least.ranks",
        )
    try:
        fixed = fixed_choices(job.elastic.fixed)
    except UserError as error:
        raise UserError(error.framed(f"elastic.fixed={job.elastic.fixed!r}: ")) from None
    own = {key: getattr(layout, key) for key in fixed if key in FIXABLE and key != "samples"}
    if conflicts := [f"{key}={value}" for key, value in own.items() if fixed[key] != value]:
        raise UserError(
            f"elastic.fixed={job.elastic.fixed!r} is for every layout, and the job's own has {conflicts[0]}",
            "elastic.fixed.layout",
        )


def _why(best: Option, ranks: int, options: list[Option]) -> str:
    reason = f"the fastest by the plan, {_step_time(best)} a step"
    if best.layout.world == ranks:
        return reason
    on_all = next((option for option in options if option.layout.world == ranks), None)
    if on_all is None:
        return f"{reason}; no layout uses all of them"
    return f"{reason}; {_step_time(on_all)} with all of them"


def _step_time(option: Option) -> str:
    return f"{option.seconds:.3g} s" if option.seconds >= 1 else f"{option.seconds * 1e3:.3g} ms"


def _sizes(ranks: int, per_node: int, least: int) -> Iterator[tuple[int, int]]:
    """(ranks, nodes) that a layout may use, the most ranks first: whole nodes, then some ranks of one node."""
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


def _rank_list(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"
