"""Writes the torchrun command, which is the same on every node.

The ranks meet by the c10d rendezvous, which numbers the nodes itself and can therefore restart all of them: an agent
whose ranks fail enters it again, and the other agents follow. (The static rendezvous takes the numbers from the command
and cannot do that.) The host of the rendezvous must stay.
"""

from itertools import chain

from fivefold.clusters.deployment import Deployment
from fivefold.clusters.environment import Variable, export_lines, rank_variables
from fivefold.clusters.machines import Machines
from fivefold.clusters.quoting import comment_lines

HOST = "FILL_IN_HOST"
PORT = 29400
_JOIN_TIMEOUT = 3600  # seconds that nodes wait for each other; torchrun's default, 600, is less than some queues take


def node_script(deployment: Deployment, host: str, run_id: str, restarts: int) -> str:
    """The lines to type on each node."""
    machines = deployment.machines
    host = host or (HOST if machines.nodes > 1 else "localhost")
    variables = [
        *rank_variables(machines, threads_per_rank(machines), "${TMPDIR:-/tmp}/fivefold-$(id -un)", "$PWD"),
        shutdown_timeout(deployment),
        *late_join(deployment),
    ]
    text = [
        *comment_lines(f"{deployment.title}."),
        *chain(*map(comment_lines, _instructions(deployment, host))),
        *export_lines(variables),
        " \\\n  ".join(torchrun_command(deployment, f"{host}:{PORT}", run_id, restarts)),
    ]
    return "\n".join(text) + "\n"


def _instructions(deployment: Deployment, host: str) -> list[str]:
    """Sentences for the person who types the command."""
    where = f", in the directory that has {deployment.needed_file}" if deployment.needed_file else ""
    comma = "," if where else ""
    if deployment.machines.nodes == 1:
        return [f"Run this on the node{where}. Its port {PORT} must be free."]
    elastic = (
        f"The run begins with {deployment.min_nodes} nodes, and continues on the remaining ones when others are lost, "
        f"but for {host}, at which they meet. The same line on a node that is back, or another, has it join."
    )
    return [
        f"Run this on each of the {deployment.machines.nodes} nodes{where}{comma} within an hour; it is the same "
        f"on all. {host} is one of them, by the name or address that the others reach it by, and its port {PORT} is "
        "free. run.dir is a directory that all nodes share.",
        "Ranks prove that they belong together by a secret in run.dir. Where that is not shared, they need one of 16 "
        "characters or more, the same on all nodes: export FIVEFOLD_SECRET=...",
        *([elastic] if deployment.min_nodes else []),
    ]


def torchrun_command(deployment: Deployment, endpoint: str, run_id: str, restarts: int, conf: str = "") -> list[str]:
    """The words of the command, which the shell expands. `conf` is added to the settings of the rendezvous."""
    machines, min_nodes = deployment.machines, deployment.min_nodes
    return [
        "torchrun",
        f"--nnodes={min_nodes}:{machines.nodes}" if min_nodes else f"--nnodes={machines.nodes}",
        f"--nproc-per-node={machines.per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}",
        f"--rdzv-conf=join_timeout={_JOIN_TIMEOUT}{conf}",
        f"--max-restarts={restarts}",
        f"-m {deployment.rank_command()}",
    ]


def threads_per_rank(machines: Machines) -> str:
    """A shell expression for the number of cores per rank."""
    return f"$(( $(nproc) > {machines.per_node} ? $(nproc) / {machines.per_node} : 1 ))"


def shutdown_timeout(deployment: Deployment) -> Variable:
    """The variable that gives ranks the time to save when torchrun is told to end."""
    why = "torchrun that is told to end gives its ranks so many seconds to save, not 30"
    return Variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(deployment.save_notice), why)


def late_join(deployment: Deployment) -> list[Variable]:
    """The variable that agents of an elastic run need, so that some can join later."""
    why = (
        "an agent that joins a run would else wait for the address of its store, which torch 2.11 and 2.13 do not tell"
    )
    return [Variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", why)] if deployment.min_nodes else []
