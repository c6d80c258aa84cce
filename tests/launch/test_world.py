"""Ranks come from torchrun, Slurm, or our own launcher."""

import json
from pathlib import Path

import pytest

from fivefold.launch.faults import strike
from fivefold.launch.rendezvous import Rendezvous
from fivefold.launch.world import RESTARTS_ENV, World, current_world, first_host
from tests.commands import fivefold
from tests.refusals import refusal


def test_a_plain_process_is_a_world_of_one() -> None:
    assert current_world({}) == World()


def test_torchrun_says_who_we_are() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    env |= {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert current_world(env) == World(5, 8, 1, local_size=4, joined=True, meeting=Rendezvous("", "a", 29500))


def test_ranks_that_are_all_of_one_machine_meet_on_its_loopback() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu007", "MASTER_PORT": "29500"}
    assert current_world(env).meeting == Rendezvous("", "127.0.0.1", 29500, alone=True)
    agent = env | {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # torchrun's store is where torchrun put it
    assert current_world(agent).meeting == Rendezvous("", "gpu007", 29500, agent=True, alone=True)
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "gpu007"}
    assert (current_world(step).meeting.address, current_world(step).meeting.alone) == ("127.0.0.1", True)


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "abc", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "x"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "x"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "65536"},
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
    ],
)
def test_a_broken_environment_is_named(env: dict[str, str]) -> None:
    assert refusal(lambda: current_world(env)).codes == ["environment.ranks"]


def test_slurm_says_who_we_are_inside_a_step_only() -> None:
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "7"}
    batch_script["SLURM_JOB_NODELIST"] = "gpu[007-010]"
    assert current_world(batch_script) == World()
    step = batch_script | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    step["SLURM_STEP_TASKS_PER_NODE"] = "4(x3),2(x2)"
    found = current_world(step)
    meeting = Rendezvous("", "gpu007", found.meeting.port)
    assert found == World(9, 16, 1, local_size=4, joined=True, meeting=meeting, run="Slurm step 7.0")


def test_every_start_of_every_slurm_step_has_a_port_of_its_own() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    others = [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "78"}, {"SLURM_RESTART_COUNT": "1"}]
    worlds = [current_world(step | other) for other in [{}, *others]]
    assert len({world.meeting.port for world in worlds}) == 4
    assert len({(world.run, world.start) for world in worlds}) == 4
    assert current_world(step | {"MASTER_PORT": "29500"}).meeting.port == 29500


@pytest.mark.parametrize(
    ("nodes", "first"), [("a1", "a1"), ("gpu[007-010,12],x1", "gpu007"), ("n3,n4", "n3"), ("rack-2-[1,5]", "rack-2-1")]
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


PROBE = """
import json, pathlib, sys
import torch.distributed as dist, torch
from fivefold.support.errors import UserError
from fivefold.launch.group import join, leave
from fivefold.launch.world import current_world
from tests.launch.test_meeting import listening
world = current_world()
join(world, "gloo")
total = torch.tensor([world.rank + 1])
dist.all_reduce(total)
pathlib.Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps([world.size, total.item(), sorted(listening())]))
leave(world)
sys.exit(int(sys.argv[2]) if world.rank == 1 else 0)
"""


def test_launch_starts_ranks_that_meet_and_returns_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    begin = "import sys; from fivefold.launch.local import launch; sys.exit(launch(3, ['probe', *sys.argv[1:]]))"
    (tmp_path / "begin.py").write_text(begin)
    done = fivefold(tmp_path, 7, module="begin", cwd=tmp_path)
    assert done.returncode == 7
    assert "rank 1 failed with exit code 7" in done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert found == [[3, 6, ["127.0.0.1"]]] * 3


def test_a_fault_finds_its_rank_and_its_start_under_every_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]"}
    for name in ("RANK", "WORLD_SIZE", RESTARTS_ENV):
        monkeypatch.delenv(name, raising=False)
    for name, value in (step | {"FIVEFOLD_FAULT": "nan@rank=1,step=3"}).items():
        monkeypatch.setenv(name, value)

    def struck(rank: int, start: int) -> bool:
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(start))
        return bool(strike("step", 3))

    assert [struck(0, 0), struck(1, 0), struck(1, 1)] == [False, True, False]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert struck(0, 0)  # ranks of a torchrun that srun has started
    monkeypatch.setenv(RESTARTS_ENV, "1")
    assert not struck(0, 0)
