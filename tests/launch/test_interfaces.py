"""Which interface gloo gets. tests/cluster has two hosts that need the right one."""

import os
import re
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from fivefold.launch import rendezvous
from fivefold.launch.rendezvous import GLOO_INTERFACE_ENV, Rendezvous, check_interfaces, choose_interface, interface_of
from tests.refusals import refusal


def test_an_address_has_an_interface() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == interface_of("2001:db8::7") == ""


def test_an_interface_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE_ENV, "ib7")
    error = refusal(lambda: check_interfaces(Rendezvous("", "127.0.0.1", 29500)))
    assert error.codes == ["environment.interface"]
    assert re.search(r"GLOO_SOCKET_IFNAME=ib7: .* has no such interface, only lo.*; nearest: unset", str(error))


def test_loopback_is_refused_where_rank_0_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE_ENV, "lo")
    check_interfaces(Rendezvous("", "127.0.0.1", 29500))
    monkeypatch.setattr(rendezvous, "_interface_to", lambda address, port: "eth9")
    error = refusal(lambda: check_interfaces(Rendezvous("", "127.0.0.1", 29500)))
    assert error.codes == ["environment.interface"]
    assert re.search(r"reach a loopback interface; .* or GLOO_SOCKET_IFNAME=eth9", str(error))


def test_gloo_gets_the_interface_over_which_ranks_met_unless_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOO_INTERFACE_ENV, raising=False)
    meeting = Rendezvous("", "127.0.0.1", 29500)
    assert choose_interface(meeting, HashStore(), 2, 1.0) == "this rank uses lo"
    assert os.environ[GLOO_INTERFACE_ENV] == "lo"
    monkeypatch.setenv(GLOO_INTERFACE_ENV, "docker0")
    assert "uses docker0, as GLOO_SOCKET_IFNAME says, but 127.0.0.1 is reached over lo" in choose_interface(
        meeting, HashStore(), 2, 1.0
    )
    assert os.environ[GLOO_INTERFACE_ENV] == "docker0"


def test_a_rank_whose_name_is_loopback_learns_its_address_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 does on Debian, where a machine's own name is 127.0.1.1."""
    store, found = HashStore(), list[str]()
    store.set_timeout(timedelta(seconds=5))
    local, other = Rendezvous("", "n1", 29500), Rendezvous("", "n1", 29501)
    monkeypatch.setattr(Rendezvous, "resolved", lambda self: [(2, "10.77.0.1" if self is other else "127.0.1.1")])
    ask = threading.Thread(target=lambda: found.append(rendezvous._address_of_rank_0(local, store, 2, 20.0)))
    ask.start()
    assert rendezvous._address_of_rank_0(other, store, 2, 20.0) == "10.77.0.1"
    ask.join()
    assert found == ["10.77.0.1"]
