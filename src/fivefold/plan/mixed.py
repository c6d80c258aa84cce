"""Unlike nodes in one pipeline: each replica has stages on every group, and a faster group takes more layers.

A replica spans all groups, so that no replica is slower than another; the stages of one group hold as many layers as
its devices have the speed for.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from msgspec import structs

from fivefold.layout import Layout, Recompute, tp_fits
from fivefold.plan.time import Case

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


def mixed_cases(case: Case, fixed: dict[str, Any]) -> Iterator[Case]:
    """Layouts whose pipeline runs through the groups in their order, with layers dealt out by speed."""
    spec, groups = case.spec, case.cluster.groups
    for tp, dp, zero, samples, recompute in product(
        [fixed["tp"]] if "tp" in fixed else [1, 2, 4, 8],
        [fixed["dp"]] if "dp" in fixed else [n for n in range(1, case.batch + 1) if case.batch % n == 0],
        [fixed["zero"]] if "zero" in fixed else [0, 1],
        [1, 2, 4],
        [fixed["recompute"]] if "recompute" in fixed else RECOMPUTES,
    ):
        if not tp_fits(spec, tp) or any(group.gpus % tp or group.world % (dp * tp) for group in groups):
            continue
        if case.batch % (dp * samples) or (zero and dp == 1):
            continue
        stages = [group.world // (dp * tp) for group in groups]
        pp = sum(stages)
        if pp > spec.layers or pp == 1:
            continue
        where = tuple(at for at, count in enumerate(stages) for _ in range(count))
        layout = Layout(
            dp=dp,
            tp=tp,
            pp=pp,
            zero=zero,
            sp=tp > 1,
            microbatches=case.batch // (dp * samples),
            recompute=recompute,
        )
        if layout.problems(spec, seq=case.seq, batch=case.batch):
            continue
        yield dealt(replace(case, layout=layout, groups=where))


def dealt(case: Case) -> Case:
    """The same with layers by speed: each next layer goes to the stage that would then be done first."""
    pp = case.layout.pp
    each = [sum(part.total for part in case.work_of(rank).block) for rank in range(pp)]
    load = [0.0] * pp
    load[0] += sum(part.total for part in case.work_of(0).bottom)
    load[-1] += sum(part.total for part in case.work_of(pp - 1).top)
    split = [0] * pp
    for _ in range(case.spec.layers):
        rank = min(range(pp), key=lambda at: load[at] + each[at])
        load[rank] += each[rank]
        split[rank] += 1
    return replace(case, layout=structs.replace(case.layout, split=tuple(split)))
