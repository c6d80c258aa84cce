"""This machine's cores, and what a rank may take of them beside its step."""

import os

from fivefold.train.world import ranks_here

_MOST = 8  # threads: a disk takes no more than a few of them write


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def for_files() -> int:
    """Threads that hash, read and write files: half of a rank's share of the cores, as the other half trains."""
    return max(1, min(_MOST, cores() // ranks_here() // 2))
