"""Axes are found in every nn.Sequential, or declared; wrong ones are refused."""

from __future__ import annotations

import pytest
from torch import nn

import thinwire as tw
from tests.surgery.sliceable_models import NETS, Gated, made
from thinwire.surgery.axes.axis import Axis
from thinwire.surgery.axes.find import axes_of
from thinwire.surgery.axes.residual import residual_blocks_of


@pytest.mark.parametrize("name", NETS)
def test_axes_are_found(name: str) -> None:
    assert sorted(axis.size for axis in axes_of(made(name))) == sorted(NETS[name][2])


def test_what_cannot_be_found_is_an_error_with_the_line_to_add() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    with pytest.raises(
        tw.UsageError, match=r'Own: first .*tw.Axis\(8, {"first.weight": 0, "first.bias": 0}, {"second.weight": 1}\)'
    ):
        axes_of(Own())
    with pytest.raises(tw.UsageError, match=r"no residual blocks are found in Own.*thinwire_branches"):
        residual_blocks_of(Own())


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (Axis(8, {"up.wait": 0}, {}), "no tensor 0.up.wait"),
        (Axis(7, {"up.weight": 0}, {}), "0.up.weight is 16×6, so its dimension 0 is not made up of 7 units"),
        (Axis(8, {"up.weight": (0, 3)}, {}), "not made up of 3 times 8 units"),
        (Axis(8, {"up.bias": 1}, {}), "dimension 1"),
    ],
)
def test_wrong_axes_are_refused(axis: Axis, message: str) -> None:
    gated = Gated()
    gated.thinwire_axes = [axis]
    with pytest.raises(tw.UsageError, match=message):
        axes_of(nn.Sequential(gated))


def test_layers_that_share_weights_are_left_whole() -> None:
    net = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    net[2].weight = net[0].weight
    assert [axis.made_by.keys() for axis in axes_of(net)] == [{"4.weight", "4.bias"}]
    wrapped = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 4),
                            nn.ReLU(), nn.Linear(4, 2))  # fmt: skip
    assert [axis.made_by.keys() for axis in axes_of(wrapped)] == [{"2.weight", "2.bias"}]


def test_a_search_ends_where_units_would_not_be_on_their_own() -> None:
    softmax = nn.Softmax(-1)
    twice = nn.Sequential(
        nn.Linear(6, 12), softmax, nn.Linear(12, 12), softmax, nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    assert [axis.size for axis in axes_of(twice)] == [8]
    with pytest.raises(tw.UsageError, match="no hidden units"):
        axes_of(nn.Sequential(nn.Conv1d(1, 16, 1), nn.ReLU(), nn.Linear(16, 4)))  # of the length, not the channels
    made_from_others = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(4, 4)), nn.ReLU(),
                                     nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))  # fmt: skip
    assert [axis.made_by.keys() for axis in axes_of(made_from_others)] == [{"4.weight", "4.bias"}]


@pytest.mark.parametrize(
    ("norm", "bias", "removes_scale"),
    [
        (nn.BatchNorm1d(4), True, True),
        (nn.BatchNorm1d(4).eval(), True, False),
        (nn.BatchNorm1d(4, track_running_stats=False), False, True),
        (nn.LayerNorm(4), True, False),
        (nn.LayerNorm(4), False, True),
    ],
)
def test_a_norm_counts_only_if_it_removes_the_scale(norm: nn.Module, bias: bool, removes_scale: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4, bias=bias), norm)
    assert [axis.normed for axis in axes_of(net)] == [removes_scale]
