"""Writes an sbatch file: one task per rank, a checkpoint before the time limit, and the job requeued until it is done.

The script relies on these facts, which were tried with Slurm 22.05:

- srun ends with the highest code of its tasks, and a task that a signal killed counts as 128 + its number. With
  --kill-on-bad-exit the first failure ends the other tasks by SIGTERM, and their 143 would hide it. So ranks end by
  themselves, and --wait ends those that cannot.
- `scancel`, a requeue by others and the time limit leave the job in state COMPLETING while its processes end. A script
  that queues itself again only in state RUNNING can be cancelled.
- srun hands SIGUSR1 on to all tasks; SIGTERM makes it end them.
- What `scontrol requeue` starts again has the same job id, the same number of its first step, and one more in
  SLURM_RESTART_COUNT: by these `train` knows its own directory.
"""

from fivefold.clusters import slurm_elastic
from fivefold.clusters.deployment import Deployment
from fivefold.clusters.environment import export_lines, rank_variables
from fivefold.clusters.options import DEFAULT_TIME_LIMIT, LaunchOptions
from fivefold.clusters.quoting import comment_lines, fill_template, quote, quote_command, quote_path
from fivefold.support.errors import UserError

ACCOUNT, PARTITION = "FILL_IN_ACCOUNT", "FILL_IN_PARTITION"
_LAST_MOMENT = 60  # seconds before the limit, or less, at which a job that has not saved is queued again as it is

_HEAD = r"""
#!/bin/bash
@TITLE@
#SBATCH --job-name=@NAME@
@NAMES@

@WHOLE@
#SBATCH --nodes=@NODES@
#SBATCH --@EACH@=@PER_NODE@
@GPUS@
#SBATCH --exclusive
#SBATCH --mem=0

@LIMIT@
#SBATCH --time=@TIME@
#SBATCH --signal=B:USR1@@NOTICE@
#SBATCH --requeue

# This script's own log, of all starts. The environment is that of the shell in which you run sbatch.
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --export=ALL

set -u
restarts=@RESTARTS@  # so many failures in a row are followed by another start
@GROW@
refuse() { echo "error: $*" >&2; exit 2; }

@PREPARE@
logs=@LOGS@/slurm-$SLURM_JOB_ID
mkdir -p -- "$logs" || refuse "cannot make $logs in $PWD"
[[ $logs = /* ]] || logs=$PWD/$logs

# Left in the shell that submits by another launcher, or by salloc, they would be taken for this job's.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT ${!TORCHELASTIC_@}
unset SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU
# Slurm hands on that shell's limits, too. InfiniBand locks memory, ranks open many sockets, and nobody reads a
# core file of each rank: they print the stack of a crash.
@LOCKED@
ulimit -n 65536 2> /dev/null || ulimit -n "$(ulimit -Hn)"
ulimit -c 0
# A rank's share of a node's cores. srun does not take it from sbatch, and would bind each rank to one core.
cpus=$((SLURM_CPUS_ON_NODE / @PER_NODE@))
[ "$cpus" -gt 0 ] || cpus=1
@EXPORTS@
"""

