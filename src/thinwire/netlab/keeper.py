"""The process that holds a lab. It makes namespaces, links and queues; when it ends, the Linux kernel removes them.

It ends when its standard input does, so nothing is left however its parent ends: nothing outside the namespaces has a
name. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from pyroute2 import IPRoute, NetlinkError

from thinwire.netlab import linux
from thinwire.netlab.link import Link
from thinwire.netlab.probe import measure
from thinwire.netlab.relay import open_tun, relay

NETWORK = "10.77.0."
QUEUE_BYTES = 4_000_000
ROOT_QUEUE = 0x10000
HEADERS_BYTES = 200  # at most, of one packet
QUIET_SECONDS, DRAIN_SECONDS = 0.05, 5.0  # without a byte sent, after a measurement; at most, until then
SETTINGS = {
    "ipv4/tcp_congestion_control": "reno",  # in every Linux kernel, for every user: runs can be repeated elsewhere
    "ipv4/tcp_rmem": "4096 131072 33554432",  # enough for links that are fast and long
    "ipv4/tcp_wmem": "4096 131072 33554432",
    "ipv6/conf/default/disable_ipv6": "1",  # else the Linux kernel looks for routers, and counts these bytes
}


class Frames(NamedTuple):
    """The largest frame on the network (`mtu`) and the largest packet that passes a queue whole (`packet_bytes`)."""

    mtu: int
    packet_bytes: int


def frames(link: Link | None, relayed: bool) -> Frames:
    """Packets of one or two milliseconds: the rate also holds for small messages, and headers still cost little.

    >>> frames(Link(10), False), frames(Link(100), False), frames(Link(1000), False)
    (Frames(mtu=2500, packet_bytes=2500), Frames(mtu=9000, packet_bytes=9000), Frames(mtu=9000, packet_bytes=60000))
    """
    if link is None:
        return Frames(9_000, 60_000)
    mtu = min(max(round(link.rate_mbit * 250), 1_500), 9_000)
    if relayed:  # each packet costs the relay some time
        mtu = min(max(mtu, round(link.rate_mbit * 60)), 18_000)
    return Frames(mtu, max(mtu, min(round(link.rate_mbit * 60), 60_000)))


class Keeper:
    """A switch and n hosts, each a network namespace of its own."""

    def __init__(self, num_hosts: int, link: Link | None) -> None:
        self.link = link
        self.untaken: set[str] = set()  # settings that the Linux kernel did not accept
        linux.unshare(linux.CLONE_NEWNET)
        self.switch = self._hold_namespace()
        self.addresses = [f"{NETWORK}{i + 1}" for i in range(num_hosts)]
        self.hosts = [self._new_host() for _ in range(num_hosts)]
        delay = link is not None and link.latency_ms > 0
        self.relayed = delay and not self._has_netem()
        self.frames = frames(link, self.relayed)
        if self.relayed:
            self._join_by_relay()
        else:
            self._join_by_bridge(delay)

    def enter(self, host: int) -> None:
        """Move to a host: sockets made from now on are there."""
        linux.setns(self.hosts[host], linux.CLONE_NEWNET)

    # ---- namespaces

    @staticmethod
    def _hold_namespace() -> str:
        """Keep the current network namespace alive; returns the path by which others enter it."""
        return f"/proc/{os.getpid()}/fd/{os.open('/proc/self/ns/net', os.O_RDONLY)}"

    def _new_host(self) -> str:
        linux.unshare(linux.CLONE_NEWNET)
        for setting, value in SETTINGS.items():
            path = Path("/proc/sys/net", setting)
            try:
                path.write_text(value)
            except OSError:
                self.untaken |= {setting} if path.exists() else set()
        with IPRoute() as ip:
            ip.link("set", index=_index(ip, "lo"), state="up")
        return self._hold_namespace()

    # ---- network

    def _has_netem(self) -> bool:
        linux.setns(self.switch, linux.CLONE_NEWNET)
        with IPRoute() as ip:
            try:
                ip.tc("add", "netem", _index(ip, "lo"), handle=ROOT_QUEUE, delay=1000)
                ip.tc("del", "netem", _index(ip, "lo"), handle=ROOT_QUEUE)
            except NetlinkError:
                return False
        return True

    def _join_by_bridge(self, delay: bool) -> None:
        mtu = self.frames.mtu
        linux.setns(self.switch, linux.CLONE_NEWNET)
        with IPRoute() as switch:
            switch.link("add", ifname="bridge", kind="bridge", mtu=mtu)
            bridge = _index(switch, "bridge")
            switch.link("set", index=bridge, state="up")
            for i, host in enumerate(self.hosts):
                name = f"port{i}"
                peer = {"ifname": linux.INTERFACE, "mtu": mtu, "net_ns_fd": host}
                switch.link("add", ifname=name, kind="veth", mtu=mtu, peer=peer)
                port = _index(switch, name)
                switch.link("set", index=port, master=bridge, state="up")
                self._shape(switch, port, delay)
        for i in range(len(self.hosts)):
            self._bring_up(i)

    def _join_by_relay(self) -> None:
        tuns = []
        for i in range(len(self.hosts)):
            self.enter(i)
            tuns.append(open_tun())
            self._bring_up(i)
        reader, self._relay_stop = os.pipe()  # closed when this process ends, however it ends
        if os.fork() == 0:
            os.close(self._relay_stop)
            assert self.link is not None
            try:
                relay(tuns, self.link, stop=reader)
            finally:
                os._exit(1)
        signal.signal(signal.SIGCHLD, lambda *_: os._exit(1))  # the lab cannot work without its relay

    def _bring_up(self, host: int) -> None:
        self.enter(host)
        with IPRoute() as ip:
            wire = _index(ip, linux.INTERFACE)
            ip.addr("add", index=wire, address=self.addresses[host], prefixlen=24)
            ip.link("set", index=wire, mtu=self.frames.mtu, state="up")
            self._shape(ip, wire, delay=False)

    def _shape(self, ip: IPRoute, index: int, delay: bool) -> None:
        """Limit what leaves an interface by a token bucket, and delay it by netem if asked."""
        if self.link is None:
            return
        rate = round(self.link.rate_mbit * 1e6 / 8)
        packet = self.frames.packet_bytes
        burst = packet + HEADERS_BYTES  # one packet: more would pass at once after each pause
        ip.link("set", index=index, gso_max_size=packet)  # else the bucket would cut packets
        position: dict[str, Any] = {"handle": ROOT_QUEUE}
        if delay:
            ip.tc("add", "netem", index, handle=ROOT_QUEUE, delay=round(1e3 * self.link.latency_ms), limit=100_000)
            position = {"handle": 2 * ROOT_QUEUE, "parent": ROOT_QUEUE + 1}
        ip.tc("add", "tbf", index, rate=rate, burst=burst, limit=QUEUE_BYTES, **position)

    # ---- requests

    def answer(self, request: str) -> Any:
        """The answer to a request: "measure" or "sent"."""
        if request == "measure":
            measured = measure(self.addresses, self.link, self.enter)
            self._wait_until_quiet()
            return measured._asdict()
        assert request == "sent", request
        return self._sent()

    def _wait_until_quiet(self) -> None:
        """Wait until queues have sent what a measurement left in them: whoever counts from now on must not count it."""
        quiet = QUIET_SECONDS + (4e-3 * self.link.latency_ms if self.link else 0)  # a round trip, twice
        before, since = self._sent(), time.monotonic()
        end = since + quiet + DRAIN_SECONDS
        while since + quiet > time.monotonic() < end:
            time.sleep(QUIET_SECONDS / 10)
            if (now := self._sent()) != before:
                before, since = now, time.monotonic()

    def _sent(self) -> list[dict[str, int]]:
        """The bytes that each host has sent."""
        counts = []
        for i in range(len(self.hosts)):
            self.enter(i)
            counts.append(linux.sent_bytes())
        return counts


def _index(ip: IPRoute, name: str) -> int:
    return int(ip.link_lookup(ifname=name)[0])


def main() -> None:
    """Make the lab that the arguments describe, print its hosts, answer requests until the input ends."""
    num_hosts, link_json = int(sys.argv[1]), json.loads(sys.argv[2])
    link = Link(*link_json) if link_json else None
    user = None
    try:
        try:
            keeper = Keeper(num_hosts, link)
        except (PermissionError, NetlinkError) as error:
            if getattr(error, "code", errno.EPERM) != errno.EPERM or "tun" in str(error):
                raise
            linux.become_root()  # in a user namespace, which any user may make
            user = f"/proc/{os.getpid()}/ns/user"
            keeper = Keeper(num_hosts, link)
    except (OSError, NetlinkError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    hosts = [{"address": a, "net": n, "user": user} for a, n in zip(keeper.addresses, keeper.hosts, strict=True)]
    print(json.dumps({"hosts": hosts, "relayed": keeper.relayed, "untaken": sorted(keeper.untaken)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(keeper.answer(line.strip())), flush=True)


if __name__ == "__main__":
    main()
