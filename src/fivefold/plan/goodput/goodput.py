"""Goodput as a function: how long a run takes with failures, how often to save it, what uneven ranks cost.

goodput("llama3-405b", "2048x8xH100", tokens="15.6T").goodput
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fivefold.hardware.cluster import Cluster
from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.plan.goodput.failures import Costs, inputs
from fivefold.plan.goodput.figures import DAY, JITTER
from fivefold.plan.goodput.result import GoodputResult
from fivefold.plan.goodput.run import Run, length
from fivefold.plan.goodput.simulate import RUNS
from fivefold.plan.goodput.stragglers import straggling
from fivefold.plan.plan import plan
from fivefold.plan.result import too_large
from fivefold.plan.training import TWENTY
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.ranges import STEPS, checked, misfit, within

FEW, MANY = 16, 16_384  # ranks, between which jobs lie
MOST_RUNS, SEEDS = 100_000, 2**63


def goodput(
    model: str | Path | ModelSpec | Job,
    cluster: str | Path | Cluster | None = None,
    *,
    changes: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    tokens: str | float | None = None,
    layout: str | Layout | None = None,
    fix: str | Mapping[str, Any] = "",
    precision: str = "",
    software: str = "fivefold",
    every: int | None = None,
    mtbf: float | None = None,
    detect: float | None = None,
    restart: float | None = None,
    storage: float | None = None,
    save: float | None = None,
    jitter: float | None = None,
    runs: int = RUNS,
    seed: int = 0,
) -> GoodputResult:
    """Days to train with failures: expected, and as a distribution of seeded simulated runs.

        ff.goodput("llama3-405b", "2048x8xH100", tokens="15.6T")
        ff.goodput("llama3-70b", "8x8xH100", tokens="1.4T", mtbf=50_000, every=500)

    The run is that of `plan` with the same arguments; `tokens` are 20 per parameter where neither they nor the job say.
    `every` counts steps between checkpoints; without it, and where the job does not say, they are those of the shortest
    run. `mtbf` is hours between failures of one GPU, `detect` and `restart` are seconds, `storage` is GB a second of
    all nodes together, `save` the seconds that a save blocks steps: published or measured where not given. `jitter` is
    the deviation of a rank's step as a share of its mean.
    """
    costs = Costs(mtbf, detect, restart, storage, save)
    costs.check()
    checked("every", every, within(1, STEPS))
    checked("runs", runs, within(10, MOST_RUNS))
    checked("seed", seed, within(0, SEEDS))
    if wrong := misfit("jitter", jitter, within(0, 1)):
        raise UserError(wrong)
    jitter = JITTER if jitter is None else jitter
    own = isinstance(model, Job) or str(model).endswith(".toml") or any("train.steps=" in change for change in changes)
    planned = plan(
        model, cluster, changes=changes, batch=batch, seq=seq, layout=layout, fix=fix, precision=precision,
        software=software, tokens=TWENTY if tokens is None and not own else tokens,
    )  # fmt: skip
    option, training = planned.explained, planned.training
    if not option.fits:
        raise UserError(f"{option.layout}: {too_large(option)}; nearest: layout={planned.chosen.layout}")
    run = training.run(option, costs, every)
    found = run.simulated(runs, seed)
    if found is None:
        raise UserError(_no_end(run))
    world, machine = option.layout.world, option.case.cluster.groups[0].gpus
    return GoodputResult(
        option=option,
        tokens=training.tokens,
        run=run,
        given=run.every != run.best,
        costs=costs,
        simulated=found,
        runs=runs,
        seed=seed,
        inputs=tuple(inputs(option, costs, run.failures)),
        straggling=tuple(straggling(ranks, machine, jitter) for ranks in sorted({FEW, world, MANY})),
        jitter=jitter,
    )


def _no_end(run: Run) -> str:
    """Why failures leave no progress, and what would."""
    between, down, interval = (length(each / DAY) for each in (run.failures.between, run.failures.down, run.interval))
    return (
        f"the job fails once in {between}, needs {down} to run again and has {interval} from save to save, so it comes "
        "to no end; take fewer GPUs, save more often, or start again sooner"
    )
