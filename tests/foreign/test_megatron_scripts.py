"""docs/megatron: two layouts of a released Megatron-Core, each shown by a script that needs nothing of Fivefold."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extras
pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core")

SCRIPTS = Path(__file__).parents[2] / "docs/megatron"


def printed(script: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPTS / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_the_auxiliary_loss_enters_with_half_its_weight() -> None:
    distance, ratio = sorted(printed("aux_loss.py"), key=lambda line: "x 0" in line)
    assert ratio.endswith("x 0.500000 of that of one process")
    assert float(distance.split()[-1]) < 1e-15


def test_batched_messages_of_two_stages_are_taken_for_each_other() -> None:
    right = [f"batch_p2p_comm=False: rank {rank} received activation 1, gradient 2" for rank in range(2)]
    swapped = [f"batch_p2p_comm=True: rank {rank} received activation 2, gradient 1" for rank in range(2)]
    assert printed("interleaved_p2p.py") == sorted([*right, *swapped])
