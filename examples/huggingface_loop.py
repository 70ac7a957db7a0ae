"""A run of Hugging Face's Trainer. The lines with `callback` are all that thinwire adds.

torchrun --nproc-per-node 2 -m examples.huggingface_loop "error_feedback(maxnorm(bits=4))"
torchrun --nproc-per-node 2 -m examples.huggingface_loop "diloco(every=8)" --rounds
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from examples.tiny_gpt2 import gpt2, main, outcome, pieces
from thinwire.integrations.huggingface import AttachCallback, RoundsCallback


def train(spec: str, in_rounds: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=2, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=1,
            lr_scheduler_type="constant", save_strategy="no", report_to=[], disable_tqdm=True, log_level="error",
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(gpt2(), args, train_dataset=pieces())  # type: ignore[arg-type]
        callback: Any = RoundsCallback(trainer, spec) if in_rounds else AttachCallback(trainer, spec)
        trainer.add_callback(callback)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert trainer.model is not None
    exchange = callback.rounds if in_rounds else callback.exchange
    found = outcome(losses, trainer.model, exchange)
    exchange.close()
    return found


if __name__ == "__main__":
    main(train)
