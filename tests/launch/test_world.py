"""Ranks come from torchrun, Slurm, or our own launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.launch.world import World, current_world, first_host
from fivefold.support.errors import UserError


def test_a_plain_process_is_a_world_of_one() -> None:
    assert current_world({}) == World()


def test_torchrun_says_who_we_are() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}
    assert current_world(env) == World(5, 8, 1, local_size=4, joined=True)


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "abc", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "x"},
    ],
)
def test_a_broken_environment_is_named(env: dict[str, str]) -> None:
    with pytest.raises(UserError, match="RANK"):
        current_world(env)


def test_slurm_says_who_we_are_inside_a_step_only() -> None:
    batch_script = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "16",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "gpu[007-010]",
    }
    assert current_world(batch_script) == World()
    step = batch_script | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    step["SLURM_STEP_TASKS_PER_NODE"] = "4(x3),2(x2)"
    assert current_world(step) == World(9, 16, 1, local_size=4, joined=True, address="gpu007", port=20_007)


@pytest.mark.parametrize(
    ("nodes", "first"), [("a1", "a1"), ("gpu[007-010,12],x1", "gpu007"), ("n3,n4", "n3"), ("rack-2-[1,5]", "rack-2-1")]
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


PROBE = """
import json, pathlib, sys
import torch.distributed as dist, torch
from fivefold.support.errors import UserError
from fivefold.launch.world import current_world, join, leave
world = current_world()
join(world, "gloo")
total = torch.tensor([world.rank + 1])
dist.all_reduce(total)
pathlib.Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps([world.size, total.item()]))
leave(world)
sys.exit(int(sys.argv[2]) if world.rank == 1 else 0)
"""


@pytest.mark.parametrize("code", [0, 7])
def test_launch_starts_ranks_that_meet_and_returns_the_exit_code(tmp_path: Path, code: int) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    start = "import sys; from fivefold.launch.local import launch; sys.exit(launch(3, ['probe', *sys.argv[1:]]))"
    env = os.environ | {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}  # a process of its own: ranks are forked
    done = subprocess.run(
        [sys.executable, "-c", start, str(tmp_path), str(code)], env=env, text=True, capture_output=True
    )
    assert done.returncode == code
    if code == 0:
        found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
        assert found == [[3, 6]] * 3
    else:
        assert "rank 1 failed with exit code 7" in done.stderr
