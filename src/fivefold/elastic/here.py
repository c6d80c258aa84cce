"""What a job runs on, in the planner's words: the cluster that the job names, or the devices of this machine."""

from fivefold.hardware.accelerators import Accelerator, find_accelerator
from fivefold.hardware.cluster import Cluster, Group
from fivefold.job.config import Job
from fivefold.launch.roster import gpus_here
from fivefold.support.errors import UserError


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
        raise UserError(
            f"{problem}; run.cluster, such as 8xH100, says what this machine is to be planned as"
            for problem in error.problems
        ) from None
