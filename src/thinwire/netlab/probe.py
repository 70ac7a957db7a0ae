"""Measure a link as programs see it: TCP streams round the ring of hosts, and small messages there and back."""

from __future__ import annotations

import select
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from thinwire.netlab.link import Link

NUM_PINGS = 5
WARMUP_SECONDS, WARMUP_LATENCIES = 0.4, 40  # that streams need until they flow evenly
SECONDS, NUM_BYTES = 0.6, 100_000  # to measure for: both of them
TOLERANCE = 0.10  # a link further off than this is called off
TOO_SHORT_MS = 0.5  # a latency below this is the machine's own, not the link's
CHUNK_BYTES = 2**18


class Measured(NamedTuple):
    """What a link really does: the slowest host's rate, all sending and receiving at once, and the latency."""

    rate_mbit: float
    latency_ms: float

    def is_off(self, link: Link) -> bool:
        """Is it further from what was asked for than a tenth?"""
        rate_off = abs(self.rate_mbit / link.rate_mbit - 1) > TOLERANCE
        room_ms = max(TOLERANCE * link.latency_ms, TOO_SHORT_MS)
        return rate_off or abs(self.latency_ms - link.latency_ms) > room_ms


class Stream(NamedTuple):
    """A connection from one host to the next."""

    sender: socket.socket
    receiver: socket.socket


def measure(addresses: Sequence[str], link: Link | None, enter: Callable[[int], None]) -> Measured:
    """Rate and latency between hosts; `enter(i)` moves this process to host i, where sockets made then belong."""
    expected = link or Link(rate_mbit=1000)
    seconds = max(SECONDS, NUM_BYTES * 8e-6 / expected.rate_mbit)
    num_hosts = len(addresses)
    streams = [_connect(i, (i + 1) % num_hosts, addresses, enter) for i in range(num_hosts)]
    try:
        latency = statistics.median(_round_trip(streams[0]) for _ in range(NUM_PINGS)) / 2
        rates = _rates(streams, WARMUP_SECONDS + WARMUP_LATENCIES * latency, seconds)
        return Measured(rate_mbit=min(rates) * 8e-6, latency_ms=1e3 * latency)
    finally:
        for stream in streams:
            stream.sender.close()
            stream.receiver.close()


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
    """Bytes per second that each receiver gets while all send, after a while."""
    for stream in streams:
        stream.sender.setblocking(False)
        stream.receiver.setblocking(False)
    got = dict.fromkeys((stream.receiver for stream in streams), 0)
    senders = [stream.sender for stream in streams]
    _pump(senders, got, warmup)
    before, begin = dict(got), time.perf_counter()
    _pump(senders, got, seconds)
    took = time.perf_counter() - begin
    return [(got[receiver] - before[receiver]) / took for receiver in got]


def _pump(senders: list[socket.socket], got: dict[socket.socket, int], seconds: float) -> None:
    data, buffer = bytes(CHUNK_BYTES), bytearray(CHUNK_BYTES)
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        readable, writable, _ = select.select(list(got), senders, [], left)
        for receiver in readable:
            got[receiver] += receiver.recv_into(buffer)
        for sender in writable:
            try:
                sender.send(data)
            except BlockingIOError:
                continue  # it filled up in between
