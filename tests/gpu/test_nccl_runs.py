"""Training over NCCL: long runs with evaluation, checkpoints and other layouts are the curve that gloo gives."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu.nccl import needs_a_gpu, train

pytestmark = needs_a_gpu
# At the default lr of 0.003 six layers amplify a last bit tenfold every two steps: two layouts on CPUs are 1e-2 apart
# at step 60.
TINY = ("train.dtype=float64", "model.layers=6", "optimizer.lr=0.001")


def steps(count: int, of: int) -> tuple[str, ...]:
    """`count` steps of a run of `of`, with four evaluations and checkpoints."""
    every = (f"train.eval_every={of // 4}", f"checkpoint.every={of // 4}")
    return (f"train.steps={count}", f"optimizer.schedule_steps={of}", *every, *TINY)


@pytest.mark.parametrize(
    ("layout", "nproc", "then", "others", "count"),
    [
        ("pp=2,schedule=zb-v,microbatches=4", 2, "dp=2,zero=1", 2, 200),
        ("pp=4,schedule=zb-v,microbatches=4", 4, "dp=2,pp=2,microbatches=2,zero=2", 4, 200),  # eight stages
        # the ring sends inside of actions, in evaluation, too; over gloo, through host memory, a step of it takes 1.5 s
        ("cp=2,pp=2,microbatches=2", 4, "tp=2,sp", 2, 60),
    ],
)
def test_long_runs_are_those_of_gloo(
    tmp_path: Path, layout: str, nproc: int, then: str, others: int, count: int
) -> None:
    folders = [tmp_path / name for name in ("nccl", "gloo", "resumed")]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(3) as pool:
        whole, gloo, half = pool.map(
            lambda folder, until, shared: train(folder, layout, nproc, *steps(until, count), shared=shared),
            folders,
            (count, count, count // 2),
            (True, False, True),
        )
    for done in (whole, gloo, half):
        assert done.code == 0, done.output
    assert len(whole.losses) == count
    assert whole.losses[count] < whole.losses[1] - 1
    apart = max(abs(whole.losses[step] / gloo.losses[step] - 1) for step in whole.losses)
    print(f"{layout}: {count} steps over NCCL in {whole.seconds:.0f} s, within {apart:.1e} of gloo's")
    assert whole.losses == pytest.approx(gloo.losses, rel=1e-10)
    assert whole.held_out == pytest.approx(gloo.held_out, rel=1e-10)
    again = train(folders[2], then, others, *steps(count, count))
    assert again.code == 0, again.output
    assert again.losses == pytest.approx(whole.losses, rel=1e-10)


def test_replayed_microbatches_agree_and_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """A rank computes a microbatch of another, forward and backward through the pipeline, between two steps."""
    words = ("train.steps=6", "train.dtype=float32", "watch.replay=2", "watch.digests=2", "checkpoint.save=false")
    layout = "dp=2,pp=2,microbatches=4,schedule=zb-v"
    healthy = train(tmp_path, layout, 4, *words)
    assert healthy.code == 0, healthy.output
    assert sorted(healthy.losses) == [1, 2, 3, 4, 5, 6]
    flipped = train(tmp_path, layout, 4, *words, "run.name=flipped", fault="flip@rank=2,step=4,at=compute")
    assert flipped.code == 1, flipped.output
    assert "rank 2" in flipped.said


def test_replays_under_zero_3_agree_while_gradients_come_on_a_stream_of_their_own(tmp_path: Path) -> None:
    """The first replay comes before any other digest, and FSDP2 hands over experts' gradients on its own stream."""
    words = ("model=tiny-moe", "train.steps=4", "train.dtype=bfloat16", "watch.replay=2", "watch.digests=0")
    layout = "dp=2,pp=2,zero=3,microbatches=4"
    done = train(tmp_path, layout, 4, *words, "checkpoint.save=false")
    assert done.code == 0, done.output
    assert sorted(done.losses) == [1, 2, 3, 4]


def test_text_generated_over_nccl_is_that_of_one_process(tmp_path: Path) -> None:
    done = train(tmp_path, "dp=2", 2, "train.steps=40", "checkpoint.every=40")
    assert done.code == 0, done.output

    def text(layout: str) -> str:
        command = [sys.executable, "-m", "fivefold", "generate", str(tmp_path / "run"), "--prompt", "def f"]
        options = ["--layout", layout, "--device", "cuda", "--dtype", "float64", "--seed", "3", "-n", "40"]
        shared = ["--share-gpu", "nccl"] if layout != "dp=1" else []
        said = subprocess.run([*command, *options, *shared], capture_output=True, text=True, timeout=200, check=False)
        assert said.returncode == 0, said.stderr
        return said.stdout

    alone = text("dp=1")
    assert len(alone) > 20
    for layout in ("tp=2", "tp=2,pp=2", "pp=2"):
        assert text(layout) == alone, layout