_TAIL = r"""
# Whether Slurm itself is ending this start: after scancel the job stays cancelled, and after the loss of a node or
# preemption Slurm queues it again. No answer means that slurmctld is busy.
ending() { ! [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) =~ ^(RUNNING)?$ ]]; }
again() {
  ending && return
  for pause in 0 10 30 60; do
    sleep "$pause"
    said=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) && return
    echo "$said"
    [[ $said != *disabled* ]] || break  # by --no-requeue, or by the site: it stays so
  done
  echo "not queued again: Slurm has refused that; to go on from the last checkpoint:" @SBATCH@
}
# srun hands USR1 on to the ranks, which finish a step, save and end with code 143. If they do not, because they hang
# or the disk is slow, the job goes on from its last periodic checkpoint; at the limit Slurm would only end it.
stop() {
  printf 'told to stop (%s) at %(%FT%T%z)T: the ranks save a checkpoint\n' "$1" -1
  kill -USR1 "${ranks:-$!}" 2> /dev/null
}
too_late() { sleep @LAST@ && echo "the ranks have not saved in time" && again; }

@LOOK@
echo "start ${SLURM_RESTART_COUNT:-0} at $(date -Is) on $SLURM_JOB_NODELIST; ranks write to $logs/rank-*.log"

# While signals may come, no $(...) outside of a subshell: bash 5.2 leaves the loop with "unexpected EOF" if a trap is
# due while it reads one.
trap 'stop "time limit"; too_late 2> /dev/null & timer=$!' USR1
trap 'stop "by Slurm"' TERM
@RANKS@
ranks=$!

# By looking once a second: bash may lose the code of a process that ends while a signal interrupts `wait`.
while kill -0 "$ranks" 2> /dev/null; do sleep 1@MORE@; done
wait "$ranks"
code=$?
trap '' USR1 TERM
[ -z "${timer:-}" ] || pkill --parent "$timer"

case $code in
  0) echo "done at $(date -Is)" ;;
  138 | 143)  # the checkpoint is saved; there was nothing to save yet; or no rank could hear yet
    rm -f "$logs/failures"
    again ;;
  2) echo "refused, as any other start@ALIKE@ would be; the reason is in $logs/rank-*.log" ;;
  130) echo "interrupted" ;;
  *)  # a rank failed (1), lost a peer (3), or was killed (128 + signal); after an hour it counts as a first failure
    ending && exit "$code"
    [ "$SECONDS" -lt 3600 ] || rm -f "$logs/failures"
    echo "start ${SLURM_RESTART_COUNT:-0} ended with code $code at $(date -Is)" >> "$logs/failures"
    failed=$(wc -l < "$logs/failures")
    echo "failed with code $code, $failed in a row; the reason is in $logs/rank-*.log"
    if [ "$failed" -le "$restarts" ]; then again; else echo "not started again: restarts=$restarts"; fi ;;
esac
exit "$code"
"""

_LOCKED_MEMORY = """\
ulimit -l unlimited 2> /dev/null || echo "note: locked memory is limited to $(ulimit -l) KiB; InfiniBand may need more"\
"""


