"""A strategy that nobody knows brings its own model and its own figure, all the way into the report."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import PositiveFloat
from safetensors.torch import load_file
from torch import Tensor, nn

import thinwire as tw
from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.compare.report import page
from thinwire.compare.results import read_results
from thinwire.config import RunConfig
from thinwire.data import Batch, Shard
from thinwire.exchange.gradients import NoExchange
from thinwire.run.records import read_rows
from thinwire.run.tables import number_and_reference
from thinwire.run.worker import Run
from thinwire.strategies.base import Artifact, Strategy
from thinwire.strategies.learner import Learner
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.series import Series


class Toy(Strategy):
    """Every rank for itself, beside a slow average of its weights."""

    series: ClassVar = {
        "distance": Series("Distance <of> the average", "lines", "How far the weights are from their slow average."),
        "steps": Series("Toy steps", "column", "Steps, and how many were asked for.", cell="asked"),
    }

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        decay: PositiveFloat = 0.9,  # of the average
    ) -> None:
        self.shard = Shard(comm.rank, comm.size)
        self.learner, self.exchange = Learner(model, recipe), NoExchange(model)
        self.decay, self.average = decay, [p.detach().clone() for p in model.parameters()]

    def step(self, batch: Batch) -> Tensor:
        loss = self.learner.backward(batch, self.exchange)
        self.learner.update()
        torch._foreach_lerp_(self.average, list(self.learner.model.parameters()), 1 - self.decay)
        return loss

    def status(self) -> dict[str, Any]:
        far = sum(
            (p - a).square().sum().item() for p, a in zip(self.learner.model.parameters(), self.average, strict=True)
        )
        return {"distance": {"<b>far</b>": far}, "steps": [self.learner.num_steps, 100]}

    def consolidate(self) -> nn.Module:
        return self._copy(list(self.learner.model.parameters()))

    def artifacts(self) -> list[Artifact]:
        return [Artifact("slow", "the slow average", self._copy(self.average), "slow.safetensors", "Slow model")]

    def _copy(self, weights: list[Tensor]) -> nn.Module:
        made = copy.deepcopy(self.learner.model)
        for parameter, weight in zip(made.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        return made

    def state_dict(self) -> dict[str, Any]:
        return {"learner": self.learner.state_dict(), "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self.average = list(state["average"])


def test_a_strategy_brings_its_own_artifact_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.TABLE["strategies"], "toy", f"{__name__}:Toy")
    folder = tmp_path / "run"
    with tw.join() as comm:
        config = RunConfig(strategy="toy(decay=0.8)", out=folder, epochs=2, model="mlp(width=8)")
        summary = Run(config, comm, torch.device("cpu")).run()

    (slow,) = summary["artifacts"]
    assert (slow["name"], slow["file"], slow["ratio"]) == ("slow", "slow.safetensors", 1)
    assert slow["value"] > 20
    assert sum(t.numel() for t in load_file(folder / "slow.safetensors").values()) == slow["parameters"]
    rows = read_rows(folder / "metrics.jsonl")
    far = [row["distance"]["<b>far</b>"] for row in rows]
    assert far[0] != far[1] > 0
    assert json.loads((folder / "summary.json").read_text())["status"] == {k: rows[1][k] for k in ("distance", "steps")}

    html = page(read_results(folder))
    assert "Distance &lt;of&gt; the average" in html
    drawn = json.loads(html.split('id="drawn">')[1].split("</script>")[0])["figures"]
    assert drawn["series-distance-1"]["data"][0]["y"] == far
    assert drawn["series-distance-1"]["data"][0]["name"] == "&lt;b&gt;far&lt;/b&gt;"
    assert '<th scope="col">Slow model</th>' in html
    assert '<th scope="col">Toy steps</th>' in html
    assert f"{rows[1]['step'] / 100:.2f} × asked" in html


class Clash(Toy):
    """Its status has a name that every row of metrics has."""

    def status(self) -> dict[str, Any]:
        return {"epoch": 3}


def test_a_status_must_not_take_names_of_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.TABLE["strategies"], "clash", f"{__name__}:Clash")
    with tw.join() as comm, pytest.raises(tw.UsageError, match=r"clash: status\(\) has epoch, .*; use other names"):
        Run(RunConfig(strategy="clash", out=tmp_path / "run", epochs=1), comm, torch.device("cpu")).run()


@pytest.mark.parametrize("value", [None, 3, [], [1], [1, 0], [0, 1], ["a", 2], {"a": 1}])
def test_a_status_that_is_no_column_has_none(value: Any) -> None:
    assert number_and_reference({"status": {"steps": value}}, "steps") is None


@pytest.mark.parametrize("forgotten", ["step", "consolidate", "state_dict", "load_state_dict"])
def test_a_strategy_that_forgets_a_method_is_refused_when_it_is_defined(forgotten: str) -> None:
    methods = {name: lambda self: None for name in ("step", "consolidate", "state_dict", "load_state_dict")}
    type("Whole", (Strategy,), dict(methods))
    del methods[forgotten]
    with pytest.raises(TypeError, match=f"Half is a Strategy without {forgotten}; define them"):
        type("Half", (Strategy,), methods)
    type("Abstract", (Strategy,), methods, abstract=True)
