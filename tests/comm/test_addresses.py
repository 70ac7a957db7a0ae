"""The addresses and interfaces of this machine."""

from __future__ import annotations

import ipaddress
import os
import socket

import pytest

from thinwire.comm.addresses import (
    addresses_of,
    gloo_address,
    gloo_interface,
    interface_to,
    network_of,
    own_addresses,
    resolve_host,
)
from thinwire.errors import UsageError

OWN = own_addresses()
LAN = [address for address in OWN if not ipaddress.ip_address(address).is_loopback and ":" not in address]


def test_interfaces_are_found_for_names_and_addresses() -> None:
    assert OWN["127.0.0.1"] == "lo"
    assert resolve_host("localhost")[0] == "127.0.0.1", "also where ::1 comes first"
    assert interface_to("127.0.0.1") == interface_to("localhost") == interface_to("127.0.0.9") == "lo"
    assert interface_to("gpu03.invalid") is None
    if "::1" in OWN:
        assert interface_to("::1") == "lo"
    for address in LAN:
        assert interface_to(address) == OWN[address] != "lo"


def test_an_interface_has_an_address_that_others_can_be_told() -> None:
    assert addresses_of("lo")[0] == "127.0.0.1"
    for address in LAN:
        assert addresses_of(OWN[address])[0] == address


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError) as caught:
        addresses_of("eth77")
    for part in ("--iface eth77: ", socket.gethostname(), "lo (127.0.0.1"):
        assert part in str(caught.value)


def test_an_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An IPv6 address that begins with fe80 is one of a cable, not of a machine: it needs the interface beside it."""
    known = {"10.0.0.7": "eth0", "fe80::1": "eth1"}
    monkeypatch.setattr("thinwire.comm.addresses.own_addresses", lambda: known)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0"), (2, "eth1"), (3, "eth2")])
    for name in ("eth1", "eth2"):
        with pytest.raises(UsageError, match=rf"--iface {name}: .* has no address.*eth0 \(10.0.0.7\)"):
            addresses_of(name)


def test_gloo_and_nccl_use_the_interface_that_was_asked_for_and_forget_it_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with gloo_interface("192.0.2.77", "lo"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo", "= lets nccl take no other name that begins so"
        assert gloo_address("192.0.2.77") == ("lo", "127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth77"
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    with gloo_interface("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth77", "the user's own setting is kept"


def test_ipv6_addresses_of_one_network_count_as_one() -> None:
    given = [
        "10.0.0.1",
        "10.0.0.2",
        "2001:db8::1",
        "2001:db8::ffff:1",
        "2001:db8:0:1::1",
        "fe80::1%eth0",
        "an unknown one",
    ]
    assert [network_of(one) for one in given] == [
        "10.0.0.1", "10.0.0.2", "2001:db8::/64", "2001:db8::/64", "2001:db8:0:1::/64", "fe80::/64", "an unknown one",
    ]  # fmt: skip
    assert network_of("::ffff:10.0.0.1") == "10.0.0.1"
