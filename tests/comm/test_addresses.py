"""The addresses and interfaces of this machine."""

from __future__ import annotations

import ipaddress

from thinwire.comm.addresses import interface_to, own_addresses, resolve_host

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
