"""What a run does about the network it asked for: measured, marked, refused when it must be strict."""

from __future__ import annotations

import multiprocessing
import resource
from typing import Any

import pytest

from tests.worlds import ProcessWorlds
from thinwire.config import RunConfig
from thinwire.errors import RunError, UsageError
from thinwire.netlab import Link, Measured
from thinwire.run.network import LinkReport, check_link, check_ranks


class Lab:
    """A lab whose measurements are given."""

    def __init__(self, *rates: float) -> None:
        self.link = Link(100)
        self.rates = list(rates)

    def measure(self) -> Measured:
        return Measured(self.rates.pop(0), 0.01)


def report(*rates: float, strict: bool = False) -> LinkReport:
    return check_link(Lab(*rates), RunConfig(link="100mbit", ranks=2, strict=strict))  # type: ignore[arg-type]


def test_a_link_that_holds_is_measured_once() -> None:
    assert report(98.7) == LinkReport(True, "shaped", 98.7, 0.01)


def test_a_busy_moment_is_forgiven_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(60, 97, strict=True).state == "shaped"
    assert capsys.readouterr().err == ""


def test_a_link_that_is_off_is_marked_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(60, 61.25) == LinkReport(True, "off", 61.25, 0.01)
    assert "warning: --link 100mbit, but 61.2 Mbit/s and 0.01 ms were measured" in capsys.readouterr().err


def test_strict_has_no_use_for_it() -> None:
    with pytest.raises(RunError, match="but 61 Mbit/s and"):
        report(60, 61, strict=True)


def test_without_a_lab_a_link_is_not_shaped() -> None:
    assert check_link(None, RunConfig(link="100mbit", ranks=2)) == LinkReport(state="not shaped")
    assert check_link(None, RunConfig()) == LinkReport()


@pytest.mark.parametrize(
    ("now", "before", "mixed"),
    [
        ("shaped", "not shaped", "not shaped"), ("not shaped", "shaped", "not shaped"), ("shaped", "off", "off"),
        (None, None, None),
    ],
)  # fmt: skip
def test_a_run_on_two_networks_is_as_bad_as_the_worse(now: str, before: str, mixed: str) -> None:
    assert LinkReport(True, now).combined_with(before).state == mixed  # type: ignore[arg-type]


def nothing(given: Any) -> None:
    pass


def test_as_many_ranks_as_are_allowed_can_be_started(process_world: ProcessWorlds) -> None:
    """What torch's launcher gives to each rank is a pipe for every rank."""
    check_ranks(124)
    context = multiprocessing.get_context("forkserver")
    given = [context.SimpleQueue() for _ in range(124)]
    process = context.Process(target=nothing, args=(given,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    for queue in given:
        queue.close()


def test_few_open_files_allow_few_ranks() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (180, before[1]))
    try:
        check_ranks(20)
        with pytest.raises(UsageError, match=r"starts 20 at most .*180 open files; ulimit -n 187 allows"):
            check_ranks(21)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
