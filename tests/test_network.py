"""What a run does about the network it asked for: measured, marked, refused when it must be strict."""

from __future__ import annotations

import pytest

from thinwire.config import RunConfig
from thinwire.errors import RunError
from thinwire.netlab import Link, Measured
from thinwire.network import LinkReport, check_link


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
    assert LinkReport(True, now).mixed_with(before).state == mixed  # type: ignore[arg-type]
