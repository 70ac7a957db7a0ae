"""The tunnel of examples/wireguard between two hosts: what is on the wire in clear without it is not with it."""

from __future__ import annotations

import runpy

import pytest

from tests.cluster.slurm import ROOT
from thinwire import netlab

WIREGUARD = runpy.run_path(str(ROOT / "benchmarks" / "wireguard.py"))


@pytest.mark.timeout(300)
def test_a_marked_tensor_is_on_the_wire_without_the_tunnel_and_not_with_it() -> None:
    if why := WIREGUARD["why_not"]():
        pytest.skip(why)
    try:
        found = WIREGUARD["measure"]("100mbit", 2.0, 1)
    except netlab.NotAllowed as error:
        pytest.skip(str(error))
    clear, hidden = found["clear"], found["wireguard"]
    assert clear["captured"]["marked"] > 300, "of 500,000 bytes, in packets of 1,448 at most"
    assert hidden["captured"]["marked"] == 0
    assert hidden["captured"]["bytes"] > 1_000_000, "what both hosts sent was looked at"
    assert hidden["captured"]["dropped"] == 0, "every packet was looked at"
    assert 1.0 < hidden["sent_bytes"] / clear["sent_bytes"] < 1.3
