"""Every strategy trains tiny models of Hugging Face, and gives back the model that it was given, trained."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.integrations.hf_table import CASES, PAGE, TITLES, UNTIED, Case, page_with_table
from tests.training import Weights, same, weights
from tests.worlds import ProcessWorlds, on_threads
from thinwire import registry
from thinwire.comm.base import Comm

pytest.importorskip("transformers", reason="needs the extra thinwire[huggingface]")
from transformers import BatchEncoding

from tests.surgery.hf_models import MODELS, Logits, tokens

PIPELINE = next(case for case in CASES if case.strategy == "pipeline")  # needs processes
RANKS, EPOCHS, STEPS, BATCH = 2, 2, 5, 8  # steps of an epoch, samples of a rank


class Trained(NamedTuple):
    """What a rank has after training."""

    weights: Weights
    modules: list[tuple[str, str]]  # names and types
    loss: float
    is_tied: bool
    status: dict[str, Any]


@cache
def model_of(name: str, wrapped: bool, **options: Any) -> nn.Module:
    model = MODELS[name](**options)
    return Logits(model) if wrapped else model


def loss_of(output: Any, targets: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def data() -> list[tuple[Tensor, Tensor]]:
    lines = tokens(STEPS * BATCH * RANKS).split(BATCH * RANKS)
    return [(line[:, :-1], line[:, 1:]) for line in lines]


@torch.no_grad()
def test_loss(model: nn.Module) -> float:
    return sum(loss_of(model.eval()(inputs), targets).item() for inputs, targets in data()) / STEPS


test_loss.__test__ = False  # type: ignore[attr-defined]


def words_are_tied(model: nn.Module) -> bool:
    whole: Any = getattr(model, "model", model) if isinstance(model, Logits) else model
    return whole.lm_head.weight is whole.get_input_embeddings().weight


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def prepared(comm: Comm, name: str, spec: str, wrapped: bool, options: dict[str, Any]) -> tw.Strategy:
    model = copy.deepcopy(model_of(name, wrapped, **options))
    return tw.prepare(spec, model=model, optimizer=adamw, loss=loss_of, comm=comm, epochs=EPOCHS)


def train_epoch(trainer: tw.Strategy) -> None:
    trainer.begin_epoch(STEPS)
    own = slice(trainer.shard.index, None, trainer.shard.count)
    for inputs, targets in data():
        trainer.step((inputs[own], targets[own]))
    trainer.end_epoch()


def train(comm: Comm, name: str, spec: str, wrapped: bool, options: dict[str, Any]) -> Trained:
    trainer = prepared(comm, name, spec, wrapped, options)
    for _ in range(EPOCHS):
        train_epoch(trainer)
    whole = trainer.consolidate()
    modules = [(path, type(module).__qualname__) for path, module in whole.named_modules()]
    return Trained(weights(whole), modules, test_loss(whole), words_are_tied(whole), trainer.status())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", TITLES)
@pytest.mark.parametrize("case", [case for case in CASES if case != PIPELINE], ids=lambda case: case.strategy)
def test_every_strategy_trains_the_model_and_gives_it_back(case: Case, name: str) -> None:
    model_of(name, case.cuts, **case.options(name))  # once, before threads copy it
    check(case, name, on_threads(train, RANKS, name, case.spec, case.cuts, case.options(name)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", TITLES)
def test_a_pipeline_trains_the_model_and_gives_it_back(name: str, process_world: ProcessWorlds) -> None:
    args = name, PIPELINE.spec, PIPELINE.cuts, PIPELINE.options(name)
    trained = process_world.run(train, RANKS, *args)
    check(PIPELINE, name, trained)
    model = copy.deepcopy(model_of(name, PIPELINE.cuts, **PIPELINE.options(name)))
    optimizer = adamw(model.parameters())
    for inputs, targets in data() * EPOCHS:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
    assert trained[0].loss == pytest.approx(test_loss(model), rel=1e-3), "what one rank would learn by backpropagation"


def train_with_a_stop(comm: Comm, name: str, case: Case, stops: bool) -> Weights:
    """The weights after two epochs; a run that stops goes on with another trainer after the first."""
    args = comm, name, case.spec, case.cuts, case.options(name)
    trainer = prepared(*args)
    train_epoch(trainer)
    if stops:
        state = copy.deepcopy(trainer.state_dict())
        trainer = prepared(*args)
        trainer.load_state_dict(state)
    train_epoch(trainer)
    return weights(trainer.consolidate())


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.strategy in ("ab", "ist", "local_parallel")], ids=lambda c: c[0]
)
def test_a_resumed_run_ends_with_the_same_weights(case: Case) -> None:
    """With GPT-2: its Conv1D layers are factored or narrow, its words are tied, its blocks are on two ranks."""
    model_of("gpt2", case.cuts, **case.options("gpt2"))
    straight, stopped = (on_threads(train_with_a_stop, RANKS, "gpt2", case, stops)[0] for stops in (False, True))
    assert same(straight, stopped)


def check(case: Case, name: str, trained: list[Trained]) -> None:
    first, *others = trained
    given = copy.deepcopy(model_of(name, case.cuts, **case.options(name)))
    assert all(same(first.weights, other.weights) for other in others), "ranks are equal"
    assert first.modules == [(path, type(module).__qualname__) for path, module in given.named_modules()]
    assert first.is_tied == words_are_tied(given)
    assert {key: t.shape for key, t in first.weights.items()} == {key: t.shape for key, t in weights(given).items()}
    assert first.loss < test_loss(given) - 0.3, "it learned"
    given.load_state_dict(first.weights)
    assert test_loss(given) == pytest.approx(first.loss, rel=1e-6)
    if case.strategy == "ab":
        ranks = first.status["layer_ranks"]
        assert len(ranks) == {"gpt2": 16, "llama": 28}[name]
        assert any(rank < most for rank, most in ranks.values()), "some layers were factored"
    if case.cuts:
        assert len(first.status["blocks"]) == RANKS


def test_all_strategies_are_tried_and_the_page_shows_the_results() -> None:
    assert sorted(case.strategy for case in CASES) == sorted(registry.TABLE["strategies"])
    page = PAGE.read_text()
    assert page_with_table(page) == page, "python -m tests.integrations.hf_table"


REFUSED = [  # a model that returns a tensor or not, its config, and the reason that docs/models.md tells
    (True, {}, "wte.weight and .*lm_head.weight are one tensor.*tie_word_embeddings=False"),
    (False, UNTIED, "no chain of blocks: the model returns a CausalLMOutput"),
]


@pytest.mark.parametrize(("wrapped", "options", "reason"), REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_reason(wrapped: bool, options: dict[str, Any], reason: str) -> None:
    model_of("gpt2", wrapped, **options)
    with pytest.raises(tw.UsageError, match=reason):
        on_threads(train, RANKS, "gpt2", "local_parallel", wrapped, options)


@pytest.mark.parametrize(("wrapped", "options", "reason"), REFUSED)
def test_what_a_pipeline_cannot_cut_is_refused_with_the_reason(
    wrapped: bool, options: dict[str, Any], reason: str, process_world: ProcessWorlds
) -> None:
    with pytest.raises(AssertionError, match=rf"UsageError: .*{reason}"):
        process_world.run(train, RANKS, "gpt2", "pipeline", wrapped, options)


# ---- batches as tokenizers return them, and the model's own loss


def padded(step: int) -> Any:
    """Lines of different lengths, padded on the right, with a mask; a class of mappings that is no dict."""
    lines = data()[step][0].clone()
    lengths = 3 + torch.arange(len(lines)) % (lines.shape[1] - 2)
    mask = (torch.arange(lines.shape[1]) < lengths.unsqueeze(1)).long()
    return {"input_ids": lines * mask, "attention_mask": mask, "labels": lines.masked_fill(mask == 0, -100)}


def train_on_padded(comm: Comm, name: str, spec: str) -> tuple[float, float, Weights]:
    model = copy.deepcopy(model_of(name, False))
    trainer = tw.prepare(spec, model=model, optimizer=adamw, loss=None, comm=comm, epochs=2)
    own, losses = slice(trainer.shard.index, None, trainer.shard.count), []
    for _ in range(2):
        trainer.begin_epoch(STEPS)
        for step in range(STEPS):
            batch = BatchEncoding({key: value[own] for key, value in padded(step).items()})
            losses.append(trainer.step(batch).item())
        trainer.end_epoch()
    return losses[0], losses[-1], weights(trainer.consolidate())


@pytest.mark.parametrize("name", TITLES)
@pytest.mark.parametrize("spec", ["data_parallel", "diloco(every=2)", "ist(local_steps=2)"])
def test_batches_of_tokenizers_train_with_the_models_own_loss(name: str, spec: str) -> None:
    model_of(name, False)  # once, before threads copy it
    found = on_threads(train_on_padded, RANKS, name, spec)
    for first, last, trained in found:
        assert last < first - 0.3
        assert same(trained, found[0][2])


@pytest.mark.parametrize("name", TITLES)
def test_padding_does_not_change_what_is_learned(name: str) -> None:
    """The mask must reach the model: other tokens under it change nothing."""

    def gradients(comm: Comm, fill: int) -> Weights:
        batch = padded(0)
        batch["input_ids"] = torch.where(batch["attention_mask"] == 0, fill, batch["input_ids"])
        trainer = tw.prepare(
            "data_parallel", model=copy.deepcopy(model_of(name, False)), loss=None, comm=comm,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        )  # fmt: skip
        trainer.step(batch)
        return weights(trainer.consolidate())

    one, other = (tw.simulate(lambda comm, fill=fill: gradients(comm, fill), ranks=1)[0] for fill in (0, 7))
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-6)
