"""The addresses and network interfaces of this machine, and which of them leads to another machine."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


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
    """This machine's addresses → their interfaces: the first IPv4 address of each interface, and all IPv6 ones."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
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


def gloo_address(master: str) -> tuple[str | None, str | None]:
    """The interface that gloo uses when rank 0's machine is `master`, and its address; None for what is not there."""
    given = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    name = given or interface_to(master)
    return name, next((address for address, one in own_addresses().items() if one == name), None)


@contextmanager
def gloo_interface(master: str) -> Iterator[None]:
    """Inside, gloo uses only the interface that leads to rank 0's machine, `master`.

    By default gloo looks up this machine's own name, which on many systems gives an address that no other machine can
    reach. A GLOO_SOCKET_IFNAME that the user has set is kept.
    """
    name = None if "GLOO_SOCKET_IFNAME" in os.environ else interface_to(master)
    if name is None:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
