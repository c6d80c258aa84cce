"""The variables that ranks are started with, each with its reason. What torch and NCCL do by themselves they do.

TORCH_NCCL_ASYNC_ERROR_HANDLING is not among them: torch's default ends a rank whose collective failed. Neither is
CUDA_DEVICE_MAX_CONNECTIONS: no kernel of ours relies on the order in which streams are served.
"""

from dataclasses import dataclass

from fivefold.deploy.machines import Machines
from fivefold.deploy.shell import comment


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    why: str
    chosen: bool = True  # false: the user may, and how is in `why`


def variables(machines: Machines, threads: str, scratch: str, traces: str) -> list[Variable]:
    """`threads`: of a rank; `scratch`: a directory of the node's own; `traces`: one that outlives the node."""
    found = [Variable("OMP_NUM_THREADS", threads, "each rank would take all cores of the node for itself")]
    if machines.gpus:
        found += [
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
        found += _network(machines.gpus)
    return found


def _network(gpus: bool) -> list[Variable]:
    why = "only if the nodes have several networks, and the wrong one is taken; `ip -brief address` lists them"
    if not gpus:
        return [Variable("GLOO_SOCKET_IFNAME", "eth0", why, chosen=False)]
    return [
        Variable("NCCL_SOCKET_IFNAME", "=eth0", f"{why}; = means this name and no other", chosen=False),
        Variable(
            "NCCL_IB_HCA",
            "=mlx5_0,mlx5_1",
            "only if some adapters are for storage; `ibstat` lists them; = means these, not all that begin so",
            chosen=False,
        ),
    ]


def exports(found: list[Variable]) -> list[str]:
    """As lines of a shell script; values are the shell's to expand."""
    lines = []
    for one in found:
        lines += comment(f"{one.name}: {one.why}.") if one.why else []
        lines.append(f'{"" if one.chosen else "# "}export {one.name}="{one.value}"')
    return lines
