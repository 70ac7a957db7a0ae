"""Convolutions in channels_last order train the same model; here on a CPU, where that order is possible too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils.data import TensorDataset

import thinwire as tw
from tests.training import batches, seeded, steps, trainer, weights
from tests.worlds import on_threads
from thinwire.comm.base import Comm
from thinwire.common.tensor_files import save_model
from thinwire.exchange.overlapped import Overlapped
from thinwire.run.evaluation import evaluate
from thinwire.run.states import pack, unpack
from thinwire.surgery import memory_format
from thinwire.tasks.base import Task

SPECS = [
    "data_parallel(reducer=error_feedback(maxnorm))", "local_sgd(every=2)", "alone", "ist(local_steps=3)",
    "daso(ranks_per_node=1, warmup_epochs=1, cooldown_epochs=0)", "local_parallel",
    "ab(sync_every=3, warmup=1, cutoff=0.9, moments=rotate)",
]  # fmt: skip


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


class Viewing(nn.Module):
    """Calls `view` on what a convolution returns, which is possible in the usual order alone.

    Before that, its forward pass changes buffers, and with dropout draws random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm2d(2), nn.Dropout(0.0)
        self.convolution, self.last = nn.Conv2d(2, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.convolution(self.dropout(self.norm(x))).view(x.size(0), -1))


NETS = {"convolutions": seeded(0, convolutions), "viewing": seeded(0, Viewing)}
DATA = batches(8, 16, (2, 6, 6))


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Fused kernels need gradients and moments in the order of their parameter."""
    return torch.optim.SGD(parameters, 0.05, 0.9, fused=True)


def trained(comm: Comm, spec: str, net: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """The weights; those of a trainer that went on from a saved state; how many weights are in another order."""
    straight, resumed = (trainer(comm, spec, NETS[net], fused) for _ in range(2))
    steps(straight, DATA[:5])
    tensors: dict[str, Tensor] = {}
    tree = pack(straight.state_dict(), tensors)
    assert all(t.is_contiguous() for t in tensors.values())
    resumed.load_state_dict(unpack(tree, tensors))
    for one in (straight, resumed):
        steps(one, DATA[5:])
    num_strided = sum(not p.is_contiguous() for p in straight.learner.model.parameters())
    first, second = (weights(one.consolidate()) for one in (straight, resumed))
    return first, second, num_strided


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("net", NETS)
def test_channels_last_trains_the_same_model(spec: str, net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if net == "viewing" and spec[:2] in ("is", "ab"):
        pytest.skip("has no layer that could be divided or factored")
    usual, _, num_strided = on_threads(trained, 2, spec, net)[0]
    assert num_strided == 0
    monkeypatch.setattr(memory_format, "FAST_ON", {"cpu"})
    for straight, resumed, num_strided in on_threads(trained, 2, spec, net):
        assert num_strided or (spec == "local_parallel" and net == "viewing")  # of which one block has no convolution
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)
        for name, value in usual.items():
            torch.testing.assert_close(straight[name], value, rtol=1e-3, atol=1e-4)


def test_a_cpu_keeps_the_usual_order_and_files_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(0, convolutions)
    assert not memory_format.use_channels_last(model)
    before = weights(model)
    monkeypatch.setattr(memory_format, "FAST_ON", {"cpu"})
    assert memory_format.use_channels_last(model)
    assert model[0].weight.stride() == (18, 1, 6, 2)
    save_model(model, tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert all(saved[name].is_contiguous() and torch.equal(saved[name], value) for name, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_a_process_goes_back_to_the_usual_order_too(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DDP, whose first forward pass has failed then. The second one changes what the first would have changed."""
    with tw.join() as comm, inductor_config.patch(compile_threads=1):  # a pool of threads would stay
        usual = whole_after(comm, compile)
        monkeypatch.setattr(memory_format, "FAST_ON", {"cpu"})
        found = whole_after(comm, compile)
    assert found.norm.num_batches_tracked == len(DATA)
    for name, value in weights(usual).items():
        torch.testing.assert_close(weights(found)[name], value, rtol=1e-3, atol=1e-4)


