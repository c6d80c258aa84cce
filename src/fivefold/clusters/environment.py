"""The environment variables that ranks are started with, each with its reason. Defaults of torch and NCCL are kept.

TORCH_NCCL_ASYNC_ERROR_HANDLING is not among them: torch's default ends a rank whose collective failed. Neither is
CUDA_DEVICE_MAX_CONNECTIONS: no kernel of ours relies on the order in which streams are served.
"""

from dataclasses import dataclass

from fivefold.clusters.machines import Machines
from fivefold.clusters.quoting import comment_lines


@dataclass(frozen=True)
class Variable:
    """A variable, its value as the shell expands it, and the reason for it."""

    name: str
    value: str
    why: str
    enabled: bool = True  # false: it is written as a comment, for the user to set, and `why` says when


def rank_variables(machines: Machines, threads: str, scratch: str, traces: str) -> list[Variable]:
    """The variables of ranks. `threads` is the number per rank, `scratch` a directory on the node's own disk, `traces`
    a directory that outlives the node."""
    variables = [Variable("OMP_NUM_THREADS", threads, "each rank would take all cores of the node for itself")]
    if machines.gpus:
        variables += [
            Variable(
                "TRITON_CACHE_DIR", f"{scratch}/triton", "kernels are compiled onto the node's own disk, not home"
            ),
            Variable("NCCL_DEBUG", "WARN", "NCCL says why it failed, and nothing else"),
            Variable(
                "TORCH_NCCL_TRACE_BUFFER_SIZE",
                "2000",
                "if a collective hangs, each rank writes its last ones; torchfrtrace finds the one who is missing",
            ),
            Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", ""),
            Variable("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{traces}/nccl-rank-", ""),
        ]
    if machines.nodes > 1:
        variables += _network_variables(gpus=machines.gpus)
    return variables


def _network_variables(*, gpus: bool) -> list[Variable]:
    """The choice of a network, for the user to make."""
    why = "only if the nodes have several networks, and the wrong one is taken; `ip -brief address` lists them"
    if not gpus:
        return [Variable("GLOO_SOCKET_IFNAME", "eth0", why, enabled=False)]
    return [
        Variable("NCCL_SOCKET_IFNAME", "=eth0", f"{why}; = means this name and no other", enabled=False),
        Variable(
            "NCCL_IB_HCA",
            "=mlx5_0,mlx5_1",
            "only if some adapters are for storage; `ibstat` lists them; = means these, not all that begin so",
            enabled=False,
        ),
    ]


def export_lines(variables: list[Variable]) -> list[str]:
    """The variables as lines of a shell script, which expands their values."""
    lines = []
    for variable in variables:
        lines += comment_lines(f"{variable.name}: {variable.why}.") if variable.why else []
        lines.append(f'{"" if variable.enabled else "# "}export {variable.name}="{variable.value}"')
    return lines
