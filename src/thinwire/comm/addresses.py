"""The addresses and network interfaces of this machine, and which of them leads to another machine."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.errors import UsageError

AUTO = "auto"  # instead of the name of an interface: the one that leads to rank 0
SIOCGIFCONF = 0x8912  # Linux: the IPv4 addresses of all interfaces
RECORD_BYTES, MOST_RECORDS = 40, 1024  # of what it answers


def resolve_host(host: str) -> tuple[str, ...]:
    """The addresses of a host name, IPv4 first. An address resolves to itself.

    >>> resolve_host("127.0.0.1"), resolve_host("::1")
    (('127.0.0.1',), ('::1',))
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # Python's error for text that cannot be a host name
        raise OSError(str(error)) from error
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return tuple(dict.fromkeys(str(where[0]) for *_, where in found))


def own_addresses() -> dict[str, str]:
    """This machine's addresses → their interfaces, IPv4 first."""
    found: dict[str, str] = {}
    answer = array.array("B", bytes(RECORD_BYTES * MOST_RECORDS))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", len(answer), answer.buffer_info()[0])
        (size,) = struct.unpack_from("i", fcntl.ioctl(any_socket, SIOCGIFCONF, request))
    for at in range(0, size, RECORD_BYTES):
        label = answer[at : at + 16].tobytes().partition(b"\0")[0].decode()  # as eth0, or eth0:1 for a second address
        found[socket.inet_ntoa(answer[at + 20 : at + 24])] = label.partition(":")[0]
    with suppress(OSError):  # a Linux kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return found


def interface_to(host: str) -> str | None:
    """The interface through which this machine reaches another one, if there is a route."""
    with suppress(OSError):  # the name is unknown, or there is no route
        for address in resolve_host(host):
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing: it only looks up the route
                return own_addresses().get(probe.getsockname()[0])
    return None


def addresses_of(iface: str) -> list[str]:
    """The addresses of an interface which other machines can be told; UsageError if there are none.

    >>> addresses_of("lo")[0]
    '127.0.0.1'
    """
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for address, name in own_addresses().items():
        if not ipaddress.ip_address(address).is_link_local:  # that would need the interface's name beside it
            found.setdefault(name, []).append(address)
    if found.get(iface):
        return found[iface]
    there = "; ".join(f"{name} ({', '.join(addresses)})" for name, addresses in found.items() if addresses)
    what = "has no address" if iface in found else "is no interface"
    raise UsageError(f"--iface {iface}: it {what} on this machine ({socket.gethostname()}); possible: {there}")


def gloo_address(master: str) -> tuple[str | None, str | None]:
    """The interface that gloo uses when rank 0's machine is `master`, and its address; None for what is not there."""
    given = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    name = given or interface_to(master)
    return name, next((address for address, one in own_addresses().items() if one == name), None)


@contextmanager
def gloo_interface(master: str, iface: str = AUTO) -> Iterator[None]:
    """Inside, gloo uses only one interface: `iface`, or the one that leads to rank 0's machine, `master`.

    By default gloo looks up this machine's own name, which on many systems gives an address that no other machine can
    reach. A GLOO_SOCKET_IFNAME that the user has set is kept, unless an interface is named here. nccl chooses for
    itself, unless one is.
    """
    if iface != AUTO:
        addresses_of(iface)
        asked = {"GLOO_SOCKET_IFNAME": iface, "NCCL_SOCKET_IFNAME": f"={iface}"}  # "=": not a part of a name
    elif "GLOO_SOCKET_IFNAME" in os.environ or (found := interface_to(master)) is None:
        asked = {}
    else:
        asked = {"GLOO_SOCKET_IFNAME": found}
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def network_of(address: str) -> str:
    """An IPv4 address, or the network (/64) of an IPv6 one: who has one address in that has all."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, 64), strict=False))
