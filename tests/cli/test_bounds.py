"""A number out of bounds: one sentence, and the same one from every command that has the option."""

import json

import pytest

from tests.commands import fivefold, here
from tests.refusals import refusal

OUTSIDE = {
    "plan tiny --batch 0": "batch=0 must be at least 1",
    "plan tiny --seq=-1": "seq=-1 must be at least 1",
    "plan tiny --tokens=-1": "tokens=-1 must be at least 1; write 300B, 1.4T or 2e9",
    "plan tiny --top 0": "top=0 must be at least 1",
    "plan tiny --price=-1": "price=-1 must be at least 0; it is in dollars per GPU and hour",
    "plan tiny --layout pp=0": "layout.pp=0 must be at least 1",
    "dryrun tiny --batch=0": "batch=0 must be at least 1",
    "dryrun tiny --layout dp=0": "layout.dp=0 must be at least 1",
    "goodput tiny --mtbf 0": "mtbf=0 must be at least 0.001",
    "goodput tiny --runs 0": "runs=0 must be at least 10",
    "compare zero tiny --ranks 0": "ranks=0 must be at least 1",
    "compare schedules --pp=0": "pp=0 must be at least 1",
    "compare cp --seq 8192 --cp 0": "cp=0 must be at least 2; one rank divides nothing",
    "compare cp --seq 8192 --cp 2 --heads 0": "heads=0 must be at least 1",
    "compare mixed tiny --cluster 2x8xH100 --slower 0": "slower=0 must be at least 1",
    "draw 1f1b --pp 4 -m 0": "microbatches=0 must be at least 1",
    "list models --seq 0": "seq=0 must be at least 1",
    "ui --port=-1": "port=-1 must be at least 0",
    "verify --steps 0": "steps=0 must be at least 1",
    "verify --timeout 0": "timeout=0 must be at least 0.001",
    "verify --all --world 0": "world=0 must be at least 1",
    "verify --all --sample 0": "sample=0 must be at least 1",
    "train --nproc 0": "nproc=0 must be at least 1",
    "train --nproc 2 --restarts=-1": "restarts=-1 must be at least 0",
    "doctor --nproc 0": "nproc=0 must be at least 1",
    "calibrate --ranks --nproc 1": "nproc=1 must be at least 2; one rank has nothing to compare with",
    "bench peers --ranks 0": "--ranks=0 must be at least 2; one rank has nothing to compare with",
    "bench peers --scaling --ranks 1": "--ranks=1 must be at least 2; one rank has nothing to compare with",
    "bench optimizer tiny --rounds 0": "--rounds=0 must be at least 1",
    "launch --slurm --nodes 0": "--nodes=0 must be at least 1",
}


@pytest.mark.parametrize("words", OUTSIDE)
def test_one_sentence_for_a_number_out_of_bounds(words: str) -> None:
    assert refusal(lambda: here(*words.split())).problems == [OUTSIDE[words]]


def test_what_scripts_read_has_the_codes(tmp_path) -> None:
    done = fivefold("plan", "tiny", "--batch", "0", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout) == {"problems": ["batch=0 must be at least 1"], "codes": ["option.range"]}
    assert done.stderr == "error: batch=0 must be at least 1\n"
