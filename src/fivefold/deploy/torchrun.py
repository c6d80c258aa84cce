"""torchrun on every node: the line that is the same on all of them.

The ranks meet by c10d's rendezvous, which numbers the nodes itself, and so restarts together: an agent whose ranks fail
comes back to it, and the others follow. (The static one takes numbers from the line and cannot do that.) The host of
the rendezvous must stay.
"""

from fivefold.deploy.deployment import Deployment
from fivefold.deploy.environment import Variable, comment, exports, variables

HOST = "FILL_IN_HOST"
PORT = 29400
_JOIN = 3600  # seconds that nodes wait for each other; torchrun's own 600 are less than some queues take


def saving(it: Deployment) -> Variable:
    why = "torchrun that is told to end gives its ranks so many seconds to save, not 30"
    return Variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(it.notice), why)


def words(it: Deployment, endpoint: str, run: str, restarts: int, conf: str = "") -> list[str]:
    """The command, one piece a line; what starts with a $ is the shell's to expand."""
    machines = it.machines
    return [
        "torchrun",
        f"--nnodes={machines.nodes}",
        f"--nproc-per-node={machines.per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run}",
        f"--rdzv-conf=join_timeout={_JOIN}{conf}",
        f"--max-restarts={restarts}",
        f"-m {it.words()}",
    ]


def lines(it: Deployment, host: str, run: str, restarts: int) -> str:
    """What is typed on each node."""
    where = f", in the directory that has {it.own_file}," if it.own_file else ""
    endpoint = f"{host or HOST}:{PORT}"
    text = [
        *comment(f"{it.title}."),
        *comment(
            f"Type this on each of the {it.machines.nodes} nodes{where} within an hour; it is the same on all. "
            f"{host or HOST} is one of them, by the name or address that the others reach it by, and its port {PORT} "
            "is free. run.dir is a directory that all nodes share."
        ),
        *comment(
            "Ranks prove that they belong together by a secret in run.dir. Where that is not shared, they need one of "
            "16 characters or more, the same on all nodes: export FIVEFOLD_SECRET=..."
        ),
        *exports([*variables(it.machines, threads(it), "${TMPDIR:-/tmp}/fivefold-$(id -un)", "$PWD"), saving(it)]),
        " \\\n  ".join(words(it, endpoint, run, restarts)),
    ]
    return "\n".join(text) + "\n"


def threads(it: Deployment) -> str:
    """Cores of a rank, for a shell."""
    return f"$(( $(nproc) > {it.machines.per_node} ? $(nproc) / {it.machines.per_node} : 1 ))"
