"""Plans for ranks whose speeds were measured: rank 0 stays rank 0."""

from msgspec import structs

from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.hardware.cluster import Cluster, Group
from fivefold.planner import plan
from fivefold.planner.mixed import merge_groups, orders
from fivefold.planner.mixed_compare import slow_accelerator

FAST = structs.replace(ACCELERATORS["CPU"], memory_bandwidth=1e10)
SLOW = slow_accelerator(FAST, 2.0)


def ranks(*devices) -> Cluster:
    return Cluster(tuple(Group(1, 1, device) for device in devices))


def test_measured_ranks_keep_their_numbers_and_those_of_a_catalogue_may_move() -> None:
    assert list(orders(ranks(FAST, SLOW))) == [ranks(FAST, SLOW)]
    assert len(list(orders(Cluster.parse("8xH100+8xA100")))) == 2
    assert merge_groups(ranks(FAST, SLOW, FAST)) == ranks(FAST, SLOW, FAST)
    assert merge_groups(ranks(FAST, FAST, SLOW)) == Cluster((Group(2, 1, FAST), Group(1, 1, SLOW)))
    assert merge_groups(Cluster.parse("8xH100+8xA100+8xH100")) == Cluster.parse("2x8xH100+8xA100")


def test_the_slow_rank_gets_fewer_layers_wherever_it_is() -> None:
    for devices, slow in (((FAST, SLOW), 1), ((SLOW, FAST), 0)):
        found = plan.plan("small", ranks(*devices), batch=8, seq=64, fix="schedule=1f1b")
        layers = found.chosen.layout.split
        assert layers[slow] < layers[1 - slow]