def sbatch(deployment: Deployment, file: str, options: LaunchOptions) -> str:
    """The text of an sbatch file, whose name is `file`."""
    machines, min_nodes = deployment.machines, deployment.min_nodes
    names = {"account": (options.account, ACCOUNT), "partition": (options.partition, PARTITION)}
    notice = min(deployment.save_notice, options.time_limit // 2)  # a short limit leaves half of it to train
    start = quote_command(["sbatch"], file)
    where = f", in the directory that has {deployment.needed_file}" if deployment.needed_file else ""
    parts = {
        "TITLE": comment_lines(f"{deployment.title}.")
        + comment_lines(f"Start it: {start}{where}, in a shell that knows `fivefold`."),
        "SBATCH": quote(start),
        "NAME": deployment.safe_name,
        "NAMES": [f"#SBATCH --{key}={name or blank}" for key, (name, blank) in names.items() if name != ""],
        "WHOLE": comment_lines(
            f"Whole nodes, and a task for each rank.{' It starts on those that are free.' if min_nodes else ''}"
        ),
        "NODES": slurm_elastic.node_range(deployment),
        "GROW": slurm_elastic.growth_settings(deployment),
        "LOOK": slurm_elastic.growth_functions(deployment),
        "MORE": "; more" if min_nodes else "",
        "ALIKE": " on $SLURM_JOB_NUM_NODES nodes" if min_nodes else "",
        "EACH": slurm_elastic.node_size_option(deployment),
        "PER_NODE": machines.per_node,
        "GPUS": [f"#SBATCH --gpus-per-node={machines.per_node}"] if machines.gpus else [],
        "LIMIT": comment_lines(
            f"The ranks are told {notice} s before the time limit, and save a checkpoint "
            f"({deployment.save_estimate}). Then, and when a node is lost or the job is preempted, it is requeued "
            "and resumes from its last checkpoint."
        ),
        "TIME": options.time or DEFAULT_TIME_LIMIT,
        "NOTICE": notice,
        "RESTARTS": options.restarts,
        "PREPARE": _check_lines(deployment, options.container or ""),
        "LOGS": _log_directory(deployment),
        "LOCKED": [_LOCKED_MEMORY] if machines.gpus else [],
        "EXPORTS": export_lines(rank_variables(machines, "$cpus", "${TMPDIR:-/tmp}/fivefold-$(id -un)", "$logs")),
        "RANKS": _srun_lines(deployment, options.container or ""),
        "LAST": notice - min(_LAST_MOMENT, notice // 2),
    }
    return fill_template((_HEAD + _TAIL).lstrip(), parts)


def _check_lines(deployment: Deployment, container: str) -> list[str]:
    """Lines that check for `fivefold` and for the job file before the ranks start."""
    check_command = [
        "# Write here what makes `fivefold` known, if the shell in which you run sbatch does not know it:",
        "# module load cuda",
        "# source .venv/bin/activate",
        'command -v fivefold > /dev/null || refuse "there is no fivefold on PATH on $(hostname)"',
    ]
    file, why = (
        quote_path(deployment.needed_file),
        "in $PWD on $(hostname); run sbatch where it is, on a shared file system",
    )
    check_file = [f'[ -f {file} ] || refuse "there is no" {file} "{why}"'] if deployment.needed_file else []
    return ([] if container else check_command) + check_file


def _log_directory(deployment: Deployment) -> str:
    """The directory for logs, quoted."""
    if "\\" in deployment.log_directory:
        backslash = f"run.dir={deployment.log_directory!r} has a backslash, which srun removes from names; rename it"
        raise UserError(backslash, "launch.characters")
    return quote_path(deployment.log_directory)


def _container_mounts(deployment: Deployment) -> list[str]:
    """The paths that a container mounts, quoted."""
    if bad := [place for place in deployment.mounts if set(place) & set(":,")]:
        problem = f"{bad[0]!r} has a colon or a comma, which separate the mounts of --container; rename it"
        raise UserError(problem, "launch.characters")
    return [quote_path(place) for place in deployment.mounts]


def _srun_lines(deployment: Deployment, container: str) -> list[str]:
    """The lines that start the ranks."""
    machines = deployment.machines
    flags = [
        slurm_elastic.task_options(deployment),
        '--distribution=block --cpus-per-task="$cpus" --cpu-bind=none --mpi=none',
        "--kill-on-bad-exit=0 --wait=120",
        '--open-mode=append --output="${logs//%/%%}/rank-%t.log"',
    ]
    if container:
        mounts = ",".join(['"$PWD:$PWD"', *(f"{place}:{place}" for place in _container_mounts(deployment))])
        flags.append(f'--container-image={quote(container)} --container-workdir="$PWD"')
        flags.append(f"--container-mounts={mounts}")
    # A rank that sees a single GPU cannot know that its neighbours have their own, and takes gloo instead of NCCL.
    all_gpus = " Every rank sees all GPUs of its node, takes the one of its number, and binds itself to cores near it."
    end = "When one ends the others have 120 s to say what they know and end, too."
    return [
        *comment_lines(f"Ranks count node by node.{all_gpus if machines.gpus else ''} {end}"),
        "flags=(",
        *(f"  {line}" for line in flags),
        ")",
        "# Half a minute that reports slow or deviating nodes before the first step:",
        f'# srun "${{flags[@]}}" {deployment.rank_command("doctor")} || exit 1',
        f'srun "${{flags[@]}}" {deployment.rank_command("train")} &',
    ]
