"""`fivefold doctor` on hosts with addresses of their own, and under Slurm."""

import json
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm

WORDS = ["doctor", "--json", "layout=dp=4", "train.device=cpu", "train.timeout=120"]


def test_a_host_with_a_slow_link_is_named(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "n1", "MASTER_PORT": "29511", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts("n1", "n2", "n3", "n4"))
        hosts[2].rate("200mbit")
        every = {**meeting, "LOCAL_RANK": "0", "FIVEFOLD_SECRET": "which all hosts are told"}
        tasks = [
            stack.enter_context(host.start("fivefold", *WORDS, cwd=tmp_path, env={**every, "RANK": str(rank)}))
            for rank, host in enumerate(hosts)
        ]
        assert [task.wait() for task in tasks] == [1, 0, 0, 0], tasks[0].output
        found = json.loads(next(line for line in tasks[0].output.splitlines() if line.startswith("{")))
    assert [one["node"] for one in found["ranks"]] == ["n1", "n2", "n3", "n4"]
    (said,) = [one for one in found["findings"] if one.startswith("dp: messages")]
    assert said.startswith("dp: messages with node n3 (rank 2) reach"), found["findings"]


def test_srun_examines_its_nodes(tmp_path: Path) -> None:
    with Slurm("n1", "n2") as slurm:
        words = ["fivefold", *WORDS, "layout=dp=2,tp=2", "||", "true"]  # srun ends with 1 if something is odd
        out = slurm.run("bash", "-c", f"srun -N2 --ntasks-per-node=2 {' '.join(words)}", cwd=tmp_path)
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert [one["node"] for one in found["ranks"]] == ["n1", "n1", "n2", "n2"]
    rings = [(ring["axis"], ring["ranks"]) for one in found["ranks"] for ring in one["rings"]]
    assert sorted(rings) == [("dp", [0, 2]), ("dp", [1, 3]), ("tp", [0, 1]), ("tp", [2, 3])]
    assert sum(one["disk"] is not None for one in found["ranks"]) == 2
