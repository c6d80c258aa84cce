"""The axis table: sizes, coordinates and groups of ranks, of dense parameters and of experts."""

from itertools import product

import pytest

from fivefold.layout.axes import AXES, shown_order
from fivefold.layout.layout import Layout

LAYOUTS = [
    Layout(dp=dp, pp=pp, cp=cp, tp=tp, replicate=replicate, schedule=schedule)
    for dp, pp, cp, tp, replicate in product((1, 2, 4), (1, 3), (1, 2), (1, 2), (1, 2))
    for schedule in ("1f1b", "zb-v")
    if dp % replicate == 0
]


def test_tp_varies_fastest_then_cp_pp_and_dp() -> None:
    layout = Layout(dp=2, pp=3, cp=2, tp=2)
    assert [layout.coordinates(rank) for rank in (0, 1, 2, 4, 12)] == [
        {"dp": 0, "pp": 0, "cp": 0, "tp": 0},
        {"dp": 0, "pp": 0, "cp": 0, "tp": 1},
        {"dp": 0, "pp": 0, "cp": 1, "tp": 0},
        {"dp": 0, "pp": 1, "cp": 0, "tp": 0},
        {"dp": 1, "pp": 0, "cp": 0, "tp": 0},
    ]
    assert [layout.rank(**layout.coordinates(rank)) for rank in range(24)] == list(range(24))
    assert layout.place(23) == "dp 1, pp 2, cp 1, tp 1"
    assert Layout(tp=2, pp=2).place(2) == "pp 1, tp 0"


def test_groups_sizes_and_positions_agree() -> None:
    for layout, axis in product(LAYOUTS, AXES):
        groups = layout.groups(axis)
        assert {len(group) for group in groups} == {layout.size(axis)}, (layout, axis)
        for group in groups:
            assert [layout.position(axis, rank) for rank in group] == list(range(layout.size(axis))), (layout, axis)
            assert layout.group(axis, group[-1]) == group, (layout, axis)
        met = sorted(rank for group in groups for rank in group)
        if axis != "embedding":
            assert met == list(range(layout.world)), (layout, axis)
        else:
            assert {layout.coordinates(rank)["pp"] for rank in met} == {0, layout.last_stage}, layout


def test_two_axes_are_the_same_where_their_groups_are() -> None:
    for layout in LAYOUTS:
        groups = {axis: sorted(map(sorted, layout.groups(axis))) for axis in AXES}
        ones = [axis for axis in AXES if layout.size(axis) == 1]
        for axis in AXES:
            same = [other for other in AXES if (axis in ones and other in ones) or groups[other] == groups[axis]]
            assert layout.same_axis(axis) == same[0], (layout, axis)


def test_ranks_of_one_pipeline_differ_in_their_stage_alone() -> None:
    layout = Layout(dp=2, pp=2, cp=2, tp=2)
    lines = [[rank for rank in range(16) if layout.pipeline(rank) == line] for line in range(8)]
    assert lines == layout.groups("pp")


def test_groups_of_hybrid_sharding() -> None:
    layout = Layout(dp=4, replicate=2, zero=3, tp=2)
    assert layout.groups("replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("fsdp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("dp") == layout.groups("dp_cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_traffic_is_listed_in_the_order_of_the_table_and_unknown_groups_last() -> None:
    assert [shown_order(axis) for axis in ("dp", "cp", "ranks 0+3")] == [0, 1, len(AXES)]


# ---- a grid of its own: expert axes fold over dp x cp x tp -----------------------------------------------------------


def test_expert_axes_are_another_factorisation_of_the_ranks_of_a_stage() -> None:
    layout = Layout(dp=2, pp=2, cp=1, tp=2, ep=2)
    assert (layout.size("ep"), layout.size("expert_dp"), layout.world) == (2, 2, 8)
    assert layout.groups("ep") == [[0, 1], [4, 5], [2, 3], [6, 7]]  # stage by stage, the fastest axis first
    assert layout.groups("expert_dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [layout.position("expert_dp", rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(("ep", "ranks"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 8, 9]), (8, [0, 1, 2, 3, 8, 9, 10, 11])])
def test_expert_groups_skip_the_other_stages(ep: int, ranks: list[int]) -> None:
    layout = Layout(dp=2, pp=2, cp=1 if ep == 4 else 2, tp=2, ep=ep)
    if ep == 4:  # without cp, four ranks are those of both replicas
        ranks = [0, 1, 4, 5]
    assert layout.group("ep", 0) == ranks
    assert all(len({layout.coordinates(rank)["pp"] for rank in group}) == 1 for group in layout.groups("ep"))


def test_an_expert_axis_with_the_ranks_of_a_dense_one_goes_by_its_name() -> None:
    assert Layout(dp=2, tp=2, ep=2).same_axis("ep") == "tp"
    assert Layout(dp=2, tp=2, ep=2).same_axis("expert_dp") == "dp"
    assert Layout(dp=2, tp=2, ep=4).same_axis("ep") == "world"
    assert Layout(dp=4, tp=2, ep=4).same_axis("ep") == "ep"
    assert Layout(dp=2, cp=2, pp=2, ep=4).same_axis("ep") == "fsdp"


def test_copies_of_shards_keep_experts_to_themselves() -> None:
    layout = Layout(dp=4, tp=2, ep=2, zero=3, replicate=2)
    assert layout.groups("efsdp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("expert_dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups("stage") == [list(range(8))]
    assert layout.groups("cp_tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
