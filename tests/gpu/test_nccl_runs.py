"""Training over NCCL: long runs with evaluation, checkpoints and other layouts are the curve that gloo gives."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu.nccl import needs_a_gpu, train

pytestmark = needs_a_gpu
STEPS = 200
LONG = (f"train.steps={STEPS}", "train.dtype=float64", "train.eval_every=50", "checkpoint.every=50", "model.layers=6")
FIRST_HALF = (f"train.steps={STEPS // 2}", f"optimizer.schedule_steps={STEPS}", *LONG[1:])
CHANGED = (f"train.steps={STEPS}", f"optimizer.schedule_steps={STEPS}")


@pytest.mark.parametrize(
    ("layout", "nproc", "then", "others"),
    [
        ("pp=2,schedule=zb-v,microbatches=4", 2, "dp=2,zero=1", 2),
        ("pp=4,schedule=zb-v,microbatches=4", 4, "dp=2,pp=2,microbatches=2,zero=2", 4),  # eight stages
    ],
)
def test_two_hundred_steps_are_those_of_gloo(tmp_path: Path, layout: str, nproc: int, then: str, others: int) -> None:
    folders = [tmp_path / name for name in ("nccl", "gloo", "resumed")]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(3) as pool:
        whole, gloo, half = pool.map(
            lambda folder, words, shared: train(folder, layout, nproc, *words, shared=shared),
            folders,
            (LONG, LONG, FIRST_HALF),
            (True, False, True),
        )
    for done in (whole, gloo, half):
        assert done.code == 0, done.output
    assert len(whole.losses) == STEPS
    assert whole.losses[STEPS] < whole.losses[1] - 1
    apart = max(abs(whole.losses[step] / gloo.losses[step] - 1) for step in whole.losses)
    print(f"{layout}: {STEPS} steps over NCCL in {whole.seconds:.0f} s, within {apart:.1e} of gloo's")
    assert whole.losses == pytest.approx(gloo.losses, rel=1e-10)
    assert whole.held_out == pytest.approx(gloo.held_out, rel=1e-10)
    again = train(folders[2], then, others, *CHANGED, *LONG[1:])
    assert again.code == 0, again.output
    assert again.losses == pytest.approx(whole.losses, rel=1e-10)
