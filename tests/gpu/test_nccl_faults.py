"""Faults under NCCL: who is named, within how many seconds, with which exit code; and what goes on.

No peer's connection closes here: a rank that is gone leaves the others in a wait of their device. `train.timeout` is 12
seconds, so a silent rank is named after 12 + 1.2 + 2, and the launcher's patience with the others is 8.
"""

import json
import re
from pathlib import Path

import pytest

from tests.gpu.nccl import Done, needs_a_gpu, train

pytestmark = needs_a_gpu
LAYOUT = "dp=2,pp=2,microbatches=2"
RUN = ("train.steps=6", "checkpoint.every=2", "train.timeout=12")


def faulty(folder: Path, fault: str, *words: str, layout: str = LAYOUT, nproc: int = 4) -> Done:
    done = train(folder, layout, nproc, *RUN, *words, fault=fault)
    named = re.findall(r"^rank \d.*", done.output, re.MULTILINE)[-1:]
    print(f"{fault} ({layout}): exit code {done.code}, {done.after:.1f} s after it: {' '.join(named)[:120]}")
    assert done.after > 0, done.output
    return done


@pytest.mark.parametrize(
    ("fault", "said", "code", "within"),
    [
        ("kill@rank=1,step=3", "rank 1 (dp 0, pp 1) was ended by SIGKILL in step 3", 1, 20),
        ("segv@rank=1,step=3", "rank 1 (dp 0, pp 1) was ended by SIGSEGV in step 3", 1, 20),
        ("raise@rank=1,step=3", "rank 1 (dp 0, pp 1) failed with exit code 1 in step 3", 1, 20),
        ("kill@rank=2,step=3,at=backward", "rank 2 (dp 1, pp 0) was ended by SIGKILL in step 3", 1, 20),
    ],
)
def test_a_rank_that_ends_is_named(tmp_path: Path, fault: str, said: str, code: int, within: float) -> None:
    done = faulty(tmp_path, fault)
    assert done.code == code, done.output
    assert said in done.said
    assert done.output.count("was ended by") + done.output.count("failed with") == 1  # and no other
    assert done.after < within


def test_a_rank_that_is_stopped_is_named_and_no_other(tmp_path: Path) -> None:
    done = faulty(tmp_path, "stop@rank=1,step=3")
    assert done.code == 1, done.output
    named = [line for line in done.output.splitlines() if line.startswith("rank ")]
    assert [line[:20] for line in named if "NCCL" not in line] == ["rank 1 (dp 0, pp 1) "], done.output
    assert "SIGSTOP or a debugger held it" in named[-1]
    assert done.after < 45


def test_a_rank_that_hangs_is_named_and_the_others_say_what_nccl_has_not_finished(tmp_path: Path) -> None:
    done = faulty(tmp_path, "hang@rank=1,step=3", layout="pp=2,microbatches=4,schedule=zb-v", nproc=2)
    assert done.code == 1, done.output
    assert "rank 1 (pp 1)" in done.output.strip().splitlines()[-1]
    assert "rank 0 has not moved for" in done.said
    assert "NCCL has not finished all_reduce of" in done.said
    assert done.after < 45


def test_a_rank_that_skips_a_collective_is_told_apart_by_what_nccl_has_not_finished(tmp_path: Path) -> None:
    """Rank 1 leaves out the sum of the gradient norm in step 3: both ranks wait, for different things."""
    done = faulty(tmp_path, "skip@rank=1,step=3", layout="dp=2", nproc=2)
    assert done.code == 1, done.output
    assert "all ranks only waited for others, so none is to blame by itself" in done.said
    for rank in (0, 1):
        assert f"rank {rank} (dp {rank}) waited: rank {rank} has not moved for" in done.said
    assert "failed with" not in done.said
    unfinished = re.findall(r"NCCL has not finished (.*)", done.output)
    assert len(set(unfinished)) == 2, done.output
    assert done.after < 45


def test_a_sum_of_another_shape_names_both_ranks(tmp_path: Path) -> None:
    done = faulty(tmp_path, "shape@rank=1,step=1", layout="dp=2", nproc=2)
    assert done.code == 1, done.output
    assert "on rank 0" in done.said
    assert "on rank 1" in done.said
    assert "collective" in done.said
    assert done.after < 45


def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    done = faulty(tmp_path, "term@rank=1,step=3", layout="tp=2,sp", nproc=2)
    assert done.code == 143
    assert "its checkpoint is saved" in done.said
    again = train(tmp_path, "pp=2,microbatches=2", 2, *RUN)
    assert again.code == 0
    assert sorted(again.losses) == [1, 2, 3, 4, 5, 6]


def test_a_gradient_that_is_no_number_ends_all_ranks_alike(tmp_path: Path) -> None:
    done = faulty(tmp_path, "nan@rank=1,step=3")
    assert done.code == 1, done.output
    assert "step 3" in done.said
    assert done.after < 20


def test_a_killed_run_starts_again_from_memory(tmp_path: Path) -> None:
    whole = train(tmp_path, LAYOUT, 4, *RUN, "train.dtype=float64", "run.name=whole")
    assert whole.code == 0, whole.output
    memory = ("--restarts=1", "checkpoint.memory_every=1", "checkpoint.every=100", "train.dtype=float64")
    done = faulty(tmp_path, "kill@rank=2,step=4", *memory)
    assert done.code == 0, done.output
    assert "memory" in done.said
    assert done.losses == pytest.approx(_losses(tmp_path / "whole"), rel=1e-10)


def test_an_elastic_run_goes_on_without_the_rank_that_is_lost(tmp_path: Path) -> None:
    done = faulty(tmp_path, "lose@rank=1,step=3", "--elastic", layout="dp=2", nproc=2)
    assert done.code == 0, done.output
    assert "elastic:" in done.said
    assert sorted(done.losses) == [1, 2, 3, 4, 5, 6]


def _losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}
