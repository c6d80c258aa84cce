"""Mixed nodes in one pipeline: each replica has stages on every group, and a faster group takes more layers.

A replica spans all groups, so that no replica is slower than another; the stages of one group hold as many layers as
its devices have the speed for.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from msgspec import structs

from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout, tp_fits
from fivefold.plan.cost.time import Case
from fivefold.plan.search.space import RECOMPUTES, divisors
from fivefold.support.errors import UserError
from fivefold.support.formatting import either


def groups_of(cluster: Cluster, layout: Layout) -> tuple[int, ...]:
    """The group of each pipeline rank, where every replica spans all groups; empty where there is one group."""
    if len(cluster.groups) == 1:
        return ()
    row = layout.world // layout.pp  # ranks of one stage
    if any(group.world % row for group in cluster.groups):
        raise UserError(
            f"{layout} does not span the mixed nodes of {cluster}: a pipeline stage has dp x tp x cp = {row} "
            f"ranks, and the groups have {either([group.world for group in cluster.groups])}; nearest: a dp x tp x cp "
            f"that divides {math.gcd(*(group.world for group in cluster.groups))}"
        )
    return tuple(at for at, group in enumerate(cluster.groups) for _ in range(group.world // row))


def mixed_cases(case: Case, fixed: dict[str, Any]) -> Iterator[Case]:
    """Layouts whose pipeline runs through the groups in their order, with layers divided by speed."""
    spec, groups = case.spec, case.cluster.groups
    for tp, dp, zero, samples, recompute in product(
        [fixed["tp"]] if "tp" in fixed else [1, 2, 4, 8],
        [fixed["dp"]] if "dp" in fixed else divisors(case.batch),
        [fixed["zero"]] if "zero" in fixed else [0, 1],
        [1, 2, 4],
        [fixed["recompute"]] if "recompute" in fixed else RECOMPUTES,
    ):
        if not tp_fits(spec, tp) or any(group.gpus % tp or group.world % (dp * tp) for group in groups):
            continue
        if case.batch % (dp * samples) or (zero and dp == 1):
            continue
        where = groups_of(case.cluster, Layout(dp=dp, tp=tp))
        pp = len(where)
        if pp > spec.layers or pp == 1:
            continue
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
        yield split_by_speed(replace(case, layout=layout, groups=where))


def split_by_speed(case: Case) -> Case:
    """The case with layers divided by speed: each next layer goes to the stage that would then finish first."""
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
