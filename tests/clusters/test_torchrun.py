"""The line that is typed on each node, as bash and torchrun read it."""

import os
import subprocess
import sys
from pathlib import Path

from torch.distributed.run import get_args_parser

from fivefold.clusters.deployment import Deployment
from fivefold.clusters.machines import Machines
from fivefold.clusters.torchrun import node_script
from fivefold.job.reading import read_job

SHOW = f"#!{sys.executable}\nimport json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def typed(text: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What torchrun gets: its words and its environment."""
    import json

    (folder / "torchrun").write_text(SHOW)
    (folder / "torchrun").chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-eu", "-c", text], env=env, capture_output=True, text=True, check=True)
    words, found = json.loads(done.stdout)
    return words, found


def test_torchrun_understands_the_line(tmp_path: Path) -> None:
    job = read_job(None, ["layout=dp=8", "train.batch=16"])
    it = Deployment(job, Machines(2, 4), "my job.toml", ("layout=dp=8", "data.path=it's here"))
    words, env = typed(node_script(it, "node1", "run-1", 5), tmp_path)
    read = get_args_parser().parse_args(words)
    assert (read.nnodes, read.nproc_per_node, read.max_restarts) == ("2", "4", 5)
    assert (read.rdzv_backend, read.rdzv_endpoint, read.rdzv_id) == ("c10d", "node1:29400", "run-1")
    assert (read.module, read.training_script) == (True, "fivefold")
    assert read.training_script_args == ["train", "my job.toml", "layout=dp=8", "data.path=it's here"]
    assert env["NCCL_DEBUG"] == "WARN"
    assert "NCCL_SOCKET_IFNAME" not in env or env["NCCL_SOCKET_IFNAME"] == os.environ.get("NCCL_SOCKET_IFNAME")
    assert '# export NCCL_IB_HCA="=mlx5_0,mlx5_1"' in node_script(
        it, "node1", "run-1", 5
    )  # "mlx5" would be all of them
    assert int(env["OMP_NUM_THREADS"]) >= 1


def test_an_elastic_run_takes_a_range_of_nodes(tmp_path: Path) -> None:
    job = read_job(None, ["layout=dp=8", "train.batch=16"])
    words, env = typed(
        node_script(Deployment(job, Machines(4, 2), "job.toml", min_nodes=3), "node1", "run-1", 5), tmp_path
    )
    read = get_args_parser().parse_args(words)
    assert (read.nnodes, read.rdzv_id) == ("3:4", "run-1")
    assert read.training_script_args == ["train", "job.toml", "--elastic"]
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_one_node_is_spoken_to_as_one() -> None:
    text = node_script(Deployment(read_job(None, ["layout=dp=4"]), Machines(1, 4)), "", "run-1", 5)
    assert "# Run this on the node. Its port 29400 must be free.\n" in text
    assert "--rdzv-endpoint=localhost:29400" in text
    assert "FILL_IN" not in text
