"""Models whose units are found or declared, with the sizes of their axes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import thinwire as tw
from tests.surgery import own_models
from tests.surgery.own_models import with_suggestion
from thinwire import registry
from thinwire.surgery.attention import unpack_attention


class Gated(nn.Module):
    """A layer whose halves are multiplied: found by nobody, so declared."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 2 * 8), nn.Linear(8, 6)
        self.thinwire_axes = [tw.Axis(8, {"up.weight": (0, 2), "up.bias": (0, 2)}, {"down.weight": 1})]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.glu(self.up(x)))


def model(name: str, *args: object) -> nn.Module:
    built: nn.Module = registry.build("models", name, *args)
    return built


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[int]]] = {  # model, input, sizes of its axes
    "mlp": (lambda: model("mlp(width=12, depth=3, norm=True)", (5,), 3), (4, 5), [12, 12, 12]),
    "nested": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 3))
        ),
        (4, 5),
        [8],
    ),
    "prelu": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.PReLU(8), nn.Linear(8, 7), nn.PReLU(), nn.Linear(7, 3)),
        (4, 5),
        [8, 7],
    ),
    "cnn": (lambda: model("cnn(width=6)", (1, 8, 8), 3), (4, 1, 8, 8), [6, 12, 24]),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 1),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, groups=8, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 4, 1),
        ),
        (2, 2, 5, 5),
        [8],
    ),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 8, 1),
            nn.ReLU(),
            nn.Conv1d(8, 8, 1, groups=2),
            nn.ReLU(),
            nn.Conv1d(8, 6, 1),
            nn.ReLU(),
            nn.Conv1d(6, 2, 1),
        ),
        (2, 2, 5),
        [6],
    ),
    "transposed": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2)
        ),
        (2, 2, 5, 5),
        [6, 8],
    ),
    "flat sequence": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Flatten(), nn.Linear(40, 2)),
        (4, 5, 3),
        [8],
    ),
    "resnet": (lambda: model("resnet32", (3, 8, 8), 3), (2, 3, 8, 8), [16] * 5 + [32] * 5 + [64] * 5),
    "bottleneck": (
        lambda: model("resnet50", (3, 4, 4), 3),
        (2, 3, 4, 4),
        [64] * 6 + [128] * 8 + [256] * 12 + [512] * 6,
    ),
    "vit": (lambda: model("vit(width=24, depth=2, heads=4)", (1, 8, 8), 3), (2, 1, 8, 8), [4, 4, 96, 96]),
    "declared": (lambda: nn.Sequential(nn.Linear(5, 6), Gated(), nn.Linear(6, 3)), (4, 5), [8]),
    "torch": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(12, 4, 20, 0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        (2, 5, 12),
        [20, 4, 20, 4],
    ),
    "own heads": (lambda: own_models.with_heads(fused=True), (2, 5, 12), [4]),
    "own grouped heads": (lambda: own_models.with_heads(fused=False), (2, 5, 12), [2]),
    "own gpt, as suggested": (lambda: with_suggestion(own_models.gpt()), (2, 5, 12), [20, 20]),
    "own llama, as suggested": (lambda: with_suggestion(own_models.llama()), (2, 5, 12), [20, 20]),
    "own grouped, as suggested": (lambda: with_suggestion(own_models.grouped()), (2, 5, 12), [20]),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = NETS[name][0]()
    unpack_attention(net)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.bias)
    return net.eval()
