"""Measure a link as programs see it: by TCP streams around a ring of hosts, and by round trips of small messages."""

from __future__ import annotations

import select
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from thinwire.netlab.link import Link

NUM_PINGS = 5
WARMUP_SECONDS, WARMUP_LATENCIES = 0.4, 40  # TCP needs their sum to reach its rate
SECONDS, NUM_BYTES = 0.6, 100_000  # a measurement takes at least both
TOLERANCE = 0.10  # a link that differs by more than this share is off
OWN_LATENCY_MS = 0.5  # the machine itself may take so long
CHUNK_BYTES = 2**18
AT_ONCE = struct.pack("ii", 1, 0)  # a socket that is closed drops what it has not sent


class Measured(NamedTuple):
    """The rate of the slowest host while all send and receive, and the latency."""

    rate_mbit: float
    latency_ms: float

    def is_off(self, link: Link) -> bool:
        """Whether the rate or the latency differs from the given link by more than a tenth."""
        rate_off = abs(self.rate_mbit / link.rate_mbit - 1) > TOLERANCE
        tolerance_ms = max(TOLERANCE * link.latency_ms, OWN_LATENCY_MS)
        return rate_off or abs(self.latency_ms - link.latency_ms) > tolerance_ms


class Stream(NamedTuple):
    """A connection from one host to the next."""

    sender: socket.socket
    receiver: socket.socket


def measure(addresses: Sequence[str], link: Link | None, enter: Callable[[int], None]) -> Measured:
    """Rate and latency between hosts. `enter(i)` moves this process to host i, to make sockets there."""
    expected = link or Link(rate_mbit=1000)
    seconds = max(SECONDS, NUM_BYTES * 8e-6 / expected.rate_mbit)
    num_hosts = len(addresses)
    streams = [_connect(i, (i + 1) % num_hosts, addresses, enter) for i in range(num_hosts)]
    try:
        latency = statistics.median(_round_trip(streams[0]) for _ in range(NUM_PINGS)) / 2
        rates = _rates(streams, WARMUP_SECONDS + WARMUP_LATENCIES * latency, seconds)
        return Measured(rate_mbit=min(rates) * 8e-6, latency_ms=1e3 * latency)
    finally:
        for end in (end for stream in streams for end in stream):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            end.close()


def _connect(source: int, to: int, addresses: Sequence[str], enter: Callable[[int], None]) -> Stream:
    enter(to)
    with socket.create_server((addresses[to], 0)) as listener:
        enter(source)
        sender = socket.create_connection(listener.getsockname(), timeout=30)
        receiver, _ = listener.accept()
    for end in (sender, receiver):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Stream(sender, receiver)


def _round_trip(stream: Stream) -> float:
    begin = time.perf_counter()
    stream.sender.sendall(b"?")
    stream.receiver.recv(1)
    stream.receiver.sendall(b"!")
    stream.sender.recv(1)
    return time.perf_counter() - begin


def _rates(streams: Sequence[Stream], warmup: float, seconds: float) -> list[float]:
    """Bytes per second that each receiver gets while all send, after a warm-up."""
    for stream in streams:
        stream.sender.setblocking(False)
        stream.receiver.setblocking(False)
    received = dict.fromkeys((stream.receiver for stream in streams), 0)
    senders = [stream.sender for stream in streams]
    _pump(senders, received, warmup)
    before, begin = dict(received), time.perf_counter()
    _pump(senders, received, seconds)
    elapsed = time.perf_counter() - begin
    return [(received[one] - before[one]) / elapsed for one in received]


def _pump(senders: list[socket.socket], received: dict[socket.socket, int], seconds: float) -> None:
    """Send from all senders for some seconds; adds what arrives to `received`."""
    data, buffer = bytes(CHUNK_BYTES), bytearray(CHUNK_BYTES)
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        readable, writable, _ = select.select(list(received), senders, [], left)
        for receiver in readable:
            received[receiver] += receiver.recv_into(buffer)
        for sender in writable:
            try:
                sender.send(data)
            except BlockingIOError:
                continue  # its buffer is full again
