"""The model of a network: how long an operation takes on it, and how many bytes the Linux kernel counts for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.netlab.link import Link

SMALL_GATHER = 2**16  # bytes of a rank; a larger all_gather is our own ring, without gloo's waits between its steps
SMALL_PARTS = 2**17  # bytes that an all_to_all has in flight at once
PREAMBLE_BYTES = 48  # of each of the three messages by which gloo sends one: two to meet, one with the data
TCP_BYTES, ETHERNET_BYTES = 52, 14  # headers of a packet, TCP's time stamps included; a TUN device has no Ethernet
PACKETS_PER_MESSAGE = 3.7  # those three, and an acknowledgement that does not always travel with other data
LOOPBACK_MBIT = 12_000.0  # between processes of one machine, of which each byte is copied four times
CORE_SECONDS_PER_BYTE = 3.6e-9  # of gloo and Linux, to send one byte and to receive one
HOP_SECONDS = 1e-4  # that gloo and Linux need to pass a message on


@dataclass(frozen=True)
class Frames:
    """How data travel: the largest frame, the largest packet that Linux counts as one, and a packet's headers."""

    mtu: int = 1500
    packet_bytes: int = 1500
    header_bytes: int = TCP_BYTES + ETHERNET_BYTES

    @property
    def overhead(self) -> float:
        """Bytes of headers and acknowledgements for each byte of data: a header a packet, an answer every two frames.

        >>> round(Frames().overhead, 4)
        0.0684
        """
        frame, packet = self.mtu - TCP_BYTES, self.packet_bytes - TCP_BYTES
        return self.header_bytes / packet + self.header_bytes / max(2 * frame, packet)


@dataclass(frozen=True)
class Wire:
    """A network: every node has one link, with this rate in each direction; ranks of a node share it.

    `cores` are those of a machine, for all its ranks. With `is_one_machine` the nodes are hosts on one machine, as
    `--link` makes them, and share its cores.
    """

    link: Link
    frames: Frames = Frames()
    cores: float = math.inf
    is_one_machine: bool = False
    loopback_mbit: float = LOOPBACK_MBIT
    hop_seconds: float = HOP_SECONDS
    busy_hop_seconds: float = HOP_SECONDS  # while all cores of a machine compute
    slowdown: tuple[float, ...] = (1.0,)  # of one process, while 1, 2, … processes of a machine compute

    def seconds_per_byte(self, is_between: bool) -> float:
        """For each byte that Linux counts."""
        return 8e-6 / (self.link.rate_mbit if is_between else self.loopback_mbit)

    def latency(self, is_between: bool, busy: float = 0.0) -> float:
        """Of one message from one rank to another, while so many threads of a machine compute."""
        own = self.busy_hop_seconds if busy >= self.cores else self.hop_seconds
        return own + (self.link.latency_ms / 1e3 if is_between else 0.0)

    def kernel_bytes(self, wire_bytes: float, messages: float) -> float:
        """What Linux counts for so many bytes in so many messages: with preambles, headers and acknowledgements."""
        return wire_bytes * (1 + self.frames.overhead) + messages * (
            3 * PREAMBLE_BYTES + PACKETS_PER_MESSAGE * self.frames.header_bytes
        )

    @property
    def sending_share(self) -> float:
        """The share of a core that a rank needs to send and receive at the rate of the link."""
        return min(1.0, CORE_SECONDS_PER_BYTE * self.link.rate_mbit * 1e6 / 8)

    def computing_speed(self, busy: float) -> float:
        """The speed of each of so many threads that compute on a machine at once; 1 = that of one alone."""
        known = self.slowdown[min(max(1, round(busy)), len(self.slowdown)) - 1]
        return min(1.0, self.cores / busy) / known if busy else 1.0


def hops(op: str, payload: float, ranks: int) -> float:
    """How many times an operation waits for a message to arrive: measured with gloo, on links of 10 ms.

    Each message takes two, because sender and receiver meet first.
    """
    if ranks == 1:
        return 0.0
    if op == "all_reduce":
        return 5 * (ranks - 1) - 1
    if op == "all_gather":
        return 3 * (ranks - 1) - 1 if payload < SMALL_GATHER else 2 * (ranks - 1)
    if op == "all_to_all":
        return ranks if payload * (ranks - 1) / ranks <= SMALL_PARTS else 3 * (ranks - 1) - 1
    if op == "broadcast":
        return 2.5 * math.log2(ranks)
    return 2.0


def messages(op: str, payload: float, ranks: int, receivers: int) -> float:
    """How many messages a rank sends in an operation; gloo's rings send each part in two."""
    if op == "all_reduce":
        return 4 * (ranks - 1)
    if op == "all_gather":
        return (2 if payload < SMALL_GATHER else 1) * (ranks - 1)
    return receivers


def lab_frames(link: Link, is_relayed: bool) -> Frames:
    """The frames of hosts that netlab makes."""
    from thinwire.netlab.keeper import frames

    mtu, packet = frames(link, is_relayed)
    return Frames(mtu, packet, TCP_BYTES + (0 if is_relayed else ETHERNET_BYTES))
