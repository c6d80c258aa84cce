"""Parts of the sbatch file of an elastic job: how it starts with fewer nodes, and gets those back that it lacks.

They rely on these facts, which were tried with Slurm 22.05:

- A job that asks for `--nodes=2-3` gets as many of them as are free, also when it is queued again: after the loss of
  a node Slurm does that itself (`--requeue`). `--no-kill` would keep the other nodes, and is not used: if the lost
  node runs the script, Slurm ends the job (FAILED, JobLaunchFailure) and never queues it again.
- With `--ntasks-per-node` Slurm counts the tasks when a job starts, and a job that is queued again needs as many: it
  would wait for the nodes that it has lost. So the job asks for nodes and their cores, and srun for tasks.
- Slurm adds no node to a job that runs, so one that is to grow is queued again.
- `sbatch --test-only` says when Slurm would start a job, by the same rules as it starts one.
"""

from fivefold.clusters.deployment import Deployment

_LOOK_EVERY = 600  # seconds: being queued again costs two minutes (Slurm's cred_expire), a start and a load

_SETTINGS = """
most=@MOST@  # nodes; as many of them as are free, and at least @LEAST@
grow=@EVERY@  # seconds between looks for those that it lacks; 0: it does not grow
"""

_FUNCTIONS = r"""
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


def growth_settings(deployment: Deployment) -> list[str]:
    """Lines for the head of the script; none if the job is not elastic."""
    if not deployment.min_nodes:
        return []
    text = _SETTINGS.replace("@MOST@", str(deployment.machines.nodes)).replace("@LEAST@", str(deployment.min_nodes))
    return text.replace("@EVERY@", str(_LOOK_EVERY)).strip().splitlines()


def growth_functions(deployment: Deployment) -> list[str]:
    """The functions of the script that have the job grow; none if it is not elastic."""
    return [*_FUNCTIONS.strip().splitlines(), ""] if deployment.min_nodes else []


def node_range(deployment: Deployment) -> str:
    """The number of nodes that is asked for, or a range: "4", "2-4"."""
    nodes = str(deployment.machines.nodes)
    return f"{deployment.min_nodes}-{nodes}" if deployment.min_nodes else nodes


def node_size_option(deployment: Deployment) -> str:
    """The name of the option that says how large a node must be."""
    return "mincpus" if deployment.min_nodes else "ntasks-per-node"


def task_options(deployment: Deployment) -> str:
    """srun's options for the nodes that the job has got."""
    machines = deployment.machines
    if not deployment.min_nodes:
        return f"--nodes={machines.nodes} --ntasks={machines.world} --ntasks-per-node={machines.per_node}"
    number = f'"$((SLURM_JOB_NUM_NODES * {machines.per_node}))"'
    return f'--nodes="$SLURM_JOB_NUM_NODES" --ntasks={number} --ntasks-per-node={machines.per_node}'
