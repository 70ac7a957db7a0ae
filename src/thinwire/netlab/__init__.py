"""Hosts on one machine, each with a network of its own, joined by a link of a given rate and latency.

>>> from thinwire import netlab
>>> netlab.parse_link("100mbit,10ms")
Link(rate_mbit=100.0, latency_ms=10.0)
"""

from thinwire.netlab.lab import Host, Lab, NotAllowed, hosts
from thinwire.netlab.link import Link, parse_link
from thinwire.netlab.linux import sent_bytes
from thinwire.netlab.probe import Measured

__all__ = ["Host", "Lab", "Link", "Measured", "NotAllowed", "hosts", "parse_link", "sent_bytes"]
