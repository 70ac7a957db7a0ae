"""thinwire train --iface: through which network interface ranks connect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm.test_addresses import LAN, OWN
from tests.launch.test_launch import run_quickly, scratch  # noqa: F401 (a fixture)
from thinwire.comm.world import World
from thinwire.config import RunConfig
from thinwire.errors import UsageError
from thinwire.launch import launcher
from thinwire.run.network import check_network

SMALL = ("--task", "synthetic", "--ranks", "2", "--epochs", "1")


@pytest.mark.usefixtures("program_server")
def test_a_run_begins_on_one_interface_and_goes_on_by_another(tmp_path: Path) -> None:
    first = OWN[LAN[0]] if LAN else "lo"
    code, _, err = run_quickly(*SMALL, "--iface", first, "--out", str(tmp_path / "run"))
    assert code == 0, err
    assert f'iface = "{first}"' in (tmp_path / "run" / "config.toml").read_text()
    for iface in ("auto", "lo"):
        code, _, err = run_quickly("--out", str(tmp_path / "run"), "--resume", "--epochs", "2", "--iface", iface)
        assert code == 0, err


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"--iface eth77: it is no interface .*possible: lo \(127.0.0.1"):
        check_network(RunConfig(iface="eth77", ranks=2))
    with pytest.raises(UsageError, match="--iface lo, but the hosts of --link have a network of their own"):
        check_network(RunConfig(iface="lo", ranks=2, link="1gbit"))


@pytest.mark.parametrize(("local_rank", "error"), [(0, UsageError), (1, SystemExit)])
def test_of_a_machine_without_the_interface_the_first_rank_says_so(local_rank: int, error: type[BaseException]) -> None:
    world = World(2 + local_rank, 4, local_rank, local_size=2, address="h", port=1, launcher="srun")
    with pytest.raises(error) as caught:
        launcher.check_as_rank(RunConfig(iface="eth77"), world)
    assert getattr(caught.value, "code", 2) == 2
