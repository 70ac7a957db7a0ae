"""Batches of any structure, and losses of (output, targets), of (model, batch), or the model's own."""

from __future__ import annotations

import copy
import json
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.strategies.test_laws import STRATEGIES
from tests.training import MODELS, PLAIN, batches, part, same, seeded, trainer, weights
from tests.worlds import World, on_threads, worlds
from thinwire.comm.base import Comm
from thinwire.run.states import pack, unpack

CUTTING = ("local_parallel", "pipeline")  # pass one tensor from block to block
WHOLE = [spec for spec in STRATEGIES if spec not in CUTTING]


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


def of_model(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"]["label"])


def of_named_tuple(model: Any, batch: Pair) -> Tensor:
    return nn.functional.cross_entropy(model(batch.image), batch.label)


def with_parts(output: Tensor, targets: Tensor) -> dict[str, Any]:
    loss, size = nn.functional.cross_entropy(output, targets), output.square().mean()
    return {"loss": loss, "size": size, "samples": len(targets), "logits": output}


def structured(batch: tuple[Tensor, Tensor], kind: str) -> tuple[Any, Any]:
    """The same samples in another structure, and the loss for it."""
    x, y = batch
    match kind:
        case "dict":
            return {"x": x, "y": {"label": y}}, of_model
        case "text":
            return {"x": x, "y": {"label": y}, "names": ["a", "b"], "is_last": None}, of_model
        case "mapping":
            return UserDict({"x": x, "y": {"label": y}}), of_model
        case "named tuple":
            return Pair(x, y), of_named_tuple
        case "keywords":
            return ({"input": x}, y), nn.functional.cross_entropy
        case "arguments":
            return ([x], {"target": y}), lambda output, targets: nn.functional.cross_entropy(output, targets["target"])
        case "parts":
            return batch, with_parts
    return batch, nn.functional.cross_entropy


KINDS = ["dict", "mapping", "named tuple", "keywords", "arguments", "parts"]


def trained(comm: Comm, spec: str, kind: str, model: nn.Module = MODELS[0], num_steps: int = 5, **options: Any) -> Any:
    """The weights and losses after some steps, in epochs of three; and what was sent."""
    data = batches(num_steps, 24)
    strategy = trainer(comm, spec, model, loss=structured(data[0], kind)[1], **options)
    losses = []
    for i, batch in enumerate(data):
        if i % 3 == 0:
            strategy.begin_epoch(3)
        losses.append(strategy.step(structured(part(batch, strategy.shard), kind)[0]).item())
        if i % 3 == 2:
            strategy.end_epoch()
    return weights(strategy.consolidate()), losses, comm.ledger.wire_bytes


@pytest.mark.parametrize("spec", WHOLE)
@pytest.mark.parametrize("kind", [*KINDS, "text"])
def test_the_structure_of_batches_changes_nothing(spec: str, kind: str) -> None:
    for (here, losses, sent), (there, there_losses, there_sent) in zip(
        on_threads(trained, 2, spec, kind), on_threads(trained, 2, spec, "pair"), strict=True
    ):
        assert same(here, there)
        assert losses == there_losses
        assert sent == there_sent


@worlds(threads=[], processes=[2])
@pytest.mark.parametrize("kind", ["dict", "keywords"])
def test_the_structure_of_batches_changes_nothing_in_ddp(world: World, ranks: int, kind: str) -> None:
    for reducer in ("mean", "maxnorm(bits=4)"):
        spec = f"data_parallel(reducer={reducer})"
        for here, there in zip(world(trained, ranks, spec, kind), world(trained, ranks, spec, "pair"), strict=True):
            assert same(here[0], there[0])
            assert here[1] == there[1]


@pytest.mark.parametrize("kind", KINDS)
def test_structured_batches_are_split_into_micro_batches(kind: str) -> None:
    one = on_threads(trained, 2, "data_parallel", kind, PLAIN)[0]
    options = {"accumulate": 3}
    split = tw.simulate(lambda comm: trained(comm, "data_parallel", kind, PLAIN, **options), ranks=2)[0]
    as_pair = tw.simulate(lambda comm: trained(comm, "data_parallel", "pair", PLAIN, **options), ranks=2)[0]
    assert same(split[0], as_pair[0])
    for name, tensor in one[0].items():
        torch.testing.assert_close(split[0][name], tensor, rtol=1e-4, atol=1e-6)


class ModuleLoss(nn.Module):
    """A loss of (model, batch) that is a module, calls the model twice and keeps something in it."""

    def forward(self, model: Any, batch: Any) -> Tensor:
        model.num_losses += 1
        model.state_dict()
        first, second = (model(batch["x"]) for _ in range(2))
        return nn.functional.cross_entropy((first + second) / 2, batch["y"]["label"])


def trained_by_module(comm: Comm, spec: str) -> Any:
    model = copy.deepcopy(PLAIN)
    model.num_losses = 0  # type: ignore[assignment]
    strategy = tw.prepare(
        spec, model=model, loss=ModuleLoss(), comm=comm, optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )  # fmt: skip
    losses = [strategy.step(structured(part(batch, strategy.shard), "dict")[0]).item() for batch in batches(3, 24)]
    return losses, model.num_losses


@worlds(threads=[2], processes=[2])
def test_a_loss_may_be_a_module_that_calls_the_model_twice_and_keeps_something_in_it(world: World, ranks: int) -> None:
    def plain(comm: Comm) -> list[float]:
        strategy = tw.prepare(
            "data_parallel", model=copy.deepcopy(PLAIN), loss=nn.functional.cross_entropy, comm=comm,
            optimizer=lambda p: torch.optim.SGD(p, 0.1),
        )  # fmt: skip
        return [strategy.step(part(batch, strategy.shard)).item() for batch in batches(3, 24)]

    expected = tw.simulate(plain, ranks=ranks)
    for (losses, num_losses), same_losses in zip(
        world(trained_by_module, ranks, "data_parallel"), expected, strict=True
    ):
        assert losses == pytest.approx(same_losses, rel=1e-5)
        assert num_losses == 3


# ---- the model's own loss


class WithLoss(nn.Module):
    """A model that computes its loss, as those of Hugging Face do."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.net, self.returns = copy.deepcopy(MODELS[1]), returns

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, labels)
        if self.returns == "tensor":
            return loss
        return {"loss": loss, "logits": logits, "size": logits.square().mean()}


def trained_by_itself(comm: Comm, spec: str, returns: str) -> Any:
    strategy = trainer(comm, spec, seeded(3, lambda: WithLoss(returns)), loss=None)
    for batch in batches(4, 24):
        x, y = part(batch, strategy.shard)
        strategy.step({"x": x, "labels": y})
    whole = strategy.consolidate()
    assert isinstance(whole, WithLoss)
    return weights(whole.net), dict(strategy.loss_parts)


@pytest.mark.parametrize("returns", ["tensor", "dict"])
@pytest.mark.parametrize("spec", ["data_parallel", "local_sgd(every=2)", "diloco(every=2)"])
def test_a_model_may_compute_its_loss(spec: str, returns: str) -> None:
    def by_pairs(comm: Comm) -> Any:
        strategy = trainer(comm, spec, MODELS[1])
        for batch in batches(4, 24):
            strategy.step(part(batch, strategy.shard))
        return weights(strategy.consolidate())

    own = on_threads(trained_by_itself, 2, spec, returns)
    for (here, parts), there in zip(own, tw.simulate(by_pairs, ranks=2), strict=True):
        assert same(here, there)
        assert set(parts) == ({"size"} if returns == "dict" else set())


# ---- parts of the loss


@pytest.mark.parametrize("spec", [spec for spec in STRATEGIES if spec != "pipeline"])
def test_parts_of_a_loss_are_kept(spec: str) -> None:
    def train(comm: Comm) -> Any:
        strategy = trainer(comm, spec, PLAIN, loss=with_parts)
        for batch in batches(3, 24):
            strategy.step(part(batch, strategy.shard))
        return {name: float(value) for name, value in strategy.loss_parts.items()}

    for parts in tw.simulate(train, ranks=2):
        assert set(parts) == {"size", "samples"}
        assert parts["size"] > 0


def parts_in_a_pipeline(comm: Comm) -> Any:
    strategy = trainer(comm, "pipeline", PLAIN, loss=with_parts)
    for batch in batches(3, 24):
        strategy.step(part(batch, strategy.shard))
    return sorted(strategy.loss_parts), strategy.sees_loss


@worlds(threads=[], processes=[2])
def test_parts_of_a_loss_are_kept_where_a_pipeline_ends(world: World, ranks: int) -> None:
    for names, sees_loss in world(parts_in_a_pipeline, ranks):
        assert names == (["samples", "size"] if sees_loss else [])


def test_parts_are_means_over_micro_batches() -> None:
    def train(comm: Comm, accumulate: int) -> dict[str, float]:
        strategy = trainer(comm, "data_parallel", PLAIN, loss=with_parts, accumulate=accumulate)
        strategy.step(batches(1, 25)[0])
        return {name: float(value) for name, value in strategy.loss_parts.items()}

    whole, split = (tw.simulate(lambda comm, n=n: train(comm, n), ranks=1)[0] for n in (1, 3))
    assert split["size"] == pytest.approx(whole["size"], rel=1e-5)


# ---- states


class Encoding(UserDict[str, Any]):
    """As what a tokenizer returns: keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


KEPT: dict[str, tuple[Any, Any]] = {
    "dict": (lambda x, y: {"x": x, "y": {"label": y}}, of_model),
    "mapping": (lambda x, y: UserDict(x=x, y={"label": y}), of_model),
    "encoding": (lambda x, y: Encoding(image=x, label=y), of_named_tuple),
    "named tuple": (Pair, of_named_tuple),
    "object": (lambda x, y: {"x": x, "y": {"label": y}, "source": object()}, of_model),
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("spec", ["ab(warmup=2, sync_every=2)", "ist(local_steps=2)"])
def test_states_keep_structured_inputs(spec: str, kind: str) -> None:
    """Both measure BatchNorm's statistics anew, on inputs that they kept; also if no step follows."""
    make, loss = KEPT[kind]

    def saved_and_loaded(comm: Comm, strategy: Any) -> Any:
        tensors: dict[str, Tensor] = {}
        tree = json.loads(json.dumps(pack(strategy.state_dict(), tensors)))  # as a checkpoint does
        again = trainer(comm, spec, MODELS[2], loss=loss, epochs=2)
        again.load_state_dict(unpack(tree, tensors))
        return again

    def train(comm: Comm, stop: int | None) -> Any:
        data = [make(*part(batch, tw.Shard(comm.rank, 2))) for batch in batches(8, 24)]
        strategy = trainer(comm, spec, loss=loss, epochs=2)
        for i, batch in enumerate(data):
            if i % 4 == 0:
                strategy.begin_epoch(4)
            if i == stop:
                strategy = saved_and_loaded(comm, strategy)
            strategy.step(batch)
        return weights((strategy if stop is None else saved_and_loaded(comm, strategy)).consolidate())

    straight = tw.simulate(lambda comm: train(comm, None), ranks=2)
    stopped = tw.simulate(lambda comm: train(comm, 5), ranks=2)
    assert all(same(one, other) for one, other in zip(straight, stopped, strict=True))


# ---- mistakes


def refused(match: str, batch: Any, loss: Any, spec: str = "data_parallel", **options: Any) -> None:
    def train(comm: Comm) -> None:
        trainer(comm, spec, PLAIN, loss=loss, **options).step(batch)

    with pytest.raises(tw.UsageError, match=match):
        tw.simulate(train, ranks=1)


def test_mistakes_are_named() -> None:
    (x, y), cross_entropy = batches(1)[0], nn.functional.cross_entropy
    refused(r"a batch that is a dict of x, y; .*\(inputs, targets\).*model", {"x": x, "y": y}, cross_entropy)
    refused(r"a batch that is a tuple of Tensor, Tensor, Tensor; .*\(inputs, targets\)", (x, y, y), cross_entropy)
    refused(r"a batch without a tensor", ("text", "label"), cross_entropy, accumulate=2)
    refused(r"did not call the model", {"x": x}, lambda model, batch: batch["x"].mean().requires_grad_())
    refused(r"returned a dict with size; .*\"loss\"", (x, y), lambda out, targets: {"size": out.mean()})
    refused(r"the model returned a Tensor of shape 8, 3.*give prepare a loss", {"input": x}, None)
    refused(r"accumulate=2.*str", (x, "label"), lambda out, targets: out.mean(), accumulate=2)
    refused(r"accumulate=2.*8 and 3 samples", ([x], y[:3]), lambda out, targets: out.mean(), accumulate=2)


@pytest.mark.parametrize("loss", [of_model, None])
def test_strategies_that_cut_the_model_refuse_at_once(loss: Any) -> None:
    def prepare(comm: Comm) -> None:
        trainer(comm, "local_parallel", PLAIN, loss=loss)

    with pytest.raises(tw.UsageError, match=r"local_parallel cuts .*loss of \(output, targets\)"):
        tw.simulate(prepare, ranks=2)


def test_strategies_that_cut_the_model_pass_one_tensor() -> None:
    x, y = batches(1)[0]

    def train(comm: Comm) -> None:
        trainer(comm, "local_parallel", PLAIN).step(({"input": x}, y))

    with pytest.raises(tw.UsageError, match="two tensors"):
        tw.simulate(train, ranks=2)
