"""What ist tells to declare where it finds no units: taken literally, it works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.surgery.own_models import Plain, attention_alone, gpt, grouped, llama, suggestion, with_suggestion
from thinwire.comm.base import Comm

MODELS = {"gpt": gpt, "llama": llama, "grouped": grouped, "plain": Plain}
loss = nn.functional.cross_entropy


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, 0.9)


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 5, 12, generator=g), torch.randint(0, 3, (6,), generator=g)) for _ in range(4)]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_suggestion_is_accepted_and_trains(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    model = with_suggestion(make())
    begin = state(model)

    def train(comm: Comm) -> list[dict[str, Tensor]]:
        trainer = tw.prepare("ist(local_steps=2)", model=copy.deepcopy(model), optimizer=sgd, loss=loss, comm=comm)
        seen = [state(trainer.consolidate())]
        for batch in batches():
            assert trainer.step(batch).isfinite()
        return [*seen, state(trainer.consolidate())]

    for given, trained in tw.simulate(train, ranks=2):
        torch.testing.assert_close(given, begin)
        assert any(not torch.equal(begin[name], trained[name]) for name in begin)
    whole = copy.deepcopy(model)
    optimizer = sgd(whole.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        loss(whole(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(tw.simulate(train, ranks=1)[0][1], state(whole))


def test_suggestions_name_what_shapes_leave_no_doubt_about() -> None:
    assert suggestion(gpt()) == (
        'model.thinwire_axes = [tw.Axis(20, {f"{at}.c_fc.weight": 0, f"{at}.c_fc.bias": 0}, {f"{at}.c_proj.weight": 1})'
        " for at in ['h.0.mlp', 'h.1.mlp']]"
    )
    assert suggestion(grouped()) == (
        'model.thinwire_axes = [tw.Axis(20, {"h.0.mlp.gate_proj.weight": 0, "h.0.mlp.up_proj.weight": 0}, '
        '{"h.0.mlp.down_proj.weight": 1})]'
    )


@pytest.mark.parametrize("grouped", [False, True])
def test_of_attention_alone_only_the_form_is_told(grouped: bool) -> None:
    model = attention_alone(grouped)
    assert suggestion(model) == ""
    with pytest.raises(
        tw.UsageError, match=r"its linear layers are in no nn.Sequential.*for attention thinwire_axes ="
    ):
        tw.simulate(lambda comm: tw.prepare("ist", model=model, optimizer=sgd, loss=loss, comm=comm), ranks=2)


class Normed(nn.Module):
    """Units that a norm has a part for too: a line without it would be refused by the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 3)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 3), nn.Linear(16, 5)


def test_all_that_takes_units_in_is_named_and_what_is_in_doubt_is_not() -> None:
    assert suggestion(Normed()) == ""
    assert '{"first.weight": 1, "second.weight": 1})]' in suggestion(TwoHeads())
