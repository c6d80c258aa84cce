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

import re
from collections.abc import Mapping

from fivefold.clusters.deployment import USUAL_TIME, Deployment, Options, exports, variables
from fivefold.clusters.quoting import command, comment, path, word
from fivefold.support.errors import UserError

# ---- growing --------------------------------------------------------------------------------------------------------
# Parts of the sbatch file of an elastic job: how it starts with fewer nodes, and gets those back that it lacks.
#
# They rely on these facts, which were tried with Slurm 22.05:
#
# - A job that asks for `--nodes=2-3` gets as many of them as are free, also when it is queued again: after the loss of
#   a node Slurm does that itself (`--requeue`). `--no-kill` would keep the other nodes, and is not used: if the lost
#   node runs the script, Slurm ends the job (FAILED, JobLaunchFailure) and never queues it again.
# - With `--ntasks-per-node` Slurm counts the tasks when a job starts, and a job that is queued again needs as many: it
#   would wait for the nodes that it has lost. So the job asks for nodes and their cores, and srun for tasks.
# - Slurm adds no node to a job that runs, so one that is to grow is queued again.
# - `sbatch --test-only` says when Slurm would start a job, by the same rules as it starts one.


_EVERY = 600  # seconds: being queued again costs two minutes (Slurm's cred_expire), a start and a load

_SETTINGS = """
most=@MOST@  # nodes; as many of them as are free, and at least @LEAST@
grow=@EVERY@  # seconds between looks for those that it lacks; 0: it does not grow
"""

_LOOK = r"""
# Nodes that it lacks. Slurm does not add them to a job that runs, so the ranks save and the job is queued again: if it
# would have more nodes at once, and if nobody waits who would take those that it gives up. A start that has got none
# of them, after all, waits twice as long before it tries again.
lacks=$((most - SLURM_JOB_NUM_NODES))
look=$grow
if [ -f "$logs/grows" ] && [ "$SLURM_JOB_NUM_NODES" -gt "$(tail -n 1 "$logs/grows")" ]; then rm "$logs/grows"; fi
[ ! -f "$logs/grows" ] || look=$((grow << ($(wc -l < "$logs/grows") < 6 ? $(wc -l < "$logs/grows") : 6)))
next=$((SECONDS + look))
[ "$lacks" -le 0 ] || echo "$SLURM_JOB_NUM_NODES of $most nodes; looks for more every $look s"
waiting() {
  timeout 30 squeue --noheader --states=PENDING --partition="$SLURM_JOB_PARTITION" --format=%r |
    grep --quiet --extended-regexp '^(None|Priority|Resources|ReqNodeNotAvail|Nodes required)'
}
# Whether it would get more of them now; if not, it prints the reason.
would_grow() {
  said=$(timeout 30 sbatch --test-only --nodes="1-$lacks" "$0" 2>&1)
  at=$(sed -n 's/.* to start at \([^ ]*\) .*/\1/p' <<< "$said")
  if [ -z "$at" ]; then
    echo "Slurm says: ${said:-nothing}"
  elif [ "$(date -d "$at" +%s)" -gt $(($(date +%s) + 5)) ]; then
    echo "no other node is free"
  elif waiting; then
    echo "other jobs wait, and would take its nodes"
  else
    return 0
  fi
  return 1
}
more() {
  if [ "$lacks" -le 0 ] || [ "$grow" -le 0 ] || [ "$SECONDS" -lt "$next" ] || [ -n "${timer:-}" ]; then return; fi
  next=$((SECONDS + look))
  if (would_grow) > "$logs/no-growth"; then
    echo "$SLURM_JOB_NUM_NODES" >> "$logs/grows"
    lacks=0
    stop "to grow: it has $SLURM_JOB_NUM_NODES of $most nodes, and would get more"
    return
  fi
  read -r -d '' why < "$logs/no-growth"
  [ "$why" = "${before:-}" ] || echo "it does not grow now: $why"
  before=$why
}
"""


def growing_settings(it: Deployment) -> list[str]:
    """Lines for the head of the script; none if the job is not elastic."""
    if not it.least:
        return []
    text = _SETTINGS.replace("@MOST@", str(it.machines.nodes)).replace("@LEAST@", str(it.least))
    return text.replace("@EVERY@", str(_EVERY)).strip().splitlines()


def growing_functions(it: Deployment) -> list[str]:
    """The functions of the script that have the job grow; none if it is not elastic."""
    return [*_LOOK.strip().splitlines(), ""] if it.least else []


def node_range(it: Deployment) -> str:
    """The number of nodes that is asked for, or a range: "4", "2-4"."""
    return f"{it.least}-{it.machines.nodes}" if it.least else str(it.machines.nodes)


def node_size_option(it: Deployment) -> str:
    """The name of the option that says how large a node must be."""
    return "mincpus" if it.least else "ntasks-per-node"


def task_options(it: Deployment) -> str:
    """srun's options for the nodes that the job has got."""
    machines = it.machines
    if not it.least:
        return f"--nodes={machines.nodes} --ntasks={machines.world} --ntasks-per-node={machines.per_node}"
    number = f'"$((SLURM_JOB_NUM_NODES * {machines.per_node}))"'
    return f'--nodes="$SLURM_JOB_NUM_NODES" --ntasks={number} --ntasks-per-node={machines.per_node}'


# ---- slurm ----------------------------------------------------------------------------------------------------------


ACCOUNT, PARTITION = "FILL_IN_ACCOUNT", "FILL_IN_PARTITION"
_LEFT = 60  # seconds before the limit, or less, at which a job whose ranks have not saved is queued again as it is

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

