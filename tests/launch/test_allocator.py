"""A step's memory is asked of the operating system once."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from fivefold.launch.host import keep_freed_memory

OF_OTHERS = ("MALLOC_", "MIMALLOC_", "GLIBC_TUNABLES")
# Faults in which the operating system had to provide pages in each step of a model with activations of 128 MB.
STEPS = """
from fivefold.launch.host import keep_freed_memory
keep_freed_memory()
import resource, torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(16)))
tokens = torch.ones(16384, 64)
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model(tokens).sum().backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def untouched() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_OTHERS)}


def test_what_one_step_frees_the_next_one_uses() -> None:
    found = subprocess.run([sys.executable, "-c", STEPS], env=untouched(), check=True, capture_output=True, text=True)
    first, _, *later = (int(pages) for pages in found.stdout.split())
    # A heap that is cut up may have to grow by a block, 1,024 pages, now and then; a step uses 32 of them and more.
    # Kernels that hand out large folios provide dozens of pages at a fault.
    assert first > 500
    # Where freed memory goes back, each step takes as many as the first.
    assert sum(later) / len(later) < 0.1 * first, later


@pytest.mark.parametrize(
    ("mine", "left"),
    [
        ({}, {"MIMALLOC_PURGE_DELAY", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}),
        ({"MIMALLOC_PURGE_DELAY": "5", "MALLOC_TRIM_THRESHOLD_": "131072"}, set()),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, {"MIMALLOC_PURGE_DELAY"}),
        ({"MALLOC_ARENA_MAX": "2"}, {"MIMALLOC_PURGE_DELAY", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}),
    ],
)
def test_who_has_set_an_allocator_up_is_obeyed(mine: dict[str, str], left: set[str]) -> None:
    before = untouched() | mine
    with patch.dict(os.environ, before, clear=True):  # the same object: libraries that are imported now keep it
        keep_freed_memory()
        assert os.environ.keys() - before.keys() == left
        assert {name: os.environ[name] for name in mine} == mine