def whole_after(comm: Comm, compile: bool) -> Any:
    torch.manual_seed(5)
    net = copy.deepcopy(NETS["viewing"])
    net.dropout.p = 0.2
    one = trainer(comm, "data_parallel(reducer=fp16)", net, fused, compile=compile)
    assert isinstance(one.exchange, Overlapped)
    steps(one, DATA)
    return one.consolidate()


@pytest.mark.parametrize("spec", ["alone", "data_parallel", "local_sgd(every=2)", "local_parallel(blocks=1)"])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_consolidated_model_has_the_usual_order_and_no_hooks(
    spec: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_format, "FAST_ON", {"cpu"})

    def consolidated(comm: Comm) -> nn.Module:
        one = trainer(comm, spec, NETS["viewing"], fused)
        steps(one, DATA[:num_steps])
        whole: nn.Module = one.consolidate()
        return whole

    whole = on_threads(consolidated, 1)[0]
    assert all(p.is_contiguous() for p in whole.parameters())
    assert not any(module._forward_hooks for module in whole.modules())
    whole(DATA[0][0])


@pytest.mark.parametrize("net", NETS)
def test_a_model_is_tested_in_channels_last_order_if_it_can_be(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = DATA[0]
    data = TensorDataset(inputs, targets)
    task = Task(data, data, tuple(inputs.shape[1:]), 3, lambda: NETS[net])

    def tested(comm: Comm) -> tuple[dict[str, float], nn.Module]:
        model = copy.deepcopy(NETS[net])
        return evaluate(model, task, comm, torch.device("cpu"), batch_size=5), model

    usual, _ = on_threads(tested, 1)[0]
    monkeypatch.setattr(memory_format, "FAST_ON", {"cpu"})
    found, model = on_threads(tested, 1)[0]
    assert found == pytest.approx(usual, rel=1e-5)
    assert any(not p.is_contiguous() for p in model.parameters())
    assert any(module._forward_hooks for module in model.modules()) == (net == "viewing")


class Growing(Viewing):
    """Replaces a buffer in each forward pass, sets another, and calls `view` only where that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("last_size", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.mean().detach().view(1)])
        if self.last_size is not None:
            self.last_size = self.last_size + 1
        else:
            self.last_size = torch.ones(())
        out = self.convolution(x)
        return self.last(out.view(x.size(0), -1).repeat(1, 64 // out[0].numel()))


@pytest.mark.parametrize("sizes", [(6, 6), (3, 6)])
def test_buffers_may_be_replaced_and_the_view_may_fail_later(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a map has one pixel, both orders are the same, and `view` works."""
    monkeypatch.setattr(memory_format, "FAST_ON", {"cpu"})

    def run(comm: Comm) -> Any:
        one = trainer(comm, "alone", Growing(), fused)
        for size in sizes:
            steps(one, [(DATA[0][0][:, :, :size, :size], DATA[0][1])])
        return one.model

    model = on_threads(run, 1)[0]
    assert any(module._forward_hooks for module in model.modules())
    late = sizes[0] == 3  # then the forward pass that failed is not undone
    assert (len(model.seen), model.last_size.item()) == (3 + late, 2 + late)


class FailingBackward(torch.autograd.Function):
    """Its backward pass calls `view` on a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view(-1).view_as(gradient)


def test_an_error_of_the_backward_pass_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP was given gradients by then, so the step cannot be done again."""
    monkeypatch.setattr(memory_format, "FAST_ON", {"cpu"})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(FailingBackward.apply(self.first(x))).flatten(1)

    with tw.join() as comm:
        one = trainer(comm, "data_parallel(reducer=fp16, bucket_mb=0.0001)", Net(), fused)
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            steps(one, DATA[:1])
