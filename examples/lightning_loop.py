"""A run of Lightning's Trainer. The lines with `strategy` are all that thinwire adds.

torchrun --nproc-per-node 2 -m examples.lightning_loop "error_feedback(maxnorm(bits=4))"
torchrun --nproc-per-node 2 -m examples.lightning_loop "diloco(every=8)" --rounds
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from examples.tiny_gpt2 import gpt2, main, outcome, pieces
from thinwire.integrations.lightning import AttachStrategy, RoundsStrategy


class Language(LightningModule):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = gpt2(), []  # type: ignore[var-annotated]

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


def train(spec: str, in_rounds: bool) -> dict[str, Any]:
    strategy: Any = RoundsStrategy(spec) if in_rounds else AttachStrategy(spec)
    trainer = Trainer(
        strategy=strategy, devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Language()
    trainer.fit(module, DataLoader(pieces(), batch_size=16, shuffle=True))  # type: ignore[arg-type]
    exchange = strategy.rounds if in_rounds else strategy.exchange
    found = outcome(module.losses, module, exchange)
    exchange.close()
    return found


if __name__ == "__main__":
    main(train)
