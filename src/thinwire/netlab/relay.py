"""A link with latency for Linux kernels without netem: packets pass through this process, which delays them.

The interface of every host is a TUN device. A packet leaves the sender's token bucket, is read here, and is written to
the receiver's device when the latency is over.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
from collections import deque

from thinwire.netlab.link import Link
from thinwire.netlab.linux import INTERFACE

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
QUEUE_BYTES = 4_000_000  # a port drops packets when it holds more


def open_tun() -> int:
    """The descriptor of a new TUN device in the current network namespace; each read or write is a packet."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


class Port:
    """The queue of packets to one host. They leave in order, after the latency, at the link's rate."""

    def __init__(self, tun: int, link: Link) -> None:
        self.tun = tun
        self.seconds_per_byte = 8e-6 / link.rate_mbit
        self.latency = link.latency_ms / 1e3
        self.queue: deque[tuple[float, bytes]] = deque()
        self.queued_bytes = 0
        self.free_at = 0.0

    def enqueue(self, packet: bytes, now: float) -> None:
        """Queue a packet, or drop it if the queue is full, as a switch would."""
        if self.queued_bytes > QUEUE_BYTES + self.latency / self.seconds_per_byte:
            return
        due = max(now + self.latency, self.free_at)
        self.free_at = due + len(packet) * self.seconds_per_byte
        self.queue.append((due, packet))
        self.queued_bytes += len(packet)

    def deliver(self, now: float) -> None:
        """Write the packets that are due to the host's device."""
        while self.queue and self.queue[0][0] <= now:
            _, packet = self.queue.popleft()
            self.queued_bytes -= len(packet)
            try:
                os.write(self.tun, packet)
            except BlockingIOError:
                continue  # the host does not accept it: the packet is lost


def relay(tuns: list[int], link: Link, stop: int) -> None:
    """Carry packets between hosts until the descriptor `stop` is readable. Host i has the address x.x.x.(i+1)."""
    ports = [Port(tun, link) for tun in tuns]
    while True:
        due = [port.queue[0][0] for port in ports if port.queue]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([*tuns, stop], [], [], timeout)
        if stop in readable:
            return
        now = time.monotonic()
        for tun in readable:
            packet = os.read(tun, 2**16)
            host = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of the IPv4 destination
            if 0 <= host < len(ports):
                ports[host].enqueue(packet, now)
        for port in ports:
            port.deliver(now)
