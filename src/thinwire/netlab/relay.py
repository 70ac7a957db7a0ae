"""A link with latency for kernels without netem: packets pass through this process, which holds each of them a while.

Every host's wire is a TUN device. What a host sends leaves its token bucket, is read here, and is written to the
device of the host it is addressed to when its time has come.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
from collections import deque

from thinwire.netlab.kernel import WIRE
from thinwire.netlab.link import Link

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
QUEUE_BYTES = 4_000_000  # what a host's port holds before it drops


def open_tun() -> int:
    """A TUN device in the present network namespace, as a file of packets."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", WIRE.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


class Port:
    """The way to one host: packets leave in order, none before its time, no faster than the link."""

    def __init__(self, tun: int, link: Link) -> None:
        self.tun = tun
        self.seconds_per_byte = 8e-6 / link.rate_mbit
        self.latency = link.latency_ms / 1e3
        self.queue: deque[tuple[float, bytes]] = deque()
        self.queued_bytes = 0
        self.free_at = 0.0

    def take(self, packet: bytes, now: float) -> None:
        """Queue a packet, or drop it when the queue is full, as a switch would."""
        if self.queued_bytes > QUEUE_BYTES + self.latency / self.seconds_per_byte:
            return
        due = max(now + self.latency, self.free_at)
        self.free_at = due + len(packet) * self.seconds_per_byte
        self.queue.append((due, packet))
        self.queued_bytes += len(packet)

    def deliver(self, now: float) -> None:
        """Hand over what is due."""
        while self.queue and self.queue[0][0] <= now:
            _, packet = self.queue.popleft()
            self.queued_bytes -= len(packet)
            try:
                os.write(self.tun, packet)
            except BlockingIOError:
                continue  # the host does not take it: lost


def relay(tuns: list[int], link: Link, stop: int) -> None:
    """Carry packets between hosts until `stop`, a file, can be read. Host i has the address x.x.x.(i+1)."""
    ports = [Port(tun, link) for tun in tuns]
    while True:
        nexts = [port.queue[0][0] for port in ports if port.queue]
        timeout = max(0.0, min(nexts) - time.monotonic()) if nexts else None
        readable, _, _ = select.select([*tuns, stop], [], [], timeout)
        if stop in readable:
            return
        now = time.monotonic()
        for tun in readable:
            packet = os.read(tun, 2**16)
            host = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of the IPv4 destination
            if 0 <= host < len(ports):
                ports[host].take(packet, now)
        for port in ports:
            port.deliver(now)
