"""FSDP2 inside hosts and thinwire between them: a script of one's own, by `thinwire lab` and torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.netlab.sharded_on_hosts import REDUCERS
from thinwire import netlab
from thinwire.launch.lab import run_in_lab

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_four_bits_with_feedback_train_a_small_gpt_as_well_at_an_eighth_of_the_bytes(tmp_path: Path) -> None:
    """Two hosts with two shards each. The mean computes what torch's own HSDP does (tests/exchange)."""
    try:
        code = run_in_lab([*TORCHRUN, "-m", "tests.netlab.sharded_on_hosts", str(tmp_path)], 2, "1gbit")
    except netlab.NotAllowed as error:
        pytest.skip(str(error))
    assert code == 0
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank in ranks:
        exact, coded = (rank[reducer] for reducer in REDUCERS)
        assert coded["last"] == pytest.approx(exact["last"], rel=0.01)
        assert coded["last"] < coded["first"] / 10
        assert coded["equal"]
        assert coded["ledger"] < exact["ledger"] / 7.7
        print(
            f"kernel: {exact['kernel']:,} B of the mean, {coded['kernel']:,} B of 4 bits; ledger {coded['ledger']:,} B"
        )
    for found in (ranks[0], ranks[2]):  # one rank of each host, which sends half of all
        assert found[REDUCERS[1]]["kernel"] < found[REDUCERS[0]]["kernel"] / 7.3
        for reducer in REDUCERS:
            assert found[reducer]["kernel"] == pytest.approx(found[reducer]["ledger"] / 2, rel=0.05)
