"""Shakespeare, or any other text: predict the next character."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from thinwire.errors import UsageError
from thinwire.tasks.base import Task
from thinwire.tasks.data_files import find_file


def shakespeare(
    data: Path | None,
    seed: int,
    /,
    *,
    context: PositiveInt = 128,  # characters that the model sees; more = more memory, lower loss
) -> Task:
    """Predict the next character; --data names the folder of shakespeare.txt (or input.txt, any text).

    The last tenth of the text is the test set.
    """
    path = find_file(data, "shakespeare", "shakespeare.txt", "input.txt")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text ({error}); convert it first") from None
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    codes = torch.tensor([index[character] for character in text])
    num_train = len(codes) * 9 // 10
    if num_train <= context or len(codes) - num_train <= context:
        raise UsageError(f"{path} has {len(codes)} characters, too few for context={context}; try a smaller context")
    return Task(
        train=_sequences(codes[:num_train], context),
        test=_sequences(codes[num_train:], context),
        shape=(context,),
        classes=len(alphabet),
        model="gpt",
        loss=_loss,
        metric="loss",
        defaults={
            "epochs": 3,
            "batch_size": 32,
            "lr": 1e-3,
            "optimizer": "adamw(beta2=0.99, weight_decay=0.1)",
            "schedule": "cosine(warmup_epochs=0.1, floor=0.1)",
            "clip_norm": 1.0,
        },
    )


def _sequences(codes: Tensor, context: int) -> TensorDataset:
    """Sequences of `context` characters as inputs, and the same ones shifted by one character as targets."""
    sequences = codes.unfold(0, context + 1, context)
    return TensorDataset(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
