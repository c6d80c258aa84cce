"""torchrun on every node: the line that is the same on all of them.

The ranks meet by c10d's rendezvous, which numbers the nodes itself, and so restarts together: an agent whose ranks fail
comes back to it, and the others follow. (The static one takes numbers from the line and cannot do that.) The host of
the rendezvous must stay.
"""

from itertools import chain

from fivefold.deploy.deployment import Deployment
from fivefold.deploy.environment import Variable, exports, variables
from fivefold.deploy.shell import comment

HOST = "FILL_IN_HOST"
PORT = 29400
_JOIN = 3600  # seconds that nodes wait for each other; torchrun's own 600 are less than some queues take


def saving(it: Deployment) -> Variable:
    why = "torchrun that is told to end gives its ranks so many seconds to save, not 30"
    return Variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(it.notice), why)


def joining(it: Deployment) -> list[Variable]:
    """What agents of an elastic run need, of which some join later."""
    why = (
        "an agent that joins a run would else wait for the address of its store, which torch 2.11 and 2.13 do not tell"
    )
    return [Variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", why)] if it.least else []


def words(it: Deployment, endpoint: str, run: str, restarts: int, conf: str = "") -> list[str]:
    """The command, one piece a line; what starts with a $ is the shell's to expand."""
    machines = it.machines
    return [
        "torchrun",
        f"--nnodes={it.least}:{machines.nodes}" if it.least else f"--nnodes={machines.nodes}",
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
    host = host or (HOST if it.machines.nodes > 1 else "localhost")
    usual = variables(it.machines, threads(it), "${TMPDIR:-/tmp}/fivefold-$(id -un)", "$PWD")
    text = [
        *comment(f"{it.title}."),
        *chain(*map(comment, _said(it, host))),
        *exports([*usual, saving(it), *joining(it)]),
        " \\\n  ".join(words(it, f"{host}:{PORT}", run, restarts)),
    ]
    return "\n".join(text) + "\n"


def _said(it: Deployment, host: str) -> list[str]:
    """To the person who types it."""
    where = f", in the directory that has {it.own_file}" if it.own_file else ""
    comma = "," if where else ""
    if it.machines.nodes == 1:
        return [f"Type this on the node{where}. Its port {PORT} must be free."]
    elastic = (
        f"The run begins with {it.least} nodes, and goes on with those that are left when others are lost, but for "
        f"{host}, at which they meet. The same line on a node that is back, or another, has it join."
    )
    return [
        f"Type this on each of the {it.machines.nodes} nodes{where}{comma} within an hour; it is the same "
        f"on all. {host} is one of them, by the name or address that the others reach it by, and its port {PORT} is "
        "free. run.dir is a directory that all nodes share.",
        "Ranks prove that they belong together by a secret in run.dir. Where that is not shared, they need one of 16 "
        "characters or more, the same on all nodes: export FIVEFOLD_SECRET=...",
        *([elastic] if it.least else []),
    ]


def threads(it: Deployment) -> str:
    """Cores of a rank, for a shell."""
    return f"$(( $(nproc) > {it.machines.per_node} ? $(nproc) / {it.machines.per_node} : 1 ))"