_LOCKED = """\
ulimit -l unlimited 2> /dev/null || echo "note: locked memory is limited to $(ulimit -l) KiB; InfiniBand may need more"\
"""


def sbatch(it: Deployment, file: str, options: Options) -> str:
    """The text of an sbatch file, whose name is `file`."""
    names = {"account": (options.account, ACCOUNT), "partition": (options.partition, PARTITION)}
    notice = min(it.notice, options.limit // 2)  # a short limit leaves half of it to train
    start = command(["sbatch"], file)
    where = f", in the directory that has {it.own_file}" if it.own_file else ""
    parts = {
        "TITLE": comment(f"{it.title}.") + comment(f"Start it: {start}{where}, in a shell that knows `fivefold`."),
        "SBATCH": word(start),
        "NAME": it.plain_name,
        "NAMES": [f"#SBATCH --{key}={name or blank}" for key, (name, blank) in names.items() if name != ""],
        "WHOLE": comment(
            f"Whole nodes, and a task for each rank.{' It starts on those that are free.' if it.least else ''}"
        ),
        "NODES": node_range(it),
        "GROW": growing_settings(it),
        "LOOK": growing_functions(it),
        "MORE": "; more" if it.least else "",
        "ALIKE": " on $SLURM_JOB_NUM_NODES nodes" if it.least else "",
        "EACH": node_size_option(it),
        "PER_NODE": it.machines.per_node,
        "GPUS": [f"#SBATCH --gpus-per-node={it.machines.per_node}"] if it.machines.gpus else [],
        "LIMIT": comment(
            f"The ranks are told {notice} s before the time limit, and save a checkpoint ({it.saving}). Then, and "
            "when a node is lost or the job is preempted, it is requeued and resumes from its last checkpoint."
        ),
        "TIME": options.time or USUAL_TIME,
        "NOTICE": notice,
        "RESTARTS": options.restarts,
        "PREPARE": _prepare(it, options.container or ""),
        "LOGS": _logs(it),
        "LOCKED": [_LOCKED] if it.machines.gpus else [],
        "EXPORTS": exports(variables(it.machines, "$cpus", "${TMPDIR:-/tmp}/fivefold-$(id -un)", "$logs")),
        "RANKS": _ranks(it, options.container or ""),
        "LAST": notice - min(_LEFT, notice // 2),
    }
    return filled((_HEAD + _TAIL).lstrip(), parts)


def filled(template: str, parts: Mapping[str, object]) -> str:
    """A template with each @NAME@ replaced by its part, which is not searched for more. A list is whole lines."""

    def part_of(match: re.Match[str]) -> str:
        part = parts[match[1]]
        return "".join(f"{line}\n" for line in part) if isinstance(part, list) else f"{part}{match[2]}"

    return re.sub(r"@([A-Z_]+)@(\n?)", part_of, template)


def _prepare(it: Deployment, container: str) -> list[str]:
    """Lines that check for `fivefold` and for the job file before the ranks start."""
    check_command = [
        "# Write here what makes `fivefold` known, if the shell in which you run sbatch does not know it:",
        "# module load cuda",
        "# source .venv/bin/activate",
        'command -v fivefold > /dev/null || refuse "there is no fivefold on PATH on $(hostname)"',
    ]
    file, why = path(it.own_file), "in $PWD on $(hostname); run sbatch where it is, on a shared file system"
    check_file = [f'[ -f {file} ] || refuse "there is no" {file} "{why}"'] if it.own_file else []
    return ([] if container else check_command) + check_file


def _logs(it: Deployment) -> str:
    """The directory for logs, quoted."""
    if "\\" in it.log_directory:
        backslash = f"run.dir={it.log_directory!r} has a backslash, which srun removes from names; rename it"
        raise UserError(backslash, "launch.characters")
    return path(it.log_directory)


def _mounts(it: Deployment) -> list[str]:
    """The paths that a container mounts, quoted."""
    if bad := [place for place in it.mounts if set(place) & set(":,")]:
        problem = f"{bad[0]!r} has a colon or a comma, which separate the mounts of --container; rename it"
        raise UserError(problem, "launch.characters")
    return [path(place) for place in it.mounts]


def _ranks(it: Deployment, container: str) -> list[str]:
    """The lines that start the ranks."""
    machines = it.machines
    flags = [
        task_options(it),
        '--distribution=block --cpus-per-task="$cpus" --cpu-bind=none --mpi=none',
        "--kill-on-bad-exit=0 --wait=120",
        '--open-mode=append --output="${logs//%/%%}/rank-%t.log"',
    ]
    if container:
        mounts = ",".join(['"$PWD:$PWD"', *(f"{place}:{place}" for place in _mounts(it))])
        flags.append(f'--container-image={word(container)} --container-workdir="$PWD"')
        flags.append(f"--container-mounts={mounts}")
    # A rank that sees a single GPU cannot know that its neighbours have their own, and takes gloo instead of NCCL.
    all_gpus = " Every rank sees all GPUs of its node, takes the one of its number, and binds itself to cores near it."
    end = "When one ends the others have 120 s to say what they know and end, too."
    return [
        *comment(f"Ranks count node by node.{all_gpus if machines.gpus else ''} {end}"),
        "flags=(",
        *(f"  {line}" for line in flags),
        ")",
        "# Half a minute that reports slow or deviating nodes before the first step:",
        f'# srun "${{flags[@]}}" {it.words("doctor")} || exit 1',
        f'srun "${{flags[@]}}" {it.words("train")} &',
    ]
