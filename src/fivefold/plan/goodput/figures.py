"""How often GPUs fail, what a failure costs, and how unevenly ranks run: published and measured, each with its source.

docs/goodput.md says of each figure how it was checked.
"""

from typing import NamedTuple

HOUR, DAY = 3600.0, 86_400.0
NODE = 8  # GPUs of a server, in the sources


class Fleet(NamedTuple):
    """GPUs whose failures somebody has counted."""

    name: str
    hours: float  # between two failures of one GPU, with all that stands around it
    source: str


FLEETS = (
    Fleet("Llama 3, 16,384 H100", 54 * 24 * 16_384 / 419, "arXiv 2407.21783: 419 in 54 days, maintenance apart"),
    Fleet("Meta, 32,000 GPUs", 24 * NODE * 1000 / 2.3, "arXiv 2602.00277: 2.3 a day for 1,000 servers"),
    Fleet("Meta RSC-2, A100", 24 * NODE * 1000 / 2.34, "arXiv 2410.21680: 2.34 in 1,000 node-days"),
    Fleet("Meta RSC-1, A100", 24 * NODE * 1000 / 6.50, "arXiv 2410.21680: 6.50 in 1,000 node-days"),
    Fleet("RSC, jobs of 1,024 A100", 7.9 * 1024, "arXiv 2410.21680: one in 7.9 hours"),
)
USUAL = FLEETS[0]

HANGS = 0.099  # of failures: arXiv 2509.16293, table 1. Ranks notice them after train.timeout, and a dead rank at once
HANGS_SOURCE = "9.9% of failures are hangs (arXiv 2509.16293), seen after train.timeout; others at once"
TIMEOUT = 600.0  # seconds of train.timeout, where a job does not say
RESTART = 600.0
RESTART_SOURCE = "Meta's synchronous restarts (arXiv 2602.00277); MegaScale's diagnosis stays below (arXiv 2402.15627)"

# What a save costs the steps. 405B on 8,960 GPUs: blocked 0.59 s, saved in 51.06 s (ByteCheckpoint, arXiv 2407.20143,
# table 8). This code has measured one H200: at most 0.25 s (benchmarks/h200-train-run.csv, steps 40 and 41).
BLOCKED = 0.59
BLOCKED_SOURCE = "405B on 8,960 GPUs (arXiv 2407.20143, table 8); one H200 with this code: at most 0.25 s"
COPIED = 55e9  # bytes a second from a GPU to the host, beside the next step (docs/speed.md)
# On CPUs nothing runs beside the steps: 305 MB cost them 0.886 s (docs/checkpoints.md, two Arm cores, one rank).
CPU_COPIED = 305e6 / 0.886
CPU_SOURCE = "305 MB cost the steps of two Arm cores 0.886 s (docs/checkpoints.md)"

# Bytes a second into storage: a node's own disk under this code (benchmarks/h200-train-8b-2-checkpoint.json), and all
# nodes together as in the 51.06 s above, at 12 bytes a parameter.
NODE_STORES = 2.08e9
STORES = 405.85e9 * 12 / 51.06
STORES_SOURCE = "2.08 a node (one H200, this code), at most 95 in all (arXiv 2407.20143: 405B saved in 51 s)"
READS = 2  # times that a load reads every byte: once to hash it (docs/checkpoints.md)

# One rank's steps: 35 of 0.602 s with a deviation of 4.4 ms (benchmarks/h200-train-run.csv, steps 6 to 40).
JITTER = 0.0072
JITTER_SOURCE = "one H200, this code"
SLOW_SHARE, SLOWER = 0.005, 0.10  # of machines, by as much: MegaScale, arXiv 2402.15627, section 6.3
SLOW_SOURCE = "arXiv 2402.15627: 0.5% of machines take 10% longer"
