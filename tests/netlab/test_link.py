"""Links as text, what counts as off, and how a relay's port holds packets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import UsageError
from thinwire.netlab.lab import _not_allowed
from thinwire.netlab.link import Link, parse_link
from thinwire.netlab.probe import Measured
from thinwire.netlab.relay import QUEUE_BYTES, Port


@given(st.integers(10, 100_000).map(lambda n: n / 10), st.integers(0, 2_000))
def test_a_link_and_its_text_are_the_same(rate: float, latency: float) -> None:
    assert parse_link(str(Link(rate, latency))) == Link(rate, latency)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100mbit", Link(100)),
        ("1Gbit/s", Link(1000)),
        ("5000kbit, 20 ms", Link(5, 20)),
        ("1gbit,500us", Link(1000, 0.5)),
    ],
)
def test_spellings(text: str, link: Link) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize(
    "text", ["", "fast", "0", "100", "-1mbit", "1.2.3mbit", "10mbps", "10mbit,5", "10mbit,5ms,1", "nanmbit"]
)
def test_what_is_no_link(text: str) -> None:
    with pytest.raises(
        UsageError, match="expected a rate in kbit, mbit or gbit and perhaps a latency in us, ms or s; try 100mbit"
    ):
        parse_link(text)


@pytest.mark.parametrize(
    ("link", "rate", "latency", "off"),
    [
        ("100mbit", 91, 0.01, False), ("100mbit", 89, 0.01, True), ("100mbit", 111, 0.01, True),
        ("100mbit", 98, 0.6, True), ("1gbit,10ms", 990, 10.9, False), ("1gbit,10ms", 990, 11.2, True),
        ("1gbit,10ms", 990, 8.8, True), ("1gbit,1ms", 990, 1.4, False),
    ],
)  # fmt: skip
def test_a_link_is_off_by_more_than_a_tenth(link: str, rate: float, latency: float, off: bool) -> None:
    assert Measured(rate, latency).is_off(parse_link(link)) is off


def test_a_port_holds_packets_for_the_latency_and_lets_them_out_at_the_rate() -> None:
    reader, writer = os.pipe()
    try:
        port = Port(writer, Link(rate_mbit=8, latency_ms=10))  # a byte a microsecond
        for name in (b"a", b"b", b"c"):
            port.enqueue(name * 1000, now=0.0)
        arrived = []
        for now in (0.0, 0.0099, 0.0101, 0.0105, 0.0111, 0.0121):
            before = len(port.queue)
            port.deliver(now)
            arrived.append(before - len(port.queue))
        assert arrived == [0, 0, 1, 0, 1, 1]
        assert os.read(reader, 10_000) == b"a" * 1000 + b"b" * 1000 + b"c" * 1000
        port.enqueue(b"d", now=1.0)
        assert port.queue[0][0] == pytest.approx(1.01), "a link that was idle owes nothing"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_full_port_drops() -> None:
    port = Port(-1, Link(rate_mbit=8, latency_ms=0))
    for _ in range(QUEUE_BYTES // 10_000 + 50):
        port.enqueue(bytes(10_000), now=0.0)
    assert QUEUE_BYTES <= port.queued_bytes <= QUEUE_BYTES + 20_000


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("[Errno 13] Permission denied: '/dev/net/tun'", "without latency"),
        ("(95, 'Operation not supported')", "load these modules"),
        ("[Errno 1] unshare: Operation not permitted", "namespaces are not allowed here"),
        ("[Errno 24] Too many open files", "try fewer of them"),
    ],
)
def test_what_to_do_about_what_is_missing(reason: str, advice: str) -> None:
    assert advice in _not_allowed(reason)
    assert reason in _not_allowed(reason)


@pytest.mark.parametrize("kind", ["net", "user"])
def test_namespaces_that_are_used_up_are_named(kind: str) -> None:
    """In a user namespace with a limit of its own; there, who has no rights needs another one."""
    limit = f"user.max_{kind}_namespaces"
    allowed = {"net": "3", "user": "0"}[kind]
    drop = {"net": "", "user": "setpriv --bounding-set=-sys_admin --inh-caps=-all"}[kind]
    code = "from thinwire import netlab; netlab.hosts(3).__enter__()"
    script = f"echo {allowed} > /proc/sys/user/max_{kind}_namespaces || exit 99; {drop} {sys.executable} -c '{code}'"
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 99 or done.stderr.startswith(("unshare", "setpriv")):
        pytest.skip(f"user namespaces are not allowed here: {done.stderr.strip()}")
    word = {"net": "network", "user": "user"}[kind]
    assert (
        f"NotAllowed: the Linux kernel allows no more {word} namespaces ([Errno 28] {limit} = {allowed})" in done.stderr
    )
    assert f"sysctl -w {limit}=" in done.stderr
    assert "modules" not in done.stderr
