"""Devices and links by name, and the cost of collectives over machines."""

from passes.plan import CostModel, Device, Link
from passes.plan.cost import HARDWARE, INSIDE, cluster, describe, hardware, link

import pytest

DEVICE = Device(1e12, 1e12, 1e12, 0.0)


def test_names():
    assert hardware("H100") is hardware("h100-sxm")
    assert link("400 Gbit/s") == link("400gbit")
    assert HARDWARE.keys() == INSIDE.keys()
    assert all(row.source and row.memory > 1e9 for row in HARDWARE.values())


@pytest.mark.parametrize(("name", "shown"), [
    ("100Gbps", "100gbit"), ("12.5GB/s", "100gbit"), ("3Gb/s", "3gbit"), ("62.5GBps", "500gbit"), ("0.5 gbit", "0.5gbit"),
])  # fmt: skip
def test_a_link_by_its_rate(name, shown):
    assert describe(cluster(hardware("cpu"), inside=None, between=name, node_ranks=1)).endswith(
        f", {shown} between ranks"
    )
    assert link(name).bandwidth == pytest.approx(link(shown).bandwidth)


@pytest.mark.parametrize("name", ["50gb/s", "1.2.3gbit", "GB/s"])
def test_what_is_no_rate(name):
    with pytest.raises(ValueError, match="or a rate, as in 50gbit"):
        link(name)


@pytest.mark.parametrize(("find", "name"), [(hardware, "h1000"), (link, "carrier pigeon")])
def test_an_unknown_name_lists_the_known_ones(find, name):
    with pytest.raises(ValueError, match=rf"there is no \w+ '{name}': choose one of .*(a100-80|nvlink4)"):
        find(name)


def test_a_machine_has_ranks():
    with pytest.raises(ValueError, match="1 rank or more, not 0"):
        cluster(hardware("h100"), inside=None, between=None, node_ranks=0)


def test_inside_a_machine_only_its_link_counts():
    cost = CostModel(Link(1.0, 1e3), DEVICE, node=Link(100.0, 2.0), node_ranks=8)
    assert cost.collective_seconds(800, 8) == 2.0 + 800 * 7 / 8 / 100


def test_between_machines_the_slower_of_both_counts():
    inside, between = Link(100.0, 2.0), Link(1.0, 3.0)
    cost = CostModel(between, DEVICE, node=inside, node_ranks=4)
    # each of the 4 ranks of a machine sends a quarter of what leaves it
    assert cost.collective_seconds(800, 8) == 2.0 + 3.0 + 800 / 4 / 2 / 1.0
    fast = CostModel(Link(1e9, 3.0), DEVICE, node=inside, node_ranks=4)
    assert fast.collective_seconds(800, 8) == 2.0 + 3.0 + 800 * 3 / 4 / 100


def test_replicas_lie_apart():
    cost = CostModel(Link(10.0, 3.0), DEVICE, node=Link(100.0, 2.0), node_ranks=4)
    assert cost.collective_seconds(800, 2, apart=True) == 3.0 + 800 / 2 / 10


def test_a_ring_takes_longer_with_more_ranks():
    ring = Link(1e9, 1.0, hop=0.5)
    assert [ring.seconds(0, ranks) for ranks in (1, 2, 4)] == [1.0, 1.0, 2.0]
